"""The final metrics of a run: those of its best checkpoints on every split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relattn.data import EvalSplit
from relattn.training.checkpoint import read_meta, restore
from relattn.training.distributed import from_primary
from relattn.training.evaluator import Evaluator
from relattn.training.history import BEST_METRICS, History
from relattn.training.parallel import Parallel
from relattn.training.run import CHECKPOINTS
from relattn.training.seeds import select
from relattn.training.task import Task


def final_results(
    task: Task,
    histories: Sequence[History],
    splits: Mapping[str, EvalSplit],
    evaluator: Evaluator,
    parallel: Parallel,
    workdir: Path,
    step: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluates the best checkpoint of every seed.

    Args:
        task: What was trained.
        histories: Of the seeds.
        splits: By name; "validation" was evaluated in training.
        evaluator: Of a single seed.
        parallel: The devices.
        workdir: The run directory.
        step: Number of updates.
        say: Told the results.

    Returns:
        What ``result.json`` holds: the metrics of the one seed, or for several what
        they share and, in the list ``runs``, the metrics of each. ``inference_seconds``
        is the time of the compiled model on the test split, batch by batch from the
        devices' memory, without compilation and loading; not of a test split that is
        the validation split.
    """
    seeds, kind = task.seeds, task.info.kind
    metric = BEST_METRICS[kind][0]
    folder = workdir / CHECKPOINTS
    runs = []
    for index, history in enumerate(histories):
        from_primary(partial(read_meta, folder, history.best_step))
        template = parallel.template(task.abstract_state)
        best = restore(folder, history.best_step, template)
        best = select(best, index, len(seeds))
        variables = parallel.place(best.variables)
        # A split may have two names.
        results = {id(splits["validation"]): history.best}
        for name, split in splits.items():
            if id(split) not in results:
                (results[id(split)],) = evaluator(
                    variables, split, task.config.eval_batch_size, timed=name == "test"
                )
        result = {
            "step": history.stopped_step or step,
            "num_steps": task.num_steps,
            "epochs": (history.stopped_step or step) / task.steps_per_epoch,
            "stopped_early": history.stopped_early,
            "num_params": task.num_params,
            "best_step": history.best_step,
            "skipped_updates": history.skipped_updates,
        }
        for name, split in splits.items():
            for key, value in results[id(split)].items():
                if key not in ("count", "seconds"):
                    result[f"{name}_{key}"] = value
        if "seconds" in results[id(splits["test"])]:
            result["inference_seconds"] = results[id(splits["test"])]["seconds"]
        result["seconds"] = history.seconds
        result["examples_per_second"] = history.examples_per_second
        if len(seeds) > 1:
            result = {"seed": seeds[index], **result}
        runs.append(result)
        tests = [
            f"{name.replace('_', ' ')} {metric} {result[f'{name}_{metric}']:.4f}"
            for name in splits
            if name != "validation"
        ]
        of_seed = f"Seed {seeds[index]}: best" if len(seeds) > 1 else "Best"
        say(
            f"{of_seed} validation {metric} {history.best[metric]:.4f} at step "
            f"{history.best_step}; {', '.join(tests)}. Everything is in {workdir}."
        )
    if len(runs) == 1:
        return runs[0]
    return {
        "step": step,
        "num_steps": task.num_steps,
        "epochs": step / task.steps_per_epoch,
        "stopped_early": all(run["stopped_early"] for run in runs),
        "num_params": task.num_params,
        "seconds": sum(run["seconds"] for run in runs),
        "runs": runs,
    }


def words(metrics: Mapping[str, float]) -> str:
    """Metrics in a line.

    Args:
        metrics: By name.

    Returns:
        For example ``"top5 accuracy 0.9000, loss 1.2000"``.

    Example:
        >>> words({"top5_accuracy": 0.9, "loss": 1.2})
        'top5 accuracy 0.9000, loss 1.2000'
    """
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()
    )
