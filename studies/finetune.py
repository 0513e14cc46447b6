"""Swaps the attention of a trained ViT and fine-tunes it; also trains it anew.

``python -m studies.finetune --data_dir=DATA --output=finetune``, from the project's
root, trains a small ViT with softmax on Fashion-MNIST; then, for one epoch, models with
other attentions that start from its parameters (``config.init_from``), and the same
models from random parameters. Writes ``table.md`` and ``results.json``. The same
command continues an interrupted study. Options ``--config.key=value`` are passed to
``train.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relattn import command
from relattn.files import replace_file
from relattn.markdown import markdown_table
from relattn.training.overrides import typed_keys
from relattn.training.workdir import usable_folder, write_json
from studies.launcher import Training, train

CONFIG = "configs/rpe_vit.py:mnist,softmax,none"
SIZES = {"dim": 64, "num_layers": 4, "num_heads": 4, "mlp_dim": 128}
# The attentions, and the parameters that a softmax ViT does not have.
ATTENTIONS = {
    "softmax": "",
    "favor(num_features=64)": "",
    "lor_translution(rank=4)": (
        "q_table, k_table, v_table, low_q, low_k, low_v, low_out"
    ),
}


def run_finetune(
    data_dir: str,
    output: str | Path,
    *,
    epochs: int = 5,
    jobs: int = 2,
    overrides: Sequence[str] = (),
) -> str:
    """Trains the models and writes the table.

    Args:
        data_dir: Folder of Fashion-MNIST, prepared by ``relattn prepare``.
        output: The output folder.
        epochs: Number of epochs of the first model; the others have one.
        jobs: Number of parallel processes.
        overrides: Other options of ``train.py``, also instead of the study's.

    Returns:
        The table in Markdown.

    Raises:
        ValueError: If an option does not fit the configuration.
        OSError: If the folder cannot be written to, or a training fails.
    """
    output = usable_folder(output, "--output")
    options = [f"--config.model.{name}={value}" for name, value in SIZES.items()]
    options += [
        "--config.data.name=fashion_mnist",
        f"--config.data.data_dir={data_dir}",
    ]
    options.append("--config.data.augment=none")
    # The user's options take the place of those of the study.
    given = typed_keys(overrides)
    options = [option for option in options if not typed_keys([option]) & given]
    options += overrides

    def training(label: str, num_epochs: int, *changes: str) -> Training:
        changes = (f"--config.num_epochs={num_epochs}", *changes)
        workdir = output / label.partition("(")[0].replace(" ", "-")
        return Training(label, CONFIG, workdir, overrides=[*options, *changes])

    start = training("softmax", epochs)
    train([start], jobs=1)
    trainings = {"trained": {}, "random": {}}
    for attention, new in ATTENTIONS.items():
        change = f"--config.model.attention={attention}"
        trained = [f"--config.init_from={start.workdir}", f"--config.init_skip={new}"]
        for name, extra in ("trained", trained), ("random", []):
            trainings[name][attention] = training(
                f"{name} {attention}", 1, change, *extra
            )
    train([each for group in trainings.values() for each in group.values()], jobs)
    results = {"start": start.result()}
    for name, group in trainings.items():
        results[name] = {
            attention: training.result() for attention, training in group.items()
        }
    write_json(output / "results.json", results)
    text = finetune_table(results)
    replace_file(output / "table.md", text)
    return text


def finetune_table(results: Mapping[str, Mapping]) -> str:
    """Formats the study's table: test accuracy of each attention.

    Args:
        results: The contents of ``results.json``.

    Returns:
        Markdown: one row per attention.
    """
    epochs, accuracy = (results["start"][key] for key in ("epochs", "test_accuracy"))
    header = [
        "attention",
        f"one epoch after {epochs:g} epochs of softmax ({accuracy:.1%})",
        "one epoch from random parameters",
    ]
    rows = []
    for attention in results["trained"]:
        cells = [
            f"{results[name][attention]['test_accuracy']:.1%}"
            for name in ("trained", "random")
        ]
        rows.append([f"`{attention}`", *cells])
    return markdown_table(header, rows) + "\n"


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study."""
    parser = command.Parser("python -m studies.finetune", __doc__, overrides=True)
    add = parser.add_argument
    add("--data_dir", required=True, help="folder of the prepared Fashion-MNIST")
    add("--output", default="finetune", help="output folder")
    add("--epochs", type=int, default=5, help="epochs of the softmax ViT")
    add("--jobs", type=int, default=2, help="parallel processes")
    given = parser.parse_args(argv)
    text = run_finetune(
        given.data_dir,
        given.output,
        epochs=given.epochs,
        jobs=given.jobs,
        overrides=given.overrides,
    )
    print(f"\n{text}\nWritten to {given.output}: table.md, results.json")


if __name__ == "__main__":
    main()
