"""One forward pass: which tokens of which sequences, at which positions, and which cache slots they use.

ids        a a a a b b c      tokens of all sequences, packed: ragged, no padding
spans      |---a---|-b-|c|    one `SequenceSpan` per sequence
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SequenceSpan:
    """The part of a batch that belongs to one sequence.

    Tokens [start, stop) of the packed batch; after the pass `kv_len` rows are to be cached, in the slots
    `rows` [kv_len] in order of position. `q_positions` [T] and `kv_positions` [kv_len] determine the causal
    mask; `in_order`: the queries are those of the last T of `kv_len` rows, as without a fault. `end` is one past the
    highest position that is written in the pass, `length` how long the sequence is by now, the rest of a prompt that
    comes in chunks included.

    `held` [layers] is how far each layer's cache reaches: one past the highest row that was actually written to
    it. It grows as the layers write.
    """

    seq: int
    start: int
    stop: int
    kv_len: int
    rows: Tensor
    q_positions: Tensor
    kv_positions: Tensor
    end: int
    length: int
    held: list[int]
    in_order: bool


@dataclass(slots=True)
class Batch:
    """The packed input of a forward pass: `ids`, `positions`, `slots` are [T]; `last` [S] indexes the
    rows whose logits are computed, one per sequence; `caches` are the layers of the cache that the pass writes."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    spans: list[SequenceSpan]
    caches: frozenset[int]
