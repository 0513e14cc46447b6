import json

import pytest

from relattn.training.records import write_run_json
from relattn.training.task import Task
from tests.training.conftest import make_data


@pytest.fixture
def task(tiny, config):
    return Task.build(config, make_data().info)


def start_at(workdir, task, devices, step):
    """The steps of the starts that run.json lists."""
    write_run_json(workdir, task, devices, step)
    record = json.loads((workdir / "run.json").read_text())
    assert record["data"]["name"] == "columns"
    return [start["step"] for start in record["starts"]]


def test_every_start_is_listed(tmp_path, task, one_device):
    assert start_at(tmp_path, task, one_device, 0) == [0]
    assert start_at(tmp_path, task, one_device, 3) == [0, 3]
    assert start_at(tmp_path, task, one_device, 0) == [0]


CONTENTS = [b"", b"{}", b"5", b'{"starts": 5}', b"\xff", b"[" * 100000]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content[:20]))
def test_a_run_json_that_cannot_be_read(tmp_path, task, one_device, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    message = r"run.json is damaged and begun anew, without the starts .* kept as .*/"
    with pytest.warns(UserWarning, match=f"{message}run.json.damaged$"):
        assert start_at(tmp_path, task, one_device, 3) == [3]
    assert (tmp_path / "run.json.damaged").read_bytes() == content
    assert start_at(tmp_path, task, one_device, 5) == [3, 5]
