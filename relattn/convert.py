"""Converts checkpoints of other libraries for relattn.

    relattn convert --source=timm --checkpoint=FILE --output=DIR

reads a file of safetensors, or a file of PyTorch where torch is installed, and writes
``config.json`` and ``model.safetensors`` for `relattn.load_pretrained`. With
``--source=run``, ``--checkpoint`` is the directory of a run. The number of heads is
that of the ``config.json`` beside the checkpoint; without one, pass ``--num_heads``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn import command
from relattn.command import lacks_resources, one_line
from relattn.files import check_folder
from relattn.json_files import read_json
from relattn.manifest import tokenizer_name
from relattn.messages import check_choice, printable, shorten
from relattn.models import preprocessing, pretrained, variable_names
from relattn.models.safetensors import read_safetensors
from relattn.models.source_configs import check_equal, class_names
from relattn.models.sources import SOURCES
from relattn.models.tensor_tables import unwrap

# Keys of training checkpoints that hold a model.
STATES = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "state_dict_ema",
    "model_ema",
)
# The names of a checkpoint's files in transformers, the best first.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PART = re.compile(r"-(\d+)-of-(\d+)(\.\w+)$")


def convert(
    source: str,
    checkpoint: str | Path,
    output: str | Path,
    *,
    num_heads: int = 0,
) -> dict[str, Any]:
    """Converts a checkpoint and writes ``config.json`` and ``model.safetensors``.

    The ``tokenizer.json`` beside the checkpoint of a model of text is copied. The class
    names of its ``config.json`` are kept.

    Args:
        source: A key of `SOURCES`, or ``"run"``.
        checkpoint: The file, the ``*.index.json`` of one in parts, or the folder of
            either; for a run its directory.
        output: Folder for the model's files; on an error nothing is written.
        num_heads: Number of heads; 0 for that of the ``config.json`` beside the
            checkpoint, or of the run.

    Returns:
        The contents of ``config.json``.

    Raises:
        ValueError: If the source is unknown, tensors are missing, unexpected or of
            another shape, or a key of ``config.json`` describes another model than
            relattn's.
        ImportError: If the file is PyTorch's, and torch is not installed.
        OSError: If ``output`` is empty or a file, or cannot be written.
    """
    output = check_folder(output, "--output")
    if source == "run":
        from relattn.training import load_run

        if num_heads:
            raise ValueError("a run has its number of heads: leave --num_heads out")
        run = load_run(checkpoint)
        run.save_pretrained(output)
        return run.pretrained_config()
    check_choice("--source", source, [*SOURCES, "run"])
    checkpoint = _weights_file(Path(checkpoint))
    if os.path.realpath(output) == os.path.dirname(os.path.realpath(checkpoint)):
        raise ValueError(
            f"--output={output} is the folder of the checkpoint, whose files would be "
            "replaced: choose another"
        )
    tensors = read_checkpoint(checkpoint)
    beside = checkpoint.with_name("config.json")
    settings = read_json(beside, dict) if os.path.lexists(beside) else {}
    try:
        if num_heads:
            found = f"--num_heads is {num_heads}"
            check_equal(found, num_heads, "num_heads", settings)
            settings["num_heads"] = num_heads
        converted = SOURCES[source](tensors, settings)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint} is not a checkpoint of {source}: missing "
            f"{one_line(error.args[0])}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {one_line(error)}") from error
    except Exception as error:
        if lacks_resources(error):
            raise
        # Tensors of any shape, and values of config.json, fail anywhere.
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{checkpoint} is not a checkpoint of {source}, or a value of "
            f"{beside.name} has a wrong type ({reason})"
        ) from error
    names = class_names(settings, converted.config.get("num_classes", 0))
    if names:
        converted.config["class_names"] = names
    try:
        _add_preprocessing(source, converted.config, settings, beside.parent)
        model = pretrained.build(converted.config)
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {one_line(error)}") from error
    like = pretrained.abstract(model, converted.config)
    variables = variable_names.unflatten(model, like, converted.tensors, checkpoint)
    tokenizer = _add_tokenizer(converted.config, beside.parent)
    pretrained.save_pretrained(output, converted.config, variables, tokenizer=tokenizer)
    return converted.config


def _add_preprocessing(
    source: str, config: dict[str, Any], settings: Mapping[str, Any], folder: Path
) -> None:
    """Adds to ``config.json`` how the checkpoint's images are prepared, if known."""
    height, width, channels = config.get("image_shape", (0, 1, 0))
    if height != width:
        return
    found = None
    if source == "timm":
        found = preprocessing.timm_preprocessing(settings, height)
    elif source.startswith("hf_"):
        found = preprocessing.hf_preprocessing(folder, height, source)
    if found is not None:
        config["preprocessing"] = preprocessing.with_channels(found, channels)


def _add_tokenizer(config: dict[str, Any], folder: Path) -> bytes | None:
    """Adds the name of the checkpoint's tokenizer, if it has one; returns the file."""
    path = folder / pretrained.TOKENIZER
    if "vocab_size" not in config or not os.path.lexists(path):
        return None
    read_json(path, dict)
    content = path.read_bytes()
    config["tokenizer"] = tokenizer_name(content)
    return content


def read_checkpoint(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a file of safetensors or PyTorch, or of one in parts.

    Args:
        path: ``*.safetensors``, or a file that ``torch.load(weights_only=True)`` reads:
            a state_dict, alone or as the one model of a training checkpoint. Of a
            checkpoint in several such files, ``*.index.json``. Or the folder of these.

    Returns:
        An array for each name, without the modules that `unwrap` removes.

    Raises:
        ValueError: If the file is damaged, or holds objects other than tensors, or more
            than one model.
        FileNotFoundError: If there is no such file.
        ImportError: If the file is PyTorch's, and torch is not installed.
    """
    path = _weights_file(Path(path))
    part = _PART.search(path.name)
    if part and int(part[2]) > 1:
        index = path.with_name(f"{path.name[: part.start()]}{part[3]}.index.json")
        raise ValueError(
            f"{path} is one of the {int(part[2])} files of a checkpoint: give their "
            f"index, {index}"
        )
    return unwrap(_read_file(path))


def _weights_file(path: Path) -> Path:
    """Returns a file, or the one that transformers would read in a folder."""
    if not path.is_dir():
        return path
    found = [path / name for name in NAMES if (path / name).is_file()]
    if not found:
        raise FileNotFoundError(
            f"the folder {path} has no {NAMES[0]}: pass the file of the weights"
        )
    return found[0]


def _read_file(path):
    if not path.is_file():
        index = path.with_name(f"{path.name}.index.json")
        hint = f", which is in parts: give their index, {index}"
        raise FileNotFoundError(
            f"there is no file {path}{hint if index.is_file() else ''}"
        )
    if path.suffix == ".json":
        return _read_parts(path)
    return (
        read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    )


def _read_parts(path):
    """Reads the files that an index names."""
    files = read_json(path, {"weight_map": {"*": str}})["weight_map"]
    for name in files.values():
        # An index that names itself would never end.
        if not name or name != Path(name).name or name.endswith(".json"):
            raise ValueError(f"{path} names {shorten(name)}: parts are files beside it")
        # Unlike `Path.is_file`, it takes any name.
        if not os.path.isfile(path.with_name(name)):
            raise ValueError(
                f"{path} names {shorten(name)}, but there is no such file beside it"
            )
    tensors, places = {}, {}
    for file in dict.fromkeys(files.values()):
        for name, tensor in _read_file(path.with_name(file)).items():
            if name in places:
                raise ValueError(
                    f"{path} names {shorten(places[name])} and {shorten(file)}, which "
                    f"both hold {shorten(name)}: save the checkpoint again"
                )
            tensors[name], places[name] = tensor, file
    for name, file in files.items():
        if places.get(name) != file:
            raise ValueError(
                f"{path} has {shorten(name)} in {shorten(file)}, which does not hold it"
            )
    return tensors


def _read_torch(path):
    """Reads the tensors of a file of PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]: an option.
    except ImportError as error:
        raise ImportError(
            f"{path} is not named .safetensors; to read PyTorch's: pip install torch, "
            "or save the model by save_pretrained(..., safe_serialization=True)"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if lacks_resources(error):
            raise
        raise ValueError(
            f"{path} is damaged or holds more than tensors: save its state_dict() "
            "alone, by code that you trust, and convert that"
        ) from error
    found = ["state_dict"]
    while found:
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} does not hold a state_dict")
        found = [key for key in STATES if isinstance(state.get(key), Mapping)]
        if len(found) > 1:
            raise ValueError(
                f"{path} holds more than one model, {' and '.join(found)}: save one"
            )
        state = state[found[0]] if found else state
    tensors = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} holds more than tensors by name: {shorten(name)}")
        if problem := _torch_problem(tensor, torch):
            raise ValueError(
                f"{path} holds {shorten(name)} {problem}: save it as a dense tensor of "
                "float32"
            )
        if tensor.is_floating_point():
            # NumPy has no bfloat16.
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            tensor = tensor.to(wide)
        tensors[name] = tensor.detach().numpy()
    return tensors


def _torch_problem(tensor, torch):
    """Returns why a tensor cannot be read; "" if it can."""
    if tensor.is_meta:
        return "without its values"
    if tensor.is_quantized or tensor.is_complex() or "float8" in str(tensor.dtype):
        # Numbers of 8 bits have scales elsewhere.
        return f"of {tensor.dtype}"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "as a sparse or nested tensor"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        # A file of a few bytes would fill the memory.
        return "with values that share memory"
    return ""


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Converts a checkpoint."""
    parser = command.Parser("python -m relattn.convert", __doc__)
    parser.add_argument("--source", required=True, help=", ".join([*SOURCES, "run"]))
    parser.add_argument(
        "--checkpoint", required=True, help="a file, its folder, or a run directory"
    )
    parser.add_argument("--output", required=True, help="folder for the model's files")
    parser.add_argument("--num_heads", type=int, default=0, help="number of heads")
    given = parser.parse_args(argv)
    config = convert(
        given.source, given.checkpoint, given.output, num_heads=given.num_heads
    )
    print(printable(f"Written to {given.output}: {config['model']}"))


if __name__ == "__main__":
    main()
