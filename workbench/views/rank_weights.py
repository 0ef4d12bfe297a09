"""What the ranks hold of the weights, as `info weights` leaves it in a session, by branch; and shapes and shares in
words (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from lockstep.engine.parallel.shards import Shard
from lockstep.sessions.meta import SessionMeta, WeightShare
from lockstep.sessions.records import STATISTICS
from lockstep.sessions.text import clean

#: Columns of a table of shares; the last shows how a share compares with the checkpoint.
WEIGHT_COLUMNS = ("name", "rank", "shape", "dtype", *STATISTICS, "checksum", "checkpoint")

#: The most shares that are believed of a foreign session.
_MOST = 200_000


def rank_shares(meta: SessionMeta, branch: int) -> dict[str, dict[int, WeightShare]]:
    """By parameter and rank; empty where nobody has looked on this branch."""
    found: dict[str, dict[int, WeightShare]] = {}
    for share in meta.weights.get(branch, ())[:_MOST]:
        safe = replace(
            share,
            name=clean(share.name, limit=120),
            dtype=clean(share.dtype, limit=20),
            checksum=clean(share.checksum, limit=16),
            checkpoint=clean(share.checkpoint, limit=12),
        )
        found.setdefault(safe.name, {})[safe.rank] = safe
    return found


def shape_text(shape: Sequence[int]) -> str:
    """ "2003×256"."""
    return clean("×".join(map(str, shape)), limit=40)


def share_text(shard: Shard) -> str:
    """A rank's part in words."""
    return (
        "whole"
        if shard.dim is None
        else f"{'rows' if shard.dim == 0 else 'cols'} {shard.span.start}:{shard.span.stop}"
    )
