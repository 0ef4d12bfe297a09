"""The debugger: one object that prompt, scripts, screens and replays drive by commands.

It stands at a `Position` of a `Timeline`. Moving about in what was recorded reads the session; what was not is
run by the `Executor`, if there is one: a replay is a debugger without. Commands live in modules by group and are
found through the registry; each returns a value, nothing prints.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lockstep.engine.errors import RankError, panics_as_errors
from lockstep.engine.machine import default_threads, free_memory
from lockstep.sessions import Session, clean
from lockstep.workbench import error_log
from lockstep.workbench.debugger.answers import Position, Result, Stop
from lockstep.workbench.debugger.core import registry, stopping
from lockstep.workbench.debugger.core.executor import Executor, Flight
from lockstep.workbench.debugger.core.interrupts import Interrupts
from lockstep.workbench.debugger.core.registry import ArgumentValue, Command
from lockstep.workbench.debugger.core.settings import Checkpoint, DebuggerSettings
from lockstep.workbench.debugger.core.step_tokens import StepTokens, tokens_at
from lockstep.workbench.debugger.core.timeline import Timeline
from lockstep.workbench.debugger.errors import EngineGone, InternalError, NeedsEngine, NotCaptured
from lockstep.workbench.debugger.events import OnEvent, RankLostEvent, StoppedEvent
from lockstep.workbench.debugger.failures import exit_code
from lockstep.workbench.debugger.stops.breakpoints import Breakpoints
from lockstep.workbench.exit_codes import Exit
from lockstep.workbench.judgements.golden_event import GoldenEvent
from lockstep.workbench.references.recorder_process import StandbyRecorder
from lockstep.workbench.views.token_texts import TokenTexts

#: Bytes that must be free for a recorder to wait: it takes a fifth of that.
_STANDBY_ROOM = 2 << 30


class Debugger:
    """See the module. `events` is called with finished passes and stops while a command still runs."""

    def __init__(
        self,
        timeline: Timeline,
        executor: Executor | None = None,
        *,
        texts: TokenTexts | None = None,
        events: OnEvent = lambda event: None,
    ) -> None:
        self.timeline, self.executor = timeline, executor
        self.texts = texts or TokenTexts({})
        self.events = events
        self.position = Position(0, -1)
        self.sequence = timeline.batch(0).first  # the chosen one, which every command means
        self.breakpoints = Breakpoints()
        self.checkpoints: list[Checkpoint] = []
        self.settings = DebuggerSettings()
        self.judged: dict[int, GoldenEvent] = {}  # what `golden` found last, by branch
        self.lost = ""  # why the engine is gone
        self.lost_at: Sequence[Sequence[str]] = ()  # the last operations of each rank then
        self.last_stop: Stop | None = None
        self.interrupts = Interrupts()
        self.standby: StandbyRecorder | None = None
        self._quiet = 0  # commands run by others are not journalled
        if executor is not None:
            executor.poll, executor.between = self.poll, self.interrupts.check

    # --- what it is ----------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session that is being written or replayed."""
        if self.timeline.session is None:
            raise NotCaptured("nothing is recorded: there is no session")
        return self.timeline.session

    @property
    def live(self) -> bool:
        """Whether there is an engine."""
        return self.executor is not None and not self.lost

    @property
    def engine(self) -> Executor:
        """The engine, or an error that states what to do."""
        if self.executor is None:
            raise NeedsEngine(registry.REPLAY_REASON)
        if self.lost:
            raise EngineGone(f"the engine is gone ({self.lost}): `restart` starts it again")
        return self.executor

    @property
    def recording(self) -> bool:
        """Whether all that ran is in the session: on a full disk it waits."""
        return self.executor is not None and self.executor.inferior.recorder.up_to_date

    @property
    def flight(self) -> Flight | None:
        """The pass that stands still in its middle, if there is one."""
        return self.executor.flight if self.executor is not None else None

    def close(self) -> None:
        """Finish the pass in flight, end the engine, fold the session. `RecordingLost` where a part could not be
        written to it."""
        executor, self.executor = self.executor, None
        if self.standby is not None:
            self.standby.close()
        if executor is not None:
            try:
                if executor.inferior.client.alive:
                    executor.land()
            finally:
                executor.inferior.close()
                if self.timeline.session is not None:
                    self.timeline.session.close()
                executor.inferior.recorder.close()

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception) and self.executor is not None:
            self.executor.inferior.client.close(patience=0)  # a signal: ranks in the middle of anything
        self.close()

    # --- commands ------------------------------------------------------------------------------------

    def execute(self, line: str) -> Result:
        """Carry out one command line. DebuggerError, EngineError or SessionError state why not."""
        spec, arguments = registry.parse_line(line)
        return self.perform(spec, arguments, line.strip())

    def call(self, name: str, /, **arguments: ArgumentValue) -> Result:
        """Carry out a command given by name and arguments."""
        spec = registry.find(name)
        checked = registry.check_arguments(spec, arguments)
        return self.perform(spec, checked, registry.line_of(spec, checked))

    def perform(self, spec: Command, arguments: Mapping[str, ArgumentValue], line: str) -> Result:
        """Carry out a parsed command and write it into the journal. InternalError for what no command is meant to
        raise: the debugger goes on, with the engine if it can."""
        if self.quiet:
            return self._perform(spec, arguments, line)
        self.interrupts.running = True
        try:
            with (
                self.session.walk() if self.executor is None else nullcontext()
            ):  # a replay reads a stranger's
                return self._perform(spec, arguments, line)
        finally:
            self.interrupts.running = False
            self.forget_interrupt()

    def _perform(self, spec: Command, arguments: Mapping[str, ArgumentValue], line: str) -> Result:
        before, result, by_chance = self.position, None, True
        try:
            if self.live and not self.quiet:
                self.engine.inferior.client.check()
            with panics_as_errors():
                result = registry.function_of(spec)(self, **arguments)
            by_chance = isinstance(result, Stop) and result.reason == "pause"
        except RankError as error:
            self._engine_lost(error)
            catch = stopping.catch_error(self.breakpoints)
            if catch is None:
                raise
            result = self.stop(
                "exception", f"{catch.describe()}: {error}; `restart` starts the engine again",
                thread_id=stopping.lost_rank(error), hit_breakpoint_ids=[catch.id],
            )  # fmt: skip
        except Exception as error:
            if exit_code(error) is not Exit.DEFECT:
                raise
            raise self._defect(line, error) from error
        finally:
            if not self.quiet:
                self.forget_interrupt()  # it was for this command, not for what a stop brings with it
                if spec.changes and (result is not None or self.position != before):
                    amended = self._amended(line, before) if by_chance else None
                    self.journal("command", line, before, {"amended": amended})
        return self._arrive(result) if isinstance(result, Stop) else result

    def _arrive(self, stop: Stop) -> Stop:
        self.last_stop = stop
        self.journal("stop", stop.description, data=stop.to_json())
        self.events(
            StoppedEvent(
                stop.reason, stop.description, stop.branch, stop.step, stop.tap, stop.thread_id,
                stop.hit_breakpoint_ids,
            )
        )  # fmt: skip
        if self.quiet:
            return stop  # whoever runs the command sees to the rest
        with self.quietly():
            return stopping.follow(stop, self.breakpoints, self.settings.displays, self.execute)

    @property
    def quiet(self) -> bool:
        """Whether the command that runs is another's doing (a breakpoint's, a display)."""
        return self._quiet > 0

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Commands run meanwhile are another's doing: the journal holds only that other command."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def journal(self, kind: str, text: str, at: Position | None = None, data: Any = None) -> None:
        """Append to the session's journal (a replay has none to write to)."""
        where = at or self.position
        if self.executor is not None:
            step = max(where.step, 0)
            self.executor.inferior.recorder.write(
                lambda writer: writer.event(where.branch, step, kind, text, data)
            )

    # --- interrupting --------------------------------------------------------------------------------

    def interrupt(self, *, ahead: bool = False) -> None:
        """Stop what runs soon, at an operation boundary. From any thread, or a signal handler. While nothing runs
        it does nothing, unless `ahead`: then the next command is interrupted as soon as it begins."""
        self.interrupts.ask(ahead=ahead)

    def poll(self) -> None:
        """Called often while a pass runs: passes an interrupt on to the ranks."""
        if self.executor is not None:
            self.interrupts.pass_on(self.executor.inferior.client)

    def forget_interrupt(self) -> None:
        """What was to be interrupted is over."""
        self.interrupts.forget(None if self.executor is None else self.executor.inferior.client)

    # --- stops ---------------------------------------------------------------------------------------

    def stop(
        self, reason: str, description: str, *, thread_id: int = 0, hit_breakpoint_ids: Sequence[int] = ()
    ) -> Stop:
        """A stop where the debugger stands now."""
        at, reported = self.position, self.step_tokens()
        tap = self.timeline.places.name(at.place)
        position = None if reported is None else reported.position
        emitted = None if reported is None or at.place is not None else reported.emitted
        token = None if emitted is None else self.texts.label(emitted)
        return Stop(
            reason, description, at.branch, at.step, tap, position, token, thread_id, hit_breakpoint_ids
        )

    def step_tokens(self, seq: int | None = None) -> StepTokens | None:
        """What the present step reads of a sequence (default: the chosen one) and emits; None: it did not feed it."""
        return tokens_at(self.timeline, self.position, self.flight, self.sequence if seq is None else seq)

    def _amended(self, line: str, before: Position) -> str:
        """The commands that lead here again where `line` did by chance: an interrupt, a rank that was lost."""
        at = self.position
        goto = f"goto {at.step} {self.timeline.places.name(at.place)}".strip()
        return goto if at.branch == before.branch else f"{line}\n{goto}"

    def _engine_lost(self, error: Exception) -> None:
        self.lost = str(error) or type(error).__name__
        self.lost_at = error.operations if isinstance(error, RankError) else ()
        if self.executor is not None:
            self.executor.forget()
        self._leave_flight()
        self.journal("error", self.lost, data={"last_operations": self.lost_at} if self.lost_at else None)
        self.events(RankLostEvent(self.lost))

    def stand_by(self) -> None:
        """Between commands: have what `golden` would wait for imported meanwhile, where there is memory for it."""
        if self.standby is not None and not self.standby.taken:
            return
        if self.live and self.settings.reference == "transformers" and free_memory() > _STANDBY_ROOM:
            inferior = self.engine.inferior
            try:
                self.standby = StandbyRecorder(inferior.path, default_threads())
            except OSError as error:
                inferior.recorder.on_warning(f"no reference is got ready: {error}")

    def notice_loss(self) -> None:
        """Between commands: take note of a rank that is gone."""
        if self.live:
            try:
                self.engine.inferior.client.check()
            except RankError as error:
                self._engine_lost(error)

    def _defect(self, line: str, error: Exception) -> InternalError:
        """Come to rest after an unexpected exception: the engine starts afresh from the prompt, or is given up."""
        reported = clean(f"{type(error).__name__}: {error}", limit=300)
        where = error_log.record(error, line)
        self.journal("error", reported, data={"command": line, "raised_at": _raised_at(error)})
        if self.live:
            try:
                self.engine.reset()
            except Exception as lost:  # whatever it is, the state of the ranks is not known
                self.engine.inferior.close()
                self._engine_lost(lost)
        self._leave_flight()
        return InternalError(reported, where, engine_lost=bool(self.lost))

    def _leave_flight(self) -> None:
        """Stand at the last recorded step where the step that was stood in is gone."""
        last = self.timeline.last(self.position.branch)
        if self.position.step > last:
            self.position = Position(self.position.branch, last)


def _raised_at(error: Exception) -> str:
    """ "workbench.debugger.core.motion:97": where an exception was raised."""
    last = [*traceback.walk_tb(error.__traceback__)][-1]
    return f"{last[0].f_globals.get('__name__', '')}:{last[1]}"
