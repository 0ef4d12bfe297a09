"""A process of its own that records golden sessions: `python -m lockstep.workbench.references.record JOBS.json
[LIFELINE]`, or with `-` in place of the file, and the checkpoint behind LIFELINE: then the libraries are imported, and
the file's name comes on stdin.

The file is a list of `RecordingJob`; those after the first are forced onto the tokens that came out of the first. The
sessions' paths go to stdout. On stderr one JSON object a line: `RecorderProgress`, and at the end of a failure a
`RecorderFailure` with the process's own exit code. LIFELINE is a descriptor (`engine.lifeline`): when its other end is
closed, the process ends and removes the folder that the jobs and their sessions lie in (`engine.scratch`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from lockstep.engine.children import loading
from lockstep.engine.errors import LibraryPanic, panics_as_errors
from lockstep.engine.lifeline import end_with_starter
from lockstep.engine.scratch import remove_once_left
from lockstep.engine.text import printable
from lockstep.workbench import error_log
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.request import (
    GoldenRequest,
    RecorderFailure,
    RecorderProgress,
    RecordingJob,
    ReferenceFailure,
    ReferenceName,
    decode_jobs,
)


class Recorder(Protocol):
    """Records what a request asks for."""

    def __call__(
        self, request: GoldenRequest, path: Path, *, checkpoint: str, progress: Callable[[], None]
    ) -> None: ...


def _send(message: RecorderProgress | RecorderFailure) -> None:
    print(msgspec.json.encode(message).decode(), file=sys.stderr, flush=True)


def _read(arguments: list[str]) -> list[RecordingJob]:
    if len(arguments) not in (1, 2, 3) or (arguments[0] == "-") != (len(arguments) == 3):
        raise ReferenceFailure(
            "usage: python -m lockstep.workbench.references.record JOBS.json [LIFELINE] | - LIFELINE CHECKPOINT",
            2,
        )
    file = [] if arguments[0] == "-" else [Path(arguments[0])]
    if len(arguments) > 1:
        end_with_starter(int(arguments[1]), lambda: remove_once_left(file[0].parent) if file else None)
    if not file:
        _stand_by(Path(arguments[2]))
        asked = sys.stdin.readline().rstrip("\n")
        if not asked:  # nobody wants it any more
            return []
        file.append(Path(asked))
    try:
        text = file[0].read_bytes()
    except OSError as error:
        raise ReferenceFailure(f"{file[0]}: {error.strerror}", 2) from error
    return decode_jobs(text)


def _stand_by(checkpoint: Path) -> None:
    """Import what recording will need. A checkpoint that cannot be read is reported once it is asked for."""
    _recorder("transformers")
    with loading(), contextlib.suppress(ReferenceFailure):
        from lockstep.workbench.references.loading import import_family

        import_family(checkpoint)


def _record(arguments: list[str]) -> None:
    jobs = _read(arguments)
    passes, total = 0, sum(job.request.steps + 1 for job in jobs)

    def progress() -> None:
        nonlocal passes
        passes += 1
        _send(RecorderProgress(passes, total))

    for i, job in enumerate(jobs):
        request = job.request
        if i > 0:
            request = msgspec.structs.replace(request, sequences=forced_onto(Path(jobs[0].output)))
        _recorder(request.reference)(request, Path(job.output), checkpoint=job.checkpoint, progress=progress)
        print(job.output)


def _recorder(reference: ReferenceName) -> Recorder:
    """Seconds to import, so only once the request is known to be good."""
    with loading():
        if reference == "llama.cpp":
            from lockstep.workbench.references.llamacpp import recorder as llamacpp_recorder

            return llamacpp_recorder.record
        from lockstep.workbench.references import transformers_recorder

        return transformers_recorder.record


def main() -> int:
    """Run and return the exit code."""
    try:
        with panics_as_errors():
            _record(sys.argv[1:])
    except ReferenceFailure as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except (OSError, MemoryError, LibraryPanic) as error:  # a full disk, no memory
        return _failed(f"recording failed: {type(error).__name__}: {printable(error, 400)}", 3)
    except (
        Exception
    ) as error:  # a library raises what it likes over a stranger's checkpoint, or it is our mistake
        why = f"{type(error).__name__}: {printable(error, 400)}; its traceback {error_log.record(error, 'recording')}"
        return _failed(f"recording failed: {why}", 3)
    return 0


def _failed(message: str, exit_code: int) -> int:
    _send(RecorderFailure(message, exit_code))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
