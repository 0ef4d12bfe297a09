"""The blocks of the cache's pool: whose they are, how full, which were given back, and what they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.sessions.errors import SessionError
from lockstep.sessions.records import SequenceStep
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

#: Steps back from which blocks that are in no table any more are reported.
_LOOKED_BACK = 64
#: Blocks up to which those between are listed as well. A stranger's table may name block 2**31.
_LISTED = 1 << 16
#: Bytes of an element of the cache.
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Block:
    """One block: the sequences in whose tables it is, the rows that it holds for the first of them, and whether it was
    in a table before and is in none now."""

    number: int
    owners: tuple[int, ...] = ()
    rows: int = 0
    freed: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool after a step: its blocks up to the last one that was seen in use (of a pool larger than any, those in
    use alone), how many lie beyond, and the bytes of one block on one rank (None: the session does not state the
    cache's shape)."""

    blocks: tuple[Block, ...]
    beyond: int
    block_bytes: int | None


def pool_of(
    source: SessionSource, where: Where, sequences: Sequence[SequenceStep], total: int, block_size: int
) -> Pool:
    """The pool of `total` blocks as the tables of `sequences` have it after the step of `where`."""
    owners: dict[int, list[int]] = {}
    rows: dict[int, int] = {}
    for one in sequences:
        left = one.positions[-1] + 1 if len(one.positions) else 0
        for block in one.block_table:
            owners.setdefault(block, []).append(one.seq)
            rows.setdefault(block, max(0, min(block_size, left)))
            left -= block_size
    before = _seen_before(source, where) - owners.keys()
    used = sorted(before | owners.keys())
    seen = 1 + used[-1] if used else 0
    numbers = range(seen) if seen <= _LISTED else [number for number in used if number >= 0]
    blocks = tuple(
        Block(number, tuple(owners.get(number, ())), rows.get(number, 0), number in before)
        for number in numbers
    )
    return Pool(blocks, max(0, total - seen), _block_bytes(source, block_size))


def _seen_before(source: SessionSource, where: Where) -> set[int]:
    found: set[int] = set()
    first = source.session.steps(where.branch).start
    for step in range(max(first, where.step - _LOOKED_BACK), where.step):
        try:
            found.update(*(one.block_table for one in source.record(step, where.branch).sequences))
        except SessionError:
            continue  # the pane of that step states what is damaged
    return found


def _block_bytes(source: SessionSource, block_size: int) -> int | None:
    """Keys and values of a block in all layers on one rank."""
    model, size = source.meta.model, _SIZES.get(source.meta.config.dtype)
    if not (size and model.num_layers and model.num_kv_heads and model.head_dim):
        return None
    # Of their widths a session states nothing: latents, and layers of several sizes.
    if any(source.session.has_tap(f"layers.0.attn.{one}") for one in ("latent_cache", "v_norm")):
        return None
    heads = max(1, model.num_kv_heads // source.session.ranks)
    return 2 * model.num_layers * heads * model.head_dim * size * block_size
