"""Patches: part of a tensor overwritten at a tap, in one step, on one branch.

The user speaks of the global tensor, the one that a single rank would have had; a rank is given what to
overwrite in its own part. `cut` does the translation from the tap's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.engine.errors import RequestError
from lockstep.engine.ranks.messages import StagePatch
from lockstep.engine.ranks.wire import WireArray
from lockstep.sessions.layouts import parse, shard_groups

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


@dataclass(frozen=True, slots=True)
class Patch:
    """Overwrite `parts[rank] = (bounds, values)` of the tensor at tap `place`, at `step` of sequence `seq`.

    `after`: once it was recorded. The user's own patches never are, so the journal does not speak of it.
    """

    place: int
    seq: int
    step: int
    parts: Mapping[int, tuple[Bounds, NDArray[np.float32]]]
    after: bool = False

    def shares(self) -> dict[int, StagePatch]:
        """What each of the ranks in `parts` is given."""
        return {
            rank: StagePatch(
                self.place, self.seq, self.step, bounds, WireArray.of(values, "float32"), self.after
            )
            for rank, (bounds, values) in self.parts.items()
        }

    def to_json(self) -> object:
        """For the session's journal."""
        parts = {
            rank: _RecordedPart(bounds, values.shape, values.astype("<f4").tobytes().hex())
            for rank, (bounds, values) in self.parts.items()
        }
        return msgspec.to_builtins(_RecordedPatch(self.place, self.seq, self.step, parts), str_keys=True)

    @classmethod
    def from_json(cls, data: object) -> Patch:
        """The patch that `to_json` wrote. RequestError for anything else."""
        try:
            recorded = msgspec.convert(data, _RecordedPatch, str_keys=True)
            parts = {
                rank: (part.bounds, np.frombuffer(bytes.fromhex(part.hex), "<f4").reshape(part.shape))
                for rank, part in recorded.parts.items()
            }
        except ValueError as error:  # msgspec's among them
            raise RequestError(f"the session holds a malformed patch: {error}") from error
        return cls(recorded.place, recorded.seq, recorded.step, parts)


class _RecordedPart(msgspec.Struct, frozen=True):
    """One rank's part as JSON: its values as the bytes of little-endian float32."""

    bounds: Bounds
    shape: tuple[int, ...]
    hex: str


class _RecordedPatch(msgspec.Struct, frozen=True):
    """A `Patch` as JSON."""

    place: int
    seq: int
    step: int
    parts: dict[int, _RecordedPart]


def cut(
    layout: str, shapes: Sequence[tuple[int, ...]], bounds: Bounds, values: NDArray[np.float32]
) -> dict[int, tuple[Bounds, NDArray[np.float32]]]:
    """Each rank's share of a patch of the global tensor.

    `shapes[rank]` are the ranks' own shapes, `bounds` the patched part in global coordinates, `values`
    broadcast to it. A sum takes the values on rank 0 and zeros on the others, which adds up to them; of experts that
    are divided among groups every group takes them, and reads those of its own.
    """
    target = tuple(stop - start for start, stop in bounds)
    whole = np.broadcast_to(np.asarray(values, np.float32), target)
    kind = parse(layout)
    if kind.kind == "partial":
        zeros = np.zeros(target, np.float32)
        return {rank: (bounds, whole if rank == 0 else zeros) for rank in range(len(shapes))}
    if kind.kind == "replicate":
        return dict.fromkeys(range(len(shapes)), (bounds, whole))
    found, offset = {}, 0
    for number, group in enumerate(groups := shard_groups(kind, len(shapes))):
        offset = 0 if number % (len(groups) // kind.groups) == 0 else offset
        length = shapes[group.start][kind.dim]
        start, stop = (min(max(at - offset, 0), length) for at in bounds[kind.dim])
        if start < stop:
            own = (*bounds[: kind.dim], (start, stop), *bounds[kind.dim + 1 :])
            skipped = start + offset - bounds[kind.dim][0]
            picked = [slice(None)] * whole.ndim
            picked[kind.dim] = slice(skipped, skipped + stop - start)
            for rank in group:
                found[rank] = (own, whole[tuple(picked)])
        offset += length
    return found
