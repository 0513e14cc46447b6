"""Turns the softmax attention of a trained model into linear attention.

``python -m studies.linearize --workdir=RUN --output=DIR``, from the project's root,
takes a finished run with softmax attention and, for each new attention,

- swaps the attention and keeps all parameters (``swapped``);
- trains the feature maps to reproduce the weights of softmax, layer by layer, with all
  else frozen (``imitated``; ``favor`` has no learned feature maps);
- fine-tunes low-rank changes of the projections together with the feature maps
  (``lora``), or all parameters (``full``).

Writes ``results.json`` and ``table.md``: the test accuracy or perplexity after each
stage, and the seconds of the stage, compilation included. The model of a stage is in
``DIR/ATTENTION/STAGE``, for `relattn.load_pretrained`. The same command continues with
the first stage that is missing; with other ``--attentions`` or ``--tuning`` it adds to
the results. Other settings need another ``--output``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from relattn import command
from relattn import data as data_lib
from relattn.data import DataSource
from relattn.files import replace_file
from relattn.json_files import read_json
from relattn.markdown import markdown_table
from relattn.messages import check_choice
from relattn.models import pretrained
from relattn.training import linearize, load_run
from relattn.training.config import differences
from relattn.training.draws import stream_key
from relattn.training.metrics import cross_entropy
from relattn.training.optimizer import make_schedule
from relattn.training.predict import read_tokenizer_file
from relattn.training.run import Run
from relattn.training.step import Batch
from relattn.training.task import INPUT_DTYPES
from relattn.training.workdir import usable_folder, write_json

ATTENTIONS = ("favor", "relu", "hedgehog")
METRIC = {"images": "accuracy", "tokens": "perplexity", "points": "accuracy"}
TUNING = ("lora", "full")
TITLES = {
    "swapped": "swapped",
    "imitated": "feature maps trained",
    "lora": "then low-rank changes",
    "full": "then all parameters",
}
# The largest norm of a gradient in fine-tuning.
CLIP_NORM = 1.0
FLAGS = {
    "imitate_steps": "updates of the feature maps",
    "imitate_rate": "their largest learning rate; all follow a cosine to zero",
    "tune_steps": "updates of fine-tuning",
    "lora_rate": "largest learning rate of low-rank changes and feature maps",
    "full_rate": "largest learning rate of all parameters",
    "rank": "rank of the low-rank changes",
    "batch_size": "examples of an update; 0 for those of the run",
    "seed": "seed of the order of the data and of all draws",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stages; `FLAGS` describes them."""

    imitate_steps: int = 1000
    imitate_rate: float = 1e-2
    tune_steps: int = 1000
    lora_rate: float = 1e-3
    full_rate: float = 3e-4
    rank: int = 8
    batch_size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"imitate_steps": 1, "tune_steps": 1, "rank": 1, "batch_size": 0}
        for name, smallest in {**least, "seed": 0}.items():
            if getattr(self, name) < smallest:
                raise ValueError(
                    f"--{name} must be at least {smallest}, got {getattr(self, name)}"
                )
        for name in ("imitate_rate", "lora_rate", "full_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name} must be positive, got {getattr(self, name)}"
                )


def run_linearize(
    workdir: str | Path,
    output: str | Path,
    *,
    attentions: Sequence[str] = ATTENTIONS,
    tuning: Sequence[str] = TUNING,
    settings: Settings = Settings(),
    data: DataSource | None = None,
) -> str:
    """Linearizes a run and writes the table.

    Args:
        workdir: The directory of a finished run with softmax attention.
        output: The output folder.
        attentions: Specs of the new attentions.
        tuning: Ways of fine-tuning, ``"lora"`` and ``"full"``.
        settings: Settings of the stages.
        data: The data set; None for that of the run.

    Returns:
        The table in Markdown.

    Raises:
        ValueError: If the run has another attention, the folder has results of another
            run or other settings, a name does not exist, or training diverges.
        OSError: If the folder cannot be written to, or the run cannot be loaded.
    """
    for method in tuning:
        check_choice("--tuning", method, TUNING)
    output = usable_folder(output, "--output")
    run = load_run(workdir)
    if run.config.model.attention != "softmax":
        raise ValueError(
            f"{workdir} was trained with attention {run.config.model.attention!r}: "
            "name a run with attention 'softmax'"
        )
    if not settings.batch_size:
        settings = dataclasses.replace(settings, batch_size=run.config.batch_size)
    made = _made(run, settings)
    earlier = _read_attentions(output / "results.json", made)
    data = data_lib.load_data(run.config.data) if data is None else data
    linearizations = {}
    for attention in attentions:
        folder = output / re.sub(r"[^\w=.]+", "_", attention).strip("_")
        linearization = Linearization(run, data, attention, settings, folder)
        linearization.check()  # Raises before anything is trained.
        linearizations[attention] = linearization
    softmax = run.evaluate(data)
    metric = METRIC[run.data.kind]
    results: dict[str, Any] = {**made, "metric": metric, "data": run.data.name}
    results |= {"softmax": softmax, "attentions": earlier}
    for attention, linearization in linearizations.items():
        row = earlier.setdefault(attention, {})
        for stage, result in linearization.stages(tuning):
            row[stage] = result
            print(f"{attention}, {stage}: {metric} {result[metric]:.4f}", flush=True)
            write_json(output / "results.json", results)
            replace_file(output / "table.md", linearize_table(results))
    return linearize_table(results)


def _made(run: Run, settings: Settings) -> dict[str, Any]:
    """Returns what all results in a folder depend on."""
    source = {"step": run.step, "config": run.pretrained_config()["training"]}
    # Runs of one configuration differ in the data and the models in their folders.
    digest = hashlib.blake2b(digest_size=16)
    for array in jax.tree.leaves(run.variables):
        digest.update(np.asarray(array).tobytes())
    source["weights"] = digest.hexdigest()
    return {"source": source, "settings": dataclasses.asdict(settings)}


def _read_attentions(path: Path, made: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the results of earlier commands by attention.

    Raises:
        ValueError: If they are of another run or of other settings.
    """
    if not path.exists():
        return {}
    found = read_json(path, {"source": dict, "settings": dict, "attentions": dict})
    for key, what in {"source": "another run", "settings": "other settings"}.items():
        if differing := differences(found[key], made[key], ()):
            raise ValueError(
                f"{path.parent} has results of {what} ({'; '.join(differing[:5])}): "
                "choose another --output"
            )
    return found["attentions"]


@dataclasses.dataclass(frozen=True)
class Linearization:
    """The stages of one attention.

    Attributes:
        run: The run with softmax attention.
        data: Its data.
        attention: Spec of the new attention.
        settings: Settings of the stages.
        folder: The output folder of the attention.
    """

    run: Run
    data: DataSource
    attention: str
    settings: Settings
    folder: Path

    @property
    def model(self) -> nn.Module:
        """The model with the new attention."""
        return self.run.model.clone(attention=self.attention)

    @property
    def key(self) -> jax.Array:
        """The key of all draws."""
        return jax.random.key(self.settings.seed)

    @property
    def example(self) -> jax.Array:
        """One input of the model."""
        shape = data_lib.input_shape(self.run.config.data, self.run.data)
        return jnp.zeros((1, *shape), INPUT_DTYPES[self.run.data.kind])

    def check(self) -> None:
        """Raises ValueError if the model cannot have the attention."""
        jax.eval_shape(self.model.init, self.key, self.example)

    def stages(self, tuning: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Computes or reads the stages; yields their names and results."""
        variables, result = self.complete("swapped", self.swap)
        yield "swapped", result
        if linearize.feature_map_params(self.model, variables, self.example):
            imitate = functools.partial(self.imitate, variables)
            variables, result = self.complete("imitated", imitate)
            yield "imitated", result
        for method in tuning:
            tune = functools.partial(self.fine_tune, variables, method)
            yield method, self.complete(method, tune)[1]

    def complete(
        self, stage: str, compute: Callable[[], tuple[Any, dict[str, Any]]]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns a stage's variables and result; computes them unless they exist."""
        folder, file = self.folder / stage, self.folder / stage / "result.json"
        made = _made(self.run, self.settings)
        if file.exists():
            found = read_json(file, {"settings": dict, "result": dict})
            if {name: found.get(name) for name in made} == made:
                return pretrained.load_pretrained(folder).variables, found["result"]
            file.unlink()
        start = time.monotonic()
        variables, details = compute()
        jax.block_until_ready(variables)
        seconds = time.monotonic() - start
        changed = dataclasses.replace(self.run, model=self.model, variables=variables)
        result = changed.evaluate(self.data) | details | {"seconds": seconds}
        config = self.run.pretrained_config()
        for values in (config["model"], config["training"]["model"]):
            values["attention"] = self.attention
        tokenizer = read_tokenizer_file(self.run)
        pretrained.save_pretrained(folder, config, variables, tokenizer=tokenizer)
        write_json(file, {**made, "result": result})
        return variables, result

    def batches(self, steps: int) -> Iterator[Batch]:
        """Yields batches of the training split."""
        settings = self.settings
        with self.data.train_loader(settings.batch_size, settings.seed) as loader:
            for _, batch in itertools.islice(loader, steps):
                yield batch

    def swap(self) -> tuple[Any, dict[str, Any]]:
        """Swaps the attention."""
        run = self.run
        _, variables = linearize.swap_attention(
            run.model, run.variables, self.attention, self.example, self.key
        )
        return variables, {}

    def imitate(self, variables: Any) -> tuple[Any, dict[str, Any]]:
        """Trains the feature maps; returns the variables, and the divergences."""
        steps, preprocess = self.settings.imitate_steps, jax.jit(self.run.preprocess)
        title = f"{self.attention}, imitated"
        with tqdm(total=steps, desc=title, disable=None) as bar:
            variables, divergences = linearize.imitate_softmax(
                self.model,
                variables,
                map(preprocess, self.batches(steps)),
                optax.adam(_schedule(self.settings.imitate_rate, steps)),
                on_step=lambda step: bar.update(),
            )
        _check_finite(divergences[-1], "--imitate_rate")
        return variables, {
            "first_divergences": divergences[0].tolist(),
            "last_divergences": divergences[-1].tolist(),
        }

    def fine_tune(self, variables: Any, method: str) -> tuple[Any, dict[str, Any]]:
        """Fine-tunes the model; returns the variables, and the losses."""
        settings, model, key = self.settings, self.model, self.key
        steps, params = settings.tune_steps, variables["params"]
        trained, rate = params, settings.full_rate
        if method == "lora":
            lora_key = stream_key(key, "lora")
            trained = {
                "lora": linearize.init_lora(params, lora_key, rank=settings.rank),
                "maps": linearize.feature_map_params(model, variables, self.example),
            }
            rate = settings.lora_rate

        def merge(params: Any, trained: Any) -> Any:
            if method == "full":
                return trained
            params = linearize.replace_params(params, trained["maps"])
            return linearize.merge_lora(params, trained["lora"])

        optimizer = optax.chain(
            optax.clip_by_global_norm(CLIP_NORM), optax.adam(_schedule(rate, steps))
        )

        @jax.jit
        def update(trained, opt_state, variables, batch, step):
            def loss(trained):
                dropout = jax.random.fold_in(stream_key(key, "dropout"), step)
                logits: Any = model.apply(
                    {**variables, "params": merge(variables["params"], trained)},
                    self.run.preprocess(batch),
                    deterministic=False,
                    rngs={"dropout": dropout},
                )
                return cross_entropy(logits, batch["label"]).mean()

            value, gradients = jax.value_and_grad(loss)(trained)
            updates, opt_state = optimizer.update(gradients, opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state, value

        opt_state, losses = optimizer.init(trained), []
        title = f"{self.attention}, {method}"
        batches = tqdm(self.batches(steps), total=steps, desc=title, disable=None)
        for step, batch in enumerate(batches):
            trained, opt_state, loss = update(
                trained, opt_state, variables, batch, step
            )
            losses.append(loss)
        losses = np.asarray(jax.device_get(losses), np.float64)
        _check_finite(losses[-1], f"--{method}_rate")
        details = {"first_loss": losses[:10].mean(), "last_loss": losses[-10:].mean()}
        return {**variables, "params": merge(params, trained)}, details


def _schedule(rate: float, steps: int) -> optax.Schedule:
    return make_schedule("cosine", rate, warmup_steps=0, num_steps=steps)


def _check_finite(values: Any, flag: str) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"training diverged: choose a smaller {flag}")


def linearize_table(results: Mapping[str, Any]) -> str:
    """Formats the study's table.

    Args:
        results: The contents of ``results.json``.

    Returns:
        Markdown: one row per attention, one column per stage.
    """
    metric = results["metric"]

    def shown(result: Mapping[str, Any] | None) -> str:
        if result is None:
            return "–"
        value = result[metric]
        text = f"{value:.2%}" if metric == "accuracy" else f"{value:#.4g}"
        return f"{text} ({result['seconds']:,.0f} s)" if "seconds" in result else text

    rows = results["attentions"]
    stages = [stage for stage in TITLES if any(stage in row for row in rows.values())]
    softmax = shown(results["softmax"])
    header = [
        f"test {metric} on {results['data']}; softmax: {softmax}",
        *(TITLES[stage] for stage in stages),
    ]
    cells = [
        [f"`{name}`", *(shown(row.get(stage)) for stage in stages)]
        for name, row in rows.items()
    ]
    return markdown_table(header, cells) + "\n"


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the study."""
    parser = command.Parser("python -m studies.linearize", __doc__)
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--workdir", required=True, help="a finished run with softmax attention")
    add("--output", required=True, help="output folder")
    add("--attentions", **several, help="new attentions, by default all three")
    add("--tuning", **several, help="lora and full; by default both")
    for name, text in FLAGS.items():
        default = getattr(Settings, name)
        add(f"--{name}", type=type(default), default=default, help=text)
    given = parser.parse_args(argv)
    command.keep_heap()
    text = run_linearize(
        given.workdir,
        given.output,
        attentions=given.attentions or ATTENTIONS,
        tuning=given.tuning or TUNING,
        settings=Settings(**{name: getattr(given, name) for name in FLAGS}),
    )
    print(f"\n{text}\nWritten to {given.output}: table.md, results.json")


if __name__ == "__main__":
    main()
