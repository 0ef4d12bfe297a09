"""Long tables of like cases take turns: a run of the slow tests has a share of the cases of each, and `TURNS` runs have
them all. Which cases a turn has follows from their names alone, so that no axis of a table falls into step with it.

    make test-all TURN=1      # the second share; TURN=all runs every case
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

#: After so many turns every case was run.
TURNS = 8
#: Up to so many cases of a test each turn has every second.
_HALF = 4


def left_out(cases: Sequence[str], turn: int) -> set[str]:
    """Of the node ids of tests those that are another turn's."""
    tables: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        tables[case.partition("[")[0]].append(case)
    return {
        case
        for table in tables.values()
        for number, case in enumerate(sorted(table, key=lambda one: (crc32(one.encode()), one)))
        if number % _shares(len(table)) != turn % _shares(len(table))
    }


def _shares(cases: int) -> int:
    if cases == 1:
        return 1
    return 2 if cases <= _HALF else TURNS
