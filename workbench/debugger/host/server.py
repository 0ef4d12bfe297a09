"""The host's side of the protocol: one debugger, served to one client."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, assert_never

from lockstep.engine.errors import panics_as_errors
from lockstep.engine.ranks.wire import Connection, Disconnected, MalformedMessage, WireArray
from lockstep.engine.scratch import ScratchFolder
from lockstep.sessions.text import clean
from lockstep.workbench.debugger.commands.print import tensor_value
from lockstep.workbench.debugger.core.debugger import Debugger
from lockstep.workbench.debugger.core.registry import commands
from lockstep.workbench.debugger.core.tensors import weight_of
from lockstep.workbench.debugger.errors import CommandError, RunEnded
from lockstep.workbench.debugger.events import DebuggerEvent, ProgressEvent, StepEvent
from lockstep.workbench.debugger.failures import exit_code, explain
from lockstep.workbench.debugger.host.messages import (
    HEARTBEAT_SECONDS,
    Answer,
    AnswerFrame,
    CallRequest,
    CloseRequest,
    CommandAnswer,
    DoneAnswer,
    ErrorAnswer,
    ErrorInfo,
    HeartbeatEvent,
    HostFrame,
    InterruptRequest,
    LineRequest,
    OutputEvent,
    ReadyEvent,
    RegistryAnswer,
    RegistryRequest,
    Request,
    RequestFrame,
    StartFailedEvent,
    StateAnswer,
    StateRequest,
    TensorAnswer,
    TensorRequest,
    WeightAnswer,
    WeightRequest,
)
from lockstep.workbench.debugger.host.state import command_answer, state_of
from lockstep.workbench.exit_codes import Exit, ended_by
from lockstep.workbench.inferior.session import fold_recordings

#: Seconds for the debugger to end in an orderly way once its client is gone; then for the session alone to be folded.
_GRACE, _LAST_GRACE = 5.0, 10.0
#: Seconds between two looks at the ranks while there is nothing to do.
_LOOK_SECONDS = 0.25
#: Seconds without a request before what may be asked for next is got ready.
_IDLE_SECONDS = 8 * _LOOK_SECONDS
#: Least seconds between two events of steps or of progress: a screen draws no faster.
_STEP_INTERVAL = 1 / 30

Start = Callable[[Callable[[str], None]], Debugger]


class Host:
    """Serves one client. `folder` is for temporary files."""

    def __init__(self, connection: Connection[RequestFrame], folder: ScratchFolder) -> None:
        self.connection, self.folder = connection, folder
        self.debugger: Debugger | None = None
        self._sending, self._counting = threading.Lock(), threading.Lock()
        self._requests: queue.Queue[RequestFrame | None] = queue.Queue()
        self._outstanding = 0  # requests received and not answered; interrupts are for them alone
        self._last_step = 0.0
        self._signal = 0  # what is ending this process

    def run(self, start: Start) -> int:
        """Start the debugger (`start` is given what takes warnings) and serve until the client is gone; returns an
        exit code."""
        threading.Thread(target=self._attend, name="requests", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            with panics_as_errors():
                self.debugger = start(self._warn)
        except Exception as error:
            self._send(StartFailedEvent(described(error)))
            return exit_code(error)
        with self.debugger as debugger:
            debugger.events = self._debugger_event
            self._send(_ready(debugger))
            self.serve(debugger)
            self._leave_in_a_while()
        return self._leave(0)  # neither the timers nor the reading thread are waited for

    def end(self, number: int, _: FrameType | None = None) -> None:
        """A signal handler: end as if the client were gone."""
        self._signal = number
        with contextlib.suppress(OSError):  # it is gone
            self.connection.socket.shutdown(socket.SHUT_RD)

    def serve(self, debugger: Debugger) -> None:
        """Answer requests, one after another, until the client asks to close or is gone."""
        while (frame := self._next(debugger)) is not None:
            if isinstance(frame.request, CloseRequest):
                self._answer(frame, DoneAnswer())
                return
            try:
                with panics_as_errors():
                    answer = _perform(debugger, frame.request)
                self._answer(frame, answer)
            except RunEnded:
                self._answer(frame, CommandAnswer({"kind": "quit"}, "", state_of(debugger)))
                return
            except Exception as error:  # a defect ends neither the host nor its ranks
                self._answer(frame, ErrorAnswer(described(error), state_of(debugger)))
            with self._counting:
                self._outstanding -= 1
                if not self._outstanding:
                    debugger.forget_interrupt()

    def _next(self, debugger: Debugger) -> RequestFrame | None:
        """The next request; a rank that dies meanwhile is noticed."""
        idle = 0.0
        while True:
            try:
                return self._requests.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                debugger.notice_loss()
                idle += _LOOK_SECONDS
                if idle == _IDLE_SECONDS:
                    debugger.stand_by()

    # --- requests ------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Reads requests; interrupts are served here and now. Then what runs is to stop, and `serve` to end."""
        try:
            while True:
                frame = self.connection.receive()
                if isinstance(frame.request, InterruptRequest):
                    self._interrupt()
                    self._answer(frame, DoneAnswer())
                else:
                    with self._counting:
                        self._outstanding += 1
                    self._requests.put(frame)
        except Disconnected as error:
            if isinstance(error, MalformedMessage):
                print(clean(f"lockstep host: {error}"), file=sys.stderr, flush=True)
        finally:
            if self.debugger is not None:
                self.debugger.interrupt(ahead=True)
            self._requests.put(None)

    def _attend(self) -> None:
        """The reading thread: without a client the host ends, whatever it is doing."""
        try:
            self.listen()
        finally:
            self._leave_in_a_while()
            if self.debugger is None:
                self._abandon()  # still starting

    def _interrupt(self) -> None:
        with self._counting:
            if self.debugger is not None and self._outstanding:
                self.debugger.interrupt(ahead=True)

    def _leave_in_a_while(self) -> None:
        for seconds, act in ((_GRACE, self._abandon), (_LAST_GRACE, lambda: os._exit(Exit.INTERRUPTED))):
            timer = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()

    def _abandon(self) -> NoReturn:
        """Leave what is under way, with the session folded; ranks and recorders end with this process."""
        if self.debugger is not None and self.debugger.timeline.session is not None:
            self.debugger.timeline.session.close()  # a reader would keep the log from being folded away
        fold_recordings()
        self._leave(Exit.INTERRUPTED)

    def _leave(self, code: int) -> NoReturn:
        if self._signal:
            code = 128 + self._signal
            stated = ended_by(self._signal, fold_recordings())
            print(f"lockstep host: {stated}", file=sys.stderr, flush=True)
        self.folder.close()
        os._exit(code)

    # --- to the client -------------------------------------------------------------------------------

    def _answer(self, frame: RequestFrame, answer: Answer) -> None:
        self._send(AnswerFrame(frame.id, answer))

    def _send(self, message: HostFrame) -> None:
        with self._sending, contextlib.suppress(Disconnected):  # a client that is gone hears nothing
            self.connection.send(message)

    def _beat(self) -> None:
        """Show the client that this process lives, whatever it is busy with; while it is being sent something else
        that shows it."""
        while True:
            if self._sending.acquire(blocking=False):
                try:
                    self.connection.send(HeartbeatEvent())
                except Disconnected:
                    return
                finally:
                    self._sending.release()
            time.sleep(HEARTBEAT_SECONDS)

    def _warn(self, text: str) -> None:
        self._send(OutputEvent(text))

    def _debugger_event(self, event: DebuggerEvent) -> None:
        counted = isinstance(event, ProgressEvent) and 0 < event.done < event.of
        if counted or isinstance(event, StepEvent):
            now = time.monotonic()
            if now - self._last_step < _STEP_INTERVAL:
                return
            self._last_step = now
        self._send(event)


def _perform(debugger: Debugger, request: Request) -> Answer:
    match request:
        case LineRequest():
            if request.sequence not in (None, debugger.sequence):
                debugger.call("sequence", number=request.sequence)
            return command_answer(debugger, debugger.execute(request.line))
        case CallRequest():
            return command_answer(debugger, debugger.call(request.command, **request.arguments))
        case StateRequest():
            return StateAnswer(state_of(debugger))
        case RegistryRequest():
            return RegistryAnswer(list(commands().values()))
        case TensorRequest():
            value = tensor_value(debugger, request.tap, None, request.rank, request.seq)
            packed = WireArray.of(value.array, str(value.array.dtype))
            return TensorAnswer(packed, value.note, value.source, value.step)
        case WeightRequest():
            shares = weight_of(debugger, request.name)
            return WeightAnswer(
                [WireArray.of(shares[rank], str(shares[rank].dtype)) for rank in sorted(shares)]
            )
        case InterruptRequest() | CloseRequest():
            return DoneAnswer()
        case _:
            assert_never(request)


def _ready(debugger: Debugger) -> ReadyEvent:
    replay = debugger.executor is None
    meta = debugger.session.meta
    return ReadyEvent(
        session=str(debugger.session.path),
        state=state_of(debugger),
        model=meta.model_label,
        tp=debugger.timeline.ranks,
        replay=replay,
        pid=os.getpid(),
        rank_pids=[] if replay else list(debugger.engine.inferior.client.pids),
    )


def described(error: Exception) -> ErrorInfo:
    """An error for the client. What nobody expected is reported with its traceback in the host's log, its stderr."""
    code, message = explain(error)
    if code is Exit.DEFECT:
        traceback.print_exception(error)
    else:
        message = clean(str(error), newlines=True)
    line = caret = None
    if isinstance(error, CommandError) and error.caret is not None:
        line, caret = error.line, error.caret
    return ErrorInfo(type(error).__name__, message, int(code), line, caret)
