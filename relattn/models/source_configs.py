"""The ``config.json`` of other libraries: every key is used, harmless or refused.

A `Keys` for each source lists the keys that the conversion reads, the keys
that have to have one value, and the keys that do not change a model's logits in
evaluation. Any other key is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from relattn.json_files import Range, check_json
from relattn.messages import list_problems, shorten

Settings = Mapping[str, Any]


class Keys(NamedTuple):
    """What the keys of a ``config.json`` mean.

    Attributes:
        read: Keys that the conversion uses, or compares with the tensors.
        fixed: The values of a key that relattn's models have, also as elements of a
            list; another value is refused.
        flags: Keys of ``read`` that must be true or false: what null, a string or
            another number means differs between libraries and their versions.
        harmless: Keys that do not change the logits: training, generation, labels,
            preprocessing, names and versions.
    """

    read: frozenset[str]
    fixed: Mapping[str, tuple]
    flags: frozenset[str] = frozenset()
    harmless: frozenset[str] = frozenset()


def _names(*lists: str) -> frozenset[str]:
    return frozenset(name for text in lists for name in text.split())


# Keys of transformers' PreTrainedConfig, of versions 2 to 5.
_HF_COMMON = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _commit_hash _from_model_config _name_or_path _num_labels _output_attentions
    attn_implementation chunk_size_feed_forward cross_attention_hidden_size dtype
    experts_implementation finetuning_task gradient_checkpointing id2label
    initializer_range is_decoder label2id name_or_path num_labels output_attentions
    output_hidden_states output_past prefix problem_type return_dict
    task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype
    torchscript transformers_version use_bfloat16 use_cache xla_device
    bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id
"""
# Keys of its GenerationConfig.
_HF_GENERATION = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config
    cache_implementation compile_config constraints continuous_batching_config
    disable_compile diversity_penalty do_sample dola_layers early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_bos_token_id
    forced_eos_token_id generation_kwargs guidance_scale is_assistant length_penalty
    low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time
    min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences
    output_logits output_scores penalty_alpha prefill_chunk_size
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits
    repetition_penalty return_dict_in_generate return_legacy_cache sequence_bias
    speculation_type stop_strings suppress_tokens target_lookbehind temperature
    token_healing top_h top_k top_p typical_p use_mtp watermarking_config
"""
_HF_FIXED = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}

_HF_VIT_READ = """
    num_heads num_attention_heads hidden_size num_hidden_layers intermediate_size
    hidden_act layer_norm_eps image_size patch_size num_channels id2label num_labels
"""
_HF_VIT_HARMLESS = _names(
    _HF_COMMON,
    _HF_GENERATION,
    """
    hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout
    drop_path_rate initializer_factor tie_word_embeddings
    """,
)

HF_VIT = Keys(
    read=_names(_HF_VIT_READ, "qkv_bias"),
    fixed={
        **_HF_FIXED,
        "model_type": ("vit", "vit_mae"),
        "architectures": (
            "ViTForImageClassification",
            "ViTModel",
            "ViTMAEModel",
            "ViTMAEForPreTraining",
        ),
    },
    flags=_names("qkv_bias"),
    # The pooler is no part of ViTForImageClassification; encoder_stride is the masked
    # image model's, and the decoder MAE's.
    harmless=_HF_VIT_HARMLESS
    | _names(
        """
        encoder_stride pooler_act pooler_output_size decoder_hidden_size
        decoder_intermediate_size decoder_num_attention_heads decoder_num_hidden_layers
        mask_ratio norm_pix_loss
        """
    ),
)

HF_DINOV2 = Keys(
    # mlp_ratio and use_swiglu_ffn are in the tensors' shapes.
    read=_names(_HF_VIT_READ, "qkv_bias num_register_tokens"),
    fixed={
        **_HF_FIXED,
        "model_type": ("dinov2", "dinov2_with_registers"),
        "architectures": tuple(
            f"{name}{ending}"
            for name in ("Dinov2", "Dinov2WithRegisters")
            for ending in ("Model", "ForImageClassification", "Backbone")
        ),
    },
    flags=_names("qkv_bias"),
    harmless=_HF_VIT_HARMLESS
    | _names(
        """
        apply_layernorm layerscale_value mlp_ratio out_features out_indices
        reshape_hidden_states stage_names use_mask_token use_swiglu_ffn
        """
    ),
)

HF_CLIP = Keys(
    read=_names(_HF_VIT_READ, "projection_dim"),
    fixed={
        **_HF_FIXED,
        "model_type": ("clip", "clip_vision_model"),
        "architectures": (
            "CLIPModel",
            "CLIPVisionModel",
            "CLIPVisionModelWithProjection",
            "CLIPForImageClassification",
        ),
    },
    harmless=_HF_VIT_HARMLESS | _names("logit_scale_init_value"),
)

HF_SIGLIP = Keys(
    read=_names(_HF_VIT_READ),
    fixed={
        **_HF_FIXED,
        "model_type": ("siglip", "siglip_vision_model"),
        "architectures": (
            "SiglipModel",
            "SiglipVisionModel",
            "SiglipForImageClassification",
        ),
    },
    harmless=_HF_VIT_HARMLESS | _names("vision_use_head"),
)

HF_GPT2 = Keys(
    read=_names(
        """
        num_heads n_head n_embd n_layer n_positions n_inner vocab_size
        num_attention_heads hidden_size num_hidden_layers max_position_embeddings
        activation_function layer_norm_epsilon tie_word_embeddings scale_attn_weights
        scale_attn_by_inverse_layer_idx
        """
    ),
    fixed={
        **_HF_FIXED,
        "model_type": ("gpt2",),
        "architectures": tuple(
            f"{prefix}{name}"
            for prefix in ("", "TF", "Flax")
            for name in ("GPT2LMHeadModel", "GPT2Model")
        ),
        "n_special": (0,),
    },
    flags=_names(
        "tie_word_embeddings scale_attn_weights scale_attn_by_inverse_layer_idx"
    ),
    # reorder_and_upcast_attn is about the precision of training.
    harmless=_names(
        _HF_COMMON,
        _HF_GENERATION,
        """
        attn_pdrop embd_pdrop n_ctx predict_special_tokens reorder_and_upcast_attn
        resid_pdrop summary_activation summary_first_dropout summary_proj_to_labels
        summary_type summary_use_proj
        """,
    ),
)
HF_LLAMA = Keys(
    read=_names(
        """
        num_heads num_attention_heads num_key_value_heads head_dim hidden_size
        intermediate_size num_hidden_layers vocab_size max_position_embeddings
        rms_norm_eps rope_theta sliding_window attention_bias mlp_bias
        tie_word_embeddings
        """
    ),
    fixed={
        **_HF_FIXED,
        "model_type": ("llama", "mistral"),
        "architectures": ("LlamaForCausalLM", "MistralForCausalLM"),
        "hidden_act": ("silu", "swish"),
    },
    flags=_names("attention_bias mlp_bias tie_word_embeddings"),
    # Products are split by pretraining_tp, and added again.
    harmless=_names(_HF_COMMON, _HF_GENERATION, "attention_dropout pretraining_tp"),
)
# Other names of the same keys, by which transformers reads them too.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
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
# Those of a ViT by our names; silu is that of SwiGLU, which the tensors' shapes show.
_ACTIVATIONS = {
    **dict.fromkeys([*_GELU["gelu_new"], "gelu_tanh"], "gelu_tanh"),
    **dict.fromkeys(_GELU["gelu"], "gelu"),
    **dict.fromkeys(["quick_gelu", "quickgelu"], "quick_gelu"),
    **dict.fromkeys(["silu", "swish"], "swiglu"),
}

TIMM = Keys(
    # image_size is ours, the size of images that are not square, and layer_norm_eps.
    read=_names(
        """
        architecture num_heads embed_dim num_features depth mlp_ratio patch_size
        img_size image_size input_size in_chans num_classes global_pool class_token
        no_embed_class qkv_bias init_values reg_tokens pre_norm final_norm fc_norm
        pool_include_prefix act_layer layer_norm_eps
        """
    ),
    fixed={
        "model_type": ("timm_wrapper",),
        "architectures": ("TimmWrapperForImageClassification", "TimmWrapperModel"),
        "do_pooling": (True,),
        "qk_norm": (False,),
        "scale_attn_norm": (False,),
        "scale_mlp_norm": (False,),
        "proj_bias": (True,),
        "pos_embed": ("learn",),
        "representation_size": (0,),
        "distilled": (False,),
        "norm_layer": ("layernorm",),
    },
    flags=_names("class_token no_embed_class qkv_bias pre_norm final_norm"),
    harmless=_names(
        # The arguments of VisionTransformer.
        """
        drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate
        drop_path_rate weight_init fix_init dynamic_img_size dynamic_img_pad
        strict_img_size device dtype
        """,
        # The rest of the file, and pretrained_cfg.
        """
        model_args pretrained_cfg labels label_names label_descriptions label_offset
        classifier crop_mode crop_pct custom_load description file first_conv
        fixed_input_size hf_hub hf_hub_filename hf_hub_id interpolation license mean
        min_input_size notes origin_url paper_ids paper_name pool_size source std tag
        task test_crop_pct test_input_size test_pool_size url
        """,
        # What transformers adds in a wrapper of timm's models.
        """
        _name_or_path id2label initializer_range label2id num_labels problem_type
        torch_dtype transformers_version
        """,
    ),
)
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
# Those of them with GELU by tanh, which their names do not show.
_TIMM_TANH = _names(
    """
    vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256
    vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384
    vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
    vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_512
    vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384
    vit_so400m_patch16_siglip_512 vit_so400m_patch16_siglip_gap_256
    vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
    """
)
_TIMM_MEAN = ("test_vit2", "eva_large_patch14_196", "eva_large_patch14_336")
_TIMM_MAP = re.compile(r"_siglip_|_map_|^test_vit3$")
_TIMM_SWIGLU = re.compile(r"_giant_patch14_(dinov2|reg\d_)")
_TIMM_NO_NORM = re.compile(r"_radio_v|_intern300m_")
# Names of older versions, which have the origin of the weights at their end.
_TIMM_OLD_ENDING = re.compile(r"(\..*|_in21k|_in21ft1k|_sam|_dino)$")

# The values of the keys that are read, in any source.
_SIZE = Range(1, 2**24)
_SIDE = Range(1, 2**16)
_SIDES = (_SIDE, [_SIDE, _SIDE], [_SIDE])
_VALUES = {
    **dict.fromkeys(
        _names(
            """
            num_attention_heads hidden_size num_hidden_layers intermediate_size
            num_channels n_embd n_layer n_positions n_inner vocab_size
            max_position_embeddings embed_dim num_features depth in_chans num_labels
            projection_dim num_key_value_heads head_dim sliding_window
            """
        ),
        _SIZE,
    ),
    **dict.fromkeys(("patch_size", "image_size", "img_size"), _SIDES),
    **dict.fromkeys(
        ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
        Range(1e-30, 1, float),
    ),
    "rope_theta": Range(1, 1e30, float),
    **dict.fromkeys(
        _names("architecture global_pool activation_function act_layer hidden_act"), str
    ),
    **dict.fromkeys(("reg_tokens", "num_register_tokens"), Range(0, 2**16)),
    **dict.fromkeys(("fc_norm", "pool_include_prefix"), bool),
    "num_classes": Range(0, 2**24),
    "input_size": [_SIDE, _SIDE, _SIDE],
    "id2label": dict,
    "init_values": float,
    "mlp_ratio": Range(1e-3, 1e3, float),
}

# The classes of transformers that resize, crop and scale as `Pretrained.preprocess`.
_HF_PROCESSORS = ("ViT", "CLIP", "Siglip", "Bit", "DeiT")
HF_PROCESSOR = Keys(
    read=_names(
        """
        do_resize do_rescale do_normalize do_center_crop size crop_size resample
        rescale_factor image_mean image_std
        """
    ),
    fixed={
        "image_processor_type": tuple(
            f"{name}ImageProcessor{ending}"
            for name in _HF_PROCESSORS
            for ending in ("", "Fast", "Pil")
        ),
        "feature_extractor_type": tuple(
            f"{name}FeatureExtractor" for name in _HF_PROCESSORS
        ),
        "do_pad": (False,),
    },
    harmless=_names(
        """
        _valid_processor_keys data_format default_to_square device disable_grouping
        do_convert_rgb image_seq_length input_data_format pad_size processor_class
        return_tensors
        """
    ),
)
TRANSLUTION = Keys(_names("num_heads image_size channels"), {})
PERFORMER = Keys(_names("num_heads heads image_size"), {})


_SOURCES = {
    "hf_vit": HF_VIT,
    "hf_dinov2": HF_DINOV2,
    "hf_clip": HF_CLIP,
    "hf_siglip": HF_SIGLIP,
    "hf_gpt2": HF_GPT2,
    "hf_llama": HF_LLAMA,
    "timm": TIMM,
}


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
            for source, keys in _SOURCES.items()
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
    unknown = sorted(set(settings) - keys.read - set(keys.fixed) - keys.harmless)
    if unknown:
        raise ValueError(
            f"{where} has keys whose meaning is "
            f"{list_problems({'unknown:': unknown})}; remove those that do not change "
            f"the {what}"
        )
    for key, allowed in keys.fixed.items():
        value = settings.get(key, allowed[0])
        values = value if isinstance(value, list) and value else [value]
        if any(element not in allowed for element in values):
            expected = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{where} has {key}={shorten(value)}, which relattn's {what} does not "
                f"have: expected {expected}"
            )
    values = {f"{key}?": _VALUES[key] for key in keys.read & set(_VALUES)}
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
    """What an architecture of timm has, and the tensors do not show."""
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
        >>> hf_settings({"vision_config": {"hidden_size": 8}, "text_config": {
        ...     "hidden_size": 6}, "projection_dim": 7, "model_type": "clip"}, HF_CLIP)
        {'hidden_size': 8, 'projection_dim': 7, 'num_attention_heads': 12}
    """
    parts = ("vision_config", "vision_config_dict", "text_config", "text_config_dict")
    check_json(settings, {f"{name}?": (dict, None) for name in parts}, "config.json")
    joined = {key: value for key, value in settings.items() if key not in parts}
    # For transformers, the second replaces the first, its defaults too.
    given = [settings[name] for name in parts[:2] if settings.get(name) is not None]
    # Labels in it are those of no classifier.
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
    return names if all(isinstance(name, str) for name in names) else []


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
    for alias, key in _GPT2_ALIASES.items():
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
    """Returns the keys of Llama and Mistral; refuses scaled rotary positions.

    Args:
        settings: The contents of a ``config.json``, of any version of transformers.

    Raises:
        ValueError: If positions are scaled, a key is missing or unknown, or has a value
            that relattn does not have.

    Example:
        >>> llama_settings({"model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta":
        ...     500.0, "rope_scaling": None, "max_position_embeddings": 7})
        {'rope_theta': 500.0, 'rms_norm_eps': 1e-05, 'max_position_embeddings': 7}
    """
    names = ("rope_parameters", "rope_scaling")
    check_json(settings, {f"{name}?": (dict, None) for name in names}, "config.json")
    for name in names:
        rope = {"rope_type": "default", **(settings.get(name) or {})}
        # The older name.
        kind = rope.pop("type", rope.pop("rope_type"))
        theta = rope.pop("rope_theta", None)
        if kind != "default" or rope.pop("partial_rotary_factor", 1.0) != 1.0 or rope:
            raise ValueError(
                f"config.json has {name}={shorten(settings[name])}, and relattn's "
                "rope1d does not scale positions: convert a model of rope_type "
                "'default'"
            )
        if theta is not None:
            found = f"{name} has rope_theta={theta}"
            check_equal(found, theta, "rope_theta", settings)
            settings = {**settings, "rope_theta": theta}
    kind = settings.get("model_type")
    needed = ["max_position_embeddings", "rms_norm_eps"]
    # The first Llamas had no key for the base of rotary positions.
    needed += [] if kind else ["rope_theta"]
    missing = [name for name in needed if settings.get(name) is None]
    if kind != "llama" and "sliding_window" not in settings:
        missing.append("sliding_window")
    if missing:
        raise ValueError(
            f"the tensors do not show {', '.join(missing)}: give it in a config.json "
            "beside the checkpoint (sliding_window may be null)"
        )
    if kind == "llama" and settings.get("sliding_window") is not None:
        raise ValueError(
            f"config.json has sliding_window={shorten(settings['sliding_window'])}, "
            "which Llama does not use: remove the key"
        )
    kept = {key: value for key, value in settings.items() if key not in names}
    return {"rope_theta": 10000.0, **read_settings(kept, HF_LLAMA)}


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
            f"the tensors, of width {dim}, do not show the number of heads: give "
            f"--num_heads, or {key} in a config.json beside the checkpoint"
        )
    name, heads = list(given.items())[-1]
    if type(heads) is not int or heads < 1 or dim % heads:
        raise ValueError(
            f"{name}={shorten(heads)} must be an integer that divides the width, {dim}"
        )
    check_equal(f"config.json has {name}={heads}", heads, "num_heads", settings)
    return heads
