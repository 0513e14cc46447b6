"""Writes small random checkpoints of PyTorch models, and their logits, for the tests.

    python -m tools.pretrained --output=tests/pretrained

Needs torch, timm and transformers, which the project does not install;
``versions.json`` names the versions that wrote the files. Each folder has the
checkpoint, the model's ``config.json`` if it has one, and ``expected.safetensors``:
inputs in the layout of relattn, and logits.
"""

import functools
import json
import pathlib
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from relattn import command
from relattn.files import usable_folder
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


def hf_vit_model(scale: float = SCALE, **sizes):
    """Makes a random ViTForImageClassification of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    return randomize(ViTForImageClassification(ViTConfig(**sizes)), scale)


def hf_gpt2_model(scale: float = SCALE, **sizes):
    """Makes a random GPT2LMHeadModel of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return randomize(GPT2LMHeadModel(GPT2Config(**ends, **sizes)), scale)


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


def write_timm_registers(folder: pathlib.Path) -> None:
    """Writes timm's ViT with registers, SwiGLU, LayerScale and the mean of patches."""
    from safetensors.torch import save_file
    from timm.layers.mlp import SwiGLUPacked

    sizes = {"patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 3}
    sizes |= {"mlp_ratio": 1.5, "num_classes": 5, "reg_tokens": 2, "init_values": 1e-5}
    options = {"no_embed_class": True, "global_pool": "avg", "act_layer": "silu"}
    model = timm_model(img_size=6, mlp_layer=SwiGLUPacked, **sizes, **options)
    save_file(model.state_dict(), folder / "model.safetensors")
    settings = {"num_heads": 3, **options, "reg_tokens": 2}
    (folder / "config.json").write_text(json.dumps(settings) + "\n")
    images = draw_images(6, 6)
    expected = {"inputs": images, "logits": image_logits(model, images)}
    write_safetensors(folder / "expected.safetensors", expected)


def write_hf_encoder(folder: pathlib.Path, name: str, output: str, **sizes) -> None:
    """Writes an image encoder of transformers, or a model of images and texts."""
    import torch
    import transformers

    vision = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    vision |= {"image_size": 6, "patch_size": 2, **sizes}
    model = getattr(transformers, name)
    config = model.config_class
    if "vision_config" in config.sub_configs_defaults:
        text = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
        text |= {"intermediate_size": 4, "vocab_size": 5, "max_position_embeddings": 3}
        options = {"projection_dim": 7} if output == "image_embeds" else {}
        config = config(vision_config=vision, text_config=text, **options)
    else:
        config = config(**vision)
    model = randomize(model(config))
    model.save_pretrained(folder)
    images = draw_images(6, 6)
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2)
    with torch.no_grad():
        if output == "image_embeds":
            pooled = model.vision_model(inputs).pooler_output
            logits = model.visual_projection(pooled)
        else:
            logits = getattr(model(inputs), output)
    # The CLS token, where outputs are those of all tokens.
    logits = logits[:, 0] if logits.ndim == 3 else logits
    expected = {"inputs": images, "logits": logits.numpy()}
    write_safetensors(folder / "expected.safetensors", expected)


def write_hf_gpt2(folder: pathlib.Path) -> None:
    """Writes a checkpoint of transformers' GPT-2."""
    model = hf_gpt2_model(
        vocab_size=23, n_positions=11, n_embd=15, n_layer=2, n_head=3, n_inner=17
    )
    _write_text_model(folder, model)


def hf_llama_model(name: str = "Llama", **options):
    """Makes a random Llama, Mistral or Qwen2 of transformers."""
    import transformers

    sizes = {"vocab_size": 23, "hidden_size": 12, "intermediate_size": 17}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 6}
    # Qwen2's is that of the sizes.
    sizes |= {"hidden_size": 24} if name == "Qwen2" else {"head_dim": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 11}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return randomize(getattr(transformers, f"{name}ForCausalLM")(config))


def write_hf_llama(folder: pathlib.Path) -> None:
    """Writes a checkpoint of transformers' Mistral, a Llama with a window."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    model = hf_llama_model("Mistral", sliding_window=3, rope_parameters=rope)
    _write_text_model(folder, model)


def _write_text_model(folder: pathlib.Path, model) -> None:
    model.save_pretrained(folder)
    tokens = np.random.default_rng(SEED).integers(23, size=(2, 7)).astype(np.int32)
    expected = {"inputs": tokens, "logits": text_logits(model, tokens)}
    write_safetensors(folder / "expected.safetensors", expected)


def draw_state(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Draws the tensors of a checkpoint."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return {
        name: SCALE * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def translution_shapes(dim, mlp_dim, num_layers, rows, low) -> dict:
    """Names and shapes of the layers of Translution's authors.

    With ``low``, the inner width of LoR-Translution, without tables of queries.
    """
    shapes = {}
    for layer in range(num_layers):
        attention = f"translution.layers.{layer}.0."
        if low:
            shapes[f"{attention}to_qkv.weight"] = (3 * dim, dim)
            for name in "qkv":
                shapes[f"{attention}to_{name}1.weight"] = (low, dim)
            for name in "kv":
                shapes[f"{attention}to_{name}2.unique_params"] = (rows, low, low)
            shapes[f"{attention}to_v3.weight"] = (dim, low)
        else:
            for name in "qkv":
                shapes[f"{attention}to_{name}.unique_params"] = (rows, dim, dim)
        net = f"translution.layers.{layer}.1.net."
        for name, shape in {
            f"{attention}norm": (dim,),
            f"{attention}to_out.0": (dim, dim),
            f"{net}0": (dim,),
            f"{net}1": (mlp_dim, dim),
            f"{net}4": (dim, mlp_dim),
        }.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes | {f"translution.norm.{name}": (dim,) for name in ("weight", "bias")}


def translution_blocks(state, x, heads: int, num_layers: int, index, reversed_index):
    """Applies the layers and the final norm, by the authors' definition.

    ``index`` [n, n] has the table row of keys and values, for query and key; that of
    queries is ``reversed_index``, for key and query.
    """
    import torch
    import torch.nn.functional as F

    def norm(name, x):
        return F.layer_norm(
            x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"]
        )

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def split(x):
        return x.unflatten(-1, (heads, -1))

    def pairs(name, x, index):
        """[batch, i, j, heads, depth]: token j by the row of (i, j)."""
        weights = state[f"{name}.unique_params"][index]
        return split(torch.einsum("bjc,ijcd->bijd", x, weights))

    n = x.shape[1]
    causal = "translution.layers.0.0.causal" in state
    future = torch.ones(n, n).triu(1).bool() & causal
    for layer in range(num_layers):
        name = f"translution.layers.{layer}.0."
        y = norm(f"{name}norm", x)
        scale = (x.shape[-1] // heads) ** -0.5
        low = f"{name}to_qkv.weight" in state
        if low:
            plain = [split(z) for z in linear(f"{name}to_qkv", y).chunk(3, -1)]
            q = split(linear(f"{name}to_q1", y))[:, :, None]
            k = pairs(f"{name}to_k2", linear(f"{name}to_k1", y), index)
            v = pairs(f"{name}to_v2", linear(f"{name}to_v1", y), index)
        else:
            q = pairs(f"{name}to_q", y, reversed_index).transpose(1, 2)
            k = pairs(f"{name}to_k", y, index)
            v = pairs(f"{name}to_v", y, index)
        scores = (q * k).sum(-1)
        if low:
            plain_scores = torch.einsum("bihd,bjhd->bijh", plain[0], plain[1])
            scores = (scores + plain_scores) / 2
        scores = (scores * scale).masked_fill(future[None, :, :, None], -torch.inf)
        weights = scores.softmax(2)
        out = torch.einsum("bijh,bijhd->bihd", weights, v).flatten(2)
        if low:
            plain_out = torch.einsum("bijh,bjhd->bihd", weights, plain[2]).flatten(2)
            out = (plain_out + linear(f"{name}to_v3", out)) / 2
        x = x + linear(f"{name}to_out.0", out)
        net = f"translution.layers.{layer}.1.net."
        x = x + linear(f"{net}4", F.gelu(linear(f"{net}1", norm(f"{net}0", x))))
    return norm("translution.norm", x)


def write_translution(folder: pathlib.Path, low: int = 0) -> None:
    """Writes the ViT of Translution, full or LoR, with the authors' names."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    dim, heads, layers, side, patch, classes = 6, 2, 2, 3, 2, 5
    width = 3 * patch**2
    shapes = translution_shapes(dim, 7, layers, (2 * side - 1) ** 2 + 3, low)
    shapes |= {"cls_token": (1, 1, dim), "pos_embedding": (1, side**2 + 1, dim)}
    for name, shape in {
        "to_patch_embedding.1": (width,),
        "to_patch_embedding.2": (dim, width),
        "to_patch_embedding.3": (dim,),
        "mlp_head": (classes, dim),
    }.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    state = draw_state(shapes)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"num_heads": {heads}}}\n')
    rows = (2 * side - 1) ** 2
    index = torch.full((side**2 + 1,) * 2, rows)
    index[0, 1:], index[1:, 0] = rows + 1, rows + 2
    for i in range(side**2):
        for j in range(side**2):
            down, right = i // side - j // side, i % side - j % side
            index[1 + i, 1 + j] = (down + side - 1) * (2 * side - 1) + right + side - 1
    images = draw_images(side * patch, side * patch)
    x = torch.from_numpy(images).reshape(2, side, patch, side, patch, 3)
    x = x.transpose(2, 3).reshape(2, side**2, width)

    def part(index):
        name = f"to_patch_embedding.{index}"
        return state[f"{name}.weight"], state[f"{name}.bias"]

    x = F.linear(F.layer_norm(x, (width,), *part(1)), *part(2))
    x = F.layer_norm(x, (dim,), *part(3))
    x = torch.cat([state["cls_token"].expand(2, -1, -1), x], 1)
    x = x + state["pos_embedding"]
    x = translution_blocks(state, x, heads, layers, index, index)
    logits = F.linear(x[:, 0], state["mlp_head.weight"], state["mlp_head.bias"])
    expected = {"inputs": images, "logits": logits.numpy()}
    write_safetensors(folder / "expected.safetensors", expected)


def write_lor_translution(folder: pathlib.Path) -> None:
    """Writes the ViT of LoR-Translution, with tables of keys and values."""
    write_translution(folder, low=4)


def write_translution_gpt(folder: pathlib.Path) -> None:
    """Writes the GPT of Translution with the authors' names."""
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    dim, heads, layers, length, vocab_size = 6, 2, 2, 7, 23
    shapes = translution_shapes(dim, 5, layers, length, 0)
    shapes |= {"wte.weight": (vocab_size, dim), "output_head.weight": (vocab_size, dim)}
    shapes |= {"norm.weight": (dim,), "norm.bias": (dim,)}
    state = draw_state(shapes)
    for layer in range(layers):
        mask = torch.ones(1, 1, length, length).tril()
        state[f"translution.layers.{layer}.0.causal"] = mask
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"num_heads": {heads}}}\n')
    offset = torch.arange(length)[:, None] - torch.arange(length)
    tokens = np.random.default_rng(SEED).integers(vocab_size, size=(2, length))
    x = state["wte.weight"][torch.from_numpy(tokens)]
    index, reversed_index = offset.clamp(min=0), offset.clamp(max=0) + length - 1
    x = translution_blocks(state, x, heads, layers, index, reversed_index)
    x = F.layer_norm(x, (dim,), state["norm.weight"], state["norm.bias"])
    logits = F.linear(x, state["output_head.weight"])
    expected = {"inputs": tokens.astype(np.int32), "logits": logits.numpy()}
    write_safetensors(folder / "expected.safetensors", expected)


def write_performer(folder: pathlib.Path) -> None:
    """Writes a Performer of strategy 1 with the authors' names.

    Logits are those with eps = 0: the authors' eps follows a maximum over the batch.
    """
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    dim, heads, layers, size, classes, scales, features = 6, 2, 2, 5, 3, 2, 7
    pairs = 2 * scales
    shapes = {"class_query": (dim,), "positional_embedding.inv_freq": (scales,)}
    linears = {"content_embedding": (dim, 1), "output_layer": (classes, dim)}
    for layer in range(layers):
        name = f"performer.net.layers.{layer}."
        for end in ("to_q.content_linear", "to_k.content_linear", "to_v", "to_out"):
            linears[f"{name}0.fn.{end}"] = (dim, dim)
        linears |= {f"{name}0.norm": (dim,), f"{name}1.norm": (dim,)}
        linears[f"{name}1.fn.fn.w1"] = (4 * dim, dim)
        linears[f"{name}1.fn.fn.w2"] = (dim, 4 * dim)
        for end in ("alpha", "beta"):
            shapes[f"{name}0.fn.to_q.{end}"] = (pairs * heads,)
        depth = dim // heads + 2 * pairs
        projection = f"{name}0.fn.fast_attention.projection_matrix"
        shapes[projection] = (features, depth)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    state = draw_state(shapes)
    state["performer.calls_since_last_redraw"] = torch.tensor(3)
    save_file(state, folder / "model.safetensors")
    settings = {"heads": heads, "image_size": size}
    (folder / "config.json").write_text(json.dumps(settings) + "\n")

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, (dim,), state[f"{name}.weight"], state[f"{name}.bias"])

    def split(x):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    images = draw_images(size, size, 1)
    x = linear("content_embedding", torch.from_numpy(images).flatten(1, 2))
    x = torch.cat([state["class_query"].expand(2, 1, -1), x], 1)
    rows, columns = torch.meshgrid(*[torch.arange(size)] * 2, indexing="ij")
    positions = torch.stack([rows, columns], -1).reshape(-1, 2, 1)
    angles = (positions * state["positional_embedding.inv_freq"]).flatten(1)
    # [tokens, pairs, (sine, cosine)]; CLS has zeros.
    u = F.pad(torch.stack([angles.sin(), angles.cos()], -1), (0, 0, 0, 0, 1, 0))
    for layer in range(layers):
        name = f"performer.net.layers.{layer}."
        y = norm(f"{name}0.norm", x)
        a, b = (
            state[f"{name}0.fn.to_q.{end}"].reshape(heads, 1, pairs)
            for end in ("alpha", "beta")
        )
        sine, cosine = u[..., 0], u[..., 1]
        turned = torch.stack([sine * a - cosine * b, sine * b + cosine * a], -1)
        q = split(linear(f"{name}0.fn.to_q.content_linear", y))
        k = split(linear(f"{name}0.fn.to_k.content_linear", y))
        q = torch.cat([q, turned.flatten(2).expand(2, -1, -1, -1)], -1)
        k = torch.cat([k, u.flatten(1).expand(2, heads, -1, -1)], -1)
        projection = state[f"{name}0.fn.fast_attention.projection_matrix"]

        def features_of(x, projection=projection):
            x = x * x.shape[-1] ** -0.25
            return (x @ projection.T - (x**2).sum(-1, keepdim=True) / 2).exp()

        weights = features_of(q) @ features_of(k).transpose(-1, -2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = weights @ split(linear(f"{name}0.fn.to_v", y))
        x = x + linear(f"{name}0.fn.to_out", out.transpose(1, 2).flatten(2))
        hidden = F.gelu(linear(f"{name}1.fn.fn.w1", norm(f"{name}1.norm", x)))
        x = x + linear(f"{name}1.fn.fn.w2", hidden)
    logits = linear("output_layer", x[:, 0])
    expected = {"inputs": images, "logits": logits.numpy()}
    write_safetensors(folder / "expected.safetensors", expected)


WRITERS = {
    "timm": write_timm,
    "timm_registers": write_timm_registers,
    "hf_vit": write_hf_vit,
    "hf_vit_mae": functools.partial(
        write_hf_encoder,
        name="ViTMAEModel",
        output="last_hidden_state",
        intermediate_size=14,
        mask_ratio=0.0,
    ),
    "hf_dinov2": functools.partial(
        write_hf_encoder,
        name="Dinov2WithRegistersForImageClassification",
        output="logits",
        mlp_ratio=1,
        num_register_tokens=2,
        num_labels=5,
    ),
    "hf_clip": functools.partial(
        write_hf_encoder,
        name="CLIPModel",
        output="image_embeds",
        intermediate_size=14,
    ),
    "hf_siglip": functools.partial(
        write_hf_encoder,
        name="SiglipVisionModel",
        output="pooler_output",
        intermediate_size=14,
    ),
    "hf_gpt2": write_hf_gpt2,
    "hf_llama": write_hf_llama,
    "translution": write_translution,
    "translution_lor": write_lor_translution,
    "translution_gpt": write_translution_gpt,
    "performer": write_performer,
}


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Writes all folders."""
    parser = command.Parser("python -m tools.pretrained", __doc__)
    parser.add_argument("--output", required=True, help="folder for the checkpoints")
    output = usable_folder(parser.parse_args(argv).output, "--output")
    for name, write in WRITERS.items():
        folder = output / name
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    versions = {name: version(name) for name in PACKAGES}
    (output / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
