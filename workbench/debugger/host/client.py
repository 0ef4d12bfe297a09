"""The other side of `host`: starts it, asks it, hears from it. Torch-free and free of the debugger's modules.

    client = HostClient.start(["demo", "--tp", "2"], on_event=post_to_the_screen)
    client.ready.result()                         # the body of "ready", or a HostError
    client.command("next 3").result()["text"]     # a concurrent.futures.Future; asyncio.wrap_future(…) awaits it
    client.interrupt()
    client.close()

Two threads of its own: one reads (events are handed over on it, so hand them on), one waits for the process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine.ranks.wire import MAPS, Connection, Disconnected

#: Seconds that the host's socket may take to appear (Python and numpy are imported first).
_PATIENCE = 30.0
#: Seconds that the host may take to end once it was told to.
_GRACE = 8.0
#: Bytes of a temporary directory's path in which a socket still has room: 104 at the least, less the names below it.
_LONGEST = 70

Event = Callable[[str, dict[str, Any]], None]


class HostError(Exception):
    """A request that failed. `kind` is the error's class at the host, `exit_code` the design's; `line` and
    `caret` point into a command that was not understood."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message", "the host failed")))
        self.kind = str(error.get("kind", "HostError"))
        self.exit_code = int(error.get("exit_code", 2))
        self.line, self.caret = error.get("line"), error.get("caret")


class HostLost(HostError):
    """The host's process is gone."""

    def __init__(self, message: str) -> None:
        super().__init__({"kind": "HostLost", "message": message, "exit_code": 5})


def _directory() -> Path:
    """A directory of our own (mode 0700) for the socket, whose path may not be longer than about 100 bytes."""
    place = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="lockstep-host-", dir=place if len(place) <= _LONGEST else "/tmp"))


class HostClient:
    """One host process. `on_event(name, body)` is called on the reading thread; after the last event comes
    "closed" with {"message"}: "" when it was asked to close."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, on_event: Event) -> None:
        """Use `start`."""
        self.process, self.on_event = process, on_event
        self.ready: Future[dict[str, Any]] = Future()
        self._directory = directory
        self._connection: Connection[dict[str, Any]] | None = None
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._queued: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closing = False
        self._last_words: deque[str] = deque(maxlen=5)
        threading.Thread(target=self._overhear, name="host-stderr", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name="host-reader", daemon=True)
        self._reader.start()
        atexit.register(self.close)  # however the program ends, its host does not outlive it

    @classmethod
    def start(
        cls, arguments: Sequence[str], on_event: Event = lambda name, body: None, python: str = sys.executable
    ) -> HostClient:
        """Start a host on `arguments` (see `workbench.debugger.host`); returns at once."""
        directory = _directory()
        root = str(Path(__file__).resolve().parents[3])  # the very package that runs here
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            # -P: the working directory may hold a stranger's torch.py
            [python, "-P", "-m", "workbench.debugger.host", "--socket", str(directory / "socket"), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        return cls(process, directory, on_event)

    # --- asking --------------------------------------------------------------------------------------

    def request(self, do: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request; the future has its answer, or a HostError."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            message = {"id": number, "do": do, **fields}
            if self._closing or self.process.poll() is not None:
                future.set_exception(HostLost("the host has ended"))
                return future
            self._pending[number] = future
            if self._connection is None:
                self._queued.append(message)  # sent as soon as the host listens
                return future
            try:
                self._connection.send(message)
            except Disconnected:
                self._pending.pop(number)
                future.set_exception(HostLost("the host has ended"))
        return future

    def command(self, line: str) -> Future[dict[str, Any]]:
        """Carry out a command line: {"result", "text", "state"}."""
        return self.request("command", line=line)

    def call(self, command: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Carry out a command given by name and arguments."""
        return self.request("call", command=command, arguments=arguments)

    def interrupt(self) -> Future[dict[str, Any]]:
        """Stop what is running, at an operation boundary. Answered at once."""
        return self.request("interrupt")

    def close(self) -> None:
        """End the host and its ranks, whatever they are doing; the session is kept. Safe to call again."""
        atexit.unregister(self.close)
        if not self.ready.done():
            self._closing = True
            self.process.terminate()  # nothing to save yet, and the ranks end with it
        elif not self._closing:
            self.interrupt()
            done = self.request("close")
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
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- hearing -------------------------------------------------------------------------------------

    def _read(self) -> None:
        message = ""
        try:
            self._connect()
            assert self._connection is not None
            while True:
                self._received(self._connection.receive())
        except (Disconnected, OSError, ValueError) as error:
            message = "" if self._closing else self._epitaph(error)
        finally:
            self._fail_pending(message or "the host has ended")
            self.on_event("closed", {"message": message})

    def _connect(self) -> None:
        """Wait for the socket to be there and greet it."""
        path, deadline = self._directory / "socket", time.monotonic() + _PATIENCE
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
            self._connection = Connection(sock, MAPS)
            for message in self._queued:
                self._connection.send(message)
            self._queued.clear()

    def _received(self, message: dict[str, Any]) -> None:
        if "event" in message:
            name, body = str(message["event"]), message.get("body") or {}
            if name == "ready" and not self.ready.done():
                if "error" in body:
                    self.ready.set_exception(HostError(body["error"]))
                else:
                    self.ready.set_result(body)
            self.on_event(name, body)
            return
        with self._lock:
            future = self._pending.pop(message.get("id", -1), None)
        if future is not None and future.set_running_or_notify_cancel():
            if message.get("ok"):
                future.set_result(message)
            else:
                future.set_exception(HostError(message.get("error") or {}))

    def _fail_pending(self, message: str) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in (*pending.values(), self.ready):
            if not future.done():
                future.set_exception(HostLost(message))

    def _overhear(self) -> None:
        """What the host says on stderr is kept for its epitaph."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last_words.append(line.decode("utf-8", "replace").strip())

    def _epitaph(self, error: Exception) -> str:
        try:
            code: object = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = "still running"
        said = " | ".join(word for word in self._last_words if word)
        return f"the host has ended (exit code {code}){f': {said}' if said else f': {error}'}"
