"""`python -m workbench.references.record REQUEST.json`: record golden sessions in a process of its own.

The request is {"requests": [a GoldenRequest and "checkpoint", "output", …]}; those after the first are forced
onto the tokens that came out of the first. The sessions' paths go to stdout. On stderr one JSON object a line:
{"progress": [done, of]}, and at the end of a failure {"error": message, "exit_code": code}, the code being the
process's own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.text import printable
from workbench.references.golden import forced_onto
from workbench.references.request import GoldenRequest, ReferenceFailure


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), file=sys.stderr, flush=True)


def _read(arguments: list[str]) -> list[tuple[GoldenRequest, str, Path]]:
    """The requests with the checkpoint's digest and where to record each."""
    if len(arguments) != 1:
        raise ReferenceFailure("usage: python -m workbench.references.record REQUEST.json", 2)
    try:
        asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))["requests"]
        outputs = [(str(one["checkpoint"]), Path(one["output"])) for one in asked]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReferenceFailure(f"{arguments[0]}: not a request: {printable(repr(error))}", 2) from error
    requests = [GoldenRequest.from_json(one) for one in asked]
    return [(request, *output) for request, output in zip(requests, outputs, strict=True)]


def _record(arguments: list[str]) -> None:
    jobs = _read(arguments)
    # torch and transformers: seconds to import, so only once the request is known to be good.
    from workbench.references.transformers_recorder import record

    passes, total = 0, sum(request.steps + 1 for request, _, _ in jobs)

    def progress() -> None:
        nonlocal passes
        passes += 1
        _say({"progress": [passes, total]})

    for i, (request, checkpoint, output) in enumerate(jobs):
        if i > 0:
            request = replace(request, sequences=forced_onto(jobs[0][2]))
        record(request, output, checkpoint=checkpoint, progress=progress)
        print(output)


def main() -> int:
    """Run and return the exit code."""
    try:
        _record(sys.argv[1:])
    except ReferenceFailure as error:
        _say({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except (OSError, MemoryError, RuntimeError) as error:  # a full disk, no memory (torch: RuntimeError)
        _say({"error": f"recording failed: {type(error).__name__}: {printable(error, 400)}", "exit_code": 3})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
