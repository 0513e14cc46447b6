"""Makes tables of README.md and docs/ from the measurements in results/."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relattn.json_files import parse_json, read_json
from relattn.markdown import markdown_table
from relattn.training.config_file import read_config
from studies.demo import demo_table
from studies.figure1 import published_accuracies, published_name
from studies.finetune import finetune_table
from studies.lengths import lengths_table
from studies.linearize import linearize_table
from studies.presets import PRESETS
from studies.redraws import Point, redraw_table

RESULTS = Path(__file__).parents[1] / "results"
MISSING = "–"
# Titles of columns of accuracies on class 1, by shift along x in pixels.
_CLASS_1 = {
    -8: "class 1, 8 left",
    -4: "class 1, 4 left",
    0: "class 1, unshifted",
    4: "class 1, 4 right",
    8: "class 1, 8 right",
}

_GUOJI = {"rope2d": "RoPE", "irpe_gate": "iRPE gate", "string_gate": "STRING gate"}
_LABELS = {
    "self_attention": "self-attention",
    "rope": "self-attention, RoPE",
    "lor_translution": "LoR-Translution",
    "translution": "Translution",
    "none": "Performer, none",
    "learnable_sincos": "Performer, learnable_sincos",
    "constrained_sincos": "Performer, constrained_sincos",
    "banded": "Performer, banded",
    **{
        f"{attention}_{name}": f"{attention}, {label}"
        for attention in ("favor", "relu")
        for name, label in _GUOJI.items()
    },
}


def study(file: str, columns: Mapping[str, str]) -> str:
    """Returns the table of a study: mean ± standard deviation (published value).

    Args:
        file: Name of a file in ``results/``, as `studies` writes it.
        columns: Titles of the columns, by their names in the file.

    Returns:
        The table, with the parameters and the epochs of each model.
    """
    rows = []
    for row in _rows(file):
        run, *_ = row["runs"].values()
        cells = [
            f"{row['columns']['parameters']['mean']:.2f}M",
            f"{run['results'][0]['epochs']:.3g}",
            *(_value(row["columns"][name]) for name in columns),
        ]
        rows.append([_label(row["name"]), *cells])
    return markdown_table(["model", "parameters", "epochs", *columns.values()], rows)


def _rows(file: str) -> list[dict[str, Any]]:
    """Returns the rows of a study that one command trained, or a list of commands."""
    results = read_json(RESULTS / file, allow_nan=True)
    commands = results if isinstance(results, list) else [results]
    return [row for command in commands for row in command["rows"]]


def _value(value: Mapping[str, Any]) -> str:
    published = value["published"] and f" ({value['published']})"
    if value.get("mean") is None:
        return f"not trained{published}"
    # Losses are below 10, accuracies above.
    digits = 1 if value["mean"] > 10 else 3
    spread = "" if value["std"] is None else f" ± {value['std']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}{published}"


def _label(name: str) -> str:
    name = name.split("(")[0].removeprefix("a12_")
    return _LABELS.get(name, name)


def figure1(study: str) -> str:
    """Returns the accuracies of the Performers on Fashion-MNIST, also under shifts."""
    shifted = _shift_accuracies(f"{study}_shift.csv")
    rows = []
    for row in _rows(f"{study}.json"):
        name = row["name"]
        model = read_config(f"performer:{name}").model
        known = published_name(model.name, model.attention, model.position)
        published = published_accuracies("fashion_mnist", known)
        cells = [_label(name), _value(row["columns"]["fashion_mnist"])]
        for shift in _CLASS_1:
            value = f" ({100 * published[shift]:.1f})" if shift in published else ""
            cells.append(f"{shifted[name, '1', shift]}{value}")
        cells += [shifted[name, "all", shift] for shift in (-4, 4)]
        rows.append(cells)
    titles = [*_CLASS_1.values(), "all, 4 left", "all, 4 right"]
    return markdown_table(["model", "test images", *titles], rows)


def baselines() -> str:
    """Returns the accuracies of the baselines of table 1, also under shifts."""
    shifted = _shift_accuracies("performer_table1_shift.csv")
    rows = []
    for row in _rows("performer_table1.json"):
        (result,) = row["runs"]["fashion_mnist"]["results"]
        columns = row["columns"]
        cells = [
            _label(row["name"]),
            f"{columns['parameters']['mean']:.2f}M",
            f"{result['epochs']:.0f}",
            _value(columns["fashion_mnist"]),
            *(shifted[row["name"], "1", shift] for shift in _CLASS_1),
        ]
        rows.append(cells)
    titles = ["model", "parameters", "epochs", "test images", *_CLASS_1.values()]
    return markdown_table(titles, rows)


def _shift_accuracies(file: str) -> dict[tuple[str, str, int], str]:
    """Returns the accuracies in % by model, class and shift along x."""
    accuracies = {}
    for row in _read_csv(file):
        if row["source"] == "measured":
            runs = row["run"].split()
            mean, std = (100 * float(row[f"accuracy_{key}"]) for key in ("mean", "std"))
            spread = f" ± {std:.1f}" if len(runs) > 1 else ""
            key = runs[0].split("-")[0], row["class"], int(row["shift_x_px"])
            accuracies[key] = f"{mean:.1f}{spread}"
    return accuracies


def invariant_shift() -> str:
    """Returns the accuracies and consistencies of the exact models and of others."""
    trained = _rows("invariant_shift.json")
    tested = {row["name"]: row["columns"]["fashion_mnist"] for row in trained}
    shifted: dict[str, list[str]] = {name: [] for name in tested}
    for row in _read_csv("invariant_shift_shift.csv"):
        measures = ["accuracy"]
        if row["source"] == "random":
            measures.append("consistency")
        for measure in measures:
            mean, std = (
                100 * float(row[f"{measure}_{key}"]) for key in ("mean", "std")
            )
            shifted[row["run"].split("-")[0]].append(f"{mean:.1f} ± {std:.1f}")
    rows = [[name, _value(tested[name]), *cells] for name, cells in shifted.items()]
    titles = ["100, unshifted", "100, shifted", "consistency"]
    return markdown_table(["model", "1,000, unshifted", *titles], rows)


def choosing_shift() -> str:
    """Returns the accuracies of four ways to encode positions, under shifts."""
    titles = {
        "learnable_sincos": "absolute positions (`learnable_sincos`)",
        "constrained_sincos": "strategy 1 of Horn et al. (`constrained_sincos`)",
        "sincos_bias": "the same score as a bias (`sincos_bias`)",
        "invariant": '`periodic=True` with `anchor="polyphase"`',
    }
    found = {
        (row["run"].split("-")[0], row["source"]): 100 * float(row["accuracy_mean"])
        for row in _read_csv("invariant_shift_shift.csv")
        if row["source"] == "random" or row["shift_x_px"] == row["shift_y_px"] == "0"
    }
    rows = [
        [title, *(f"{found[name, source]:.0f}" for source in ("measured", "random"))]
        for name, title in titles.items()
    ]
    return markdown_table(["positions", "unshifted", "shifted"], rows)


def demo() -> str:
    """Returns the table of the demo."""
    results = read_json(RESULTS / "demo.json", allow_nan=True)
    return demo_table(results, "1 (Trouser)").rstrip()


def speed(
    file: str,
    kernels: Mapping[str, Sequence[str]],
    sizes: Mapping[str, Mapping[str, int]],
) -> str:
    """Returns time and memory, forward and backward.

    Args:
        file: Name of a file in ``results/``, as `benchmarks.speed` writes it.
        kernels: For each title of a row, names of kernels in the file; the first that
            was measured counts.
        sizes: For each title of a column, the sizes that identify its measurements.

    Returns:
        The table.
    """
    measured = _read_lines(file)

    def cell(names: Sequence[str], size: Mapping[str, int]) -> str:
        for row in measured:
            same = size.items() <= row.items() and row["kernel"] in names
            if same and row.get("forward_backward_ms"):
                return _time_and_memory(row)
        return MISSING

    rows = [
        [title, *(cell(names, size) for size in sizes.values())]
        for title, names in kernels.items()
    ]
    return markdown_table(["kernel", *sizes], rows)


def _read_lines(file: str) -> list[dict[str, Any]]:
    lines = (RESULTS / file).read_text("utf-8").splitlines()
    return [parse_json(line, RESULTS / file, allow_nan=True) for line in lines]


def _read_csv(file: str) -> list[dict[str, str]]:
    with (RESULTS / file).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _time_and_memory(row: Mapping[str, Any]) -> str:
    memory = row["forward_backward_memory_mb"]
    memory = f"{memory:.0f} MB" if memory < 1000 else f"{memory / 1e3:.1f} GB"
    return f"{row['forward_backward_ms']:,.0f} ms, {memory}"


def speed_steps() -> str:
    """Returns the times of training steps beside PyTorch."""
    names = {"vit": "ViT-A/12, self-attention", "performer": "Performer"}
    rows = [
        [
            names[row["model"]],
            str(row["cores"]),
            *(f"{row[key]:,.0f} ms" for key in ("relattn_ms", "torch_ms")),
            f"{row['ratio']:.2f}",
        ]
        for row in _read_lines("speed_steps_cpu.jsonl")
    ]
    header = ["model", "cores", "relattn", "PyTorch", "relattn / PyTorch"]
    return markdown_table(header, rows)


def places() -> str:
    """Returns the accuracies of ViTs that were trained on digits at several places."""
    names = ("static_static", "static_dynamic", "once_dynamic", "dynamic_dynamic")
    rows = [
        row
        for row in [*_rows("translution_mnist.json"), *_rows("translution_places.json")]
        # Rows of the same recipe.
        if all(each["results"][0]["step"] == 5154 for each in row["runs"].values())
    ]
    return _joined_rows(
        rows, {name: (name.replace("_", " → "), "{:.1f}") for name in names}
    )


def long_text() -> str:
    """Returns the validation losses of small GPTs with short and long contexts."""
    columns = {
        "parameters": ("parameters", "{:.2f}M"),
        "loss_160": ("loss, 160", "{:.3f}"),
        "loss_1024": ("loss, 1,024", "{:.3f}"),
        "loss_4096": ("loss, 4,096", "{:.3f}"),
        "seconds_160": ("training, 160", "{:,.0f} s"),
        "seconds_1024": ("training, 1,024", "{:,.0f} s"),
        "seconds_4096": ("training, 4,096", "{:,.0f} s"),
    }
    return _joined_rows(_rows("translution_long_text.json"), columns)


def _joined_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]
) -> str:
    """Makes a table with one row a model from rows that each have some of its columns.

    Args:
        rows: Rows of studies.
        columns: Titles and formats of the columns, by their names in the studies.
    """
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        cells = found.setdefault(_label(row["name"]), {})
        for name in columns.keys() & row["columns"].keys():
            # Parameters are those of the first row, with the shortest context.
            cells.setdefault(
                name, columns[name][1].format(row["columns"][name]["mean"])
            )
    return markdown_table(
        ["model", *(title for title, _ in columns.values())],
        [
            [label, *(cells.get(name, MISSING) for name in columns)]
            for label, cells in found.items()
        ],
    )


def fourier() -> str:
    """Returns the accuracies of Fourier values, and what a step of them costs."""
    file = RESULTS / "translution_fourier.json"
    trained, timed = read_json(file, allow_nan=True)
    memory = read_json(RESULTS / "translution_fourier_memory.json", allow_nan=True)
    speeds = {row["name"]: row["runs"]["static"]["results"][0] for row in timed["rows"]}
    batch_size = memory["self_attention"]["batch_size"]
    rows = []
    for row in trained["rows"]:
        name, columns = row["name"], row["columns"]
        (sizes,) = memory[name]["bytes_per_device"]
        step = MISSING
        if name in speeds:
            seconds = batch_size / speeds[name]["examples_per_second"]
            step = f"{1000 * seconds:,.0f} ms"
        rows.append(
            [
                _label(name),
                f"{columns['parameters']['mean']:.2f}M",
                step,
                f"{sizes['total'] / 1e9:.2f} GB",
                # The published ones are of other trainings.
                *(
                    _value(columns[f"static_{to}"] | {"published": ""})
                    for to in ("static", "dynamic")
                ),
            ]
        )
    titles = ["step", "memory", "static → static", "static → dynamic"]
    return markdown_table(["model", "parameters", *titles], rows)


def mesh_memory() -> str:
    """Returns what each device of a mesh holds."""
    file = RESULTS / "translution_mesh_memory.json"
    rows = [
        [
            str(row["data"] * row["model"]),
            f"{row['data']} x {row['model']}",
            *(f"{row[key] / 1e9:.2f} GB" for key in ("state", "temporary", "total")),
        ]
        for row in read_json(file, allow_nan=True)["bytes_per_device"]
    ]
    held = ["parameters and optimiser", "temporary", "total"]
    return markdown_table(["devices", "data x model", *held], rows)


def compiled(target: str) -> str:
    """Returns what programs become when they are compiled for an accelerator."""
    file = RESULTS / f"compiled_{target}.json"
    rows = []
    for name, row in read_json(file, allow_nan=True).items():
        if "failed" in row:
            rows.append([f"`{name}`", "does not compile", *[MISSING] * 8])
            continue
        cells = [
            f"{row['seconds']:.0f} s",
            f"{row['code_mb']:,.1f} MB" if row["code_mb"] else MISSING,
            f"{row['temporary_mb']:,.1f} MB",
            f"{row['instructions']:,}",
            f"{row['moved_mb']:,.0f} MB",
            f"{row['gflops']:,.1f}",
            *(f"{row[key]:,.2f} ms" for key in ("limit_ms", "time_ms")),
            f"{row['roofline_share']:.0%}",
        ]
        rows.append([f"`{name}`", *cells])
    titles = ["compiled in", "code", "temporary", "instructions", "moved", "GFLOP"]
    return markdown_table(["program", *titles, "limit", "time", "limit / time"], rows)


def _gpu_rows(prefix: str) -> dict[str, dict[str, Any]]:
    rows = read_json(RESULTS / "gpu_h200.json", allow_nan=True)["rows"]
    return {
        name.removeprefix(prefix): row
        for name, row in rows.items()
        if name.startswith(prefix)
    }


def _gpu_kernels(
    kernels: Mapping[str, str], sizes: Mapping[str, str], dtypes: Sequence[str]
) -> str:
    """Returns the times of kernels on a GPU, forward and forward + backward.

    ``kernels`` and ``sizes``, such as ``4096x16`` (tokens and batch), have titles.
    """
    measured = _gpu_rows("")

    def cell(name: str) -> str:
        if name not in measured:
            return MISSING
        row = measured[name]
        forward, both = row["forward_ms"], row["forward_backward_ms"]
        return f"{forward:.2f}, {both:.2f} ms ({row['forward_backward_share']:.0%})"

    columns = {
        f"{title}, {dtype}": f"{size}, {dtype}"
        for size, title in sizes.items()
        for dtype in dtypes
    }
    rows = [
        [title, *(cell(f"{kernel}@{size}") for size in columns.values())]
        for kernel, title in kernels.items()
    ]
    return markdown_table(["kernel", *columns], rows)


def gpu_steps() -> str:
    """Returns the times of training steps on a GPU beside the modelled ones."""
    modelled = read_json(RESULTS / "compiled_h100.json", allow_nan=True)
    rows = [
        [
            f"`{name}`",
            str(row["batch_size"]),
            f"{row['step_ms']:.1f} ms",
            f"{modelled[name]['time_ms']:.1f} ms",
            f"{row['examples_per_s']:,.0f}",
            f"{row['share']:.0%}",
            f"{row['launches']:,.0f}",
            f"{row['temporary_mb'] / 1e3:.1f} GB",
        ]
        for name, row in _gpu_rows("step:").items()
    ]
    titles = ["batch", "step", "modelled", "examples/s", "share", "launches"]
    return markdown_table(["model", *titles, "temporary"], rows)


def gpu_accuracy() -> str:
    """Returns the largest errors of kernels on a GPU."""
    rows = [
        [
            name,
            *(
                f"{errors['values']:.0e}, {errors['gradients']:.0e}"
                for errors in row.values()
            ),
        ]
        for name, row in _gpu_rows("accuracy:").items()
    ]
    precisions = ["float32, highest precision", "float32", "bfloat16"]
    return markdown_table(["kernel", *precisions], rows)


def _lengths(**size: int) -> dict[str, dict[str, int]]:
    return {f"{n:,} tokens": {"length": n, **size} for n in (1024, 4096, 16384)}


def _translution(name: str) -> list[str]:
    """Returns the names of a kernel and of its causal form."""
    if name.startswith("gather_"):
        return [name, name.replace("gather_", "gather_causal_")]
    return [name, f"causal_{name}"]


def redraws(preset: str) -> str:
    """Returns what small Performers do under shifts, by draws of random features."""
    points = read_json(RESULTS / f"{preset}_redraws.json")["points"]
    study = PRESETS[preset].redraws
    assert study is not None
    return redraw_table(study, [Point(**point) for point in points]).rstrip()


def linearize(file: str) -> str:
    """Returns the table of a model whose softmax attention becomes linear."""
    return linearize_table(read_json(RESULTS / file)).rstrip()


def finetune() -> str:
    """Returns the table of fine-tuning after a change of the attention."""
    results = read_json(RESULTS / "finetune_cpu.json", allow_nan=True)
    return finetune_table(results).rstrip()


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "invariant_shift": invariant_shift,
    "choosing_shift": choosing_shift,
    "choosing_speed": lambda: speed(
        "speed_cpu.jsonl",
        {
            "`softmax`": ["softmax"],
            "`favor`": ["linear"],
            "`favor`, causal": ["causal_linear"],
        },
        _lengths(batch=2),
    ),
    "finetune": finetune,
    "redraws": lambda: redraws("performer_pixels16"),
    "redraws_torus": lambda: redraws("performer_torus16"),
    "linearize_vit": lambda: linearize("linearize_vit.json"),
    "linearize_gpt": lambda: linearize("linearize_gpt.json"),
    "rpe_vit": lambda: study(
        "rpe_vit_mnist.json",
        {"mnist_val_acc": "validation", "mnist_test_acc": "test"},
    ),
    "rpe_vit_cifar10": lambda: study(
        "rpe_vit_cifar10.json",
        {"cifar10_val_acc": "validation", "cifar10_test_acc": "test"},
    ),
    "performer_figure1": lambda: figure1("performer_figure1"),
    "performer_figure1_pixels": lambda: figure1("performer_figure1_pixels"),
    "performer_table1": baselines,
    "translution_mnist": lambda: study(
        "translution_mnist.json",
        {
            "static_static": "static → static",
            "static_dynamic": "static → dynamic",
            "dynamic_static": "dynamic → static",
            "dynamic_dynamic": "dynamic → dynamic",
        },
    ),
    "translution_places": places,
    "translution_fourier": fourier,
    "translution_text": lambda: study(
        "translution_text_cpu.json", {"loss": "validation loss, nats per byte"}
    ),
    "translution_text_lengths": lambda: lengths_table(
        read_json(RESULTS / "translution_text_lengths.json")
    ),
    "translution_long_text": long_text,
    "translution_kernel_docs": lambda: study(
        "translution_kernel_docs.json", {"perplexity": "validation perplexity"}
    ),
    "translution_wikitext2": lambda: study(
        "translution_wikitext2.json", {"perplexity": "validation perplexity"}
    ),
    "speed_steps": speed_steps,
    "speed_banded": lambda: speed(
        "speed_cpu.jsonl",
        {
            "banded": ["banded"],
            "banded, gathered over the band": ["gather_band"],
            "linear, content heads only": ["linear"],
        },
        {"32x32 and CLS, batch 8, 4 heads of 32": {"length": 1024, "batch": 8}},
    ),
    "gpu_long": lambda: _gpu_kernels(
        {
            "causal_linear": "causal linear",
            "fla_causal_linear": "causal linear, flash-linear-attention",
            "causal_softmax": "causal softmax",
            "causal_cudnn_softmax": "causal softmax, cuDNN",
            "causal_softmax_pytorch": "causal softmax, PyTorch",
            "linear": "linear",
            "softmax": "softmax",
            "cudnn_softmax": "softmax, cuDNN",
            "relative_bias": "softmax, offset bias",
            "causal_relative_bias": "causal softmax, offset bias",
            "toeplitz": "linear, offset bias",
        },
        {"4096x16": "4,096 tokens", "16384x4": "16,384 tokens"},
        ["bfloat16", "float32"],
    ),
    "gpu_translution": lambda: _gpu_kernels(
        {
            "lor_translution_by_rows": "LoR-Translution, by rows",
            "lor_translution_by_offsets": "LoR-Translution, by offsets",
            "gather_lor_translution": "LoR-Translution, gathered",
            "self_attention": "self-attention",
            "translution_by_rows": "Translution, by rows",
        },
        {"49x256": "7x7 and CLS, batch 256"},
        ["bfloat16", "float32"],
    ),
    "gpu_causal_translution": lambda: _gpu_kernels(
        {
            "causal_lor_translution_by_rows": "LoR-Translution, by rows",
            "gather_causal_lor_translution": "LoR-Translution, gathered",
        },
        {"160x8": "causal, 160 tokens, batch 8"},
        ["bfloat16", "float32"],
    ),
    "gpu_steps": gpu_steps,
    "gpu_accuracy": gpu_accuracy,
    "speed_linear": lambda: speed(
        "speed_cpu.jsonl",
        {
            "linear": ["linear"],
            "its matrix products alone": ["linear_products"],
            "causal linear": ["causal_linear"],
            "banded, clip 6": ["banded"],
            "causal linear, a scan per token": ["scan_per_token"],
            "softmax": ["softmax"],
            "softmax, all scores at once": ["dense_softmax"],
            "softmax, offset bias": ["relative_bias"],
        },
        _lengths(batch=2),
    ),
    "speed_translution": lambda: speed(
        "speed_translution_cpu.jsonl",
        {
            "Translution": _translution("translution"),
            "Translution, gathered": _translution("gather_translution"),
            "Translution, clip 2": _translution("clipped_translution"),
            "LoR-Translution, rank 8": _translution("lor_translution"),
            "LoR-Translution, gathered": _translution("gather_lor_translution"),
            "self-attention": _translution("self_attention"),
        },
        {
            "7x7 and CLS, batch 8": {"length": 49, "batch": 8},
            "12x12 and CLS, batch 32": {"length": 144, "batch": 32},
            "causal, 160 tokens, batch 8": {"length": 160, "batch": 8},
        },
    ),
    "speed_toeplitz": lambda: speed(
        "speed_toeplitz_cpu.jsonl",
        {
            "by pairs, O(n^2)": ["toeplitz_by_pairs"],
            "by FFT, O(n log n)": ["toeplitz_by_fft"],
        },
        _lengths(batch=1),
    ),
    "speed_torus": lambda: speed(
        "speed_torus_cpu.jsonl",
        {
            f"{title}{where}": [f"{kernel}{suffix}"]
            for title, kernel in (
                ("Translution", "translution"),
                ("LoR-Translution, rank 8", "lor_translution"),
                ("relative bias", "relative_bias"),
                ("linear, offset bias, by FFT", "toeplitz_by_fft"),
                ("banded, clip 6", "banded"),
            )
            for where, suffix in (("", ""), (", torus", "_torus"))
        },
        {
            "7x7 and CLS, batch 8, 3 heads of 64": {"length": 49},
            "12x12 and CLS, batch 8, 3 heads of 64": {"length": 144},
            "32x32, batch 1, 8 heads of 32": {"length": 1024},
        },
    ),
    "mesh_memory": mesh_memory,
    "compiled": lambda: compiled("v5e"),
    "compiled_h100": lambda: compiled("h100"),
}
