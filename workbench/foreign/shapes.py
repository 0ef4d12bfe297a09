"""The shapes that taps have in a session (`engine.taps.names`), whatever an engine's tensors look like."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from lockstep.engine.taps.names import layer_of, layer_taps, local_name
from lockstep.sessions.meta import ModelMeta

#: Taps of [T, heads, head_dim].
HEADS = frozenset({"attn.q_norm", "attn.k_norm", "attn.q_rope", "attn.k_rope"})
#: Taps of [heads, T, K], which dumps have as [T, heads, K].
ATTENTION = frozenset({"attn.scores", "attn.probs"})
#: Taps of [K, heads, head_dim]: a cache is no row of a pass.
CACHES = frozenset({"attn.k_cache", "attn.v_cache"})

_LAYER = frozenset(layer_taps(qk_norm=True, kv_replicas=1))
_OUTSIDE = frozenset({"embed", "final_norm", "logits"})
#: Taps whose width is a number of heads, as a field of `ModelMeta`.
_BY_HEADS = {
    "attn.q_proj": "num_heads", "attn.q_norm": "num_heads", "attn.q_rope": "num_heads", "attn.context": "num_heads",
    "attn.k_proj": "num_kv_heads", "attn.k_norm": "num_kv_heads", "attn.k_rope": "num_kv_heads",
    "attn.v_proj": "num_kv_heads",
}  # fmt: skip


def is_canonical(tap: str) -> bool:
    """Whether it is one of the design's taps, not a generic one under the engine's own name."""
    return tap in _OUTSIDE if layer_of(tap) is None else local_name(tap) in _LAYER


def head_dim(model: ModelMeta) -> int | None:
    """The width of a head."""
    if model.head_dim is not None or model.hidden_size is None or not model.num_heads:
        return model.head_dim
    return model.hidden_size // model.num_heads


def width(tap: str, model: ModelMeta) -> int | None:
    """How many numbers a row of the whole tap has, over all ranks; None where the model does not tell."""
    local = local_name(tap)
    if local in _BY_HEADS:
        heads: int | None = getattr(model, _BY_HEADS[local])
        size = head_dim(model)
        return None if heads is None or size is None else heads * size
    if local in ("mlp.gate", "mlp.up", "mlp.act"):
        return model.intermediate_size
    if local in ATTENTION | CACHES or not is_canonical(tap):
        return None
    return model.vocab_size if tap == "logits" else model.hidden_size


def by_rows(tap: str, array: NDArray[Any], rows: int) -> NDArray[Any]:
    """`array` with one of `rows` tokens along its first axis, where it can be brought to that: a leading axis of one
    goes, and heads that were flattened into the rows come back."""
    if array.ndim > 2 and array.shape[0] == 1 and array.shape[1] == rows:
        array = array[0]
    heads = local_name(tap) in HEADS
    if heads and array.ndim == 2 and rows and array.shape[0] != rows and array.shape[0] % rows == 0:
        array = array.reshape(rows, -1, array.shape[1])
    return array


def shaped(tap: str, array: NDArray[Any], model: ModelMeta) -> NDArray[Any]:
    """Rows [T, …] of one rank in the shape that the tap has in a session (ATTENTION: still rows first)."""
    local = local_name(tap)
    if array.ndim == 0 or array.size == 0:
        return array
    rows = len(array)
    if local in ATTENTION | CACHES or not is_canonical(tap):
        return array
    if local not in HEADS:
        return array.reshape(rows, -1)
    size = head_dim(model)
    if array.ndim == 3 or size is None or (array.size // max(rows, 1)) % size:
        return array
    return array.reshape(rows, -1, size)
