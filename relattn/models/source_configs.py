"""Reads the ``config.json`` of other libraries, by `relattn.models.source_keys`."""

from __future__ import annotations

import re
from typing import Any

from relattn.json_files import check_json
from relattn.messages import list_problems, shorten
from relattn.models.source_keys import (
    GPT2_ALIASES,
    HF_GPT2,
    HF_LLAMA,
    ROPE_OPTIONS,
    ROPE_TYPES,
    SOURCES,
    TIMM,
    VALUES,
    Keys,
    Settings,
)

# The activations of timm and transformers that are GELU by its tanh approximation, or
# by erf.
_GELU = {
    "gelu_new": [
        "gelu_new",
        "gelu_fast",
        "gelu_accurate",
        "gelu_pytorch_tanh",
        "gelu_python_tanh",
    ],
    "gelu": ["gelu", "gelu_python"],
}
# Activations of a ViT by our names; silu means SwiGLU, which the tensors' shapes show.
_ACTIVATIONS = {
    **dict.fromkeys([*_GELU["gelu_new"], "gelu_tanh"], "gelu_tanh"),
    **dict.fromkeys(_GELU["gelu"], "gelu"),
    **dict.fromkeys(["quick_gelu", "quickgelu"], "quick_gelu"),
    **dict.fromkeys(["silu", "swish"], "swiglu"),
}

# Width and heads of timm's architectures that are relattn's ViT. The other ones have
# parts that it lacks, such as other norms or parallel layers.
TIMM_ARCHITECTURES = {
    name: sizes
    for sizes, names in {
        (64, 2): "test_vit test_vit2",
        (96, 3): "test_vit3",
        (192, 3): """
            deit_tiny_patch16_224 vit_tiny_patch16_224 vit_tiny_patch16_384
        """,
        (256, 4): "vit_wee_patch16_reg1_gap_256 vit_xsmall_patch16_clip_224",
        (320, 5): "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
        (384, 6): """
            deit3_small_patch16_224 deit3_small_patch16_384 deit_small_patch16_224
            flexivit_small vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2
            vit_small_patch16_224 vit_small_patch16_36x1_224 vit_small_patch16_384
            vit_small_patch32_224 vit_small_patch32_384 vit_small_patch8_224
        """,
        (512, 8): """
            deit3_medium_patch16_224 vit_medium_patch16_clip_224
            vit_medium_patch16_gap_240 vit_medium_patch16_gap_256
            vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256
            vit_medium_patch16_reg4_gap_256 vit_medium_patch32_clip_224
            vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384
        """,
        (640, 10): """
            vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256
            vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384
            vit_betwixt_patch32_clip_224
        """,
        (768, 12): """
            deit3_base_patch16_224 deit3_base_patch16_384 deit_base_patch16_224
            deit_base_patch16_384 flexivit_base vit_base_patch14_dinov2
            vit_base_patch14_reg1_tipsv2 vit_base_patch14_reg4_dinov2
            vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384
            vit_base_patch16_clip_224 vit_base_patch16_clip_384
            vit_base_patch16_clip_quickgelu_224 vit_base_patch16_radio_v3
            vit_base_patch16_reg4_gap_256 vit_base_patch16_siglip_224
            vit_base_patch16_siglip_256 vit_base_patch16_siglip_384
            vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224
            vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384
            vit_base_patch16_siglip_gap_512 vit_base_patch32_224 vit_base_patch32_384
            vit_base_patch32_clip_224 vit_base_patch32_clip_256
            vit_base_patch32_clip_384 vit_base_patch32_clip_448
            vit_base_patch32_clip_quickgelu_224 vit_base_patch32_siglip_256
            vit_base_patch32_siglip_gap_256 vit_base_patch8_224
        """,
        (768, 16): "vit_base_patch16_gap_224",
        (832, 13): """
            vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384
            vit_so150m2_patch16_reg1_gap_448
        """,
        (896, 14): """
            vit_base_patch16_plus_240 vit_base_patch16_plus_clip_240
            vit_base_patch32_plus_256 vit_so150m_patch16_reg4_gap_256
            vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
        """,
        (1024, 16): """
            deit3_large_patch16_224 deit3_large_patch16_384 eva_large_patch14_196
            eva_large_patch14_336 flexivit_large vit_intern300m_patch14_448
            vit_large_patch14_224 vit_large_patch14_clip_224 vit_large_patch14_clip_336
            vit_large_patch14_clip_quickgelu_224 vit_large_patch14_clip_quickgelu_336
            vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2
            vit_large_patch14_reg4_dinov2 vit_large_patch16_224 vit_large_patch16_384
            vit_large_patch16_radio_v3 vit_large_patch16_siglip_256
            vit_large_patch16_siglip_384 vit_large_patch16_siglip_512
            vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
            vit_large_patch16_siglip_gap_512 vit_large_patch32_224 vit_large_patch32_384
        """,
        (1152, 16): """
            vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch14_siglip_224
            vit_so400m_patch14_siglip_378 vit_so400m_patch14_siglip_384
            vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
            vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
            vit_so400m_patch14_siglip_gap_896 vit_so400m_patch16_radio_v4
            vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384
            vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256
            vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
        """,
        (1280, 16): """
            deit3_huge_patch14_224 vit_huge_patch14_224 vit_huge_patch14_clip_224
            vit_huge_patch14_clip_336 vit_huge_patch14_clip_378
            vit_huge_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_378
            vit_huge_patch14_gap_224 vit_huge_patch16_gap_448 vit_huge_patch16_radio_v3
            vit_huge_patch16_radio_v4
        """,
        (1408, 16): """
            vit_giant_patch14_224 vit_giant_patch14_clip_224 vit_giant_patch16_gap_224
        """,
        (1536, 16): """
            vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384
            vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
        """,
        (1536, 24): """
            vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2
            vit_giant_patch14_reg4_dinov2 vit_giant_patch16_radio_v3
        """,
        (1664, 16): """
            vit_gigantic_patch14_224 vit_gigantic_patch14_clip_224
            vit_gigantic_patch14_clip_378 vit_gigantic_patch14_clip_quickgelu_224
        """,
    }.items()
    for name in names.split()
}
# The ones with GELU by tanh, which their names do not show.
_TIMM_TANH = {
    "vit_base_patch32_siglip_256",
    "vit_base_patch32_siglip_gap_256",
    "vit_giantopt_patch16_siglip_256",
    "vit_giantopt_patch16_siglip_384",
    "vit_giantopt_patch16_siglip_gap_256",
    "vit_giantopt_patch16_siglip_gap_384",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
    "vit_so400m_patch16_siglip_256",
    "vit_so400m_patch16_siglip_384",
    "vit_so400m_patch16_siglip_512",
    "vit_so400m_patch16_siglip_gap_256",
    "vit_so400m_patch16_siglip_gap_384",
    "vit_so400m_patch16_siglip_gap_512",
}
_TIMM_MEAN = ("test_vit2", "eva_large_patch14_196", "eva_large_patch14_336")
_TIMM_MAP = re.compile(r"_siglip_|_map_|^test_vit3$")
_TIMM_SWIGLU = re.compile(r"_giant_patch14_(dinov2|reg\d_)")
_TIMM_NO_NORM = re.compile(r"_radio_v|_intern300m_")
# Names of older versions, which have the origin of the weights at their end.
_TIMM_OLD_ENDING = re.compile(r"(\..*|_in21k|_in21ft1k|_sam|_dino)$")


def describe_other(settings: Settings) -> str:
    """Says whose model a ``config.json`` describes that is not one of relattn.

    Args:
        settings: The contents of the ``config.json``.

    Returns:
        The end of a sentence.

    Example:
        >>> describe_other({"model_type": "bert"})
        "it has model_type='bert', which relattn cannot convert"
        >>> describe_other({"model_type": "gpt2"})
        "it has model_type='gpt2': convert the checkpoint first, relattn convert \
--source=hf_gpt2 --checkpoint=FILE --output=DIR"
    """
    key = next((key for key in ("model_type", "architecture") if key in settings), "")
    if not key:
        return "it has no model"
    value, found = settings[key], []
    if key == "model_type":
        found = [
            source
            for source, keys in SOURCES.items()
            if value in keys.fixed["model_type"]
        ]
    elif _TIMM_OLD_ENDING.sub("", str(value)) in TIMM_ARCHITECTURES:
        found = ["timm"]
    what = f"it has {key}={shorten(value)}"
    if not found:
        return f"{what}, which relattn cannot convert"
    return (
        f"{what}: convert the checkpoint first, relattn convert --source={found[0]} "
        "--checkpoint=FILE --output=DIR"
    )


def read_settings(
    settings: Settings, keys: Keys, where: str = "config.json", what: str = "model"
) -> dict[str, Any]:
    """Returns the keys that a conversion reads; refuses what it does not know.

    Args:
        settings: The contents of a ``config.json``; None stands for a missing key.
        keys: The meaning of its keys.
        where: The file's name, for messages.
        what: What the file describes, for messages.

    Raises:
        ValueError: If a key is unknown, or has a value that relattn does not have.

    Example:
        >>> from relattn.models.source_keys import PERFORMER
        >>> read_settings({"num_heads": 3, "heads": None}, PERFORMER)
        {'num_heads': 3}
        >>> read_settings({"depth": 3}, PERFORMER)
        Traceback (most recent call last):
        ValueError: config.json has keys whose meaning is unknown: depth; remove those \
that do not change the model
    """
    for key in keys.flags & set(settings):
        if type(settings[key]) is not bool:
            raise ValueError(
                f"{where} has {key}={shorten(settings[key])}, which must be true or "
                "false"
            )
    settings = {key: value for key, value in settings.items() if value is not None}
    for key, allowed in keys.fixed.items():
        value = settings.get(key, allowed[0])
        values = value if isinstance(value, list) and value else [value]
        if any(element not in allowed for element in values):
            expected = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{where} has {key}={shorten(value)}, which relattn's {what} does not "
                f"have: expected {expected}"
            )
    # Last: the keys of another --source are unknown too.
    unknown = sorted(set(settings) - keys.read - set(keys.fixed) - keys.harmless)
    if unknown:
        raise ValueError(
            f"{where} has keys whose meaning is "
            f"{list_problems({'unknown:': unknown})}; remove those that do not change "
            f"the {what}"
        )
    values = {f"{key}?": VALUES[key] for key in keys.read & set(VALUES)}
    check_json(settings, values, where)
    return {key: value for key, value in settings.items() if key in keys.read}


def timm_settings(settings: Settings) -> dict[str, Any]:
    """Joins the parts of timm's ``config.json``, and adds what the architecture has.

    Args:
        settings: ``architecture``, ``model_args`` and ``pretrained_cfg``, or the keys
            of the last two beside the first.

    Returns:
        The keys that `relattn.models.vit_sources.timm` reads.

    Raises:
        ValueError: If two parts differ, or the architecture is unknown.

    Example:
        >>> timm_settings({"architecture": "vit_huge_patch14_224", "model_args": {
        ...     "depth": 2}, "pretrained_cfg": {"mean": [0.5, 0.5, 0.5]}})
        {'embed_dim': 1280, 'num_heads': 16, 'act_layer': 'gelu', \
'layer_norm_eps': 1e-06, 'depth': 2}
    """
    names = ("pretrained_cfg", "model_args")
    check_json(settings, {f"{name}?": (dict, None) for name in names}, "config.json")
    pretrained_cfg, arguments = (settings.get(name) or {} for name in names)
    # pretrained_cfg may be that of the weights from which a model was fine-tuned.
    whole = {**pretrained_cfg, **settings, **arguments}
    joined, norm_layer = read_settings(whole, TIMM), whole.get("norm_layer")
    if "architecture" in joined:
        name = _TIMM_OLD_ENDING.sub("", str(joined.pop("architecture")))
        if name not in TIMM_ARCHITECTURES:
            raise ValueError(
                f"config.json has architecture={shorten(name)}, which relattn does not "
                "know; if the model has the parts of relattn's ViT, replace the key by "
                'its number of heads, such as "num_heads": 12'
            )
        sizes = _architecture(name)
        if norm_layer is not None:
            # Its own epsilon takes the place of the architecture's.
            sizes["layer_norm_eps"] = 1e-6
        arguments = {"num_heads": sizes["num_heads"], **arguments}
        joined = {**sizes, **joined}
    if "input_size" in joined:
        channels, *size = joined.pop("input_size")
        joined = {"in_chans": channels, "img_size": size, **joined}
    if "img_size" in joined:
        joined.setdefault("image_size", joined.pop("img_size"))
    for key, value in arguments.items():
        if value is not None:
            check_equal(f"config.json has {key}={value}", value, key, settings)
    return joined


def _architecture(name: str) -> dict[str, Any]:
    """Returns what an architecture of timm has and the tensors do not show."""
    width, heads = TIMM_ARCHITECTURES[name]
    activation = "quick_gelu" if "_quickgelu_" in name else "gelu"
    if _TIMM_SWIGLU.search(name):
        activation = "silu"
    sizes: dict[str, Any] = {
        "embed_dim": width,
        "num_heads": heads,
        "act_layer": "gelu_tanh" if name in _TIMM_TANH else activation,
        "layer_norm_eps": 1e-5 if "_clip_" in name else 1e-6,
    }
    if "_gap_" in name or name in _TIMM_MEAN:
        sizes["global_pool"] = "avg"
    elif _TIMM_MAP.search(name):
        sizes["global_pool"] = "map"
    if name == "test_vit3":
        sizes["pool_include_prefix"] = True
    if _TIMM_NO_NORM.search(name):
        sizes["final_norm"] = False
    return sizes


def hf_settings(settings: Settings, keys: Keys) -> dict[str, Any]:
    """Returns the keys of transformers' image encoder.

    Args:
        settings: The contents of a ``config.json``, of the encoder or of a model of
            images and texts, which has those of the encoder as ``vision_config``.
        keys: The meaning of its keys.

    Raises:
        ValueError: If a key is unknown, or has a value that relattn does not have.

    Example:
        >>> from relattn.models.source_keys import HF_CLIP
        >>> hf_settings({"vision_config": {"hidden_size": 8}, "text_config": {
        ...     "hidden_size": 6}, "projection_dim": 7, "model_type": "clip"}, HF_CLIP)
        {'hidden_size': 8, 'projection_dim': 7, 'num_attention_heads': 12}
    """
    parts = ("vision_config", "vision_config_dict", "text_config", "text_config_dict")
    check_json(settings, {f"{name}?": (dict, None) for name in parts}, "config.json")
    joined = {key: value for key, value in settings.items() if key not in parts}
    # For transformers, the second replaces the first, its defaults too.
    given = [settings[name] for name in parts[:2] if settings.get(name) is not None]
    # Its labels are defaults: these models have no classifier.
    ours = {
        key: value
        for key, value in (given[-1] if given else {}).items()
        if key not in ("id2label", "architectures", "model_type")
    }
    joined = {**ours, **joined}
    whole = read_settings(joined, keys)
    # Files leave out defaults.
    if "num_heads" not in whole and "model_type" in joined:
        whole.setdefault("num_attention_heads", 12)
    labels = whole.pop("id2label", None)
    if labels is not None:
        found = f"id2label has {len(labels)}"
        check_equal(found, len(labels), "num_labels", whole)
        whole["num_labels"] = len(labels)
    return whole


def class_names(settings: Settings, num_classes: int) -> list[str]:
    """Returns the names of a classifier's classes, in label order.

    They are ``id2label`` of transformers or ``label_names`` of timm, a list or by
    number.

    Args:
        settings: The contents of a ``config.json``.
        num_classes: The number of classes.

    Returns:
        The names; [] if they are unknown, or those that transformers writes then.

    Example:
        >>> class_names({"id2label": {"1": "dog", "0": "cat"}}, 2)
        ['cat', 'dog']
        >>> class_names({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, 2)
        []
    """
    parts = (settings, settings.get("pretrained_cfg") or {})
    keys = ("id2label", "label_names", "labels")
    given = [part[key] for part in parts for key in keys if part.get(key)]
    names = given[0] if given else []
    if isinstance(names, dict):
        names = [names.get(str(index)) for index in range(len(names))]
    unnamed = [f"LABEL_{index}" for index in range(num_classes)]
    if not isinstance(names, list) or len(names) != num_classes or names == unnamed:
        return []
    texts = [name for name in names if isinstance(name, str)]
    return texts if len(texts) == len(names) else []


def activation(name: str) -> str:
    """Returns our name of an activation.

    Args:
        name: The name in timm or transformers.

    Raises:
        ValueError: If relattn's ViT does not have it.

    Example:
        >>> activation("gelu_pytorch_tanh")
        'gelu_tanh'
    """
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"relattn's ViT does not have the activation {shorten(name)}: expected a "
            "GELU or quick_gelu"
        )
    return _ACTIVATIONS[name]


def hf_activation(ours: str) -> str:
    """Returns transformers' name of an activation; see `activation`.

    Args:
        ours: Our name.

    Example:
        >>> hf_activation("gelu_tanh")
        'gelu_new'
    """
    return next(name for name, known in _ACTIVATIONS.items() if known == ours)


def gpt2_settings(settings: Settings) -> dict[str, Any]:
    """Returns the keys of GPT-2 by one name, and one name for equal activations.

    Args:
        settings: The contents of a ``config.json``.

    Raises:
        ValueError: If two keys differ, or the activation is not a GELU.

    Example:
        >>> gpt2_settings({"hidden_size": 8, "activation_function": "gelu_fast"})
        {'activation_function': 'gelu_new', 'n_embd': 8, 'n_inner': 32}
    """
    settings = read_settings(settings, HF_GPT2)
    for alias, key in GPT2_ALIASES.items():
        if alias in settings:
            value = settings.pop(alias)
            check_equal(f"{alias} is {value}", value, key, settings)
            settings[key] = value
    if "n_embd" in settings:
        settings.setdefault("n_inner", 4 * settings["n_embd"])
    activation = settings.get("activation_function", "gelu_new")
    equal = [name for name, names in _GELU.items() if activation in names]
    if not equal:
        raise ValueError(
            f"relattn's GPT does not have activation_function={shorten(activation)}: "
            f"expected {' or '.join(map(repr, _GELU))}"
        )
    return {**settings, "activation_function": equal[0]}


def llama_settings(settings: Settings) -> dict[str, Any]:
    """Returns the keys of Llama, Mistral and Qwen2, and the ``position``, a `rope1d`.

    Args:
        settings: The contents of a ``config.json``, of any version of transformers.

    Raises:
        ValueError: If a key is missing or unknown, or has a value that relattn does not
            have.

    Example:
        >>> llama_settings({"model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta":
        ...     500.0, "rope_scaling": None, "max_position_embeddings": 7})
        {'rms_norm_eps': 1e-05, 'max_position_embeddings': 7, 'position': \
'rope1d(base=500.0)'}
    """
    names = ("rope_parameters", "rope_scaling")
    check_json(settings, {f"{name}?": (dict, None) for name in names}, "config.json")
    scaled = set()
    for name in names:
        rope = dict(settings.get(name) or {})
        theta = rope.pop("rope_theta", None)
        if theta is not None:
            found = f"{name} has rope_theta={theta}"
            check_equal(found, theta, "rope_theta", settings)
            settings = {**settings, "rope_theta": theta}
        if rope:
            scaled.add(_rope_scaling(rope, f"{name} of config.json"))
    if len(scaled) > 1:
        raise ValueError(f"{' and '.join(names)} of config.json differ: remove one")
    kind = settings.get("model_type")
    if kind == "qwen2":
        # Its layers use the window only with use_sliding_window, which is refused.
        settings = {**settings, "sliding_window": None}
    # First, since another model has other keys.
    kept = read_settings(
        {key: value for key, value in settings.items() if key not in names}, HF_LLAMA
    )
    needed = ["max_position_embeddings", "rms_norm_eps"]
    # The first Llamas had no key for the base of rotary positions.
    needed += [] if kind else ["rope_theta"]
    missing = [name for name in needed if settings.get(name) is None]
    if kind != "llama" and "sliding_window" not in settings:
        missing.append("sliding_window")
    if missing:
        raise ValueError(
            f"the tensors do not show {', '.join(missing)}: set it in a config.json "
            "beside the checkpoint (sliding_window may be null)"
        )
    if kind == "llama" and settings.get("sliding_window") is not None:
        raise ValueError(
            f"config.json has sliding_window={shorten(settings['sliding_window'])}, "
            "which Llama does not use: remove the key"
        )
    base = float(kept.pop("rope_theta", 10000.0))
    return {**kept, "position": f"rope1d(base={base}{''.join(scaled)})"}


def _rope_scaling(rope: Settings, where: str) -> str:
    """Returns the further options of `rope1d` for scaled rotary positions."""
    rope = {"rope_type": "default", **rope}
    # The older name.
    kind = rope.pop("type", rope.pop("rope_type"))
    if kind not in (*ROPE_TYPES,):
        raise ValueError(
            f"{where} has rope_type={shorten(kind)}, which relattn's rope1d does not "
            f"have: expected {' or '.join(map(repr, ROPE_TYPES))}"
        )
    found, options = read_settings(rope, ROPE_TYPES[kind], where, "rope1d"), ""
    for key in sorted(ROPE_TYPES[kind].read):
        if key not in found:
            raise ValueError(f"{where} has no {key}, which rope_type={kind!r} needs")
        options += f", {ROPE_OPTIONS[key]}={found[key]}"
    return options


def check_equal(found: str, value: Any, key: str, settings: Settings) -> None:
    """Checks a key, if it is given, against the value that was found.

    Args:
        found: The end of the message, such as "wte.weight has 23".
        value: The value that was found.
        key: The key.
        settings: The contents of a ``config.json``.

    Raises:
        ValueError: If the key has another value.

    Example:
        >>> check_equal("wte.weight has 23", 23, "vocab_size", {"vocab_size": 24})
        Traceback (most recent call last):
        ValueError: vocab_size=24 does not fit: wte.weight has 23
    """
    if settings.get(key) is not None and settings[key] != value:
        raise ValueError(f"{key}={shorten(settings[key])} does not fit: {found}")


def num_heads(settings: Settings, key: str, dim: int) -> int:
    """Returns the number of heads, which most tensors do not show.

    Args:
        settings: The keys, with ``num_heads``, which ``--num_heads`` sets, or ``key``.
        key: The source's name for it.
        dim: Width of the tokens.

    Raises:
        ValueError: If the number is not given, given twice, or does not divide ``dim``.

    Example:
        >>> num_heads({"n_head": 3}, "n_head", 12)
        3
    """
    given = {name: settings[name] for name in ("num_heads", key) if name in settings}
    if not given:
        raise ValueError(
            f"the tensors, of width {dim}, do not show the number of heads: pass "
            f"--num_heads, or {key} in a config.json beside the checkpoint"
        )
    name, heads = list(given.items())[-1]
    if type(heads) is not int or heads < 1 or dim % heads:
        raise ValueError(
            f"{name}={shorten(heads)} must be an integer that divides the width, {dim}"
        )
    check_equal(f"config.json has {name}={heads}", heads, "num_heads", settings)
    return heads
