"""One branch of a session as diagnosis reads it: whole tensors and ranks' parts, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import layouts
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.layouts import Layout
from lockstep.sessions.records import SequenceStep
from lockstep.sessions.session import Session

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recording:
    """A session seen along one branch."""

    session: Session
    branch: int = 0

    @property
    def ranks(self) -> int:
        return self.session.ranks

    @property
    def dtype(self) -> str:
        """The dtype that the model ran in, by torch's name."""
        return self.session.meta.config.dtype or "float32"

    @property
    def steps(self) -> range:
        return self.session.steps(self.branch)

    def has_tap(self, tap: str) -> bool:
        """Whether the session knows a tap of that name."""
        return self.session.has_tap(tap)

    def layout(self, tap: str) -> Layout:
        """How the tap is spread over the ranks."""
        return layouts.parse(self.session.tap(tap).layout)

    def sequences(self, step: int) -> dict[int, SequenceStep]:
        """What the step did to each sequence, by its number."""
        return {sequence.seq: sequence for sequence in self.session.step(step, self.branch).sequences}

    def rebuilt(self, tap: str, step: int, seq: int) -> layouts.Rebuilt:
        """The tensor that one rank alone would have had. LayoutError where the parts do not fit together."""
        return self.session.rebuilt(tap, step=step, seq=seq, branch=self.branch, slice="")

    def whole_or_none(self, tap: str, step: int, seq: int) -> Array | None:
        """That tensor in float64; None where it was not captured or its parts do not fit together."""
        if not self.has_tap(tap) or step not in self.steps:
            return None
        try:
            array = self.rebuilt(tap, step, seq).array
        except LayoutError:
            return None
        return None if array is None else array.astype(np.float64)

    def shard(self, tap: str, rank: int, step: int, seq: int) -> Array | None:
        """What one rank held, in float64; None where it was not captured."""
        if not self.has_tap(tap):
            return None
        array: NDArray[Any] | None = self.session.tensor(
            tap, step=step, rank=rank, seq=seq, branch=self.branch, slice=""
        )
        return None if array is None else array.astype(np.float64)


def unpadded(logits: Array, width: int) -> Array:
    """Logits [..., columns] without those behind the first `width` where these are zeros, which rows give that only
    fill a head up to a round size or to that of the other ranks, or hidden by infinity. Others as they are."""
    surplus = logits[..., width:]
    return logits[..., :width] if ((surplus == 0) | (surplus == -np.inf)).all() else logits
