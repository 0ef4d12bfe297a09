"""`ModelConfig` from the metadata of a GGUF file. Torch-free.

Keys as llama.cpp reads them (llama-hparams, llama-model); what it would compute differently is refused by key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lockstep.engine.checkpoint.gguf.header import GgufTensor
from lockstep.engine.checkpoint.gguf.metadata import MetadataArray, Scalar
from lockstep.engine.checkpoint.gguf.vocabulary import end_ids, token_id
from lockstep.engine.config import DType, Family, ModelConfig
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.lacking import lacking
from lockstep.engine.config.model import MOST_LAYERS
from lockstep.engine.config.rope_scaling import DEFAULT_THETA, RopeScaling
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

Metadata = Mapping[str, Scalar | MetadataArray]
Tensors = Mapping[str, GgufTensor]
Floats = Callable[[str], tuple[float, ...]]

#: GGUF architecture -> family. Mistral's files say `llama`.
ARCHITECTURES: dict[str, Family] = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
#: Architectures of families that run from safetensors alone, and what is said of them.
SAFETENSORS_ONLY = ("olmo2", "gemma2", "gemma3", "phi3", "granite", "smollm3", "glm4", "starcoder2")
NO_GGUF = "this one is not read from GGUF files; its checkpoint in safetensors is"
ROPE_FACTORS = "rope_freqs.weight"
#: Keys (after the architecture) that change the numbers in a way that the engine does not know, and the value that
#: changes nothing.
NEUTRAL: dict[str, float | bool] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": False,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def model_config(metadata: Metadata, tensors: Tensors, where: str, floats: Floats) -> ModelConfig:
    """The model that the metadata describes. `where` opens each message; `floats(name)` reads a small F32 tensor.

    ConfigError for what is missing, senseless or not supported.
    """
    general = Fields(metadata, where)
    architecture = general.word("general.architecture")
    if architecture not in ARCHITECTURES:
        known, own = ", ".join(ARCHITECTURES), _OwnKeys(general, architecture).data
        told = NO_GGUF if architecture in SAFETENSORS_ONLY else lacking(architecture, own)
        raise general.error(
            "general.architecture", f"not a supported architecture; supported are {known}; {told}"
        )
    fields = _OwnKeys(general, architecture)
    _refuse_unsupported(fields)
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    kv_heads = fields.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.error("attention.head_count_kv", f"does not divide attention.head_count = {heads}")
    layers = fields.size("block_count", most=MOST_LAYERS)
    head_dim = _head_dim(fields, hidden, heads)
    max_position = fields.size("context_length")
    window = _window(fields, architecture, max_position)
    bos = token_id(general, "bos")
    return ModelConfig(
        family="mistral" if window else ARCHITECTURES[architecture],
        hidden_size=hidden,
        intermediate_size=fields.size("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocabulary(metadata, tensors, fields),
        max_position=max_position,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", above=0.0),
        rope_theta=fields.number("rope.freq_base", DEFAULT_THETA, above=0.0),
        rope_scaling=_rope_scaling(fields, tensors, head_dim, max_position, floats),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=architecture == "qwen3",
        tie_embeddings="output.weight" not in tensors,
        windows=(window,) * layers,
        dtype=_dtype(tensors),
        bos_id=bos,
        eos_ids=end_ids(general),
        block_types=tuple(sorted({tensor.type.name for tensor in tensors.values()})),
    )


class _OwnKeys(Fields):
    """The keys of one architecture, given without its name."""

    def __init__(self, general: Fields, architecture: str) -> None:
        start = f"{architecture}."
        own = {key.removeprefix(start): value for key, value in general.data.items() if key.startswith(start)}
        super().__init__(own, f"{general.where}: {architecture}")


def _refuse_unsupported(fields: Fields) -> None:
    for key, neutral in NEUTRAL.items():
        if fields.data.get(key, neutral) != neutral:
            what = "a mixture of experts is not supported" if key.startswith("expert") else "not supported"
            raise fields.error(key, what)
    for key, value in fields.data.items():
        if isinstance(value, MetadataArray):
            raise ConfigError(f"{fields.where}: {printable(key)} differs from layer to layer: not supported")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if "attention.key_length" in fields:
        size = fields.size("attention.key_length")
    elif hidden % heads:
        raise fields.error("embedding_length", f"attention.head_count = {heads} does not divide it")
    else:
        size = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.size(key, size) != size:
            raise fields.error(key, f"heads are {size} wide: another width here is not supported")
    if size % 2:
        raise ConfigError(f"{fields.where}: heads are {size} wide: odd; rotary embedding turns pairs")
    return size


def _window(fields: Fields, architecture: str, max_position: int) -> int | None:
    """The sliding window of all layers: only Mistral, which calls itself llama, has one."""
    window = fields.size("attention.sliding_window", 0, least=0)
    if window == 0 or window >= max_position:
        return None
    if architecture != "llama":
        raise fields.error("attention.sliding_window", f"not supported for {architecture}")
    return window


def _vocabulary(metadata: Metadata, tensors: Tensors, fields: Fields) -> int:
    """As llama.cpp counts: the tokens, else the key of a file without tokenizer, else the embedding's rows."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, MetadataArray) and tokens.count:
        return tokens.count
    embedding = tensors.get("token_embd.weight")
    return fields.size("vocab_size", embedding.shape[0] if embedding else 0)


def _rope_scaling(
    fields: Fields, tensors: Tensors, head_dim: int, max_position: int, floats: Floats
) -> RopeScaling:
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    if factor < 0:
        raise fields.error("rope.scaling.factor", "expected a number above 0")
    kind = fields.word("rope.scaling.type", "linear" if factor != 1.0 else "none")
    factors = _rope_factors(fields, tensors, head_dim, floats)
    if factors and kind == "yarn":
        raise fields.error("rope.scaling.type", f"together with {ROPE_FACTORS} it is not supported")
    if kind in ("none", "linear"):
        linear = kind == "linear" and factor != 1.0
        return RopeScaling("linear" if linear else "none", factor if linear else 1.0, factors=factors)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", "not supported; supported are none, linear and yarn")
    own = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        "yarn",
        factor,
        fields.size("rope.scaling.original_context_length", max_position),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        attention_factor=None if own == 1.0 else own * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )


def _rope_factors(fields: Fields, tensors: Tensors, head_dim: int, floats: Floats) -> tuple[float, ...]:
    """By what each pair's frequency is divided: how a GGUF file states Llama 3.1's scaling."""
    tensor = tensors.get(ROPE_FACTORS)
    if tensor is None:
        return ()
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        raise ConfigError(
            f"{fields.where}: {ROPE_FACTORS} is {tensor.type.name} {list(tensor.shape)}, expected F32 [{head_dim // 2}]"
        )
    factors = floats(ROPE_FACTORS)
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"{fields.where}: {ROPE_FACTORS} holds a factor that is not finite and above 0")
    return factors


def _dtype(tensors: Tensors) -> DType:
    """The dtype of the matrices, for a GPU; bfloat16 where they are quantised, as the models were trained."""
    types = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"
