"""Options, error messages and exit codes of all programs."""

import ast
import errno
import importlib
import importlib.metadata
import io
import json
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from relattn import cli, command, training
from relattn.data import image_list
from relattn.evaluation import perplexity
from relattn.nn import ATTENTIONS
from relattn.training.config import flatten, to_json
from relattn.training.config_file import read_config

ROOT = Path(__file__).parents[1]
# Required arguments of each program.
PROGRAMS = {
    "eval_shift": ["--output=x"],
    "tools.embed": ["--source=x"],
    "tools.offline": ["--python=3.12", "--output=x"],
    "tools.pretrained": ["--output=x"],
    "tools.tables": [],
    "relattn.__main__": ["report", "--workdir=x"],
    "relattn.convert": ["--source=timm", "--checkpoint=x", "--output=x"],
    "relattn.export": ["--workdir=x", "--format=hf", "--output=x"],
    "relattn.data.prepare": ["--name=mnist"],
    "relattn.data.prepare_text": ["--openwebtext", "--output=x"],
    "studies.demo": [],
    "studies.figure4": ["--output=x"],
    "studies.finetune": ["--data_dir=x"],
    "studies.lengths": ["--workdir", "x", "--output=x"],
    "studies.linearize": ["--workdir=x", "--output=x"],
    "studies.sizes": [],
    "studies.sweep": ["--config=configs/demo.py", "--output=x"],
    "studies.translation": [],
    "benchmarks.compiled": [],
    "benchmarks.gpu": [],
    "benchmarks.memory": ["--config=configs/demo.py"],
    "benchmarks.pipeline": ["--config=configs/demo.py"],
    "benchmarks.soak": ["--config=configs/demo.py", "--workdir=x"],
    "benchmarks.speed": [],
    "benchmarks.measure": ['{"kernel": "linear"}'],
    "benchmarks.steps": ['{"model": "vit", "cores": 1}'],
    "studies.__main__": ["--preset=translution_text", "--output=x"],
    "relattn.evaluation.sample": ["--workdir=x"],
    "relattn.evaluation.predict": ["--workdir=x", "--input=x"],
    "relattn.evaluation.perplexity": ["--workdir=x", "--input=x"],
    "relattn.evaluation.report": ["--workdir=x"],
    "train": ["--config=configs/demo.py", "--workdir=x"],
}
NO_PROGRAM = "relattn.evaluation.shift"


def start(program, arguments):
    importlib.import_module(program).main(arguments)


def run_file(program, arguments):
    """Runs a program as Python does: as ``__main__``, which loads its module again."""
    path = ROOT / f"{program.replace('.', '/')}.py"
    sys.argv[:] = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


@pytest.fixture
def refused(capsys, monkeypatch):
    """Returns a function that starts a program, which must fail with one sentence."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # `run_file` changes it.
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def refused(program, arguments, run=start):
        with pytest.raises(SystemExit) as raised:
            run(program, arguments)
        out, err = capsys.readouterr()
        assert (raised.value.code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    return refused


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\rb", "a\nb", "\u202eb", "\udcff"])
def test_messages_do_not_control_the_terminal(name, capsys):
    @command.entry_point
    def main():
        print(warnings.formatwarning(f"{name} is bad", UserWarning, "a.py", 3))
        command.Parser("a", "").parse_args([f"--import={name}"])

    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    for line in (out.rstrip("\n"), err.rstrip("\n")):
        assert line.replace("\n", "").isprintable()
    assert err.count("\n") == 1


def test_warnings_of_relattn_are_one_sentence(capsys):
    @command.entry_point
    def main():
        for file in (image_list.__file__, "a.py"):
            print(warnings.formatwarning("b is left out", UserWarning, file, 3, "c()"))

    main()
    ours, others = capsys.readouterr().out.split("\n\n")[:2]
    assert ours == "warning: b is left out"
    assert others == "a.py:3: UserWarning: b is left out\n  c()"


WRITERS = {
    program: [word for word in arguments if not word.startswith("--output")]
    for program, arguments in PROGRAMS.items()
    if arguments[-1:] == ["--output=x"]
} | {
    "benchmarks.memory": PROGRAMS["benchmarks.memory"],
    "relattn.evaluation.predict": PROGRAMS["relattn.evaluation.predict"],
    "relattn.evaluation.report": PROGRAMS["relattn.evaluation.report"],
    "studies.demo": [],
    "studies.finetune": PROGRAMS["studies.finetune"],
    "tools.embed": PROGRAMS["tools.embed"],
}


@pytest.mark.parametrize("program", WRITERS)
def test_an_empty_output_is_not_the_current_folder(program, refused):
    """As of an unset shell variable."""
    message = refused(program, [*WRITERS[program], "--output="])
    assert message.startswith("error: --output is empty (unset shell variable?): name")


def test_all_programs_are_listed():
    folders = ["relattn", "studies", "benchmarks", "tools"]
    sources = [path for name in folders for path in ROOT.glob(f"{name}/**/*.py")]
    found = set()
    for path in [*ROOT.glob("*.py"), *sources]:
        guard = '\nif __name__ == "__main__":'
        _, start, rest = path.read_text("utf-8").partition(guard)
        if start:
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
            # Names defined below would be missing when the program runs.
            assert rest.count("\n") <= 2, path
    assert found == {*PROGRAMS, NO_PROGRAM}


@pytest.mark.parametrize("program", PROGRAMS)
def test_unknown_options_are_rejected(program, refused):
    error = refused(program, [*PROGRAMS[program], "--no_such=3"], run_file)
    assert "unknown option --no_such: " in error
    if program == "train":
        assert error.endswith("of the configuration is written --config.no_such\n")


def test_unknown_commands_are_rejected(refused):
    assert "unknown command 'tran': did you mean 'train'" in refused(
        "relattn.__main__", ["tran", "--config=demo"]
    )


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    version = importlib.metadata.version("relattn")
    assert capsys.readouterr().out == f"relattn {version}\n"


@pytest.fixture
def printed(capsys, monkeypatch):
    """Returns a function that returns what ``relattn config`` prints."""
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def printed(*options):
        cli.main(["config", *options])
        return capsys.readouterr().out

    return printed


def test_config_prints_every_key_as_training_reads_it(printed):
    options = [
        "--config=demo:banded",
        "--config.seed=3",
        "--config.model.qkv_bias=True",
    ]
    config = read_config(options[0].removeprefix("--config="), options[1:])
    lines = printed(*options).splitlines()
    values = dict(line.removeprefix("config.").split(" = ", 1) for line in lines)
    assert {key: ast.literal_eval(v) for key, v in values.items()} == flatten(config)
    assert values["seed"] == "3" and values["model.qkv_bias"] == "True"
    assert json.loads(printed(*options, "--json")) == to_json(config)


def test_config_lists_the_configurations(printed):
    names = [line.split(": ")[0] for line in printed().splitlines()]
    assert names == sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("own", [None, "", "mine"])
def test_programs_keep_what_they_compile(monkeypatch, tmp_path, own):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", own)
        command.entry_point(lambda: None)()
        folder = jax.config.jax_compilation_cache_dir
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert folder == (str(tmp_path / "relattn" / "jax") if own is None else own)


# Frees 16 MB in a thread, then 2 GB; prints whether the heap keeps most of them.
KEEPS = """
import ctypes, threading
from relattn.command import keep_heap
keep_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = libc.sbrk(0)
for size in (24, 31):
    thread = threading.Thread(target=lambda: libc.free(libc.malloc(1 << size)))
    thread.start()
    thread.join()
    print(libc.sbrk(0) - before > 1 << size - 1)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_training_on_cpus_keeps_the_heap():
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    said = subprocess.run(
        [sys.executable, "-c", KEEPS],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert said == "True\nFalse\n"


@pytest.mark.parametrize(
    "platforms, tunables, calls",
    [("cpu", None, 4), ("cuda,cpu", None, 0), ("cpu", "", 0)],
)
def test_the_heap_is_kept_on_cpus_unless_the_user_tunes_it(
    platforms, tunables, calls, monkeypatch
):
    found = []
    libc = SimpleNamespace(mallopt=lambda *option: found.append(option))
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(command.platform, "libc_ver", lambda: ("glibc", "2"))
    monkeypatch.setattr(command.jax, "config", SimpleNamespace(jax_platforms=platforms))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if tunables is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    command.keep_heap()
    assert len(found) == calls


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_commands_explain_themselves(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert re.search(rf"^  {name} +[a-z]", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    assert sys.argv == ["pytest"]
    assert capsys.readouterr().out.startswith(f"usage: relattn {name} [-h]")


def test_module_without_a_program(capsys):
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(NO_PROGRAM).main()
    assert "run `eval_shift.py`" in capsys.readouterr().err


DEMO = "--config=configs/demo.py"


@pytest.mark.parametrize(
    "program, arguments, message",
    [
        ("eval_shift", ["--output=x"], "no run: name at least one folder by --workdir"),
        ("eval_shift", ["--workdir=no/run", "--output={}"], "no complete checkpo"),
        (
            "eval_shift",
            ["--workdir=no/run", "--workdir=no/../no/run/", "--output={}"],
            "--workdir=no/run is given twice: pass it once",
        ),
        ("train", ["--config=demos", "--workdir={}"], "--config 'demos': did you mean"),
        ("eval_shift", ["--output=x", "extra"], "unexpected argument 'extra': options"),
        ("tools.embed", ["--source={}"], "images-idx3-ubyte.gz is missing: --s"),
        ("tools.tables", ["contract"], "table 'contract': did you mean 'contracts'?"),
        ("relattn.data.prepare", ["--name=minst"], "invalid choice: 'minst'"),
        ("relattn.data.prepare_text", ["--output=x"], "--input --openwebtext is requ"),
        ("studies.demo", ["--output={}/file"], "file is a file: name a directory"),
        ("studies.demo", ["--config.num=3", "--output={}/d"], "no --config.num: "),
        ("studies.demo", ["--variants=,"], "no variant: name at least one"),
        ("studies.demo", ["--seeds=0"], "seeds must be at least 1, got 0"),
        ("benchmarks.compiled", ["--only=lineer@4096"], "mean 'linear@4096'?"),
        ("benchmarks.gpu", ["--only=step:ruting"], "did you mean 'step:routing'"),
        ("benchmarks.gpu", ["--only=zz*"], "no row 'zz*'. Rows have names like"),
        ("benchmarks.gpu", ["--minutes=-1"], "--minutes must be at least 0, got -1"),
        ("benchmarks.memory", [DEMO, "--meshes=ax2"], "=ax2: pass DATAx"),
        ("benchmarks.memory", ["--config={}/a.py"], "a.py cannot be read"),
        ("benchmarks.memory", [DEMO, "--num_classes=0"], "at least 1, got 0"),
        ("benchmarks.memory", [DEMO, "--vocab_size=-5"], "at least 1, got -5"),
        ("benchmarks.memory", [DEMO, "--config.num_seeds=2"], "leave it at 1"),
        ("benchmarks.pipeline", ["--config=/no/such.py"], "such.py cannot be"),
        ("benchmarks.pipeline", [DEMO, "--steps=0"], "must be at least 1, got"),
        ("studies.sizes", ["--foo"], "did you mean '--json'?"),
        (
            "benchmarks.soak",
            ["--config=nope.py", "--workdir={}/run"],
            "nope.py",
        ),
        (
            "benchmarks.soak",
            [DEMO, "--workdir={}/file"],
            "file is a file: name a directory",
        ),
        ("benchmarks.speed", ["--output={}/file/a"], "file is a file: name a"),
        ("benchmarks.speed", ["--output="], "--output is empty (unset shell"),
        ("benchmarks.speed", ["--kernel="], "--kernel: name at least one kern"),
        ("benchmarks.speed", ["--kernel=lineer"], "did you mean 'linear'?"),
        ("benchmarks.measure", ["{{"], "request: invalid"),
        ("benchmarks.measure", ["{{}}"], "request: invalid"),
        ("benchmarks.steps", ["{{}}"], "request: invalid"),
        ("studies.__main__", ["--preset=nope", "--output=x"], "unknown preset"),
        ("studies.__main__", ["--preset=rpe_vit", "--output="], "is empty (unset"),
        (
            "studies.__main__",
            ["--preset=rpe_vit_cpu", "--output={}/new", "--config.num=3"],
            "there is no --config.num: ",
        ),
        (
            "studies.__main__",
            ["--preset=rpe_vit_cpu", "--output={}/new", "--config.batch_size=0"],
            "config.batch_size must be at least 1, got 0",
        ),
        (
            "studies.demo",
            ["--output={}/new", "--config.batch_size=0"],
            "config.batch_size must be at least 1, got 0",
        ),
        (
            "relattn.evaluation.sample",
            ["--workdir=x", "--num_samples=0"],
            "from 1 to 1000000, got",
        ),
        (
            "relattn.evaluation.sample",
            ["--workdir=x", "--num_samples=-1"],
            "1 to 1000000, got -1",
        ),
        (
            "relattn.evaluation.sample",
            ["--workdir=x", "--seed=10**30"],
            "--seed: invalid int value",
        ),
        (
            "relattn.evaluation.sample",
            ["--workdir={}/no", "--prompt", "-- a text = with spaces"],
            "no complete checkpoint in",
        ),
        (
            "relattn.evaluation.predict",
            ["--workdir={}", "--input={}"],
            "holds no images (.jpg, ",
        ),
        (
            "relattn.evaluation.predict",
            ["--workdir={}", "--input={}/a"],
            "a is missing",
        ),
        (
            "relattn.evaluation.predict",
            ["--workdir={}", "--input="],
            "--input is empty",
        ),
        (
            "relattn.evaluation.predict",
            ["--workdir={}", "--input={}/file", "--output={}"],
            "is a folder: name a file in it",
        ),
        (
            "relattn.__main__",
            ["config", "--config.seed=3"],
            "--config is missing: name the",
        ),
        (
            "relattn.__main__",
            ["config", "--config=demo:bandd"],
            "did you mean 'banded'",
        ),
        (
            "relattn.__main__",
            ["config", "--config=demo", "--config.batch_size=0"],
            "config.batch_size must be at least 1, got 0",
        ),
        (
            "relattn.convert",
            ["--source=timm", "--checkpoint={}/a.safetensors", "--output="],
            "--output is empty (unset shell variable?): name a directory",
        ),
        ("train", [], "the following arguments are required: --config, --workdir"),
        (
            "train",
            ["--workdri=x"],
            "unknown option --workdri: did you mean '--workdir'",
        ),
        ("train", ["--flagfile=/no/such"], "--flagfile cannot be read: "),
        ("train", ["--flagfile"], "--flagfile cannot be read: "),
        ("train", [DEMO, "--workdir="], "--workdir is empty (unset shell variable?)"),
        ("train", [DEMO, "--workdir=x", "extra"], "unexpected argument 'extra': opti"),
        (
            "train",
            [f"{DEMO}:bandd", "--workdir=x"],
            "error: configs/demo.py has no arg",
        ),
        ("train", [DEMO, "--workdir=x", "--config.a.b=3"], "no --config.a.b: "),
        (
            "train",
            [DEMO, "--workdir={}/run", "--config.batch_size=0"],
            "config.batch_size must be at least 1, got 0",
        ),
    ],
)
def test_invalid_input_fails_with_one_sentence(
    program, arguments, message, refused, tmp_path
):
    (tmp_path / "file").touch()
    arguments = [argument.format(tmp_path) for argument in arguments]
    assert message in refused(program, arguments)
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file"]


@pytest.mark.quick("0", "1", "2")
@pytest.mark.parametrize(
    "source, message",
    [
        (b"x = 1\nx / 0\n", "config.py, line 2: ZeroDivisionError: division by zero"),
        (b"int('three')", "config.py, line 1: ValueError: invalid literal for int()"),
        (b"import no_such_module", "line 1: ModuleNotFoundError: No module named"),
        (b"open('/no/such/file')", "line 1: FileNotFoundError: [Errno 2] No such file"),
        (b"x = 1\0", "null bytes"),
        (b"\xff", "config.py, line 1, is not Python ("),
        (b"A title\n\nAnd text.", "config.py, line 1, is not Python (invalid syntax)"),
        (
            b"def get_config():\n    return get_config()\n",
            "config.py, line 2: RecursionError: maximum recursion depth exceeded",
        ),
        (b"x = " + 1000 * b"(" + b"1" + 1000 * b")", "config.py"),
        (b"", "config.py cannot be read (AttributeError: module"),
        (b"def get_config():\n    return {}\n", "returned dict, not a ConfigDict"),
        (
            b"from ml_collections import ConfigDict\nget_config = ConfigDict\n",
            "error: config.model is missing",
        ),
        (
            b"from relattn.training import default_config\n"
            b"def get_config():\n    return default_config()\n",
            "error: config.data.name is missing",
        ),
        (
            b"from relattn.training import default_config\n"
            b"def get_config():\n    config = default_config()\n"
            b"    config.data.name = 'mnist'\n    config.data.num_validation = 5\n"
            b"    return config\n",
            "error: config.model: unknown model name '': available: ",
        ),
    ],
    ids=range(14),
)
def test_invalid_config_file_fails_with_one_sentence(
    source, message, refused, tmp_path
):
    path = tmp_path / "config.py"
    path.write_bytes(source)
    error = refused("train", [f"--config={path}", f"--workdir={tmp_path / 'run'}"])
    assert message in error


def test_options_are_read_from_a_file(refused, tmp_path):
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    outer.write_text(f"# A comment.\n--config={DEMO}\n\n--flagfile\n{inner}\nextra\n")
    inner.write_text("--workdir=x\n")
    error = refused("train", [f"--flagfile={outer}"])
    assert "unexpected argument 'extra'" in error
    inner.write_text(f"--flagfile={outer}\n")
    error = refused("train", [f"--flagfile={outer}"])
    assert error == f"error: --flagfile cannot be read: {outer} is given twice\n"


# Programs with an option that takes one value, which they have by default.
TWICE = {name: words for name, words in PROGRAMS.items() if "benchmarks.me" not in name}


@pytest.mark.parametrize("program", TWICE)
def test_an_option_given_twice_is_refused(program, refused):
    """argparse would keep the last."""
    twice = ["--verbosity=0", "--verbosity", "0"]
    assert "--verbosity is given twice, but takes one" in refused(
        program, [*TWICE[program], *twice]
    )
    for word in TWICE[program]:
        name = word.partition("=")[0]
        # A repeatable option of a program is "--input", or written as two words.
        if "=" in word and name != "--input":
            error = refused(program, [*TWICE[program], word])
            assert f"{name} is given twice, but takes one" in error


def test_options_given_twice_are_refused(refused, tmp_path):
    speed = ["--backward", "--no-backward"]
    assert "--no-backward is given twice" in refused("benchmarks.speed", speed)
    train = [DEMO, "--workdir=x", "--config.seed=1", "--config.seed", "2"]
    assert "--config.seed is given twice" in refused("train", train)
    train = [DEMO, "--workdir=x", "--config.progress", "--noconfig.progress"]
    assert "--config.progress is given twice" in refused("train", train)
    (tmp_path / "flags").write_text("--workdir=y\n")
    train = [DEMO, "--workdir=x", f"--flagfile={tmp_path / 'flags'}"]
    assert "--workdir is given twice" in refused("train", train)
    train = ["--config=demo:banded,none", "--workdir=x"]
    assert "takes one variant, got 'banded' and 'none'" in refused("train", train)
    train = ["--config=performer:mnist,cifar10", "--workdir=x"]
    assert "takes one dataset, got 'mnist' and 'cifar10'" in refused("train", train)
    train = ["--config=performer:banded,clip=2,clip=4", "--workdir=x"]
    assert "takes one clip=..., got two" in refused("train", train)


def test_files_given_in_two_options_are_all_taken(monkeypatch):
    seen = []

    class Run:
        def evaluate(self, path, **options):
            seen.append(path)
            return dict.fromkeys(("perplexity", "bits_per_token"), 1.0) | {
                "bits_per_byte": 1.0,
                "count": 3.0,
            }

    info = SimpleNamespace(context_length=7)
    monkeypatch.setattr(perplexity, "load_text_run", lambda *args: Run())
    monkeypatch.setattr(perplexity, "require_kind", lambda run, kind: info)
    start("relattn.evaluation.perplexity", ["--workdir=x", "--input", "a", "b"])
    words = ["--workdir=x", "--input=a", "--input=b"]
    start("relattn.evaluation.perplexity", words)
    assert seen == ["a", "b", "a", "b"]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(refused, value):
    sample = ["--workdir=x", f"--temperature={value}"]
    assert f"must be a finite number, got '{value}'" in refused(
        "relattn.evaluation.sample", sample
    )


def test_overrides_reach_the_training(monkeypatch):
    given = []
    monkeypatch.setattr(
        training,
        "train_and_evaluate",
        lambda *args, profile: given.append((*args, profile)),
    )
    words = ["--config", "configs/demo.py:banded", "--workdir", "w", "--config.seed=3"]
    words += ["--config.num_steps", "7", "--noconfig.progress", "--profile=3"]
    start("train", words)
    ((config, workdir, profile),) = given
    assert profile == 3
    assert (config.seed, config.num_steps, config.progress, workdir) == (
        3,
        7,
        False,
        "w",
    )
    assert config.model.attention.startswith("banded")


@pytest.mark.parametrize(
    "error, code, said",
    [
        (MemoryError("no"), 2, "error: the host ran out of memory (no): lower "),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory."),
            2,
            "error: a device ran out of memory (Out of memory): lower ",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            2,
            "error: the host ran out of memory ([Errno 12] Cannot allocate memory): ",
        ),
        (
            RuntimeError("can't start new thread"),
            2,
            "error: the host ran out of memory (can't start new thread): lower ",
        ),
        (
            RuntimeError("Unable to initialize backend 'nonsense': it is\nunknown"),
            2,
            "error: JAX_PLATFORMS cannot be used: Unable to initialize backend "
            "'nonsense': it is unknown\n",
        ),
        (training.PreemptedError("Stopped by SIGTERM"), 75, "Stopped by SIGTERM\n"),
        (training.PreemptedError("Ctrl-C", by_hand=True), 130, "Ctrl-C\n"),
        (KeyboardInterrupt(), 130, "interrupted: "),
    ],
)
def test_exit_codes_and_messages(error, code, said, capsys):
    @command.entry_point
    def main():
        raise error

    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_an_interrupt_in_a_callback_is_not_lost(capsys):
    """Such as JAX's, which each garbage collection calls."""

    class Callback:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    @command.entry_point
    def main():
        callback = Callback()
        del callback
        for _ in range(500):
            time.sleep(0.01)

    before = sys.unraisablehook
    # A job in the background ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err.startswith("interrupted: ")
    assert sys.unraisablehook is before


@pytest.mark.parametrize("error", [KeyError("k"), ValueError("not the package's")])
def test_other_errors_keep_their_traceback(error):
    @command.entry_point
    def main():
        raise error

    with pytest.raises(type(error), match=re.escape(str(error))):
        main()


def test_characters_missing_in_the_encoding_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))

    @command.entry_point
    def main():
        print("0.5 ± 0.1", flush=True)

    main()
    assert written.getvalue() == b"0.5 \\xb1 0.1\n"


@pytest.mark.parametrize(
    "program", [name for name in PROGRAMS if name != "relattn.__main__"]
)
def test_help_without_docstrings(program, monkeypatch, capsys):
    """As under ``python -OO``."""
    monkeypatch.setattr(importlib.import_module(program), "__doc__", None)
    with pytest.raises(SystemExit, match="0"):
        start(program, ["--help"])
    assert capsys.readouterr().out.startswith("usage: python ")


def test_import_runs_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "registers_a_mean.py").write_text(
        "import relattn\n\nclass Mean(relattn.MultiHeadAttention):\n"
        "    def attend(self, q, k, v, context):\n        return v\n\n"
        "relattn.register_attention('imported_mean', Mean)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command, "imported", [])
    parser = command.Parser("python x.py", "Does nothing.")
    fix = "run the command in the module's folder, or add that to PYTHONPATH"
    with pytest.raises(ValueError, match=f"--import=no.such failed .Module.*: {fix}$"):
        parser.parse_args(["--import=no.such"])
    for file in ("registers_a_mean.py", f"{tmp_path}/registers_a_mean.py"):
        message = f"--import={file} is a file: pass .*, --import=registers_a_mean, in"
        with pytest.raises(ValueError, match=message):
            parser.parse_args([f"--import={file}"])
    assert "imported_mean" not in ATTENTIONS
    parser.parse_args(["--import=registers_a_mean"])
    assert ATTENTIONS.pop("imported_mean").__name__ == "Mean"
    assert command.imported == ["registers_a_mean"]


@command.entry_point
def call(function):
    """A program that does anything."""
    function()


def raising(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    "function, said",
    [
        (lambda: Path("a" * 300).stat(), "a cannot be read or written (File name too"),
        (
            lambda: os.open(".", os.O_WRONLY),
            ". cannot be read or written (Is a directory): check",
        ),
        (
            raising(OSError(errno.ENOSPC, "No space left on device", "a.csv")),
            "a.csv cannot be read or written (No space left on device): free some",
        ),
        (
            raising(OSError(errno.EMFILE, "Too many open files")),
            "a file cannot be read or written (Too many open files): raise the limit",
        ),
    ],
)
def test_errors_of_the_system_are_one_sentence(function, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(function)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said in error


def test_long_messages_are_cut_in_the_middle(capsys):
    with pytest.raises(SystemExit, match="2"):
        call(raising(OSError(errno.EIO, "Input/output error", "a" * 10_000)))
    error = capsys.readouterr().err
    assert error.endswith("(Input/output error): check the disk, and try again\n")
    assert len(error) < 2100


def test_errors_of_the_network_keep_their_traceback():
    with pytest.raises(ConnectionRefusedError):
        call(raising(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")))


def test_a_deleted_folder_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="2"):
        call(lambda: Path("a").absolute())
    assert capsys.readouterr().err.startswith("error: the current folder was deleted: ")


def full_disk():
    return open("/dev/full", "w")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
@pytest.mark.parametrize("place", [full_disk, closed_pipe])
@pytest.mark.parametrize(
    "function, code, said",
    [
        (lambda: print("a"), 2, "error: the output cannot be written ("),
        (lambda: print("a" * 100_000), 2, "error: "),
        (lambda: (print("a"), sys.exit(0)), 2, "error: the output cannot be written ("),
        (raising(training.PreemptedError("Stopped")), 75, "Stopped\n"),
    ],
)
def test_output_that_cannot_be_written(
    place, function, code, said, monkeypatch, capsys
):
    with place() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as raised:
            call(function)
        assert raised.value.code == code
        # As at the end of the process, where Python would print an error.
        stream.flush()
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


def test_closed_streams_are_replaced(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    call(lambda: print(sys.stdout.isatty(), sys.stdin.read(), file=sys.stderr))
    for name in ("stdin", "stdout", "stderr"):
        getattr(sys, name).close()


@pytest.mark.parametrize(
    "error, lacks",
    [
        (MemoryError(), True),
        (OSError(errno.ENFILE, "Too many open files in system"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (ValueError("truncated"), False),
    ],
)
def test_lack_of_resources(error, lacks):
    assert command.lacks_resources(error) == lacks
    wrapped = ValueError("the file is damaged")
    wrapped.__cause__ = error
    assert command.lacks_resources(wrapped) == lacks
