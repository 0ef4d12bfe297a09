"""The parameters of a checkpoint, and what the ranks hold of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.engine.errors import CheckpointError, EngineError
from lockstep.sessions.meta import WeightShare
from lockstep.sessions.text import clean
from lockstep.workbench.views.rank_weights import rank_shares, shape_text, share_text
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its global shape, which part each rank is to hold ("rows 0:128", "whole"), and what it does
    hold, as far as anybody has looked."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    held: Mapping[int, WeightShare] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether a rank holds something else than the checkpoint has, or nothing."""
        return bool(self.held) and sum(share.equal for share in self.held.values()) < max(
            len(self.parts), len(self.held)
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters, by the checkpoint or else by what the ranks held; `problem` states why the checkpoint cannot be
    read. `compared`: what the ranks hold is known."""

    parameters: tuple[Parameter, ...]
    compared: bool = False
    problem: str = ""


def weights(source: SessionSource, where: Where) -> Weights:
    """The parameters of the checkpoint that the session was made from, and what the ranks hold of them on this
    branch. Without the checkpoint: what was kept of the ranks."""
    known = rank_shares(source.meta, where.branch)
    try:
        listed, problem = _surveyed(source), ""
    except EngineError as error:
        listed, problem = [], clean(str(error), limit=400)
    named = {parameter.name for parameter in listed}
    found = [replace(parameter, held=known.get(parameter.name, {})) for parameter in listed]
    for name, shares in known.items():
        if name not in named:  # the checkpoint is gone, or it holds no such tensor
            parts = tuple(shape_text(share.shape) for share in shares.values())
            found.append(Parameter(name, (), "" if problem else "-", parts, shares))
    return Weights(tuple(found), bool(known), problem)


def _surveyed(source: SessionSource) -> list[Parameter]:
    # Imported here: the first paint waits for no reader of checkpoints.
    from lockstep.engine.checkpoint.resolve import open_checkpoint
    from lockstep.engine.checkpoint.survey import survey

    path = source.model_path
    if path is None:
        raise CheckpointError("The checkpoint of this session is not on this machine.")
    model, checkpoint = open_checkpoint(path)
    with checkpoint:
        return [
            Parameter(
                clean(item.name, limit=120),
                item.info.shape,
                item.info.encoding or item.info.dtype,
                tuple(map(share_text, item.shards)),
            )
            for item in survey(checkpoint, model, tp=source.session.ranks, statistics=False)
        ]
