"""Writes small random checkpoints of PyTorch models, and their logits, for the tests.

    python -m tools.pretrained --output=tests/pretrained

Needs torch, timm, transformers and safetensors, which the project does not install;
``versions.json`` names the versions that wrote the files. Each folder has the
checkpoint, the model's ``config.json`` if it has one, and ``expected.safetensors``:
inputs in the layout of relattn, and logits.
"""

import json
import pathlib
from importlib.metadata import version

import numpy as np

from relattn import command
from relattn.models.safetensors import write_safetensors

PACKAGES = ("torch", "timm", "transformers", "safetensors")
SEED = 7
# Standard deviation of all parameters: positions, biases and norms matter.
SCALE = 0.4


def randomize(model, scale: float = SCALE):
    """Draws all parameters of a model; returns it in evaluation mode."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * drawn)
    return model.eval()


def draw_images(height: int, width: int, channels: int = 3) -> np.ndarray:
    """Draws two images, float32 [2, height, width, channels]."""
    shape = (2, height, width, channels)
    return np.random.default_rng(SEED).normal(size=shape).astype(np.float32)


def image_logits(model, images: np.ndarray) -> np.ndarray:
    """Applies a model that takes [batch, channels, height, width]."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    return getattr(out, "logits", out).numpy()


def timm_model(**sizes):
    """Makes a random VisionTransformer of timm."""
    from timm.models.vision_transformer import VisionTransformer

    return randomize(VisionTransformer(**sizes))


def hf_vit_model(**sizes):
    """Makes a random ViTForImageClassification of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    return randomize(ViTForImageClassification(ViTConfig(**sizes)))


def hf_gpt2_model(**sizes):
    """Makes a random GPT2LMHeadModel of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return randomize(GPT2LMHeadModel(GPT2Config(**ends, **sizes)))


def text_logits(model, tokens: np.ndarray) -> np.ndarray:
    """Applies a model of text."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long())
    return getattr(out, "logits", out).numpy()


def write_timm(folder: pathlib.Path) -> None:
    """Writes a timm checkpoint, and its logits on a larger image too."""
    from safetensors.torch import save_file

    sizes = {"patch_size": 2, "embed_dim": 15, "depth": 2, "num_heads": 3}
    sizes |= {"mlp_ratio": 1.2, "num_classes": 5}
    model = timm_model(img_size=6, **sizes)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_heads": 3}\n')
    images, large = draw_images(6, 6), draw_images(10, 14)
    logits = image_logits(model, images)
    model.set_input_size((10, 14))
    expected = {"inputs": images, "logits": logits, "large_inputs": large}
    expected["large_logits"] = image_logits(model, large)
    write_safetensors(folder / "expected.safetensors", expected)


def write_hf_vit(folder: pathlib.Path) -> None:
    """Writes a checkpoint of transformers' ViT for images that are not square."""
    model = hf_vit_model(
        hidden_size=15,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        image_size=[6, 10],
        patch_size=2,
        num_labels=5,
    )
    model.save_pretrained(folder)
    images = draw_images(6, 10)
    expected = {"inputs": images, "logits": image_logits(model, images)}
    write_safetensors(folder / "expected.safetensors", expected)


def write_hf_gpt2(folder: pathlib.Path) -> None:
    """Writes a checkpoint of transformers' GPT-2."""
    model = hf_gpt2_model(
        vocab_size=23, n_positions=11, n_embd=15, n_layer=2, n_head=3, n_inner=17
    )
    model.save_pretrained(folder)
    tokens = np.random.default_rng(SEED).integers(23, size=(2, 7)).astype(np.int32)
    expected = {"inputs": tokens, "logits": text_logits(model, tokens)}
    write_safetensors(folder / "expected.safetensors", expected)


WRITERS = {"timm": write_timm, "hf_vit": write_hf_vit, "hf_gpt2": write_hf_gpt2}


def main(args: list[str] | None = None) -> None:
    """Writes all folders."""
    parser = command.Parser("python -m tools.pretrained", __doc__)
    parser.add_argument("--output", required=True, help="folder for the checkpoints")
    output = pathlib.Path(parser.parse_args(args).output)
    for name, write in WRITERS.items():
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    versions = {name: version(name) for name in PACKAGES}
    (output / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    command.entry_point(main)()
