"""The model card, ``README.md``, beside the weights of a trained model."""

from __future__ import annotations

import json
from typing import Any

from relattn.markdown import escape_markdown, markdown_table
from relattn.models import hub
from relattn.models.pretrained import data_options


def model_card(config: dict[str, Any], metrics: dict[str, Any], license: str) -> str:
    """Describes a trained model in Markdown: model, data, metrics and licence."""
    data = config["data"]
    rows = [
        (name, f"{value:.4g}")
        for name, value in metrics.items()
        if name.startswith(("validation_", "test_")) and isinstance(value, int | float)
    ]
    inputs, prepare = "Inputs are tokens.", []
    if data.get("tokenizer"):
        inputs = f"Inputs are tokens of the tokenizer {data['tokenizer']}."
        prepare = [
            "tokenizer = pretrained.load_tokenizer()",
            'inputs = tokenizer.encode("A text")[None]',
        ]
    if "point_shape" in data:
        _, axes, channels = data["point_shape"]
        inputs = (
            f"Inputs are sets of points, float32 [n, points, {axes + channels}]: the "
            f"position of {axes} axes, then {channels} features; NaN for padding. Sets "
            "far from zero are moved towards it."
        )
        prepare = [
            f"# Arrays [points, {axes + channels}], or a file of numpy.savez.",
            "inputs = pretrained.preprocess(points)",
        ]
    if "mean" in data:
        stored = ", ".join(map(str, data["image_shape"]))
        prepare = [
            f"# Files, Pillow images, or arrays: uint8 [n, {stored}].",
            "inputs = pretrained.preprocess(images)",
        ]
        library, info, options = data_options(config, "the model card")
        inputs = library.describe_preprocessing(options, info)
    lines = [
        *hub.front_matter(config, license),
        f"# {config['model']['name']} on {escape_markdown(data['name'])}",
        "```python",
        "import relattn",
        "",
        'pretrained = relattn.load_pretrained("THIS FOLDER")',
        *prepare,
        "logits = pretrained.model.apply(pretrained.variables, inputs)",
        "```",
        "## Model",
        "```json",
        json.dumps(config["model"], indent=2),
        "```",
        "## Data",
        f"{escape_markdown(data['name'])}: {data['num_train']} training examples, from "
        f"{escape_markdown(data['origin'])}.",
        inputs,
        "The key `training` of `config.json` is the configuration of the run.",
        "## Metrics",
        f"The {config['checkpoint']} checkpoint, after {config['step']} updates.",
        "",
        *([markdown_table(["metric", "value"], rows)] if rows else []),
        "",
        "## Licence",
        f"Of the weights: {escape_markdown(license)}.",
    ]
    return "\n".join(lines) + "\n"
