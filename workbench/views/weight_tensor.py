"""One parameter as a tensor: the checkpoint's, what a rank is to hold or does hold of it, and the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.errors import EngineError
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.shards import Shard
from lockstep.sessions.text import clean
from lockstep.workbench.views.axes import by_head, parameter_axes
from lockstep.workbench.views.difference import less
from lockstep.workbench.views.rank_weights import share_text
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.tensor import DIFFERENCE, Tensor
from lockstep.workbench.views.where import Where

#: The view of a parameter that is no rank's.
CHECKPOINT = "checkpoint"

#: By rank, the share of a parameter that it holds.
RankArrays = Mapping[int, NDArray[np.float32]]


def weight_tensor(source: SessionSource, where: Where, name: str, view: str, held: RankArrays) -> Tensor:
    """A view of the parameter: "checkpoint", "rank N", or "difference N" (the rank's less the checkpoint's share).

    `held` are the shares as the running ranks have them; without them "rank N" is what the plan cuts for it.
    """
    kind, _, number = view.partition(" ")
    empty = Tensor(clean(name, limit=120), where.step, view)
    try:
        whole, cuts, sampled, dtype, head_dim = _checkpoint(source, name)
    except KeyError as error:
        return replace(empty, note=clean(str(error.args[0]), limit=300))
    except EngineError as error:
        return replace(empty, note=clean(str(error), limit=300))
    if kind == CHECKPOINT:
        axes = list(parameter_axes(name, whole.shape))
        if cuts and not sampled and (dim := cuts[0].dim) is not None:
            axes[dim] = replace(axes[dim], ranks=_ranks(cuts, len(axes[dim])))
        reported = by_head(name, axes, head_dim)
        return replace(empty, array=np.atleast_1d(whole), axes=reported, dtype=dtype, slice=sampled)
    rank = int(number or 0)
    cut = cuts[rank] if rank < len(cuts) and not sampled else None
    expected, own = None if cut is None else _cut(whole, cut), held.get(rank)
    found = replace(empty, slice=share_text(cut) if cut is not None else sampled)
    array = own
    if own is None:
        array = expected if kind == "rank" else None
        note = "as the plan cuts it from the checkpoint: the rank itself is not at hand"
        found = replace(found, dtype=dtype, note=note if kind == "rank" else "the rank is not at hand")
    elif kind == DIFFERENCE:
        same = expected is not None and expected.shape == own.shape
        array = less(own, expected, name) if same and expected is not None else None
        words = f"the rank holds {own.shape}, the checkpoint's share is not of that shape"
        found = replace(found, note="" if same else words)
    if array is None:
        return found
    axes = list(parameter_axes(name, array.shape))
    if cut is not None and cut.dim is not None and cut.span.size == len(axes[cut.dim]):
        axes[cut.dim] = replace(axes[cut.dim], numbers=range(cut.span.start, cut.span.stop))
    return replace(found, array=np.atleast_1d(array), axes=by_head(name, axes, head_dim))


def _ranks(cuts: tuple[Shard, ...], size: int) -> list[int]:
    """The first rank that holds each element of the dimension that is cut."""
    found = [0] * size
    for rank in reversed(range(len(cuts))):
        span = cuts[rank].span
        found[span.start : span.stop] = [rank] * span.size
    return found


def _checkpoint(
    source: SessionSource, name: str
) -> tuple[NDArray[np.float32], tuple[Shard, ...], str, str, int]:
    """The values, how the ranks share them, which rows were read where not all were, the file's dtype, and how wide a
    head is."""
    # Imported here: the first paint waits for no reader of checkpoints.
    from lockstep.engine.checkpoint.resolve import open_checkpoint
    from lockstep.workbench.views.weight_values import read_values

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
    return values, cuts, sampled, info.encoding or info.dtype, model.head_dim


def _cut(values: NDArray[np.float32], shard: Shard) -> NDArray[np.float32]:
    if shard.dim is None:
        return values
    return values.take(range(shard.span.start, shard.span.stop), axis=shard.dim)
