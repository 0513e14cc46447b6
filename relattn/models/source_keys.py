"""The keys of other libraries' ``config.json``: used, harmless or refused.

A `Keys` for each source lists the keys that the conversion reads, the keys
that have to have one value, and the keys that do not change a model's logits in
evaluation. Any other key is refused by its name (`relattn.models.source_configs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from relattn.json_files import Range

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
    # ViTForImageClassification has no pooler; encoder_stride is the masked
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
        "model_type": ("llama", "mistral", "qwen2"),
        "architectures": ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
        "hidden_act": ("silu", "swish"),
        # Of SmolLM2, whose rotary positions are Llama's.
        "rope_interleaved": (False,),
        # Of Qwen2.
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
        "use_mrope": (False,),
    },
    flags=_names("attention_bias mlp_bias tie_word_embeddings"),
    # Products are split by pretraining_tp, and added again.
    harmless=_names(
        _HF_COMMON,
        _HF_GENERATION,
        "attention_dropout pretraining_tp is_llama_config transformers.js_config",
        "max_window_layers",
    ),
)
_WHOLE = {"partial_rotary_factor": (1.0,)}
# The keys of scaled rotary positions beside their rope_type.
ROPE_TYPES = {
    "default": Keys(_names(), _WHOLE),
    "linear": Keys(_names("factor"), _WHOLE),
    "llama3": Keys(
        _names("factor original_max_position_embeddings"),
        {**_WHOLE, "low_freq_factor": (1.0,), "high_freq_factor": (4.0,)},
    ),
}
# Our names of their numbers.
ROPE_OPTIONS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
}
# Other names of the same keys, by which transformers reads them too.
GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
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
# The values of the keys that are read, in any source.
_SIZE = Range(1, 2**24)
_SIDE = Range(1, 2**16)
_SIDES = (_SIDE, [_SIDE, _SIDE], [_SIDE])
VALUES = {
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
    "factor": Range(1, 1e6, float),
    "original_max_position_embeddings": _SIZE,
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


class Processor(NamedTuple):
    """What a class of transformers does with images where its file does not say.

    Attributes:
        square: Whether a number as ``size`` is both sides, not the shorter one.
        crop: Whether images are cropped.
    """

    square: bool
    crop: bool


# The classes of transformers that resize, crop and scale as `Pretrained.preprocess`.
HF_PROCESSORS = {
    "ViT": Processor(square=True, crop=False),
    "CLIP": Processor(square=False, crop=True),
    "Siglip": Processor(square=False, crop=False),
    "Bit": Processor(square=False, crop=True),
    "DeiT": Processor(square=True, crop=True),
}
# The class of a file that names none, by the --source.
HF_OWN_PROCESSORS = {
    "hf_vit": "ViT",
    "hf_dinov2": "Bit",
    "hf_clip": "CLIP",
    "hf_siglip": "Siglip",
}
# Some versions write the older name of a class under the newer key.
_HF_PROCESSOR_CLASSES = tuple(
    f"{name}{ending}"
    for name in HF_PROCESSORS
    for ending in (
        "ImageProcessor",
        "ImageProcessorFast",
        "ImageProcessorPil",
        "FeatureExtractor",
    )
)
HF_PROCESSOR = Keys(
    read=_names(
        """
        do_resize do_rescale do_normalize do_center_crop size crop_size resample
        rescale_factor image_mean image_std default_to_square
        image_processor_type feature_extractor_type
        """
    ),
    fixed={
        "image_processor_type": _HF_PROCESSOR_CLASSES,
        "feature_extractor_type": _HF_PROCESSOR_CLASSES,
        "do_pad": (False,),
    },
    harmless=_names(
        """
        _valid_processor_keys data_format device disable_grouping do_convert_rgb
        image_seq_length input_data_format pad_size processor_class return_tensors
        """
    ),
)
TRANSLUTION = Keys(_names("num_heads image_size channels"), {})
PERFORMER = Keys(_names("num_heads heads image_size"), {})
# By --source of relattn convert.
SOURCES = {
    "hf_vit": HF_VIT,
    "hf_dinov2": HF_DINOV2,
    "hf_clip": HF_CLIP,
    "hf_siglip": HF_SIGLIP,
    "hf_gpt2": HF_GPT2,
    "hf_llama": HF_LLAMA,
    "timm": TIMM,
}
