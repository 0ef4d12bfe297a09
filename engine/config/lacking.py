"""What a model of another family has that this engine lacks, from the keys of its configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

#: What a model may have -> keys that show it where they are set, of a Hugging Face configuration and of GGUF metadata
#: (without the architecture's name).
_SHOWN_BY: dict[str, tuple[str, ...]] = {
    "an encoder": ("is_encoder_decoder", "encoder_layers", "num_decoder_layers"),
    "images": ("vision_config", "vision_tower", "mm_vision_tower"),
    "sound": ("audio_config", "audio_token_id"),
    "a mixture of experts of its own": (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size",
        "n_shared_experts", "num_shared_experts", "ffn_config", "expert_count", "expert_used_count",
        "expert_shared_count", "routed_scaling_factor", "router_scaling_factor",
    ),
    "keys and values from latents (MLA)": ("kv_lora_rank", "attention.kv_lora_rank"),
    "sparse attention by an indexer": ("index_topk", "index_n_heads", "attention.indexer.top_k"),
    "attention in chunks": ("attention_chunk_size", "attention.chunk_size"),
    "a rotation of several axes (mRoPE)": ("mrope_section", "rope.dimension_sections"),
    "a recurrent state": (
        "ssm_state_size", "state_size", "mamba_d_state", "mamba_num_heads", "mamba_n_heads", "mamba_d_conv",
        "ssm.state_size", "ssm.inner_size", "lru_width",
    ),
    "linear attention": (
        "linear_num_key_heads", "linear_num_value_heads", "linear_attn_config", "head_size_divisor", "wkv.head_size",
    ),
    "short convolutions": ("linear_conv_kernel_dim", "conv_L_cache", "shortconv.l_cache", "ssm.conv_kernel"),
    "attention without positions but for a slope (ALiBi)": ("alibi", "attention.max_alibi_bias"),
    "attention beside the MLP": ("use_parallel_residual", "parallel_attn"),
    "layers that share keys and values": ("num_kv_shared_layers", "attention.shared_kv_layers"),
    "inputs of each layer's own": ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
    "a clamped projection": ("clip_qkv", "attention.clamp_kqv"),
    "weights that are quantised": ("quantization_config",),
}  # fmt: skip
#: What no key shows -> the families that have it, by their names here and there.
_HAD_BY: dict[str, tuple[str, ...]] = {
    "attention sinks": ("gpt-oss",),
    "a clamped activation": ("gpt-oss",),
    "gated attention": ("qwen3next", "qwen35", "qwen35moe"),
    "a recurrent state": ("rwkv", "rwkv6", "rwkv7"),
    "attention without positions but for a slope (ALiBi)": ("bloom", "mpt"),
}  # fmt: skip
#: Where a model of text and more describes the part for text.
_INNER = ("text_config", "language_config", "llm_config")
_KNOWN_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def lacking(family: str, config: Mapping[str, object]) -> str:
    """In words: "it has a mixture of experts and shared experts, not supported here"."""
    inner = [found for key in _INNER if isinstance(found := config.get(key), dict)]
    described = [(family, config), *((str(one.get("model_type", "")), one) for one in inner)]
    parts = list(dict.fromkeys(part for name, one in described for part in _parts(name, one)))
    if not parts:
        return "its configuration names no part that they lack, but its code is not theirs"
    reported = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"it has {reported}, not supported here"


def _parts(family: str, config: Mapping[str, object]) -> Iterator[str]:
    for part, keys in _SHOWN_BY.items():
        if any(_is_set(config.get(key)) for key in keys):
            yield part
    for part, families in _HAD_BY.items():
        if family in families:
            yield part
    if isinstance(kinds := config.get("layer_types"), list) and all(isinstance(kind, str) for kind in kinds):
        yield from _layers(set(kinds))
    for key in _ACTIVATIONS:
        if isinstance(found := config.get(key), str) and found not in _KNOWN_ACTIVATIONS:
            yield "another activation than SiLU and GELU"


def _layers(kinds: set[str]) -> Iterator[str]:
    if any("linear" in kind for kind in kinds):
        yield "linear attention"
    if any("mamba" in kind or "recurrent" in kind for kind in kinds):
        yield "a recurrent state"
    if any("conv" in kind for kind in kinds):
        yield "short convolutions"
    if "chunked_attention" in kinds:
        yield "attention in chunks"


def _is_set(value: object) -> bool:
    """Neither absent nor a value that switches it off."""
    return bool(value) and not (isinstance(value, float) and value == 1.0)
