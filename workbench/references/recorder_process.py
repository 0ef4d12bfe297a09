"""The golden recorder as a process of its own: started on some requests, listened to, ended with whoever waits."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from lockstep.engine.children import start_python
from lockstep.engine.extras import need
from lockstep.engine.lifeline import Lifeline
from lockstep.engine.machine import MemoryBefore
from lockstep.engine.text import printable
from lockstep.workbench.references.request import (
    GoldenRequest,
    RecorderFailure,
    RecorderProgress,
    RecordingJob,
    ReferenceFailure,
)

#: `progress(done, of)` counts forward passes.
Progress = Callable[[int, int], None]

#: The exit code where the recorder was killed: that of a lost rank.
_KILLED = 5
#: Seconds between two looks at whoever waits for a recorder.
_LOOK_SECONDS = 0.1

_MESSAGES = msgspec.json.Decoder(RecorderProgress | RecorderFailure)


def run_recorder(
    requests: Sequence[GoldenRequest],
    digest: str,
    folder: Path,
    timeout: float | None,
    progress: Progress | None,
    waiting: Callable[[], None] | None,
    standby: StandbyRecorder | None = None,
) -> list[Path]:
    """Record the requests in `folder`, in one subprocess, `standby` if that can; each after the first is forced onto
    the first's tokens. `digest` is the checkpoint's; `timeout` in seconds; the others as in `golden.Options`."""
    need("engine", "a golden reference")
    outputs = [folder / f"{number}.session" for number in range(len(requests))]
    asked = [
        RecordingJob(request, digest, str(output)) for request, output in zip(requests, outputs, strict=True)
    ]
    jobs = folder / "jobs.json"
    jobs.write_bytes(msgspec.json.encode(asked))
    before, threads = MemoryBefore.now(), requests[0].threads
    taken = None if standby is None else standby.take(jobs, threads)
    process, lifeline = taken or _start(threads, str(jobs))
    with process:
        listener = RecorderListener(process, progress)
        try:
            if progress:
                progress(0, sum(request.steps + 1 for request in requests))
            listener.start()
            code = _wait(process, timeout, waiting)
        finally:
            if process.poll() is None:  # timed out or interrupted
                process.kill()
            lifeline.close()
            if listener.ident is not None:
                listener.join()
    if code != 0:
        raise listener.failure(code, before)
    return outputs


def _start(
    threads: int, *words: str, stdin: int = subprocess.DEVNULL
) -> tuple[subprocess.Popen[bytes], Lifeline]:
    """A recorder; behind the first of `words` it is given its lifeline."""
    lifeline = Lifeline()
    first, *others = words
    try:
        process = start_python(
            "-m", "lockstep.workbench.references.record", first, str(lifeline.fd), *others, pass_fds=(lifeline.fd,),
            stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, settings=_settings(threads),
        )  # fmt: skip
    except BaseException:
        lifeline.close()
        raise
    finally:
        lifeline.handed_over()
    return process, lifeline


class StandbyRecorder:
    """A recorder of transformers that has its libraries imported before it is asked for anything, which is half of what
    a first reference takes. It serves once."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        self.threads = threads
        self.taken = False  # the process is the taker's
        self._process, self._lifeline = _start(
            threads, "-", str(checkpoint.absolute()), stdin=subprocess.PIPE
        )

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def take(self, jobs: Path, threads: int) -> tuple[subprocess.Popen[bytes], Lifeline] | None:
        """Hand it the jobs: the process, now the caller's. None where it has ended, or has other threads."""
        process = self._process
        if threads != self.threads or process.poll() is not None or process.stdin is None:
            return None
        try:
            process.stdin.write(f"{jobs}\n".encode())
            process.stdin.close()
        except OSError:  # it has ended just now
            return None
        self.taken = True
        return process, self._lifeline

    def close(self) -> None:
        """End it, unless it was taken."""
        if not self.taken:
            self._lifeline.close()
            self._process.kill()
            self._process.communicate()


def _wait(process: subprocess.Popen[bytes], timeout: float | None, waiting: Callable[[], None] | None) -> int:
    """The recorder's exit code."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (code := process.poll()) is None:
        if time.monotonic() >= deadline:
            raise ReferenceFailure(f"no golden reference within {timeout:g} s: allow more time", 4)
        if waiting:
            waiting()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_SECONDS, deadline - time.monotonic()))
    return code


def _settings(threads: int) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


class RecorderListener(threading.Thread):
    """Reads the recorder's stderr to the end: progress, its error, and the last of anything else."""

    def __init__(self, process: subprocess.Popen[bytes], progress: Progress | None) -> None:
        super().__init__(name="golden-recorder", daemon=True)
        assert process.stderr is not None
        self.lines, self.progress = process.stderr, progress
        self.error: RecorderFailure | None = None
        self.rest: deque[str] = deque(maxlen=5)

    def _read(self) -> Iterator[bytes]:
        """Lines to the end. A signal may have interrupted whoever waits at any place, which closes the pipe."""
        try:
            yield from self.lines
        except ValueError:
            if not self.lines.closed:
                raise

    def run(self) -> None:
        for line in self._read():
            try:
                message = _MESSAGES.decode(line)
            except msgspec.DecodeError:  # a library's warning
                self.rest.append(line.decode("utf-8", "replace").strip())
                continue
            if isinstance(message, RecorderFailure):
                self.error = message
            elif self.progress:
                self.progress(message.done, message.total)

    def failure(self, code: int, before: MemoryBefore) -> ReferenceFailure:
        """What to raise for a recorder that ended with `code`; `before` it was started."""
        if self.error is not None:
            return ReferenceFailure(printable(self.error.message, 600), self.error.exit_code)
        if code == -signal.SIGKILL:
            return ReferenceFailure(f"the golden recorder was {before.killed()}", _KILLED)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        stated = printable(" | ".join(self.rest), 400) or "nothing"
        return ReferenceFailure(f"the golden recorder {how}; its last output: {stated}")
