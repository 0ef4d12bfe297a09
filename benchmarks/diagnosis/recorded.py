"""Bugs and controls put into transformers' own modules, recorded as sessions: nothing of the engine runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.diagnosis.figures import Row, confidence_of, reproduction_of
from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.bug import Bug
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import as_fused, diagnose_recorded, score

#: Before the name of a part: the same recordings without what is inside of an attention kernel.
_FUSED = "fused_"
_FOLDERS = sorted({bug.part for bug in bugs().values()})
PARTS = (*_FOLDERS, *(f"{_FUSED}{one}" for one in _FOLDERS))


def cases(part: str, root: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(key, what measures it) for `part`, one of `PARTS`."""
    recordings = Recordings(root)
    for name, bug in sorted(bugs().items()):
        if bug.part == part.removeprefix(_FUSED):
            yield name, partial(_measure, part, bug, recordings)


def _measure(part: str, bug: Bug, recordings: Recordings) -> Row:
    recorded, fused = recordings.of(bug), part.startswith(_FUSED)
    started = time.perf_counter()
    answer = diagnose_recorded(recorded, reproducing=True, fused=fused)
    found = score(as_fused(bug, recorded) if fused else bug, answer)
    return Row(
        bug.name, part, bug.group, found.outcome, found.placed, found.worded, found.outcome == "named", 0,
        time.perf_counter() - started, found.why, found.printed, confidence_of(answer.causes),
        reproduction_of(answer.causes),
    )  # fmt: skip
