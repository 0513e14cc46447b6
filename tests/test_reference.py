"""The reference of the site lists every configuration key and every option."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from configs import translution_gpt
from relattn import cli
from relattn.data import IMAGE_OPTIONS
from relattn.models import MODELS, model_options
from relattn.nn import registry
from relattn.training.config import default_config, flatten


@pytest.fixture(scope="module")
def reference():
    folder = str(Path(__file__).parents[1] / "docs")
    sys.path.insert(0, folder)
    try:
        import reference
    finally:
        sys.path.remove(folder)
    return reference


def described(page):
    """Returns the keys or options of a page that have a description."""
    return set(re.findall(r"^ *- `([^`]+)`: [`\"]*\w", page, re.M))


def test_every_configuration_key_is_described(reference):
    page = reference.configuration()
    options = {key for name in MODELS for key in model_options(name)}
    text = translution_gpt.get_config().data
    expected = {
        *flatten(default_config()),
        *(f"model.{key}" for key in ("name", *options)),
        *(f"data.{key}" for key in ("name", "image_size", *IMAGE_OPTIONS, *text)),
    }
    assert {f"config.{key}" for key in expected} - described(page) == set()
    for name in registry.BUILT_IN:
        assert f"[`{name}`](../mechanisms/{name}.md)" in page


def test_defaults_are_those_of_the_code(reference):
    page = reference.configuration()
    assert "\n- `config.optimizer.b2`: Decay rate of the second" in page
    assert '\n- `config.parallel`: "pmap", a copy' in page and "``" not in page
    for key, value in flatten(default_config()).items():
        (line,) = re.findall(rf"^- `config\.{re.escape(key)}`: .*", page, re.M)
        assert line.endswith(f" Default: `{value!r}`.")
    (line,) = re.findall(r"^- `config.model.num_layers`: .*", page, re.M)
    assert "`6` (performer, vit, gpt); `5` (linformer); `9` (routing)" in line


def test_every_option_of_an_attention_is_described(reference):
    page = reference.configuration()
    for name, module in (registry.ATTENTIONS | registry.POSITIONS).items():
        if name not in registry.BUILT_IN:
            continue
        _, _, rest = page.partition(f"- [`{name}`]")
        listed = re.findall(r"\n  - `(\w+)`: .+", rest.partition("\n- ")[0])
        hidden = {*registry.SET_BY_MODEL, "parent", "name"}
        assert listed == [
            key for key in inspect.signature(module).parameters if key not in hidden
        ]


def test_every_option_of_every_command_is_described(reference):
    page = reference.commands()
    for name, (module, function, _) in cli.COMMANDS.items():
        parser = reference.find_parser(module, function, f"relattn {name}")
        _, _, rest = page.partition(f"\n## relattn {name}\n")
        section = rest.partition("\n## ")[0]
        assert section.startswith(f"\n{parser.description[:40].rstrip('.:')}")
        options = {
            a.option_strings[0] if a.option_strings else a.metavar
            for a in reference.own_options(parser)
        }
        assert described(section) == options
    assert "`--flagfile`: a file of options" in page.partition("\n## ")[0]
    assert "- `: " not in page and ": .\n" not in page


def test_every_key_has_a_comment_of_one_line(reference):
    assert {*reference.commented(default_config)} == {
        *flatten(default_config()),
        "model",
        "data",
    }


def test_lists_of_docstrings_are_read(reference):
    assert reference.listed("""A title.

        - ``a.b``, ``c``: one
          two;
        - ``d``: ``"x"`` three.

        - no key
        """) == {"a.b": "one two", "c": "one two", "d": '``"x"`` three'}
