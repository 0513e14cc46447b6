"""The generative Transformers of Translution, tables 7 and 8.

    python train.py --config=configs/translution_gpt.py:DATA,SIZE,METHOD --workdir=DIR

DATA: ``tinyshakespeare`` (bytes of the embedded text), or ``openwebtext``,
``wikitext2`` or ``kernel_docs``, the documentation of Linux (GPT-2's tokens, prepared
once with ``relattn prepare-text`` into the folder ``--config.data.data_dir``). SIZE:
``A-160`` is GPT-A with 160 tokens of context; A, B or C, and any length. METHOD:
``self_attention``, ``lor_translution``, ``translution``, or a baseline of table 8:
``no_position``, ``relative_key``, ``relative_value`` (both with learned token positions
in addition, as the published parameter counts imply), ``relative_bias``,
``gated_positional``, ``rope`` (base 10,000, from the authors' code). Or ``favor``,
``relu`` or ``hedgehog``: linear attention with learned positions, which is not in the
paper. Example: ``configs/translution_gpt.py:openwebtext,A-160,translution``.

Ablations: ``rank=16``, ``base=False``, ``relative=qk``, ``average=True``,
``position=learned``, ``clip=16`` (one matrix for all offsets over 16), and
``layers=3`` for a hybrid with the method in the first three layers and softmax in the
others.

``llama`` gives any method the other parts of Llama's decoder: RMSNorm, once before the
head, SwiGLU with two thirds of the hidden width, so as many parameters, and no biases.
``num_kv_heads=1`` lets heads share keys and values, and ``window=64`` restricts softmax
attention to the last 64 tokens: ``rope,llama,num_kv_heads=1,window=64``.

Recipe, by its source:

- the paper's text (section 4.2): the sizes of the models, ``rank=8``, batches of 8, 160
  or 512 tokens;
- the defaults of the authors' OpenWebText script: AdamW with learning rate 3e-4 and
  weight decay 0.05, clipping at 1.0, cosine schedule, 300 epochs of 32,000 random
  windows.

Best validation perplexity on WikiText-2 with ``wikitext2,A-160`` in 2,000 steps,
trained on its *test* text (see docs/results.md), one seed: 232.2 with
``self_attention``, 189.6 with ``rope``, 189.9 with ``lor_translution``, 223.6 with
``translution`` (at step 1,000).

``cpu`` is a small GPT with 2 layers and dim 128 on bytes, for 1,000 steps of 12
windows, evaluated every 200; with 64 tokens of context unless SIZE has another number.
Validation loss on tinyshakespeare by ``python -m studies --preset=translution_text``,
three seeds, in nats per byte: 2.131 with ``self_attention``, 1.941 with ``rope``, 1.896
with ``lor_translution``, 1.889 with ``translution``.

A run of seconds, and a sample of the text that it generates:

    python train.py --config=configs/translution_gpt.py:smoke --workdir=runs/smoke
    relattn sample --workdir=runs/smoke --prompt="ROMEO:"
"""

from ml_collections import ConfigDict

from configs import translution_vit
from relattn.models import SIZES
from relattn.spec import read_arguments, with_options
from relattn.training import default_config

DATA = ("tinyshakespeare", "openwebtext", "wikitext2", "kernel_docs")
EXAMPLES = [f"{letter}-{length}" for letter in SIZES for length in (160, 512)]
# Attention and position of each method: those of images, but for the rotation.
METHODS = {**translution_vit.METHODS, "rope": ("softmax", "rope1d")}
# The parts of Llama's decoder that no method has.
LLAMA = {
    "norm_type": "rms_norm",
    "activation": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
    "head_norm": False,
}
OPTIONS = {
    "num_kv_heads": int,
    "window": int,
    "rank": int,
    "base": bool,
    "relative": str,
    "average": bool,
    "clip": int,
    "position": str,
    "layers": int,
}


def get_config(arguments: str = "") -> ConfigDict:
    """Returns the recipe for a data set, a size and a method.

    Args:
        arguments: Any of a data set, a size, a method, ``llama``, options, and ``cpu``
            or ``smoke``, separated by commas; by default
            ``tinyshakespeare,A-160,lor_translution``.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument is unknown; the message names the closest.
    """
    chosen, options = read_arguments(
        arguments,
        "configs/translution_gpt.py",
        {
            "data": DATA,
            "method": METHODS,
            "size": EXAMPLES,
            "decoder": ["llama"],
            "cut": CUTS,
        },
        patterns={"size": f"[{''.join(SIZES)}]-[0-9]+"},
        options=OPTIONS,
    )
    data = chosen.get("data", "tinyshakespeare")
    cut = chosen.get("cut", "")
    size = chosen.get("size", "A-64" if cut == "cpu" else "A-160")
    letter, length = size.split("-")
    attention, position = METHODS[chosen.get("method", "lor_translution")]
    position = options.pop("position", "") or position
    changes = {}
    if "layers" in options:
        changes["num_relative_layers"] = options.pop("layers")
    if "num_kv_heads" in options:
        changes["num_kv_heads"] = options.pop("num_kv_heads")
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "gpt",
            **SIZES[letter],
            **changes,
            "attention": with_options(attention, **options),
            "position": position,
        }
    )
    config.data = ConfigDict(
        {
            "name": data,
            "source": "text",
            "data_dir": "",
            # Empty: that of the files in data_dir, or bytes.
            "tokenizer": "" if data == "tinyshakespeare" else "gpt2",
            "bpe_dir": "",
            "context_length": int(length),
            "windows_per_epoch": 32000,
        }
    )
    config.batch_size = 8
    config.eval_batch_size = 8
    config.num_epochs = 300
    config.optimizer.update(
        name="adamw",
        learning_rate=3e-4,
        weight_decay=0.05,
        decay_mask="all",
        clip_norm=1.0,
    )
    config.schedule.name = "cosine"
    if cut:
        CUTS[cut](config)
    if "decoder" in chosen:
        # Three matrices instead of two; a multiple of 8.
        hidden = -(-config.model.mlp_dim // 12) * 8
        config.model.update(LLAMA, mlp_dim=hidden)
    return config.lock()


def _fit_cpu(config: ConfigDict) -> None:
    """Reduces a recipe to a small model and two CPU cores."""
    config.model.update(dim=128, num_layers=2, mlp_dim=512, num_heads=4)
    if config.data.tokenizer:
        config.data.tokenizer = "bytes"
    config.batch_size = 12
    config.eval_batch_size = 128
    config.num_epochs = 0
    config.num_steps = 1000
    config.eval_every_steps = 200
    config.optimizer.learning_rate = 1e-3
    config.schedule.warmup_steps = 100


def _shrink(config: ConfigDict) -> None:
    """Reduces a recipe to a run of seconds."""
    config.model.update(dim=24, num_layers=2, mlp_dim=48, num_heads=3)
    config.data.update(name="tinyshakespeare", tokenizer="", context_length=32)
    config.optimizer.learning_rate = 3e-3
    config.eval_batch_size = 256
    config.num_epochs = 0
    config.num_steps = 60


CUTS = {"cpu": _fit_cpu, "smoke": _shrink}
