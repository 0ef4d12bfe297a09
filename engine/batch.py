"""One forward pass: which tokens of which sequences, at which positions, and which cache slots they use.

ids        a a a a b b c      tokens of all sequences, packed: ragged, no padding
spans      |---a---|-b-|c|    one `SequenceSpan` per sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


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

    def blocks(self, page: int) -> Tensor:
        """The blocks of `page` slots that hold the rows, in order: those of every first slot."""
        return self.rows[::page] // page


def block_tables(blocks: Sequence[Tensor]) -> Tensor:
    """Of each sequence its blocks in order, padded with 0: [S, blocks of the longest] int32."""
    return pad_sequence(list(blocks), batch_first=True).to(torch.int32)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Lengths that are on a GPU alone, of a step in which every sequence reads one token. `kv_lens` [S] int32: cached
    rows of each, the new one included; at most `most`. `tables` [S, blocks] int32: the blocks of `page` slots that hold
    them."""

    kv_lens: Tensor
    tables: Tensor
    page: int
    most: int

    @classmethod
    def of_rows(cls, keys: int, page: int, device: torch.device) -> DecodeInputs:
        """One sequence whose rows lie in order."""
        blocks = torch.arange(-(-keys // page), dtype=torch.int32, device=device)
        return cls(torch.tensor([keys], dtype=torch.int32, device=device), blocks[None], page, keys)

    @classmethod
    def of(cls, spans: list[SequenceSpan], page: int, device: torch.device) -> DecodeInputs:
        """Those of a batch in which every sequence reads one token."""
        lens = [span.kv_len for span in spans]
        tables = block_tables([span.blocks(page) for span in spans])
        return cls(torch.tensor(lens, dtype=torch.int32, device=device), tables, page, max(lens))


@dataclass(slots=True)
class Batch:
    """The packed input of a forward pass: `ids`, `positions`, `slots` are [T]; `last` [S] indexes the
    rows whose logits are computed, one per sequence; `caches` are the layers of the cache that the pass writes.
    `lengths`: attention goes by these, and not by the spans'."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    spans: list[SequenceSpan]
    caches: frozenset[int]
    lengths: DecodeInputs | None = None
