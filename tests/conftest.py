"""What every test shares: a process's settings, and which tests `make test` runs."""

import dataclasses
import resource

import pytest

from relattn.kernels import platform
from tests.helpers import settings

STARTED = pytest.StashKey[float]()
# Many examples of the library compile programs, and an example has no mark.
SLOW_EXAMPLES = ("relattn/",)
# Processor seconds of a test of `make test`, with what it sets up.
MOST_SECONDS = 15


def pytest_configure(config):
    settings.compile_quickly()
    settings.simulate_devices()
    settings.multiply_exactly()
    settings.repeat_examples()
    config.add_cleanup(settings.keep_programs())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks cases as slow; puts the longest files first, so that no process waits."""
    missing = {}
    for item in items:
        family = item.nodeid.split("[", 1)[0]
        for mark in item.iter_markers("quick"):
            case = item.callspec.params | {"id": item.callspec.id}
            for name, values in {**mark.kwargs, "id": mark.args or None}.items():
                if values is None:
                    continue
                unused = missing.setdefault((family, name), list(values))
                if case[name] in unused:
                    unused.remove(case[name])
                if case[name] not in values:
                    item.add_marker(pytest.mark.slow)
        if item.nodeid.startswith(SLOW_EXAMPLES):
            item.add_marker(pytest.mark.slow)
    missing = {" of ".join(key[::-1]): names for key, names in missing.items() if names}
    if missing and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"the mark `quick` names no case: {missing}")
    longest = ["test_contracts.py", "test_pairs.py"]
    items.sort(key=lambda item: tuple(item.path.name != name for name in longest))


def processor_seconds():
    """Returns the time that this process and its children have used processors."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a test that is slow and not marked so."""
    yield
    seconds = processor_seconds() - item.stash[STARTED]
    # Optimised programs and checks of types take longer.
    is_quick = item.config.option.markexpr == "not slow"
    if is_quick and seconds > MOST_SECONDS:
        pytest.fail(f"{seconds:.0f} s of processor time: mark it slow")


def pytest_collection_finish():
    settings.collect_garbage_rarely()


@pytest.fixture(params=["dense", "blocks"])
def form(request, monkeypatch):
    """Computes softmax attention at once, or in blocks of few queries."""
    if request.param == "blocks":
        few = dataclasses.replace(platform.PLATFORM_DEFAULTS["cpu"], block_scores=29)
        monkeypatch.setitem(platform.PLATFORM_DEFAULTS, "cpu", few)
    return request.param


@pytest.fixture
def registries():
    """Removes from the registries what a test adds."""
    # Imported late: the tests of kernels import none of these.
    from relattn.data.load import LOADERS
    from relattn.models import MODELS
    from relattn.nn.registry import ATTENTIONS, POSITIONS
    from relattn.training.metrics import METRICS

    tables = (ATTENTIONS, POSITIONS, MODELS, LOADERS, METRICS)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    yield
    settings.free_programs()
