"""Worker processes and scripts without a main guard."""

import runpy
import subprocess
import sys

import pytest
from PIL import Image

from relattn.data.main_guard import check_main_guard

CALL = "check_main_guard(2)"
UNGUARDED = [
    CALL,
    f"if True:\n    {CALL}",
    f"with open(__file__):\n    {CALL}",
    f"def main():\n    {CALL}\nmain()",
    f"import other\nif __name__ == '__main__':\n    pass\n{CALL}",
]
GUARDED = [
    f"if __name__ == '__main__':\n    {CALL}",
    f"def main():\n    {CALL}\nif '__main__' == __name__:\n    main()",
    "import multiprocessing\nif multiprocessing.parent_process() is None:\n    " + CALL,
    "check_main_guard(0)",
]


def run(tmp_path, text):
    (tmp_path / "other.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(f"from relattn.data.main_guard import check_main_guard\n{text}")
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("text", UNGUARDED)
def test_a_script_without_guard_raises(tmp_path, monkeypatch, text):
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        r"^data.num_workers=2 starts .*: put .* under `if __name__ == \"__main__\":`"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path, text)


@pytest.mark.parametrize("text", GUARDED)
def test_a_guarded_script_starts_workers(tmp_path, text):
    run(tmp_path, text)


def test_tests_and_notebooks_need_no_guard():
    check_main_guard(2)
    exec(compile(CALL, "<cell>", "exec"), {"__name__": "__main__"} | globals())


@pytest.mark.slow
def test_a_real_script_ends_with_the_sentence(tmp_path):
    for index in range(4):
        path = tmp_path / "train" / "aabb"[index] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5 + index, 7)).save(path)
    script = tmp_path / "script.py"
    script.write_text(
        "from relattn.data import image_options, load_data\n"
        "config = image_options('mine', 4, source='folder', num_workers=2)\n"
        f"config.update(data_dir={str(tmp_path)!r}, num_validation=1)\n"
        "with load_data(config).train_loader(2, seed=0) as batches:\n"
        "    print(next(batches))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and "data.num_workers=2 starts" in done.stderr
    # No worker had the chance to fail.
    assert "bootstrapping" not in done.stderr and not done.stdout
