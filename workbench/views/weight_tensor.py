"""One parameter as a tensor: the checkpoint's, what a rank is to hold or does hold of it, and the difference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.resolve import open_checkpoint
from engine.errors import EngineError
from engine.parallel import shards
from engine.parallel.shards import Shard
from sessions.text import clean
from workbench.views.source import SessionSource
from workbench.views.tensor import Tensor
from workbench.views.weights import read_values, share_text
from workbench.views.where import Where

#: By rank, the share of a parameter that it holds.
RankArrays = Mapping[int, NDArray[np.float32]]


def weight_tensor(source: SessionSource, where: Where, name: str, view: str, held: RankArrays) -> Tensor:
    """A view of the parameter: "checkpoint", "rank N", or "difference N" (the rank's less the checkpoint's share).

    `held` are the shares as the running ranks have them; without them "rank N" is what the plan cuts for it.
    """
    ranks = range(source.session.ranks)
    views = ["checkpoint", *(f"rank {rank}" for rank in ranks), *(f"difference {rank}" for rank in held)]
    view = view if view in views else "checkpoint"
    try:
        whole, cuts, sampled, dtype = _checkpoint(source, name)
    except (EngineError, KeyError) as error:
        return Tensor(
            clean(name, limit=120), view, tuple(views), None, "", "", "", clean(str(error), limit=300)
        )
    kind, _, number = view.partition(" ")
    rank = int(number or 0)
    part, note = "", ""
    array: NDArray[np.float32] | None = whole
    if kind != "checkpoint":
        expected = _cut(whole, cuts[rank]) if cuts and not sampled else None
        own = held.get(rank)
        array = expected if own is None else own
        part = share_text(cuts[rank]) if cuts else ""
        dtype = dtype if own is None else ""
        if own is None:
            note = "as the plan cuts it from the checkpoint: the rank itself is not at hand"
        elif kind == "difference":
            same = expected is not None and expected.shape == own.shape
            array = own - expected if same and expected is not None else None
            note = "" if same else f"the rank holds {own.shape}, the checkpoint's share is not of that shape"
    return Tensor(clean(name, limit=120), view, tuple(views), array, dtype, part or sampled, "", note)


def _checkpoint(source: SessionSource, name: str) -> tuple[NDArray[np.float32], tuple[Shard, ...], str, str]:
    """The values, how the ranks share them, which rows were read where not all were, and the file's dtype."""
    path = source.model_path
    if path is None:
        raise KeyError("the checkpoint of this session is not on this machine")
    model, checkpoint = open_checkpoint(path)
    with checkpoint:
        info = checkpoint.info(name)
        values, sampled = read_values(checkpoint, name)
    try:
        cuts = tuple(shards.plan(name, model, source.session.ranks, r) for r in range(source.session.ranks))
    except KeyError:  # no parameter of the model
        cuts = ()
    return values, cuts, sampled, info.encoding or info.dtype


def _cut(values: NDArray[np.float32], shard: Shard) -> NDArray[np.float32]:
    if shard.dim is None:
        return values
    return values.take(range(shard.span.start, shard.span.stop), axis=shard.dim)
