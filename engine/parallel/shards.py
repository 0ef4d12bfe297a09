"""Which rows, columns, heads and vocabulary each rank owns. Pure arithmetic on *global* sizes, torch-free.

Every parameter of the model is split along at most one dimension (Megatron's scheme, arXiv:1909.08053):

    column   q/k/v, gate, up       rows of the weight (out features) and their bias are split
    row      o, down               columns of the weight (in features) are split; the bias is replicated
    vocab    embedding, lm_head    rows are split, after padding the vocabulary to a multiple of tp
    whole    norms                 replicated

`Span`s are half-open and in global indices: a rank's slice of the checkpoint is `[span.start:span.stop]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Global indices `start <= i < stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Span:
        """The same span in units `factor` times smaller: heads to features."""
        return Span(self.start * factor, self.stop * factor)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one parameter.

    `shape` is the global shape, `dim` the dimension that is split (None: replicated whole, the span covers
    dimension 0), `span` this rank's part of it, `replicas` the number of ranks that hold the same part.
    """

    shape: tuple[int, ...]
    dim: int | None
    span: Span
    replicas: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.span.size, *self.shape[self.dim + 1 :])


def even(size: int, tp: int, rank: int, what: str = "size") -> Span:
    """Rank's equal part of `size`, which must divide."""
    if size % tp:
        raise ConfigError(f"tp={tp} does not divide {what} {size}")
    part = size // tp
    return Span(rank * part, (rank + 1) * part)


def heads(model: ModelConfig, tp: int, rank: int) -> Span:
    """The query heads of a rank."""
    return even(model.num_heads, tp, rank, "the number of attention heads")


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """How many (neighbouring) ranks hold each KV head: 1 unless tp exceeds the number of KV heads."""
    return max(1, tp // model.num_kv_heads)


def kv_heads(model: ModelConfig, tp: int, rank: int) -> Span:
    """The KV heads of a rank: its equal part, or the one head it shares with its neighbours."""
    count, replicas = model.num_kv_heads, kv_replicas(model, tp)
    if tp <= count:
        return even(count, tp, rank, "the number of key/value heads")
    if tp % count:
        raise ConfigError(f"tp={tp} is not a multiple of {count} key/value heads")
    return Span(rank // replicas, rank // replicas + 1)


def intermediate(model: ModelConfig, tp: int, rank: int) -> Span:
    """The part of the MLP's width that a rank computes."""
    return cropped(model.intermediate_size, tp, rank)


def cropped(size: int, tp: int, rank: int) -> Span:
    """Rank's equal part of `size` padded to a multiple of tp, without the padding: the last ranks may own less, or
    nothing."""
    part = -(-size // tp)
    return Span(min(rank * part, size), min((rank + 1) * part, size))


def vocab(vocab_size: int, tp: int, rank: int) -> Span:
    """The vocabulary of a rank."""
    return cropped(vocab_size, tp, rank)


_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)", re.ASCII)


def layer_parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one decoder layer (names after `model.layers.{i}.`) and their global shapes."""
    hidden, width = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if model.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if model.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, q)
    if model.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
        shapes[f"mlp.{name}_proj.weight"] = shape
        if model.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = shape[:1]
    return shapes


def parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter the checkpoint must hold: Hugging Face name to global shape, in the forward's order."""
    vocabulary = (model.vocab_size, model.hidden_size)
    layer = layer_parameters(model)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for i in range(model.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def plan(name: str, model: ModelConfig, tp: int, rank: int) -> Shard:
    """What `rank` of `tp` holds of the parameter `name`. KeyError for a name that the model does not have."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Shard((model.vocab_size, model.hidden_size), 0, vocab(model.vocab_size, tp, rank))
    if name == "model.norm.weight":
        return _whole((model.hidden_size,), tp)
    match = _LAYER.fullmatch(name)
    if match is None or int(match.group(1)) >= model.num_layers:
        raise KeyError(name)
    part = match.group(2)
    shape = layer_parameters(model)[part]
    module, _, kind = part.rpartition(".")
    if module == "self_attn.q_proj":
        return Shard(shape, 0, heads(model, tp, rank).scaled(model.head_dim))
    if module in ("self_attn.k_proj", "self_attn.v_proj"):
        span = kv_heads(model, tp, rank).scaled(model.head_dim)
        return Shard(shape, 0, span, kv_replicas(model, tp))
    if module in ("mlp.gate_proj", "mlp.up_proj"):
        return Shard(shape, 0, intermediate(model, tp, rank))
    if module == "self_attn.o_proj" and kind == "weight":
        return Shard(shape, 1, heads(model, tp, rank).scaled(model.head_dim))
    if module == "mlp.down_proj" and kind == "weight":
        return Shard(shape, 1, intermediate(model, tp, rank))
    return _whole(shape, tp)


def _whole(shape: tuple[int, ...], tp: int) -> Shard:
    return Shard(shape, None, Span(0, shape[0]), tp)


@dataclass(frozen=True, slots=True)
class QKVPlan:
    """What one rank computes of q, k and v in its fused product.

    `rows`: out features of q, k and v, global; `columns`: the in features it reads; `own`: which of the
    rows it computed (counted from its first) its heads go on with; `bias`: whether it adds the bias.
    """

    rows: tuple[Span, Span, Span]
    columns: Span
    own: tuple[Span, Span, Span]
    bias: bool = True


def qkv_by_heads(model: ModelConfig, tp: int, rank: int) -> QKVPlan:
    """A rank computes its own heads from all in features, and goes on with all that it computed."""
    q = heads(model, tp, rank).scaled(model.head_dim)
    kv = kv_heads(model, tp, rank).scaled(model.head_dim)
    return QKVPlan(
        (q, kv, kv), Span(0, model.hidden_size), (Span(0, q.size), Span(0, kv.size), Span(0, kv.size))
    )
