"""The inferior: a model under way. Everything that runs a model goes through here and is recorded.

It drives the engine one forward pass at a time, keeps what is needed to go back (tokens, seed, rules),
and writes every pass to a session when it has one. Torch-free, like the host that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.errors import RankError, RequestError
from lockstep.engine.faults.catalogue import check_faults
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.messages import (
    AbandonStep,
    AddSequence,
    DraftTokens,
    RankCommand,
    ReadTap,
    RebindRules,
    RemoveSequence,
    ReplaceRules,
    ResumeStep,
    Rewind,
    RunStep,
    SetSampling,
    StagePatch,
)
from lockstep.engine.ranks.reports import PauseReport, StepOutcome, StepReport
from lockstep.engine.ranks.wire import WireArray
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.breaks import PauseSpec
from lockstep.engine.taps.names import TapSpec, model_taps
from lockstep.sessions.records import StepRecord
from lockstep.workbench.inferior.patches import Patch
from lockstep.workbench.inferior.rank_program import RANK_COMMAND, RANK_PROGRAM
from lockstep.workbench.inferior.recorder import StepRecorder
from lockstep.workbench.inferior.state import Paused, SequenceState
from lockstep.workbench.inferior.step_record import misaligned, step_in_flight, step_record
from lockstep.workbench.models.capture import STATS, Capture


class Inferior:
    """One engine, its sequences, its rules, and the session it is recorded in."""

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        config: EngineConfig,
        rules: Mapping[str, str] | None = None,
        capture: Capture = STATS,
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.path, self.model, self.config = path, model, config
        self.rules = dict(rules or {})
        self.faults = check_faults(self.rules, model, config.tp)
        self.capture = capture
        self.specs: tuple[TapSpec, ...] = model_taps(model, config.tp, config.ep)
        self.sequences: dict[int, SequenceState] = {}
        self.step_number = 0
        self.on_warning = on_warning
        self.recorder = StepRecorder(on_warning)
        self.patched = False  # whether a patch is in force
        self.first_sampling: dict[int, Sampling] = {}
        self.paused: Paused | None = None
        #: What is wrong with the cache after the last pass, where no rule in force explains it.
        self.misalignment = ""
        for note in model.notes:
            on_warning(note)
        self.start()

    def start(self) -> None:
        """Start the ranks and load the model (again, after a rank was lost)."""
        self.client = Client(
            self.config, self.specs, program=RANK_PROGRAM, command=RANK_COMMAND, on_warning=self.on_warning
        )
        try:
            self.loaded = self.client.load(self.path, self.rules, self.model)
            self.watch(self.capture)
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Start again after a rank was lost: every sequence is back at its prompt."""
        self.client.close()
        self.patched, self.paused, self.step_number = False, None, 0
        self.start()
        for seq, state in self.sequences.items():
            del state.ids[state.prompt_length :]
            state.lengths.clear()
            self.client.call(AddSequence(seq, state.ids, state.sampling))

    def __enter__(self) -> Inferior:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. The session stays open: it is its owner's."""
        self.client.close()

    def watch(self, capture: Capture) -> None:
        """Set what every further pass leaves behind."""
        self.capture = capture
        self.client.call(capture.resolve(self.specs))

    def add(self, ids: list[int], sampling: Sampling | None = None, seq: int | None = None) -> int:
        """A new sequence; returns its number, the next one unless it is given."""
        seq = max(self.sequences, default=-1) + 1 if seq is None else seq
        chosen = sampling or Sampling()
        self.client.call(AddSequence(seq, ids, chosen))
        self.sequences[seq] = SequenceState(list(ids), len(ids), chosen)
        self.first_sampling[seq] = chosen
        return seq

    def remove(self, seq: int) -> None:
        """A sequence is done: it takes no part in further passes."""
        self.client.call(RemoveSequence(seq))
        del self.sequences[seq]

    def check_aligned(self) -> None:
        """RankError where the last pass has not cached just what was run, and no rule in force explains it."""
        if self.misalignment:
            raise RankError(self.misalignment)

    def step(self, forced: Mapping[int, int] | None = None) -> StepRecord:
        """One whole forward pass; `forced[seq]` is the token that follows (teacher forcing)."""
        outcome = self.begin_step(forced, None)
        assert isinstance(outcome, StepRecord), "a pass without a pause specification cannot pause"
        return outcome

    def measure_again(self, record: StepRecord) -> StepRecord:
        """The pass that is just over, run once more with the statistics of all taps; it is not recorded again."""
        usual, branch = self.capture, self.recorder.branch
        self.rewind(record.step)
        self.recorder.branch = None
        self.watch(Capture(statistics=True, last=()))
        try:
            return self.step(
                {
                    reported.seq: reported.emitted
                    for reported in record.sequences
                    if reported.emitted is not None
                }
            )
        finally:
            self.recorder.branch = branch
            self.watch(usual)

    def begin_step(
        self,
        forced: Mapping[int, int] | None,
        pause: PauseSpec | None,
        poll: Callable[[], None] | None = None,
    ) -> StepRecord | Paused:
        """Start a pass that stops where `pause` states (None: nowhere)."""
        return self._run(RunStep(dict(forced or {}), pause), poll)

    def resume(self, pause: PauseSpec, poll: Callable[[], None] | None = None) -> StepRecord | Paused:
        """Go on inside a paused pass, to its end or to the next stop."""
        return self._run(ResumeStep(pause), poll)

    def abandon(self) -> None:
        """Break a paused pass off: it never happened."""
        self.client.call(AbandonStep())
        self.paused = None
        self.recorder.abandoned()

    def read(self, place: int, seq: int = 0) -> list[WireArray]:
        """While paused: each rank's tensor at a tap that has passed in this pass."""
        return [report.value for report in self.client.call(ReadTap(place, seq))]

    def rewind(self, step: int) -> None:
        """Go back to where `step` is the next pass to run; the cache keeps what was computed before it."""
        lengths = {}
        for seq, state in self.sequences.items():
            kept = state.lengths[step - 1] if step else (state.prompt_length, 0, 0)
            lengths[seq] = kept
            del state.ids[kept[0] :]
            del state.lengths[step:]
        self.client.call(Rewind(lengths, step))
        self.step_number = step

    def draft(self, seq: int, ids: Sequence[int]) -> None:
        """Tokens behind those of a sequence, as speculation proposes them: its next pass reads them as well."""
        self.client.call(DraftTokens(seq, ids))
        self.sequences[seq].ids += ids

    def set_rules(self, rules: Mapping[str, str]) -> None:
        """Put other rules in force, from an empty cache: every sequence is back at its prompt."""
        faults = check_faults(rules, self.model, self.config.tp)
        reload = any(
            fault.level == "load" for fault in {*faults, *self.faults} - ({*faults} & {*self.faults})
        )
        self.client.call(ReplaceRules(dict(rules), reload), timeout=None)
        self.rules, self.faults = dict(rules), faults
        self.step_number, self.paused = 0, None
        for seq, state in self.sequences.items():
            del state.ids[state.prompt_length :]
            state.lengths.clear()
            self.client.call(AddSequence(seq, state.ids, state.sampling))

    def keep_cache(self, rules: Mapping[str, str]) -> None:
        """Put other rules in force for the passes to come and leave the cache as it is.

        RequestError for a rule that changes the cache's own shape.
        """
        faults = check_faults(rules, self.model, self.config.tp)
        changed = {*faults} ^ {*self.faults}
        for fault in changed:
            if fault.level == "build":
                raise RequestError(
                    f"{fault.seam} changes the cache's shape: it cannot be kept (leave out --keep-cache)"
                )
        reload = any(fault.level == "load" for fault in changed)
        self.client.call(RebindRules(dict(rules), reload), timeout=None)
        self.rules, self.faults = dict(rules), faults

    def set_patches(self, patches: Iterable[Patch]) -> None:
        """Replace the patches in force. They are sent as they come: none is kept here."""
        self.patched = False

        def shares() -> Iterator[Mapping[int, StagePatch]]:
            for patch in patches:
                self.patched = True
                yield patch.shares()

        self.client.patch(shares())

    def set_sampling(self, seq: int, sampling: Sampling) -> None:
        """Change how a sequence's further tokens are chosen."""
        self.client.call(SetSampling(seq, sampling))
        self.sequences[seq].sampling = sampling

    def _run(self, command: RankCommand[StepOutcome], poll: Callable[[], None] | None) -> StepRecord | Paused:
        """Run on to the end of the pass or to a stop within it."""
        self.client.send(command)
        outcomes = self.client.collect(command, self.config.timeout_seconds, poll)
        pauses = [one for one in outcomes if isinstance(one, PauseReport)]
        self.paused = self._stopped(pauses) if pauses else None
        if self.paused is not None:
            return self.paused
        reports = [one for one in outcomes if isinstance(one, StepReport)]
        record = step_record(self.step_number, reports, self.specs)
        self.misalignment = "" if self.faults else misaligned(reports, record)
        self._advance(reports[0])
        self.recorder.step(record, self.capture)
        return record

    def _stopped(self, reports: Sequence[PauseReport]) -> Paused:
        pauses = [report.pause for report in reports]
        first = pauses[0]
        if len(pauses) < self.config.tp or any(pause.place != first.place for pause in pauses):
            where = "; ".join(self.client.standing())
            self.client.close()
            raise RankError(f"the ranks stopped at different operations ({where}); the engine was ended")
        flight = step_in_flight(self.step_number, reports, self.specs)
        self.recorder.paused(flight, self.capture)
        hit = tuple(rank for rank, pause in enumerate(pauses) if pause.here)
        return Paused(
            first.place, first.reason, first.breaks, hit, tuple(pause.names for pause in pauses),
            flight.sequences, [pause.kv_lens for pause in pauses], flight.stats,
        )  # fmt: skip

    def _advance(self, report: StepReport) -> None:
        for reported in report.sequences:
            state = self.sequences[reported.seq]
            if reported.emitted is not None:
                state.ids.append(reported.emitted)
            state.lengths.append((len(state.ids), reported.expected_kv_len, reported.kv_len))
        self.step_number += 1
