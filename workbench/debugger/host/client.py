"""The client of a host process: starts it, sends requests, receives events. Torch-free.

    client = HostClient.start(["demo", "--tp", "2"], program="workbench.cli.host", on_event=post_to_the_screen)
    client.ready.result()                      # a ReadyEvent, or a HostError
    client.command("next 3").result().text     # a concurrent.futures.Future; asyncio.wrap_future(…) awaits it
    client.interrupt()
    client.close()

Two threads of its own: one reads (events are handed over on it, so hand them on), one waits for the process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from msgspec.msgpack import Decoder

from lockstep.engine.children import start_python
from lockstep.engine.lifeline import Lifeline
from lockstep.engine.ranks.vitals import Waiting, vitals_of
from lockstep.engine.ranks.wire import Connection, Disconnected
from lockstep.engine.scratch import ScratchFolder
from lockstep.workbench.debugger.core.registry import ArgumentValue
from lockstep.workbench.debugger.host.messages import (
    AnswerFrame,
    CallRequest,
    ClosedEvent,
    CloseRequest,
    CommandAnswer,
    DoneAnswer,
    HeartbeatEvent,
    HostEvent,
    HostFrame,
    InterruptRequest,
    LineRequest,
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
from lockstep.workbench.debugger.host.pending import HostError, HostLost, Pending

#: Seconds that the host's socket may take to appear (Python and numpy are imported first).
_PATIENCE = 300.0
#: Seconds without a sign of life after which the host is reported not to answer: a heartbeat before five have passed.
_SILENT_AFTER = 4.0
#: Seconds that the host may take to end once it was asked to.
_GRACE = 8.0
#: Bytes of a path in which a socket still has room: 104 at the least, less the names below it.
_LONGEST = 70

A = TypeVar("A")
OnHostEvent = Callable[[HostEvent], None]
_FRAMES: Decoder[HostFrame] = Decoder(HostFrame)


class HostClient:
    """One host process. `on_event` is called on the reading thread; the last event is a ClosedEvent."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: ScratchFolder,
        lifeline: Lifeline,
        on_event: OnHostEvent,
    ) -> None:
        """Use `start`."""
        self.process, self.on_event = process, on_event
        self.ready: Future[ReadyEvent] = Future()
        self._folder, self._lifeline = folder, lifeline
        self._connection: Connection[HostFrame] | None = None
        self._pending: dict[int, Pending[Any]] = {}
        self._queued: list[RequestFrame] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closing = False
        self._silence = Waiting()
        self._ended = False
        self._last_words: deque[str] = deque(maxlen=5)
        threading.Thread(target=self._overhear, name="host-stderr", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="host-reader", daemon=True)
        self._reader.start()
        atexit.register(self.close)  # however the program ends, its host does not outlive it

    @classmethod
    def start(
        cls, arguments: Sequence[str], on_event: OnHostEvent = lambda event: None, *, program: str
    ) -> HostClient:
        """Start `python -m program`, a host, on `arguments` (see `host.options`); returns at once."""
        folder, lifeline = ScratchFolder.make("host", longest=_LONGEST), Lifeline()
        try:
            process = start_python(
                "-m", program, "--socket", str(folder.path / "socket"), "--lifeline", str(lifeline.fd), *arguments,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, pass_fds=(lifeline.fd,),
            )  # fmt: skip
        except BaseException:
            lifeline.close()
            folder.close()
            raise
        finally:
            lifeline.handed_over()
        return cls(process, folder, lifeline, on_event)

    # --- asking --------------------------------------------------------------------------------------

    def command(self, line: str, sequence: int | None = None) -> Future[CommandAnswer]:
        """Carry out a command line, of `sequence` (None: the one that is chosen)."""
        return self._ask(LineRequest(line, sequence), CommandAnswer)

    def call(self, command: str, /, **arguments: ArgumentValue) -> Future[CommandAnswer]:
        """Carry out a command given by name and arguments."""
        return self._ask(CallRequest(command, arguments), CommandAnswer)

    def state(self) -> Future[StateAnswer]:
        """Where the debugger stands."""
        return self._ask(StateRequest(), StateAnswer)

    def registry(self) -> Future[RegistryAnswer]:
        """Every command there is."""
        return self._ask(RegistryRequest(), RegistryAnswer)

    def tensor(self, tap: str, rank: int | None = None, seq: int | None = None) -> Future[TensorAnswer]:
        """A tap's tensor at the present step: whole, or one rank's."""
        return self._ask(TensorRequest(tap, rank, seq), TensorAnswer)

    def weight(self, name: str) -> Future[WeightAnswer]:
        """Each rank's share of a parameter."""
        return self._ask(WeightRequest(name), WeightAnswer)

    def interrupt(self) -> Future[DoneAnswer]:
        """Stop what is running, at an operation boundary. Answered at once."""
        return self._ask(InterruptRequest(), DoneAnswer)

    def _ask(self, request: Request, expected: type[A]) -> Future[A]:
        """Send a request; the future has its answer, or a HostError."""
        pending = Pending(expected)
        with self._lock:
            frame = RequestFrame(next(self._numbers), request)
            if self._closing or self.process.poll() is not None:
                pending.fail("the host has ended")
                return pending.future
            self._pending[frame.id] = pending
            if self._connection is None:
                self._queued.append(frame)  # sent as soon as the host listens
                return pending.future
            try:
                self._connection.send(frame)
            except Disconnected:
                self._pending.pop(frame.id)
                pending.fail("the host has ended")
        return pending.future

    @property
    def unresponsive(self) -> str:
        """Why the host does not answer, where it shows no sign of life, and for how long; to be asked often."""
        seconds = self._silence.look()
        if seconds < _SILENT_AFTER or self._ended:
            return ""
        vitals = vitals_of(self.process.pid)
        do = f"; `kill -CONT {vitals.pid}` continues it" if vitals.stopped else ""
        return f"the host has not answered for {seconds:.0f} s: {vitals.describe()}{do}"

    def close(self) -> None:
        """End the host and its ranks, whatever they are doing; the session is kept. Safe to call again."""
        atexit.unregister(self.close)
        if self.unresponsive and vitals_of(self.process.pid).stopped:
            self._closing = True
            self.process.kill()  # it would hear nothing else; what was recorded is whole up to its last step
        elif not self.ready.done():
            self._closing = True
            self.process.terminate()  # nothing to save yet, and the ranks end with it
        elif not self._closing:
            self.interrupt()
            done = self._ask(CloseRequest(), DoneAnswer)
            with self._lock:
                self._closing = True
            with contextlib.suppress(Exception):  # it may be past answering
                done.result(_GRACE)
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the ranks' lifelines end with it
            self.process.wait()
        if self._connection is not None:
            self._connection.close()
        if self.process.stderr is not None and threading.current_thread() is not self._reader:
            self._reader.join(_GRACE)
        self._lifeline.close()
        self._folder.close()

    # --- hearing -------------------------------------------------------------------------------------

    def _read(self) -> None:
        message = ""
        try:
            self._connect()
            assert self._connection is not None
            while True:
                self._received(self._connection.receive())
        except OSError as error:  # Disconnected is one
            message = "" if self._closing else self._epitaph(error)
        finally:
            self._ended = True
            self._fail_pending(message or "the host has ended")
            self.on_event(ClosedEvent(message))

    def _connect(self) -> None:
        """Wait for the socket to be there and greet it."""
        path, deadline = self._folder.path / "socket", time.monotonic() + _PATIENCE
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                sock.close()
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        with self._lock:
            self._connection = Connection(sock, _FRAMES)
            for message in self._queued:
                self._connection.send(message)
            self._queued.clear()

    def _received(self, frame: HostFrame) -> None:
        self._silence.restart()
        if isinstance(frame, HeartbeatEvent):
            return
        if isinstance(frame, AnswerFrame):
            with self._lock:
                pending = self._pending.pop(frame.id, None)
            if pending is not None:
                pending.settle(frame.answer)
            return
        if not self.ready.done():
            if isinstance(frame, StartFailedEvent):
                self.ready.set_exception(HostError(frame.error))
            elif isinstance(frame, ReadyEvent):
                self.ready.set_result(frame)
        self.on_event(frame)

    def _fail_pending(self, message: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for one in pending.values():
            one.fail(message)
        if not self.ready.done():
            self.ready.set_exception(HostLost(message))

    def _overhear(self) -> None:
        """What the host prints on stderr is kept for its epitaph."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last_words.append(line.decode("utf-8", "replace").strip())

    def _epitaph(self, error: Exception) -> str:
        try:
            code: object = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = "still running"
        stated = " | ".join(word for word in self._last_words if word)
        return f"the host has ended (exit code {code}){f': {stated}' if stated else f': {error}'}"
