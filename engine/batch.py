"""One forward pass: which tokens of which sequences, where they stand, and which slots they use.

ids        a a a a b b c      tokens of all sequences, packed: ragged, no padding
spans      |---a---|-b-|c|    one `Span` a sequence
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SequenceSpan:
    """The part of a batch that belongs to one sequence.

    Tokens [start, stop) of the packed batch; after the pass `kv_len` rows are to be cached, in the slots
    `rows` [kv_len] in the order of their positions. `q_positions` [T] and `kv_positions` [kv_len]
    are what causality is judged by. `end` is one past the highest position that is written in the pass.

    `held` [layers] is the evidence: how far each layer's cache reaches, one past the highest row that was
    really written to it. It grows as the layers write.
    """

    seq: int
    start: int
    stop: int
    kv_len: int
    rows: Tensor
    q_positions: Tensor
    kv_positions: Tensor
    end: int
    held: list[int]


@dataclass(slots=True)
class Batch:
    """The packed input of a forward pass: `ids`, `positions`, `slots` are [T]; `last` [S] indexes the
    rows whose logits are wanted, one a sequence; `caches` are the layers of the cache that are to be written."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    spans: list[SequenceSpan]
    caches: frozenset[int]
