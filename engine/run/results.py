"""The result of a forward pass for each sequence. Torch-free: ranks send these values to the host as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What one row of logits gives: the token chosen, the best `top_ids` with their raw logits,
    the natural-log normaliser and the entropy in nats of the full distribution. NaN where the row holds NaN."""

    token: int
    top_ids: list[int]
    top_logits: list[float]
    logsumexp: float
    entropy: float


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a pass did to one sequence.

    `kv_len` counts the cache rows that its blocks are for, `expected_kv_len` the tokens that were run so far,
    `held` [layers] shows how far each layer's cache reaches, by what was written to it: all are equal unless something
    is wrong with positions or with the cache. `emitted` is None inside a chunked prefill.
    """

    seq: int
    ids: list[int]
    positions: list[int]
    kv_len: int
    expected_kv_len: int
    held: list[int]
    block_table: list[int]
    emitted: int | None
    forced: bool
    choice: TokenChoice | None  # rank 0 only
