"""Exports models of each kind to ONNX: python -m tests.helpers.onnx_models.

jax2onnx does not install beside the trainer, so `make test-full` starts this in an
environment of its own. An export compares its logits with those of the model. Then the
Python of docs/export.md runs, all formats.
"""

import re
import tempfile
from pathlib import Path

import jax
import numpy as np

from relattn.export import export
from relattn.models.pretrained import abstract, build, save_pretrained

ROOT = Path(__file__).parents[2]
SIZES = {"dim": 8, "num_heads": 2, "num_layers": 2, "mlp_dim": 11}
IMAGES = {"num_classes": 3, "image_shape": [4, 6, 1]}
TEXT = {"vocab_size": 11, "context_length": 6}
POINTS = {"num_classes": 3, "point_shape": [5, 2, 1]}
MODELS = [
    ({"name": "vit", "attention": "softmax", "position": "learned"}, IMAGES),
    ({"name": "vit", "attention": "favor", "scan_layers": False}, IMAGES),
    ({"name": "vit", "attention": "relu", "position": "rope2d"}, IMAGES),
    ({"name": "vit", "attention": "translution", "scan_layers": False}, IMAGES),
    ({"name": "vit", "attention": "hedgehog", "position": "rotary_values"}, IMAGES),
    ({"name": "gpt", "attention": "softmax", "position": "learned"}, TEXT),
    ({"name": "gpt", "attention": "softmax", "position": "rope1d"}, TEXT),
    ({"name": "point_transformer", "attention": "softmax"}, POINTS),
    ({"name": "point_transformer", "attention": "favor"}, POINTS),
]
# jax2onnx fills arrays of fixed shapes only, and causal sums start from zeros.
REFUSED = ({"name": "gpt", "attention": "favor", "position": "none"}, TEXT)


def export_onnx(options, sizes):
    """Exports a model with random parameters; returns the difference of logits."""
    config = {"model": {**SIZES, **options}, **sizes}
    if options["name"] == "vit":
        config["model"]["patch_size"] = 2
    model, rng = build(config), np.random.default_rng(0)
    variables = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), abstract(model, config)
    )
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(f"{folder}/saved", config, variables)
        return export(f"{folder}/saved", f"{folder}/onnx", format="onnx")


def main():
    """Exports the models, and runs the page."""
    for options, sizes in MODELS:
        print(f"{options}: {export_onnx(options, sizes):.1e}")
    refused = ""
    try:
        export_onnx(*REFUSED)
    except ValueError as error:
        refused = str(error)
    # docs/export.md says so.
    assert refused.startswith("jax2onnx cannot convert this model ("), refused
    scope = {}
    for example in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text("utf-8"), re.S
    ):
        exec(example, scope)
    for name in ("stablehlo_logits", "onnx_logits"):
        np.testing.assert_allclose(
            scope[name], scope["logits"], rtol=1e-4, atol=1e-5, err_msg=name
        )


if __name__ == "__main__":
    main()
