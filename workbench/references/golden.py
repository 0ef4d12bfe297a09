"""The torch-free front of the golden recorder: ask for a reference, get the path of its session.

transformers, or llama.cpp, runs in a process of its own: the debugger's host stays free of it, a crash or a full memory
ends the recorder alone, and its memory goes back when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from lockstep.engine.checkpoint.files import gguf_file
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import ModelConfig
from lockstep.engine.machine import default_threads
from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.references import cache
from lockstep.workbench.references.cache import Stamp, Warn
from lockstep.workbench.references.estimates import check_recorder_room
from lockstep.workbench.references.llamacpp.library import need_installed
from lockstep.workbench.references.recorder_process import Progress, StandbyRecorder, run_recorder
from lockstep.workbench.references.request import (
    DType,
    GoldenRequest,
    GoldenSequence,
    ReferenceFailure,
    ReferenceName,
    model_path,
)


class Options(TypedDict, total=False):
    """`chunk` as in `GoldenRequest`; `threads` defaults to the machine's processors; `timeout` is in seconds;
    `progress(done, of)` counts forward
    passes and is called from another thread; `warn` reports a damaged entry of the cache; `waiting` is called now
    and then while the recorder works, and what it raises ends it; `standby` may be one that waits already."""

    device: str
    threads: int | None
    chunk: int | None
    timeout: float | None
    progress: Progress | None
    warn: Warn
    waiting: Callable[[], None]
    standby: StandbyRecorder | None


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
    ReferenceFailure states why there is no session, RequestError that memory would not do; CheckpointError and
    ConfigError come from opening the checkpoint.
    """
    for one in wanted:
        need_readable(Path(model), one.reference)
    checkpoint, warn = _Checkpoint.open(model), options.get("warn", lambda text: None)
    requests = [checkpoint.request(sequences, steps, one, options) for one in wanted]
    first = cache.find(checkpoint.key(requests[0]), warn)
    if first is not None:
        requests[1:] = _forced(requests[1:], first)
    found = [first, *(cache.find(checkpoint.key(one), warn) if first else None for one in requests[1:])]
    missing = [i for i, path in enumerate(found) if path is None]
    if missing:
        for i in missing:
            check_recorder_room(checkpoint.model, requests[i])
        with cache.folder() as folder:
            recorded = run_recorder(
                [requests[i] for i in missing],
                checkpoint.digest,
                folder.path,
                options.get("timeout"),
                options.get("progress"),
                options.get("waiting"),
                options.get("standby"),
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
    model: ModelConfig
    digest: str
    stamps: tuple[Stamp, ...]

    @classmethod
    def open(cls, path: str | Path) -> _Checkpoint:
        model = model_path(path)
        config, source = open_checkpoint(model)
        with source:
            files = sorted({source.info(name).file for name in source.names()})
            return cls(model, config, source.digest(), tuple(cache.stamp(file) for file in files))

    def request(
        self,
        sequences: Sequence[GoldenSequence],
        steps: int,
        wanted: Wanted,
        options: Options,
    ) -> GoldenRequest:
        longest = max((len(one.prompt) for one in sequences), default=0)
        chunk = options.get("chunk")
        return GoldenRequest(
            # Not what a link leads to: in the hub's cache a blob without a suffix.
            str(self.path.absolute()),
            tuple(sequences),
            steps,
            wanted.dtype,
            "cpu" if wanted.reference == "llama.cpp" else options.get("device", "cpu"),
            options.get("threads") or default_threads(),
            wanted.reference,
            wanted.dequantised,
            chunk if chunk is not None and chunk < longest else None,  # a chunk that holds all is none
        )

    def key(self, request: GoldenRequest) -> str:
        return cache.cache_key(request, self.digest, self.stamps)


def forced_onto(path: Path) -> tuple[GoldenSequence, ...]:
    """The sequences of a golden session, each forced onto the very tokens that came out there: what to
    record another dtype of it with, and what to force an engine onto. One that left before the last step reads no
    more than it did there."""
    with Session.open(path, UNLIMITED) as session:
        emitted: dict[int, list[int]] = {}
        prompts: dict[int, list[int]] = {}
        steps = session.steps()
        for step in steps:
            for sequence in session.step(step).sequences:
                reported = emitted.setdefault(sequence.seq, [])
                if not reported:
                    prompts.setdefault(sequence.seq, []).extend(sequence.ids)
                if sequence.emitted is not None:
                    reported.append(sequence.emitted)
        stayed = {sequence.seq for sequence in session.step(steps[-1]).sequences}
        for seq in emitted.keys() - stayed:
            emitted[seq].pop()
    return tuple(GoldenSequence(tuple(ids), tuple(emitted[seq])) for seq, ids in sorted(prompts.items()))
