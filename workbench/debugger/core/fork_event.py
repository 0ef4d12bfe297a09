"""What the journal states of a fork beside what the branch itself does: patches, sampling, where the user was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.errors import broken
from lockstep.workbench.inferior.patches import Patch


class SamplingChange(Struct, frozen=True, omit_defaults=True):
    """What a branch changes of how a sequence's tokens are chosen; None: as the run began."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def of(self, first: Sampling) -> Sampling:
        """The sampling on the branch. RequestError for a value out of range."""
        changed = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return replace(first, **changed)


class ForkEvent(Struct, frozen=True):
    """The data of an event "fork". `at` is the step at which the user was; patches as `Patch.to_json` has them."""

    at: int | None = None
    patches: Sequence[object] = ()
    sampling: Mapping[int, SamplingChange] = {}

    @classmethod
    def read(cls, data: object, where: str) -> ForkEvent:
        """The fork that `to_json` wrote; SessionError names `where` for anything else."""
        try:
            return msgspec.convert(data if isinstance(data, dict) else {}, cls, str_keys=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise broken(where, f"a fork is not described like this: {error}") from error

    def to_json(self) -> object:
        """For the journal."""
        return msgspec.to_builtins(self, str_keys=True)

    def read_patches(self) -> list[Patch]:
        """The patches in force on the branch. RequestError for one that is malformed."""
        return [Patch.from_json(one) for one in self.patches]
