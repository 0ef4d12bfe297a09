"""`ModelConfig` from the metadata of a GGUF file. Torch-free.

Keys as llama.cpp reads them (llama-hparams, llama-model); what it would compute differently is refused by key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lockstep.engine.checkpoint.gguf.architectures import ARCHITECTURES
from lockstep.engine.checkpoint.gguf.expert_architectures import latent_of_gguf
from lockstep.engine.checkpoint.gguf.metadata import MetadataArray, Scalar
from lockstep.engine.checkpoint.gguf.rotary import Floats, Tensors, rope_scaling
from lockstep.engine.checkpoint.gguf.stated_sizes import StatedSizes
from lockstep.engine.checkpoint.gguf.vocabulary import end_ids, token_id
from lockstep.engine.checkpoint.gguf.windows import by_layer
from lockstep.engine.config import DType, ModelConfig
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.lacking import lacking
from lockstep.engine.config.model import MOST_LAYERS
from lockstep.engine.config.rope_scaling import DEFAULT_THETA, Rope
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

Metadata = Mapping[str, Scalar | MetadataArray]
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
#: How many layers behind the others predict further tokens.
FURTHER_KEY = "nextn_predict_layers"
FURTHER_NOTE = "ignored blk.{}: a layer that predicts further tokens, behind the model's"


def model_config(metadata: Metadata, tensors: Tensors, where: str, floats: Floats) -> ModelConfig:
    """The model that the metadata describes. `where` opens each message; `floats(name)` reads a small F32 tensor.

    ConfigError for what is missing, senseless or not supported.
    """
    general = Fields(metadata, where)
    name = general.word("general.architecture")
    if name not in ARCHITECTURES:
        known, reported = ", ".join(ARCHITECTURES), lacking(name, _OwnKeys(general, name).data)
        raise general.error(
            "general.architecture", f"not a supported architecture; supported are {known}; {reported}"
        )
    architecture, fields = ARCHITECTURES[name], _OwnKeys(general, name)
    _refuse_unsupported(fields, architecture.knows)
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    latent = latent_of_gguf(fields, tensors) if architecture.latent else None
    kv_heads = heads if latent else _largest(fields, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise fields.error("attention.head_count_kv", f"does not divide attention.head_count = {heads}")
    further = fields.size(FURTHER_KEY, 0, least=0)
    layers = fields.size("block_count", least=further + 1, most=MOST_LAYERS) - further
    head_dim = latent.head_dim if latent else _head_dim(fields, hidden, heads)
    rotary = latent.rope_dim if latent else _rotary_dim(fields, head_dim, architecture.partial)
    max_position = fields.size("context_length")
    theta = fields.number("rope.freq_base", DEFAULT_THETA, above=0.0)
    rope = Rope(theta, rope_scaling(fields, tensors, rotary or head_dim, max_position, floats))
    plain = ModelConfig(
        family=architecture.family,
        hidden_size=hidden,
        intermediate_size=_intermediate(fields),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_vocabulary(metadata, tensors, fields),
        max_position=max_position,
        rms_eps=fields.number(architecture.eps_key, above=0.0),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary=rotary,
        latent=latent,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tie_embeddings="output.weight" not in tensors,
        windows=(None,) * layers,
        dtype=_dtype(tensors),
        bos_id=token_id(general, "bos"),
        eos_ids=end_ids(general),
        block_types=tuple(sorted({tensor.type.name for tensor in tensors.values()})),
        notes=(FURTHER_NOTE.format(layers),) if further else (),
    )
    sizes = StatedSizes(hidden, heads, head_dim, layers, max_position, rope, frozenset(tensors))
    own = architecture.own(fields, sizes)
    return replace(plain, **{**own, "notes": (*plain.notes, *own.get("notes", ()))})


class _OwnKeys(Fields):
    """The keys of one architecture, given without its name."""

    def __init__(self, general: Fields, architecture: str) -> None:
        start = f"{architecture}."
        own = {key.removeprefix(start): value for key, value in general.data.items() if key.startswith(start)}
        super().__init__(own, f"{general.where}: {architecture}")


def _refuse_unsupported(fields: Fields, known: Collection[str]) -> None:
    for key, neutral in NEUTRAL.items():
        if key not in known and fields.data.get(key, neutral) != neutral:
            what = "a mixture of experts is not supported" if key.startswith("expert") else "not supported"
            raise fields.error(key, what)
    for key, value in fields.data.items():
        if isinstance(value, MetadataArray) and key not in known:
            raise ConfigError(f"{fields.where}: {printable(key)} differs from layer to layer: not supported")


def _intermediate(fields: Fields) -> int:
    """The MLP's width; of a file in which all layers have experts, theirs."""
    key, other = "feed_forward_length", "expert_feed_forward_length"
    return _largest(fields, other if key not in fields and other in fields else key)


def _largest(fields: Fields, key: str, assumed: int | None = None) -> int:
    """The number, or the largest of a list with one for each layer: 0 of those that have none."""
    stated = fields.data.get(key)
    if isinstance(stated, MetadataArray):
        return max(1, *by_layer(fields, key, stated.count, least=0))
    return fields.size(key) if assumed is None else fields.size(key, assumed)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if "attention.key_length" in fields:
        size = fields.size("attention.key_length")
    elif hidden % heads:
        raise fields.error("embedding_length", f"attention.head_count = {heads} does not divide it")
    else:
        size = hidden // heads
    if fields.size("attention.value_length", size) != size:
        raise _width_error(fields, "attention.value_length", size)
    if size % 2:
        raise ConfigError(f"{fields.where}: heads are {size} wide: odd; rotary embedding turns pairs")
    return size


def _rotary_dim(fields: Fields, head_dim: int, partial: bool) -> int | None:
    """How many channels of each head are rotated, None: all."""
    key = "rope.dimension_count"
    size = fields.size(key, head_dim)
    if size == head_dim:
        return None
    if not partial or size % 2 or size > head_dim:
        raise _width_error(fields, key, head_dim)
    return size


def _width_error(fields: Fields, key: str, head_dim: int) -> ConfigError:
    return fields.error(key, f"heads are {head_dim} wide: another width here is not supported")


def _vocabulary(metadata: Metadata, tensors: Tensors, fields: Fields) -> int:
    """As llama.cpp counts: the tokens, else the key of a file without tokenizer, else the embedding's rows."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, MetadataArray) and tokens.count:
        return tokens.count
    embedding = tensors.get("token_embd.weight")
    return fields.size("vocab_size", embedding.shape[0] if embedding else 0)


def _dtype(tensors: Tensors) -> DType:
    """The dtype of the matrices, for a GPU; bfloat16 where they are quantised, as the models were trained."""
    types = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"
