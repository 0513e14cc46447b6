"""Exports a trained model to other libraries.

    relattn export RUN --format=onnx --output=DIR

``--format`` is ``safetensors-timm`` or ``hf``, for a model that is one of timm's or of
transformers'; ``stablehlo``, which ``jax.export.deserialize`` loads on CPUs, GPUs and
TPUs; or ``onnx``. The last two need the extra of their name. ``python -m
relattn.export`` is the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from relattn import command
from relattn.command import lacks_resources, one_line
from relattn.files import check_folder, expand, replace_file
from relattn.json_files import to_plain
from relattn.manifest import write_manifest
from relattn.messages import check_choice, printable
from relattn.models import preprocessing, pretrained, variable_names
from relattn.models.hub import is_hub_id
from relattn.models.safetensors import write_safetensors
from relattn.models.targets import to_library, tokenizer_config

PLATFORMS = ("cpu", "cuda", "tpu")
STABLEHLO, ONNX = "model.stablehlo", "model.onnx"
# A fraction of the largest output: other programs round differently.
_BOUND = 1e-4
# Sizes of the batches that are compared; one size would not show that it is fixed.
_BATCHES = (2, 3)
# What flatbuffers and protobuf can hold, of which the two formats consist.
_MAX_BYTES = 2**31

_PACKAGES = {"stablehlo": "flatbuffers", "onnx": "jax2onnx"}
_HINTS = {
    "stablehlo": "flatbuffers: pip install 'relattn[stablehlo]'",
    "onnx": "jax2onnx, which asks for orbax-checkpoint below 0.11.37 and so does not "
    "install beside the trainer: write the model by run.save_pretrained, and export "
    "that folder in an environment with 'relattn[onnx]'",
}

Predict = Callable[[Any], Any]


class _Source(NamedTuple):
    """A trained model: the contents of its files, and what makes predictions."""

    model: nn.Module
    variables: dict[str, Any]
    config: dict[str, Any]
    make_predict: Callable[[nn.Module, Any], Predict]
    tokenizer: bytes | None = None

    @property
    def predict(self) -> Predict:
        """Maps inputs to logits."""
        return self.make_predict(self.model, self.variables)


def export(
    workdir: str | Path,
    output: str | Path,
    *,
    format: str,
    checkpoint: str = "best",
    seed: int | None = None,
) -> float:
    """Exports a trained model, and compares what was written with its predictions.

    Args:
        workdir: The directory of a run, or what `relattn.load_pretrained` takes: a
            folder, or ``"hf:owner/name"`` of the Hugging Face hub.
        output: Folder to write to, created if needed; files of the same names are
            replaced. Nothing is written if the export fails.
        format: A key of `FORMATS`. ``"safetensors-timm"`` and ``"hf"`` write
            ``model.safetensors`` and the ``config.json`` of timm or transformers, for a
            model that is one of theirs. ``"stablehlo"`` and ``"onnx"`` write
            ``model.stablehlo`` or ``model.onnx``, which map inputs of any batch to
            logits, and relattn's ``config.json``. All write checksums,
            ``manifest.json``, and the ``tokenizer.json`` of a model that has one.
        checkpoint: ``"best"`` or ``"latest"``, of a run.
        seed: Which of the seeds of a run that were trained together; None for the
            first.

    Returns:
        The largest difference between the logits of the exported and the trained model,
        divided by the largest logit; 0 where the parameters are compared, bit for bit.

    Raises:
        ValueError: If the format is unknown, ``output`` is ``workdir``, the other
            library has no such model, the model is too large for the format, the logits
            differ or are not finite, or the seed was not trained.
        ImportError: If the format needs packages that are not installed.
        OSError: If ``output`` is empty or a file, or cannot be written.
    """
    check_choice("--format", format, FORMATS)
    output = check_folder(output, "--output")
    if not is_hub_id(workdir):
        workdir = expand(workdir, "--workdir")
    if os.path.realpath(output) == os.path.realpath(workdir):
        raise ValueError(
            f"--output={output} is the folder of the model: choose another"
        )
    package = _PACKAGES.get(format)
    if package and find_spec(package) is None:
        raise ImportError(f"--format={format} needs {_HINTS[format]}")
    source = _load(workdir, checkpoint, seed)
    if package:
        _check_size(source, format)
    files, difference = FORMATS[format](source)
    if source.tokenizer is not None:
        files[pretrained.TOKENIZER] = source.tokenizer
    output.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name.endswith(".safetensors"):
            write_safetensors(output / name, content)
            continue
        if not isinstance(content, bytes):
            content = json.dumps(content, indent=2, default=to_plain) + "\n"
        replace_file(output / name, content)
    write_manifest(output, files)
    return difference


def _load(folder: str | Path, checkpoint: str, seed: int | None) -> _Source:
    """Loads a run or a saved model."""
    if is_hub_id(folder) or (Path(folder) / pretrained.WEIGHTS).is_file():
        pretrained.check_no_seed(folder, seed)
        loaded = pretrained.load_pretrained(folder)
        source = _Source(loaded.model, loaded.variables, loaded.config, _make_predict)
        file = (loaded.folder or Path()) / pretrained.TOKENIZER
        return source._replace(tokenizer=file.read_bytes() if file.is_file() else None)
    from relattn.training import load_run
    from relattn.training.predict import read_tokenizer_file
    from relattn.training.run import make_predict_fn

    run = load_run(folder, checkpoint, seed=seed)

    def make_predict(model: nn.Module, variables: Any) -> Predict:
        same = dataclasses.replace(run, model=model, variables=variables)
        return make_predict_fn(same)

    config = run.pretrained_config()
    tokenizer = read_tokenizer_file(run)
    return _Source(run.model, run.variables, config, make_predict, tokenizer)


def _check_size(source: _Source, format: str) -> None:
    """Refuses parameters that do not fit into a file, before they are compiled."""
    size = sum(array.nbytes for array in jax.tree.leaves(source.variables))
    if size >= _MAX_BYTES:
        raise ValueError(
            f"the model's variables have {size / 1e9:.1f} GB, but a file of {format} "
            f"holds less than {_MAX_BYTES / 1e9:.1f} GB: load the model by "
            "relattn.load_pretrained"
        )


def _make_predict(model: nn.Module, variables: Any) -> Predict:
    """Makes the function of a saved model's logits."""

    @jax.jit
    def logits(variables: Any, inputs: Any) -> Any:
        return jnp.asarray(model.apply(variables, inputs), jnp.float32)

    return functools.partial(logits, variables)


def _to_library(library: str, source: _Source) -> tuple[dict[str, Any], float]:
    """Makes the files of timm or transformers."""
    config = source.config
    if "training" in config and "image_shape" in config:
        data, info, options = pretrained.data_options(config, "the export of a run")
        values = data.library_preprocessing(options, info)
        channels = config["image_shape"][-1]
        config = {
            **config,
            "preprocessing": preprocessing.with_channels(values, channels),
        }
    files = to_library(library, source.model, config, source.variables)
    written = {"config.json": files.config, pretrained.WEIGHTS: files.tensors}
    if files.preprocessor is not None:
        written[preprocessing.PREPROCESSOR] = files.preprocessor
    if source.tokenizer is not None:
        written["tokenizer_config.json"], end = tokenizer_config(source.tokenizer)
        ends = {"bos_token_id": None, "eos_token_id": end}
        written["config.json"] = {**files.config, **ends}
    return written, 0.0


def _to_stablehlo(source: _Source) -> tuple[dict[str, Any], float]:
    """Makes the artifact of ``jax.export``, for all platforms and batches."""
    make = jax.export.export(jax.jit(source.predict), platforms=PLATFORMS)
    shape, dtype = _inputs(source)
    first, *rest = shape

    def inputs(length: Any, *constraints: str) -> jax.ShapeDtypeStruct:
        sizes = ", ".join(map(str, ("batch", length, *rest)))
        symbols = jax.export.symbolic_shape(sizes, constraints=constraints)
        return jax.ShapeDtypeStruct(symbols, dtype)

    lengths = (first,)
    if source.model.inputs == "images":
        exported = make(inputs(first))
    else:
        # Texts up to the context, and sets of any number of points.
        bounds = [f"length <= {first}"] * (source.model.inputs == "tokens")
        try:
            exported = make(inputs("length", *bounds))
            lengths = (first, max(1, first // 2))
        except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation):
            # Some attentions, and models of users, have a fixed number of tokens.
            exported = make(inputs(first))
    data = bytes(exported.serialize())
    loaded = jax.export.deserialize(bytearray(data))
    difference = _compare(source, loaded.call, "StableHLO", lengths)
    return {STABLEHLO: data, "config.json": source.config}, difference


def _inputs(source: _Source) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of one example of a model's inputs, and their dtype."""
    if source.model.inputs == "images":
        return tuple(source.config["image_shape"]), np.float32
    if source.model.inputs == "points":
        num_points, num_axes, channels = source.config["point_shape"]
        return (num_points, num_axes + channels), np.float32
    return (source.config["context_length"],), np.int32


def _compare(
    source: _Source, call: Predict, what: str, lengths: Sequence[int]
) -> float:
    """Compares an exported function with the trained model, on random inputs.

    Args:
        source: The trained model.
        call: The exported function.
        what: Its format, for the message.
        lengths: Sizes of the first axis of an example.

    Returns:
        The largest difference of two logits, divided by the largest logit.

    Raises:
        ValueError: If the logits differ too much or are not finite.
    """
    difference, predict = 0.0, source.predict
    rng = np.random.default_rng(0)
    shape, dtype = _inputs(source)
    for batch, length in zip(_BATCHES, itertools.cycle(lengths), strict=False):
        sizes = (batch, length, *shape[1:])
        if source.model.inputs != "tokens":
            inputs = rng.normal(size=sizes).astype(dtype)
        else:
            inputs = rng.integers(source.config["vocab_size"], size=sizes, dtype=dtype)
        expected = np.asarray(predict(inputs), np.float64)
        if not np.isfinite(expected).all():
            raise ValueError(
                "the trained model has NaN or inf among its logits on random inputs: "
                "export a model from before its training diverged"
            )
        found = np.asarray(call(inputs), np.float64)
        error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
        # Also where a logit of the exported function is NaN.
        if not error <= _BOUND:
            raise ValueError(
                f"the model in {what} has other logits than the trained one: they "
                f"differ by {error:.1e} of the largest; export it in another format"
            )
        difference = max(difference, float(error))
    return difference


def _unroll(source: _Source) -> Predict:
    """Computes the predictions by layers one after another.

    jax2onnx makes a loop of `jax.lax.scan`, and gives some of its constants the wrong
    dtype.
    """
    if not getattr(source.model, "scan_layers", False):
        return source.predict
    model = source.model.clone(scan_layers=False)
    like = pretrained.abstract(model, source.config)
    tensors = variable_names.flatten(source.model, source.variables)
    variables = variable_names.unflatten(model, like, tensors, "the model")
    return source.make_predict(model, variables)


def _to_onnx(source: _Source) -> tuple[dict[str, Any], float]:
    """Makes the model in ONNX, with a symbolic batch."""
    import onnxruntime  # pyright: ignore[reportMissingImports]: an option.
    from jax2onnx import to_onnx  # pyright: ignore[reportMissingImports]: an option.

    # It warns of each shape of a value without a name.
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    options = onnxruntime.SessionOptions()
    # Errors only: it warns of each constant that it removes.
    options.log_severity_level = 3
    shape, dtype = _inputs(source)
    (batch,) = jax.export.symbolic_shape("batch")
    try:
        model = to_onnx(
            _unroll(source),
            [jax.ShapeDtypeStruct((batch, *shape), dtype)],
            model_name=type(source.model).__name__,
        )
        data = model.SerializeToString()
        session = onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        if lacks_resources(error):
            raise
        # The converter has no rule for some of JAX's operations.
        reason = str(error).split("\n")[0]
        raise ValueError(
            "jax2onnx cannot convert this model "
            f"({one_line(f'{type(error).__name__}: {reason}')}): export it as stablehlo"
        ) from error
    name = session.get_inputs()[0].name

    def call(inputs: np.ndarray) -> Any:
        return session.run(None, {name: inputs})[0]

    difference = _compare(source, call, "ONNX", shape[:1])
    return {ONNX: data, "config.json": source.config}, difference


FORMATS: dict[str, Callable[[_Source], tuple[dict[str, Any], float]]] = {
    "safetensors-timm": functools.partial(_to_library, "timm"),
    "hf": functools.partial(_to_library, "hf"),
    "stablehlo": _to_stablehlo,
    "onnx": _to_onnx,
}


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Exports a trained model."""
    parser = command.Parser("python -m relattn.export", __doc__)
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        default=[],
        metavar="RUN",
        help="the run directory, or a folder or hf:owner/name for load_pretrained",
    )
    add("--workdir", help="RUN, as an option")
    add("--format", required=True, help=", ".join(FORMATS))
    add("--output", required=True, help="folder for the files")
    add("--checkpoint", default="best", help="best or latest, of a run")
    add("--seed", type=int, help=command.SEED_HELP)
    given = parser.parse_args(argv)
    runs = [*given.paths, *([] if given.workdir is None else [given.workdir])]
    if len(runs) != 1:
        raise ValueError(
            f"got {len(runs)} runs, expected one: name it, as in relattn export RUN "
            "--format=hf --output=DIR"
        )
    difference = export(
        runs[0],
        given.output,
        format=given.format,
        checkpoint=given.checkpoint,
        seed=given.seed,
    )
    compared = "the parameters are the same, bit for bit"
    if given.format in ("stablehlo", "onnx"):
        compared = f"the logits differ by {difference:.1e} of the largest"
    print(printable(f"Written to {given.output} ({given.format}): {compared}"))


if __name__ == "__main__":
    main()
