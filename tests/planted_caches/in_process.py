"""The paged engine run in this process, in place of a command of its own: its imports take longer than its passes."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from lockstep.workbench.attach.launch import Attached, TapRequest
from lockstep.workbench.attach.reports import ranks_with_passes
from lockstep.workbench.library import command_axes
from tests.planted_caches.programs import paged

PROGRAM = Path(paged.__file__)


@contextlib.contextmanager
def engine_in_process() -> Iterator[None]:
    """While it lasts, a command that `invariant` starts is a call of the engine."""
    with mock.patch.object(command_axes, "attach", attached):
        yield


def attached(command: Sequence[str], dump: Path, asked: TapRequest, scratch: Path | None = None) -> Attached:
    """What `attach` does with `python paged.py WORDS`, here."""
    assert command[1] == str(PROGRAM)
    reported = {"LOCKSTEP_TAP": str(dump), "LOCKSTEP_TAP_CAPTURE": asked.capture}
    with mock.patch.dict(os.environ, reported), contextlib.redirect_stdout(io.StringIO()):
        paged.main(command[2:])
    return Attached(dump, 0, ranks_with_passes(dump), ())
