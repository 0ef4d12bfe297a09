"""The tests' child processes, forked from one that has imported torch and transformers already.

A rank, a debugger host and a recorder of references spend two to four seconds of CPU on imports before they do
anything, and the tests start hundreds of them. Those that `engine.children.start_python` is asked for are forked by a
server (`python -P -m tests.preloaded ADDRESS FD`) instead, one for all workers of xdist. They have what a process of
their own has: arguments, environment, working directory, descriptors under their numbers, process group, a fresh
`__main__`. Only the modules are there before. Any other program is started as ever, and so is everything where a test
asks for the fixture `fresh_processes`: tests of starting, of imports and of memory. Commands that a test starts in a
shell, and all of e2e, know no server; `tests.preloaded_program` starts one that does.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import msgspec

from lockstep.engine import children

#: The programs that are forked: the module after `-m`.
PROGRAMS = (
    "lockstep.engine.faults.rank", "lockstep.engine.ranks", "lockstep.workbench.cli", "lockstep.workbench.cli.host",
    "lockstep.workbench.references.record", "tests.engine.small_frames_rank", "tests.engine.troubled_rank",
    "tests.workbench.checking.fused_rank",
)  # fmt: skip
#: What they import.
_MODULES = (
    "lockstep.engine.faults.resolve", "lockstep.engine.ranks.worker", "lockstep.workbench.checking.pipeline",
    "lockstep.workbench.cli.main", "lockstep.workbench.debugger.host.launch", "lockstep.workbench.debugger.host.server",
    "lockstep.workbench.export.command", "lockstep.workbench.references.transformers_recorder",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
#: What transformers reads while it is imported.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
#: Descriptors are moved up here before each gets the number that it is to have.
_HIGH = 512


class ForkRequest(msgspec.Struct):
    """What to fork. The descriptors sent along are to be 0, 1, 2 and `numbers`."""

    words: list[str]
    environment: dict[str, str]
    directory: str
    numbers: list[int]
    process_group: int | None
    new_session: bool


class Server:
    """The process that forks, started by the first test that needs it, unless another process has (`elsewhere`). What
    it forks uses the same one."""

    def __init__(self, address: Path, elsewhere: bool = False) -> None:
        self.address, self._owner = str(address), 0 if elsewhere else os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ensure_started(self) -> None:
        """Start it if that is for this process to do and has not been done."""
        with self._lock:
            if self._process is None and os.getpid() == self._owner:
                self._start()

    def connect(self) -> socket.socket:
        """A connection for one child."""
        self.ensure_started()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        return connection

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                children.python_command("-m", "tests.preloaded", self.address, str(listener.fileno())),
                env=children.child_environment(_ENVIRONMENT), stdin=subprocess.PIPE, pass_fds=(listener.fileno(),),
                start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        """End the server. Children end with those who started them."""
        if self._process is not None:
            self._process.communicate()


class ForkedChild:
    """A child of the server, with what the product uses of `subprocess.Popen`."""

    def __init__(
        self, server: Server, words: Sequence[str], *, env: Mapping[str, str],
        stdout: int | IO[bytes], stderr: int | IO[bytes], pass_fds: Sequence[int],
        process_group: int | None, start_new_session: bool,
    ) -> None:  # fmt: skip
        self.args = words
        self.returncode: int | None = None
        self._lock = threading.Lock()
        request = ForkRequest(
            list(words), dict(env), os.getcwd(), list(pass_fds), process_group, start_new_session
        )
        null = os.open(os.devnull, os.O_RDWR)
        self.stdout, out = _output(stdout, null)
        self.stderr, err = _output(stderr, null)
        self._connection = server.connect()
        body = msgspec.json.encode(request)
        socket.send_fds(self._connection, [struct.pack("<I", len(body))], [null, out, err, *pass_fds])
        self._connection.sendall(body)
        for number in {null} | {
            mine for mine, asked in ((out, stdout), (err, stderr)) if asked == subprocess.PIPE
        }:
            os.close(number)
        self.pid = self._number()

    def _number(self) -> int:
        data = self._connection.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            raise RuntimeError(f"the process that forks the tests' children has ended: {self.args}")
        return int(struct.unpack("<i", data)[0])

    def poll(self) -> int | None:
        """The exit code, if the child has ended."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the child has ended."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._reported(timeout)
            with self._lock:  # another thread may have heard it first
                if self.returncode is None and self._reported(0):
                    self.returncode = self._number()
                    self._connection.close()
        return self.returncode

    def _reported(self, timeout: float | None) -> bool:
        if (number := self._connection.fileno()) < 0:
            return False
        events = select.poll()
        events.register(number, select.POLLIN)
        return bool(events.poll(None if timeout is None else max(0.0, timeout * 1000)))

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended; its parent, the server, has yet to report it
                os.kill(self.pid, number)

    def __enter__(self) -> ForkedChild:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def _output(asked: int | IO[bytes], null: int) -> tuple[IO[bytes] | None, int]:
    """What to read a stream from, where a pipe is asked for, and the child's end of it."""
    if asked == subprocess.PIPE:
        reading, writing = os.pipe()
        return os.fdopen(reading, "rb"), writing
    if asked == subprocess.DEVNULL:
        return None, null
    return None, asked if isinstance(asked, int) else asked.fileno()


class Forking:
    """Stands in for the module `subprocess` in `engine.children`."""

    DEVNULL = subprocess.DEVNULL
    PIPE = subprocess.PIPE

    def __init__(self, server: Server) -> None:
        self.server = server

    def Popen(self, command: list[str], **options: Any) -> Any:
        """Fork one of `PROGRAMS`, start any other, and one that reads from its stdin."""
        stdin = options.pop("stdin")
        if command[2] != "-m" or command[3] not in PROGRAMS or stdin != subprocess.DEVNULL:
            return subprocess.Popen(command, stdin=stdin, **options)
        return ForkedChild(self.server, command[3:], **options)


def run_module(
    *words: str, timeout: float = 170, most_file_bytes: int | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """`python -m words` to its end, with `settings` in its environment. No file that it writes grows beyond
    `most_file_bytes`: to a program that is as if the disk were full."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with children.start_python("-m", *words, stdout=out, stderr=err, settings=settings) as child:
            try:
                if most_file_bytes is not None:
                    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (most_file_bytes,) * 2)
                code = child.wait(timeout)
            except BaseException:
                child.kill()
                raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())


def serve(listener: socket.socket) -> ForkRequest:
    """Fork until stdin ends. Returns in each child."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)
            elif key.fd in running:
                pid, starter = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _report(starter, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                starter.close()
            else:
                starter, _ = listener.accept()
                request, received = _receive(starter)
                if request is None:
                    starter.close()
                    continue
                if not (pid := os.fork()):
                    selector.close()
                    for number, (_, other) in running.items():
                        os.close(number)
                        other.close()
                    starter.close()
                    listener.close()
                    _take(received, request.numbers)
                    return request
                for number in received:
                    os.close(number)
                _report(starter, pid)
                ended = os.pidfd_open(pid)
                running[ended] = pid, starter
                selector.register(ended, selectors.EVENT_READ)


def _report(starter: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # whoever started the child may be gone
        starter.sendall(struct.pack("<i", number))


def _receive(starter: socket.socket) -> tuple[ForkRequest | None, list[int]]:
    """What is asked for; nothing where whoever asks is killed meanwhile."""
    head, received, _, _ = socket.recv_fds(starter, 4, 64)
    size = struct.unpack("<I", head)[0] if len(head) == 4 else 0
    body = starter.recv(size, socket.MSG_WAITALL)
    if not body or len(body) < size:
        for number in received:
            os.close(number)
        return None, []
    return msgspec.json.decode(body, type=ForkRequest), received


def _take(received: list[int], numbers: list[int]) -> None:
    """Give the descriptors their numbers."""
    above = max(_HIGH, 1 + max(numbers, default=0))  # whoever asks may have hundreds open
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in received]
    for number in received:
        os.close(number)
    for number, target in zip(high, [0, 1, 2, *numbers], strict=True):
        os.dup2(number, target)
        os.close(number)


def run(request: ForkRequest) -> None:
    """Be the program that was asked for."""
    if request.process_group is not None:
        os.setpgid(0, request.process_group)
    if request.new_session:
        os.setsid()
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None
    sys.argv[1:] = request.words[1:]
    runpy.run_module(request.words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with children.loading():
        for name in _MODULES:
            import_module(name)
    children.subprocess = Forking(Server(Path(sys.argv[1])))  # type: ignore[assignment]
    gc.freeze()
    run(serve(socket.socket(fileno=int(sys.argv[2]))))
