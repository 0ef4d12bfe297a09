"""The torch-free front of the golden recorder: ask for a reference, get the path of its session.

transformers, or llama.cpp, runs in a process of its own: the debugger's host stays free of it, a crash or a full memory
ends the recorder alone, and its memory goes back when it ends.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

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

Progress = Callable[[int, int], None]

_MESSAGES = msgspec.json.Decoder(RecorderProgress | RecorderFailure)


def record_golden(
    model: str | Path,
    sequences: Sequence[GoldenSequence],
    steps: int,
    dtype: DType,
    *,
    reference: ReferenceName = "transformers",
    dequantised: bool = True,
    device: str = "cpu",
    threads: int | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
    warn: Warn = lambda text: None,
) -> Path:
    """One golden session for these token ids, from the cache or recorded now: a prefill and `steps` decode steps.

    `model`, `reference` and `dequantised` are those of a `GoldenRequest`. `threads` defaults to the machine's
    processors; `timeout` is in seconds; `progress(done, of)` counts forward passes and is called from another
    thread; `warn` is told of a damaged entry of the cache. ReferenceFailure says why there is no session;
    CheckpointError and ConfigError come from opening the checkpoint.
    """
    if reference == "llama.cpp":
        need_installed()
    checkpoint = _Checkpoint.open(model)
    request = checkpoint.request(sequences, steps, dtype, device, threads)
    request = msgspec.structs.replace(request, reference=reference, dequantised=dequantised)
    found = cache.find(checkpoint.key(request), warn)
    if found is not None:
        return found
    with cache.folder() as folder:
        (recorded,) = _run(checkpoint, [request], folder.path, timeout, progress)
        return cache.keep(checkpoint.key(request), recorded)


def record_pair(
    model: str | Path,
    sequences: Sequence[GoldenSequence],
    steps: int,
    dtype: DType,
    *,
    device: str = "cpu",
    threads: int | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
    warn: Warn = lambda text: None,
) -> tuple[Path, Path]:
    """What an engine at `dtype` is judged by: the truth (float64), and the reference at `dtype` on the same ids.

    One process records both where neither is cached. Sequences that are not forced go on greedily in float64.
    Options and errors as `record_golden`.
    """
    checkpoint = _Checkpoint.open(model)
    truth = checkpoint.request(sequences, steps, "float64", device, threads)
    golden = cache.find(checkpoint.key(truth), warn)
    if golden is not None:
        forced = forced_onto(golden)
        floor = record_golden(
            model,
            forced,
            steps,
            dtype,
            device=device,
            threads=threads,
            timeout=timeout,
            progress=progress,
            warn=warn,
        )
        return golden, floor
    with cache.folder() as folder:
        follower = msgspec.structs.replace(
            truth, dtype=dtype
        )  # forced onto the first's tokens by the recorder
        first, second = _run(checkpoint, [truth, follower], folder.path, timeout, progress)
        follower = msgspec.structs.replace(follower, sequences=forced_onto(first))
        floor = cache.keep(checkpoint.key(follower), second)
        return cache.keep(checkpoint.key(truth), first), floor


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
        self, sequences: Sequence[GoldenSequence], steps: int, dtype: DType, device: str, threads: int | None
    ) -> GoldenRequest:
        path = str(self.path.resolve())
        return GoldenRequest(path, tuple(sequences), steps, dtype, device, threads or os.cpu_count() or 1)

    def key(self, request: GoldenRequest) -> str:
        return cache.cache_key(request, self.digest, self.stamps)


def forced_onto(path: Path) -> tuple[GoldenSequence, ...]:
    """The sequences of a golden session, each forced onto the very tokens that came out there: what to
    record another dtype of it with, and what to force an engine onto."""
    with Session.open(path, UNLIMITED) as session:
        emitted: dict[int, list[int]] = {}
        for step in session.steps():
            for sequence in session.step(step).sequences:
                if sequence.emitted is not None:
                    emitted.setdefault(sequence.seq, []).append(sequence.emitted)
        prompts = {sequence.seq: tuple(sequence.ids) for sequence in session.step(0).sequences}
    return tuple(GoldenSequence(ids, tuple(emitted[seq])) for seq, ids in sorted(prompts.items()))


def _run(
    checkpoint: _Checkpoint,
    requests: Sequence[GoldenRequest],
    folder: Path,
    timeout: float | None,
    progress: Progress | None,
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
        listener = _Listener(process, progress)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ReferenceFailure(f"no golden reference within {timeout:g} s: allow more time", 4) from None
        finally:
            if process.poll() is None:  # timed out or interrupted
                process.kill()
            lifeline.close()
            listener.join()
    if code != 0:
        raise listener.failure(code)
    return outputs


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
