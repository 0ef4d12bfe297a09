"""The timeline: every branch and every pass of it, from the session and, for the newest, from memory.

Everything that looks backwards asks here first. What a running engine has just done is noted in memory as
well as in the session, so that looking at the present costs no disk, and a full disk costs no history.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions import Session, SessionError
from lockstep.sessions.errors import broken
from lockstep.sessions.history import owner_of
from lockstep.sessions.records import STATISTICS, SequenceStep, StepRecord
from lockstep.workbench.debugger.answers import Position
from lockstep.workbench.debugger.core.fork_event import ForkEvent, SamplingChange
from lockstep.workbench.debugger.errors import DebuggerError
from lockstep.workbench.debugger.stops.locations import Places
from lockstep.workbench.debugger.stops.predicates import Value, cached
from lockstep.workbench.inferior.patches import Patch
from lockstep.workbench.views.sentinels import SentinelFinding, desync
from lockstep.workbench.views.sequences import Sequences, fed

#: Passes kept in memory beside the session; those that are not recorded yet wait in the recorder's backlog.
_REMEMBERED = 256


@dataclass(slots=True)
class TimelineBranch:
    """One branch: how its passes are run, and how many there are. It shares the passes before `fork_step` with
    its parent. `sampling[seq]` are changes of how tokens are chosen."""

    id: int
    name: str
    parent: int | None
    fork_step: int
    rules: dict[str, str]
    patches: list[Patch] = field(default_factory=list)
    sampling: dict[int, SamplingChange] = field(default_factory=dict)
    steps: int = 0  # the branch goes on with this step
    forked_at: int | None = (
        None  # the step at which the user was; more than fork_step when a prefix ran again
    )


class Timeline:
    """The branches of one session and what every pass left behind."""

    def __init__(self, session: Session | None, places: Places, ranks: int, rules: Mapping[str, str]) -> None:
        self.session, self.places, self.ranks = session, places, ranks
        self.lines: dict[int, TimelineBranch] = {0: TimelineBranch(0, "main", None, 0, dict(rules))}
        self._memory: OrderedDict[tuple[int, int], StepRecord] = OrderedDict()
        self.unrecorded: Callable[[int, int], StepRecord | None] = lambda branch, step: None
        if session is not None:
            self._load(session)

    def _load(self, session: Session) -> None:
        """Take over the branches of a session that was recorded before."""
        for branch in session.branches():
            line = TimelineBranch(branch.id, branch.name, branch.parent, branch.fork_step, dict(branch.rules))
            line.steps = session.steps(branch.id).stop
            self.lines[branch.id] = line
        for event in session.events(kind="fork"):
            if event.branch not in self.lines:
                raise broken(f"event {event.id}", f"it forks branch {event.branch}, which is not there")
            line, fork = self.lines[event.branch], ForkEvent.read(event.data, f"event {event.id}")
            line.patches, line.sampling, line.forked_at = fork.read_patches(), dict(fork.sampling), fork.at

    # --- branches ------------------------------------------------------------------------------------

    def line(self, branch: int) -> TimelineBranch:
        """A branch. DebuggerError for one that is not there."""
        if branch not in self.lines:
            raise DebuggerError(f"there is no branch {branch}: `branches` lists {len(self.lines)}")
        return self.lines[branch]

    def named(self, name: str) -> TimelineBranch:
        """The branch of that number or name."""
        if name.isdigit():
            return self.line(int(name))
        for line in self.lines.values():
            if line.name == name:
                return line
        raise DebuggerError(f"there is no branch {name!r}: `branches` lists {len(self.lines)}")

    def owner(self, branch: int, step: int) -> TimelineBranch:
        """The branch that ran this step of `branch`, or would run it."""
        self.line(branch)  # DebuggerError for one that is not there
        return owner_of(self.lines, branch, step)

    def last(self, branch: int) -> int:
        """The last step that was run, -1 for none."""
        return self.line(branch).steps - 1

    # --- passes --------------------------------------------------------------------------------------

    def note(self, branch: int, record: StepRecord) -> None:
        """A new pass, the branch's next."""
        line = self.line(branch)
        assert record.step == line.steps, (
            f"step {record.step} noted, branch {branch} goes on with {line.steps}"
        )
        line.steps += 1
        self._remember((branch, record.step), replace(record, tensors=()))

    def record(self, branch: int, step: int) -> StepRecord:
        """What happened at a step, its statistics and checksums included."""
        key = (self.owner(branch, step).id, step)
        if key not in self._memory:
            waiting = self.unrecorded(*key)
            if waiting is not None:
                return waiting
            if step < 0 or step > self.last(branch) or self.session is None:
                raise DebuggerError(f"step {step} of branch {branch} was not run yet")
            self.session.refresh()
            found = self.session.step(step, key[0])
            stats, sums = self.session.stats(step, key[0]), self.session.checksums(step, key[0])
            self._remember(key, replace(found, stats=stats, checksums=sums))
        self._memory.move_to_end(key)
        return self._memory[key]

    def stats(self, branch: int, step: int) -> NDArray[np.float32] | None:
        """Every tap's statistics at a step, [taps, ranks, 8]."""
        return self.record(branch, step).stats

    def names(self, branch: int, step: int, seq: int | None = None) -> dict[str, Value] | None:
        """What conditions on a sequence (None: the first that was fed) may speak of, for all taps and ranks of a step
        at once: arrays [taps, ranks] or [ranks], and numbers. None where statistics were not recorded."""
        record = self.record(branch, step)
        if record.stats is None:
            return None
        reported = next((one for one in record.sequences if fed(one) and seq in (None, one.seq)), None)
        names: dict[str, Value] = {
            name: record.stats[:, :, i].astype(np.float64) for i, name in enumerate(STATISTICS)
        }
        return names | {
            "step": float(step),
            "rank": np.arange(self.ranks, dtype=np.float64),
            "position": float(reported.positions[-1]) if reported is not None else math.nan,
            "token": float(reported.ids[-1]) if reported is not None else math.nan,
            "kv_len": cached(
                reported.kv_lens if reported is not None else (), self.places.layers, self.ranks
            ),
        }

    def tokens(self, branch: int, seq: int = 0, stop: int | None = None) -> list[int]:
        """The tokens that the steps before `stop` (default: all) have emitted."""
        count = self.line(branch).steps if stop is None else stop
        found = (self.sequence(branch, step, seq) for step in range(count))
        return [
            reported.emitted for reported in found if reported is not None and reported.emitted is not None
        ]

    def sequence(self, branch: int, step: int, seq: int = 0) -> SequenceStep | None:
        """What a step did to one sequence; None when it took no part."""
        return next((one for one in self.record(branch, step).sequences if one.seq == seq), None)

    def batch(self, branch: int) -> Sequences:
        """The sequences of a branch: those that the run began with, and those that came later."""
        if self.session is None:
            return Sequences()
        self.session.refresh()
        return Sequences.of(self.session.meta.sequences, self.session.sequences(branch))

    def prompt(self, seq: int = 0) -> list[int]:
        """The ids that a sequence began with."""
        known = self.session.meta.sequences.get(seq) if self.session is not None else None
        if known is None or not known.prompt_ids:
            raise DebuggerError("the session does not record what its prompt was")
        return list(known.prompt_ids)

    def backwards(self, at: Position) -> Iterator[tuple[int, int]]:
        """(step, places to look at) of everything before a position, newest step first."""
        if at.step >= 0:
            yield at.step, len(self.places) if at.place is None else at.place
        for step in range(at.step - 1, -1, -1):
            yield step, len(self.places)

    def patches(self, branch: int, step: int) -> list[Patch]:
        """The patches in force in one step."""
        return [patch for patch in self.owner(branch, step).patches if patch.step == step]

    def first_difference(self, expected: StepRecord, got: StepRecord) -> tuple[int, tuple[int, ...]] | None:
        """The first place, and the ranks, at which two runs of one pass differ; None where they are equal or
        one has no checksums."""
        if expected.checksums is None or got.checksums is None:
            return None
        different = expected.checksums != got.checksums
        if not different.any():
            return None
        place = int(np.flatnonzero(different.any(axis=1))[0])
        return place, tuple(int(rank) for rank in np.flatnonzero(different[place]))

    def desync(self, branch: int, step: int) -> SentinelFinding | None:
        """The first tap whose replicas differ between ranks."""
        return None if self.session is None else desync(self.session, self.record(branch, step).checksums)

    def _remember(self, key: tuple[int, int], record: StepRecord) -> None:
        self._memory[key] = record
        while len(self._memory) > _REMEMBERED:
            self._memory.popitem(last=False)


def open_timeline(session: Session) -> Timeline:
    """The timeline of a session alone."""
    names = [tap.name for tap in session.taps]
    if not names:
        raise SessionError(f"{session.path.name} has no taps: there is nothing to step through.")
    return Timeline(session, Places(names, session.meta.absent), session.ranks, session.meta.rules)
