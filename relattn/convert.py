"""Converts checkpoints of other libraries: python -m relattn.convert --source=timm ...

    python -m relattn.convert --source=timm --checkpoint=FILE --output=DIR

reads a file of safetensors, or a file of PyTorch where torch is installed, and writes
``config.json`` and ``model.safetensors`` for `relattn.load_pretrained`. With
``--source=run``, ``--checkpoint`` is the directory of a run. ``--num_heads`` is needed
where the heads are not 64 wide and no ``config.json`` lies beside the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn import command
from relattn.models import pretrained
from relattn.models.safetensors import read_safetensors
from relattn.models.sources import SOURCES
from relattn.spec import closest, shorten


def convert(
    source: str,
    checkpoint: str | Path,
    output: str | Path,
    *,
    num_heads: int = 0,
) -> dict[str, Any]:
    """Converts a checkpoint and writes ``config.json`` and ``model.safetensors``.

    Args:
        source: A key of `SOURCES`, or ``"run"``.
        checkpoint: The file; for a run its directory.
        output: Folder for the two files; nothing is written if anything does not fit.
        num_heads: Number of heads; 0 for that of the ``config.json`` beside the
            checkpoint, or else heads of 64.

    Returns:
        The contents of ``config.json``.

    Raises:
        ValueError: If the source is unknown, or tensors are missing, unexpected or of
            another shape.
        ImportError: If the file is PyTorch's, and torch is not installed.
    """
    if source == "run":
        from relattn.training import load_run

        run = load_run(checkpoint)
        run.save_pretrained(output)
        return run.pretrained_config()
    if source not in SOURCES:
        known = [*SOURCES, "run"]
        raise ValueError(
            f"unknown --source {shorten(source)}: {closest(source, known)}"
        )
    tensors = read_checkpoint(checkpoint)
    beside = Path(checkpoint).with_name("config.json")
    try:
        settings = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{beside} is not JSON ({error})") from error
    if num_heads:
        settings["num_heads"] = num_heads
    try:
        converted = SOURCES[source](tensors, settings)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint} is no checkpoint of {source}: missing {error.args[0]}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    model = pretrained.build(converted.config)
    like = pretrained.abstract(model, converted.config)
    variables = pretrained.unflatten(model, like, converted.tensors, checkpoint)
    pretrained.save_pretrained(output, converted.config, variables)
    return converted.config


def read_checkpoint(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a file of safetensors or PyTorch.

    Args:
        path: ``*.safetensors``, or a file that ``torch.load(weights_only=True)`` reads.

    Returns:
        An array for each name, without the prefix ``module.`` of parallel training.

    Raises:
        ValueError: If the file is damaged, or holds objects other than tensors.
        ImportError: If the file is PyTorch's, and torch is not installed.
    """
    if Path(path).suffix == ".safetensors":
        return read_safetensors(path)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path} is no .safetensors file; to read PyTorch's: pip install torch"
        ) from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged or holds more than tensors: save its state_dict() "
            "alone, by code that you trust, and convert that"
        ) from error
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, Mapping) else state
    tensors = {}
    for name, tensor in state.items():
        if not hasattr(tensor, "detach"):
            raise ValueError(f"{path} holds more than tensors: {name!r}")
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        tensors[name.removeprefix("module.")] = tensor.detach().numpy()
    return tensors


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Converts a checkpoint.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m relattn.convert", __doc__)
    parser.add_argument("--source", required=True, help=", ".join([*SOURCES, "run"]))
    parser.add_argument("--checkpoint", required=True, help="a file, or a run")
    parser.add_argument("--output", required=True, help="folder for the two files")
    parser.add_argument("--num_heads", type=int, default=0, help="number of heads")
    given = parser.parse_args(argv)
    config = convert(
        given.source, given.checkpoint, given.output, num_heads=given.num_heads
    )
    print(f"wrote {given.output}: {config['model']}")


if __name__ == "__main__":
    main()
