"""Which rows, columns, heads and vocabulary each rank owns. Pure arithmetic on *global* sizes, torch-free.

Every parameter of the model is split along at most one dimension (Megatron's scheme, arXiv:1909.08053):

    column   q/k/v, gate, up       rows of the weight (out features) and their bias are split
    row      o, down               columns of the weight (in features) are split; the bias is replicated
    vocab    embedding, lm_head    rows are split, after padding the vocabulary to a multiple of tp
    whole    norms                 replicated, but for those of all heads of q or k at once

Which is which follows from what an operation reads and gives (`engine.graph`).

`Span`s are half-open and in global indices: a rank's slice of the checkpoint is `[span.start:span.stop]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.graph import STREAM, Width, operations_of


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


def size_of(width: Width, model: ModelConfig) -> int:
    """How many channels that is, over all ranks."""
    return {
        "hidden": model.hidden_size,
        "heads": model.num_heads * model.head_dim,
        "kv_heads": model.num_kv_heads * model.head_dim,
        "intermediate": model.intermediate_size,
        "vocab": model.vocab_size,
    }[width]


def span_of(width: Width, model: ModelConfig, tp: int, rank: int) -> Span:
    """The channels that a rank has."""
    match width:
        case "hidden":
            return Span(0, model.hidden_size)
        case "heads":
            return heads(model, tp, rank).scaled(model.head_dim)
        case "kv_heads":
            return kv_heads(model, tp, rank).scaled(model.head_dim)
        case "intermediate":
            return intermediate(model, tp, rank)
        case "vocab":
            return vocab(model.vocab_size, tp, rank)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A layer's parameter: its global shape, and the dimension whose channels the ranks split."""

    shape: tuple[int, ...]
    dim: int | None = None
    width: Width = "hidden"


def _layer_parameters(model: ModelConfig) -> dict[str, _Parameter]:
    found: dict[str, _Parameter] = {}
    widths: dict[str, Width] = {STREAM: "hidden"}
    for one in operations_of(model):
        widths[one.tap], rows = one.width, size_of(one.width, model)
        if one.kind == "norm":
            split = 0 if one.sharded and model.qk_norm_whole else None
            size = model.head_dim if one.sharded and split is None else rows
            found[f"{one.module}.weight"] = _Parameter((size,), split, one.width)
            if one.bias and model.norm_bias:
                found[f"{one.module}.bias"] = _Parameter((size,))
            continue
        split = 0 if one.sharded else None
        if one.kind == "linear":
            read = widths[one.inputs["x"]]
            whole = read == "hidden"
            shape = rows, size_of(read, model)
            found[f"{one.module}.weight"] = _Parameter(
                shape, split if whole else 1, one.width if whole else read
            )
        if one.bias and getattr(model, one.bias):
            found[f"{one.module}.bias"] = _Parameter((rows,), split, one.width)
    return found


def layer_parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one decoder layer (names after `model.layers.{i}.`) and their global shapes."""
    return {name: one.shape for name, one in _layer_parameters(model).items()}


def parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter the checkpoint must hold: Hugging Face name to global shape, in the forward's order."""
    vocabulary = (model.vocab_size, model.hidden_size)
    layer = layer_parameters(model)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for i in range(model.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    for kind in ("weight", "bias") if model.norm_bias else ("weight",):
        shapes[f"model.norm.{kind}"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def plan(name: str, model: ModelConfig, tp: int, rank: int) -> Shard:
    """What `rank` of `tp` holds of the parameter `name`. KeyError for a name that the model does not have."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Shard((model.vocab_size, model.hidden_size), 0, vocab(model.vocab_size, tp, rank))
    if name.startswith("model.norm."):
        return _whole((model.hidden_size,), tp)
    match = _LAYER.fullmatch(name)
    if match is None or int(match.group(1)) >= model.num_layers:
        raise KeyError(name)
    one = _layer_parameters(model)[match.group(2)]
    if one.dim is None:
        return _whole(one.shape, tp)
    replicas = kv_replicas(model, tp) if one.width == "kv_heads" else 1
    return Shard(one.shape, one.dim, span_of(one.width, model, tp, rank), replicas)


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
