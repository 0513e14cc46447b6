"""Evaluates GPTs on shorter and longer windows of text than in training.

``python -m studies.lengths --workdir RUN ... --output=DIR``, from the project's root,
measures the loss of each run on its validation text, cut into windows of several
lengths, and writes ``lengths.json``, ``lengths.md`` and ``lengths.png``. Runs that
differ only in their seed are averaged, and so are seeds that were trained together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from relattn import command
from relattn.evaluation.figures import plain, save_figure
from relattn.evaluation.shift import recipe
from relattn.evaluation.shift_runs import run_names
from relattn.files import replace_file
from relattn.markdown import markdown_table
from relattn.training.saved_run import is_saved_model, load_text_run, open_run
from relattn.training.workdir import usable_folder, write_json

LENGTHS = (16, 32, 64, 128, 256, 512)
MISSING = "–"


def measure(workdirs: Sequence[str | Path], lengths: Sequence[int]) -> dict[str, Any]:
    """Measures the loss of runs on windows of several lengths.

    Args:
        workdirs: The run directories.
        lengths: Numbers of tokens in a window.

    Returns:
        What ``lengths.json`` holds: the lengths, and a row for each recipe, of runs
        that differ only in their seed, with its attention and position, and for each
        seed the name of its run, the length of training, and by length the loss in nats
        per token; None for a length that the model cannot have.

    Raises:
        ValueError: If a run is given twice.
    """
    folders = [Path(workdir).resolve() for workdir in workdirs]
    for workdir, folder in zip(workdirs, folders, strict=True):
        if folders.count(folder) > 1:
            # It would count as two runs that differ in their seed.
            raise ValueError(f"--workdir={workdir} is given twice: pass it once")
    rows: dict[str, dict[str, Any]] = {}
    names = run_names(workdirs)
    runs = [
        (workdir, name, seed)
        for workdir, name in zip(workdirs, names, strict=True)
        for seed in _seeds(workdir)
    ]
    bar = tqdm(total=len(runs) * len(lengths), unit=" losses", disable=None)
    for workdir, name, seed in runs:
        run = load_text_run(workdir, seed=seed)
        new = {key: run.config.model[key] for key in ("attention", "position")}
        new |= {"runs": [], "seeds": [], "trained": [], "losses": []}
        row = rows.setdefault(recipe(run), new)
        losses: list[float | None] = []
        for length in lengths:
            try:
                resized = load_text_run(workdir, context_length=length, seed=seed)
            except ValueError:
                # Tables of offsets, and matrices, have no rows for a longer text.
                if length <= run.model.context_length:
                    raise
                losses.append(None)
            else:
                losses.append(resized.evaluate(split="validation")["loss"])
            bar.update()
        row["runs"].append(name)
        row["seeds"].append(run.config.seed)
        row["trained"].append(run.model.context_length)
        row["losses"].append(losses)
    bar.close()
    return {"lengths": list(lengths), "rows": [*rows.values()]}


def _seeds(workdir: str | Path) -> Sequence[int | None]:
    """Returns the seeds of a run; that of a saved model is not asked for."""
    return [None] if is_saved_model(workdir) else open_run(workdir).seeds


def _position(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Returns a row's position, with its runs if another row has the same model."""
    models = [(other["attention"], other["position"]) for other in results["rows"]]
    if models.count((row["attention"], row["position"])) == 1:
        return row["position"]
    return f"{row['position']} [{' '.join(dict.fromkeys(row['runs']))}]"


def lengths_table(results: Mapping[str, Any]) -> str:
    """Makes a table with a row for each recipe.

    Args:
        results: What `measure` returns.

    Returns:
        Markdown: means ± standard deviations over the seeds.

    Example:
        >>> row = {"attention": "softmax", "position": "none", "losses": [[2.5, None]]}
        >>> print(lengths_table({"lengths": [64, 128], "rows": [row]}))
        | attention | position | 64 | 128 |
        | --- | --- | --- | --- |
        | softmax | none | 2.500 | – |
    """
    lines = [
        [
            row["attention"],
            _position(row, results),
            *map(_cell, zip(*row["losses"], strict=True)),
        ]
        for row in results["rows"]
    ]
    return markdown_table(
        ["attention", "position", *map(str, results["lengths"])], lines
    )


def _cell(losses: Sequence[float | None]) -> str:
    found = np.array(losses, float)
    if np.isnan(found).any():
        return MISSING
    spread = f" ± {found.std(ddof=1):.3f}" if len(found) > 1 else ""
    return f"{found.mean():.3f}{spread}"


def plot_lengths(results: Mapping[str, Any], path: Path) -> None:
    """Plots the mean loss of each recipe against the length.

    Args:
        results: What `measure` returns.
        path: The figure.
    """
    attentions = list(dict.fromkeys(row["attention"] for row in results["rows"]))
    rows = [row | {"position": _position(row, results)} for row in results["rows"]]
    # A position has the same colour in all panels.
    positions = list(dict.fromkeys(row["position"] for row in rows))
    figure = Figure(figsize=(1 + 5 * len(attentions), 4.5), layout="constrained")
    panels = figure.subplots(1, len(attentions), sharey=True, squeeze=False)[0]
    for panel, attention in zip(panels, attentions, strict=True):
        chosen = [row for row in rows if row["attention"] == attention]
        for row in chosen:
            # Not a number, where there is no loss, is not drawn.
            losses = np.array(row["losses"], float).mean(axis=0)
            color = f"C{positions.index(row['position'])}"
            label = plain(row["position"])
            panel.plot(results["lengths"], losses, ".-", color=color, label=label)
        for trained in {length for row in chosen for length in row["trained"]}:
            panel.axvline(trained, color="k", ls=":", label=f"training, {trained}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(results["lengths"], map(str, results["lengths"]))
        panel.set(title=plain(attention), xlabel="tokens in a window")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("validation loss, nats per token (lower is better)")
    save_figure(figure, path)


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Writes and prints the table."""
    parser = command.Parser("python -m studies.lengths", __doc__)
    add = parser.add_argument
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "required": True}
    add("--workdir", **many, help="run directories; repeatable")
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=list(LENGTHS),
        help=f"tokens in a window, by default {', '.join(map(str, LENGTHS))}",
    )
    add("--output", required=True, help="folder to write to")
    given = parser.parse_args(argv)
    output = usable_folder(given.output, "--output")
    results = measure(given.workdir, given.lengths)
    write_json(output / "lengths.json", results)
    table = lengths_table(results)
    replace_file(output / "lengths.md", table + "\n")
    plot_lengths(results, output / "lengths.png")
    print(table)


if __name__ == "__main__":
    main()
