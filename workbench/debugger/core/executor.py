"""The executor: brings the engine to where it is needed, and runs passes there.

The engine's cache holds the passes of one history. To run a pass of another (an earlier step, another
branch) it is rewound to what the two have in common, and the rest is run again with the recorded tokens;
every pass that is run again is held against the recorded checksums. This happens only when something must
be computed: moving about in what was recorded never touches the engine.

     asked for: step 5 of branch 2      owners of its passes   0 0 0 2 2
     in the cache: branch 0, 7 passes   owners                 0 0 0 0 0 0 0
                                        rewind to               ^ 3, run 3 and 4 again, now at 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from lockstep.engine.errors import RequestError
from lockstep.engine.taps.breaks import PauseSpec
from lockstep.sessions.records import StepRecord, TensorRecord
from lockstep.workbench.debugger.core.fork_event import SamplingChange
from lockstep.workbench.debugger.core.timeline import Timeline, TimelineBranch
from lockstep.workbench.debugger.errors import ReplayMismatch
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.patches import Patch
from lockstep.workbench.inferior.state import Paused
from lockstep.workbench.models.capture import Capture

Poll = Callable[[], None]

#: Owner of a pass that was corrected: what it leaves in the cache is no branch's.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Flight:
    """A new pass that stands still in its middle."""

    branch: int
    step: int
    stopped: Paused


@dataclass(frozen=True, slots=True)
class Trace:
    """What one pass in the cache did to each sequence: (lowest position written, rows cached after it)."""

    owner: int
    rows: Mapping[int, tuple[int, int]]


class Executor:
    """The engine of a live session."""

    def __init__(self, inferior: Inferior, timeline: Timeline, poll: Poll = lambda: None) -> None:
        self.inferior, self.timeline, self.poll = inferior, timeline, poll
        timeline.unrecorded = inferior.recorder.waiting
        self.between: Poll = lambda: None  # called between passes; may raise to break off
        self.flight: Flight | None = None
        self._cache: list[Trace] = []
        self._read: list[TensorRecord] = []  # looked at while in flight: recorded with the pass

    # --- new passes ----------------------------------------------------------------------------------

    def start(
        self, branch: int, pause: PauseSpec | None, forced: Mapping[int, int] | None = None
    ) -> Flight | StepRecord:
        """Begin the branch's next pass and run until `pause` or its end."""
        assert self.flight is None, "a pass is in flight: land it first"
        step = self.timeline.line(branch).steps
        self.reach(branch, step)
        self._configure(self.timeline.line(branch), step)
        return self._fly(branch, step, lambda: self.inferior.begin_step(forced, pause, self.poll))

    def stand_under(self, branch: int, step: int) -> None:
        """Have the rules, sampling and patches of `branch` in force as in `step`, and the cache as before it."""
        self.reach(branch, step)
        self._configure(self.timeline.owner(branch, step), step)

    def go_on(self, pause: PauseSpec) -> Flight | StepRecord:
        """Go on in the pass in flight."""
        assert self.flight is not None, "no pass is in flight"
        flight = self.flight
        return self._fly(flight.branch, flight.step, lambda: self.inferior.resume(pause, self.poll))

    def land(self) -> None:
        """Finish the pass in flight, if there is one, so that it is recorded."""
        if self.flight is not None:
            self.inferior.client.clear_interrupt()
            flight = self.flight
            outcome = self._fly(
                flight.branch, flight.step, lambda: self.inferior.resume(PauseSpec(), lambda: None)
            )
            assert isinstance(outcome, StepRecord), "a pass without a pause specification cannot pause"

    def over_within(self, branch: int, seconds: float) -> bool:
        """Whether the branch's next pass will be over so soon, as far as its last one shows (a prefill is the
        longest of them)."""
        steps = self.timeline.line(branch).steps
        return steps > 0 and self.timeline.record(branch, steps - 1).wall_seconds < seconds

    def read(self, place: int, seq: int) -> dict[int, NDArray[Any]] | None:
        """Each rank's tensor at a tap that has passed in the pass in flight; None: it was not kept."""
        assert self.flight is not None
        try:
            parts = self.inferior.read(place, seq)
        except RequestError:
            return None
        tap = self.timeline.places.names[place]
        read = [TensorRecord(tap, rank, seq, one.array, one.dtype) for rank, one in enumerate(parts)]
        self._read += read
        self.inferior.recorder.write_tensors(self.flight.branch, self.flight.step, read)
        return {rank: one.numbers for rank, one in enumerate(parts)}

    def _fly(self, branch: int, step: int, go: Callable[[], StepRecord | Paused]) -> Flight | StepRecord:
        self.inferior.recorder.branch = branch
        self.inferior.recorder.extra_tensors = self._read
        outcome = go()
        if isinstance(outcome, Paused):
            self.flight = Flight(branch, step, outcome)
            return self.flight
        self.flight = None
        self._read = []
        self._computed(branch, outcome)
        self.timeline.note(branch, outcome)
        return outcome

    # --- passes run again ----------------------------------------------------------------------------

    def reach(self, branch: int, step: int) -> None:
        """Bring the cache to hold exactly the steps of `branch` before `step`.

        ReplayMismatch when a pass that is run again does not give what was recorded.
        """
        self.land()
        wanted = [self.timeline.owner(branch, k).id for k in range(step)]
        common = 0
        while common < min(len(wanted), len(self._cache)) and wanted[common] == self._cache[common].owner:
            common += 1
        if not self._truncatable(common):
            common = 0
        if common < len(self._cache):
            self.inferior.rewind(common)
            del self._cache[common:]
        for k in range(common, step):
            self.between()
            self.rerun(branch, k)

    def rerun(self, branch: int, step: int) -> StepRecord:
        """Run the recorded `step` again (the cache stands before it) and verify it; nothing is recorded."""
        expected = self.timeline.record(branch, step)
        again = self._again(branch, step)
        self._computed(self.timeline.owner(branch, step).id, again)
        different = self.timeline.first_difference(expected, again)
        if different is not None:
            place, ranks = different
            raise ReplayMismatch(branch, step, place, self.timeline.places.names[place], ranks)
        return again

    def rerun_corrected(self, branch: int, step: int, corrections: Iterable[Patch]) -> StepRecord:
        """Run the recorded `step` again, each tap overwritten once it was recorded; nothing is recorded in the
        session, and there is nothing to verify."""
        again = self._again(branch, step, corrections)
        self._computed(NOBODY, again)
        return again

    def recapture(self, branch: int, step: int, places: Sequence[int], *, keep: bool = True) -> StepRecord:
        """Run a recorded step again and bring home the whole tensors of some taps; with `keep` they are
        added to the session."""
        names = tuple(self.timeline.places.names[place] for place in places)
        self.reach(branch, step)
        with self.capturing(replace(self.inferior.capture, full=names)):
            again = self.rerun(branch, step)
        if keep:
            found = [tensor for tensor in again.tensors if tensor.tap in names and not tensor.slice]
            self.inferior.recorder.write_tensors(self.timeline.owner(branch, step).id, step, found)
        return again

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """Another capture policy for a while."""
        usual = self.inferior.capture
        self.inferior.watch(capture)
        try:
            yield
        finally:
            if self.inferior.client.alive:
                self.inferior.watch(usual)

    def reset(self) -> None:
        """Break the pass in flight off and start from the prompt: nothing is known of where the engine stands."""
        if self.flight is not None:
            self.inferior.abandon()
        self.forget()
        self.forget_cache()

    def forget(self) -> None:
        """The engine is a new one: its cache is empty."""
        self._cache, self.flight, self._read = [], None, []

    def forget_cache(self) -> None:
        """The cache is not to be relied on: the next pass starts from the prompt."""
        self.inferior.rewind(0)
        self._cache.clear()

    # --- inside --------------------------------------------------------------------------------------

    def _again(self, branch: int, step: int, corrections: Iterable[Patch] = ()) -> StepRecord:
        expected = self.timeline.record(branch, step)
        self._configure(self.timeline.owner(branch, step), step, corrections)
        self.inferior.recorder.branch = None
        forced = {
            reported.seq: reported.emitted for reported in expected.sequences if reported.emitted is not None
        }
        return self.inferior.step(forced)

    def _computed(self, owner: int, record: StepRecord) -> None:
        cached = {seq: state.lengths[-1][2] for seq, state in self.inferior.sequences.items()}
        rows = {
            reported.seq: (min(reported.positions), cached[reported.seq]) for reported in record.sequences
        }
        self._cache.append(Trace(owner, rows))

    def _truncatable(self, keep: int) -> bool:
        """Whether the first `keep` passes' rows are still as those passes left them (a wrong position
        overwrites older rows)."""
        if keep == 0:
            return True
        return all(
            low >= self._cache[keep - 1].rows[seq][1]
            for trace in self._cache[keep:]
            for seq, (low, _) in trace.rows.items()
        )

    def _configure(self, line: TimelineBranch, step: int, corrections: Iterable[Patch] = ()) -> None:
        """Rules, sampling and patches as `line` has them in `step`, and `corrections` beside them."""
        inferior = self.inferior
        if inferior.rules != line.rules:
            if inferior.step_number == 0:
                inferior.set_rules(line.rules)
            else:
                inferior.keep_cache(line.rules)
        for seq, state in inferior.sequences.items():
            wanted = line.sampling.get(seq, SamplingChange()).of(inferior.first_sampling[seq])
            if state.sampling != wanted:
                inferior.set_sampling(seq, wanted)
        patches = [patch for patch in line.patches if patch.step == step]
        if patches or corrections or inferior.patched:
            inferior.set_patches(chain(patches, corrections))
