"""The torch-free front of the golden recorder: ask for a reference, get the path of its session.

transformers, or llama.cpp, runs in a process of its own: the debugger's host stays free of it, a crash or a full memory
ends the recorder alone, and its memory goes back when it ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from engine.checkpoint.files import gguf_file
from engine.checkpoint.resolve import open_checkpoint
from engine.children import start_python
from engine.lifeline import Lifeline
from engine.text import printable
from sessions import Session
from sessions.limits import UNLIMITED
from workbench.references import cache
from workbench.references.cache import Warn
from workbench.references.llamacpp.library import need_installed
from workbench.references.request import (
    DType,
    GoldenRequest,
    GoldenSequence,
    RecorderFailure,
    RecorderProgress,
    RecordingJob,
    ReferenceFailure,
    ReferenceName,
    model_path,
)

#: Seconds between two looks at whoever waits for a recorder.
_LOOK_SECONDS = 0.1

Progress = Callable[[int, int], None]

_MESSAGES = msgspec.json.Decoder(RecorderProgress | RecorderFailure)


class Options(TypedDict, total=False):
    """`threads` defaults to the machine's processors; `timeout` is in seconds; `progress(done, of)` counts forward
    passes and is called from another thread; `warn` is told of a damaged entry of the cache; `waiting` is called now
    and then while the recorder works, and what it raises ends it."""

    device: str
    threads: int | None
    timeout: float | None
    progress: Progress | None
    warn: Warn
    waiting: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One recording; the fields are those of a `GoldenRequest`."""

    dtype: DType
    reference: ReferenceName = "transformers"
    dequantised: bool = True


def need_readable(model: Path, reference: ReferenceName) -> None:
    """ReferenceFailure where a reference's library is missing, or reads no such checkpoint."""
    if reference != "llama.cpp":
        return
    if gguf_file(model) is None:
        raise ReferenceFailure(f"{model}: llama.cpp reads GGUF files, and this is none: give one", 2)
    need_installed()


def record_golden(
    model: str | Path,
    sequences: Sequence[GoldenSequence],
    steps: int,
    dtype: DType,
    **options: Unpack[Options],
) -> Path:
    """One golden session by transformers for these token ids: a prefill and `steps` decode steps."""
    (recorded,) = record_all(model, sequences, steps, [Wanted(dtype)], **options)
    return recorded


def record_pair(
    model: str | Path,
    sequences: Sequence[GoldenSequence],
    steps: int,
    dtype: DType,
    **options: Unpack[Options],
) -> tuple[Path, Path]:
    """What an engine at `dtype` is judged by: the truth (float64), and the reference at `dtype` on the same ids."""
    truth, floor = record_all(model, sequences, steps, [Wanted("float64"), Wanted(dtype)], **options)
    return truth, floor


def record_all(
    model: str | Path,
    sequences: Sequence[GoldenSequence],
    steps: int,
    wanted: Sequence[Wanted],
    **options: Unpack[Options],
) -> list[Path]:
    """Golden sessions for the same token ids, from the cache or recorded now, in one process.

    Sequences that are not forced go on greedily in the first; the others are forced onto what came out of it.
    ReferenceFailure says why there is no session; CheckpointError and ConfigError come from opening the checkpoint.
    """
    for one in wanted:
        need_readable(Path(model), one.reference)
    checkpoint, warn = _Checkpoint.open(model), options.get("warn", lambda text: None)
    device, threads = options.get("device", "cpu"), options.get("threads")
    requests = [checkpoint.request(sequences, steps, one, device, threads) for one in wanted]
    first = cache.find(checkpoint.key(requests[0]), warn)
    if first is not None:
        requests[1:] = _forced(requests[1:], first)
    found = [first, *(cache.find(checkpoint.key(one), warn) if first else None for one in requests[1:])]
    missing = [i for i, path in enumerate(found) if path is None]
    if missing:
        with cache.folder() as folder:
            recorded = _run(
                checkpoint,
                [requests[i] for i in missing],
                folder.path,
                options.get("timeout"),
                options.get("progress"),
                options.get("waiting"),
            )
            if first is None:
                requests[1:] = _forced(requests[1:], recorded[0])
            for i, path in zip(
                reversed(missing), reversed(recorded), strict=True
            ):  # the first last: if it is there,
                found[i] = cache.keep(
                    checkpoint.key(requests[i]), path
                )  # so are those that it was recorded with
    return [path for path in found if path is not None]


def _forced(requests: Sequence[GoldenRequest], onto: Path) -> list[GoldenRequest]:
    sequences = forced_onto(onto) if requests else ()
    return [msgspec.structs.replace(request, sequences=sequences) for request in requests]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint on disk, as far as the cache must know it."""

    path: Path
    digest: str
    stamps: tuple[tuple[int, int], ...]

    @classmethod
    def open(cls, path: str | Path) -> _Checkpoint:
        model = model_path(path)
        _, source = open_checkpoint(model)
        with source:
            files = sorted({source.info(name).file for name in source.names()})
            stats = [file.stat() for file in files]
            return cls(model, source.digest(), tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))

    def request(
        self,
        sequences: Sequence[GoldenSequence],
        steps: int,
        wanted: Wanted,
        device: str,
        threads: int | None,
    ) -> GoldenRequest:
        return GoldenRequest(
            # Not what a link leads to: in the hub's cache a blob without a suffix.
            str(self.path.absolute()),
            tuple(sequences),
            steps,
            wanted.dtype,
            "cpu" if wanted.reference == "llama.cpp" else device,
            threads or os.cpu_count() or 1,
            wanted.reference,
            wanted.dequantised,
        )

    def key(self, request: GoldenRequest) -> str:
        return cache.cache_key(request, self.digest, self.stamps)


def forced_onto(path: Path) -> tuple[GoldenSequence, ...]:
    """The sequences of a golden session, each forced onto the very tokens that came out there: what to
    record another dtype of it with, and what to force an engine onto. One that left before the last step reads no
    more than it did there."""
    with Session.open(path, UNLIMITED) as session:
        emitted: dict[int, list[int]] = {}
        steps = session.steps()
        for step in steps:
            for sequence in session.step(step).sequences:
                if sequence.emitted is not None:
                    emitted.setdefault(sequence.seq, []).append(sequence.emitted)
        stayed = {sequence.seq for sequence in session.step(steps[-1]).sequences}
        for seq in emitted.keys() - stayed:
            emitted[seq].pop()
        prompts = {sequence.seq: tuple(sequence.ids) for sequence in session.step(0).sequences}
    return tuple(GoldenSequence(ids, tuple(emitted[seq])) for seq, ids in sorted(prompts.items()))


def _run(
    checkpoint: _Checkpoint,
    requests: Sequence[GoldenRequest],
    folder: Path,
    timeout: float | None,
    progress: Progress | None,
    waiting: Callable[[], None] | None,
) -> list[Path]:
    """Record the requests in `folder`, in one subprocess; each after the first is forced onto the first's tokens."""
    outputs = [folder / f"{number}.session" for number in range(len(requests))]
    asked = [
        RecordingJob(request, checkpoint.digest, str(output))
        for request, output in zip(requests, outputs, strict=True)
    ]
    jobs = folder / "jobs.json"
    jobs.write_bytes(msgspec.json.encode(asked))
    lifeline = Lifeline()
    try:
        process = start_python(
            "-m", "workbench.references.record", str(jobs), str(lifeline.fd), pass_fds=(lifeline.fd,),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, settings=_settings(requests[0].threads),
        )  # fmt: skip
    finally:
        lifeline.handed_over()
    with process:
        if progress:
            progress(0, sum(request.steps + 1 for request in requests))
        listener = _Listener(process, progress)
        try:
            code = _wait(process, timeout, waiting)
        finally:
            if process.poll() is None:  # timed out or interrupted
                process.kill()
            lifeline.close()
            listener.join()
    if code != 0:
        raise listener.failure(code)
    return outputs


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


class _Listener(threading.Thread):
    """Reads the recorder's stderr to the end: progress, its error, and the last of anything else."""

    def __init__(self, process: subprocess.Popen[bytes], progress: Progress | None) -> None:
        super().__init__(name="golden-recorder", daemon=True)
        assert process.stderr is not None
        self.lines, self.progress = process.stderr, progress
        self.error: RecorderFailure | None = None
        self.rest: deque[str] = deque(maxlen=5)
        self.start()

    def run(self) -> None:
        for line in self.lines:
            try:
                message = _MESSAGES.decode(line)
            except msgspec.DecodeError:  # a library's warning
                self.rest.append(line.decode("utf-8", "replace").strip())
                continue
            if isinstance(message, RecorderFailure):
                self.error = message
            elif self.progress:
                self.progress(message.done, message.total)

    def failure(self, code: int) -> ReferenceFailure:
        """What to raise for a recorder that ended with `code`."""
        if self.error is not None:
            return ReferenceFailure(printable(self.error.message, 600), self.error.exit_code)
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with exit code {code}"
        said = printable(" | ".join(self.rest), 400) or "nothing"
        return ReferenceFailure(f"the golden recorder {how}; it last said: {said}")
