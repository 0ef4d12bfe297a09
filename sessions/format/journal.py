"""The journal and the judgements: the sound rows of tables that are read as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.sessions.format import read_rows
from lockstep.sessions.format.rows import Row
from lockstep.sessions.format.totals import Totals
from lockstep.sessions.limits import ReadMeter
from lockstep.sessions.records import Event, Tap, VerdictRecord


def events(
    totals: Totals, meter: ReadMeter, after: int, asked: tuple[int | None, int | None, str | None]
) -> list[Event]:
    """The events newer than `after` of this (branch, step, kind), in order. None: any."""
    found = totals.rows("events", "WHERE id > ? ORDER BY id", after, fewer=after)
    return read_rows.records(read_rows.event, _chosen(found, 1, asked), "events", meter)


def verdicts(
    totals: Totals,
    meter: ReadMeter,
    taps: Mapping[str, Tap],
    asked: tuple[int | None, int | None, str | None],
) -> list[VerdictRecord]:
    """The judgements of this (branch, step, tap), by branch, step and place in `taps`. None: any."""
    found = _chosen(totals.kept("verdicts"), 0, asked)
    verdicts = read_rows.records(read_rows.verdict, found, "verdicts", meter)
    order = {name: tap.index for name, tap in taps.items()}
    verdicts.sort(key=lambda v: (v.branch, v.step, order.get(v.tap, len(order)), v.tap))
    return verdicts


def _chosen(rows: Sequence[Row], first: int, asked: Sequence[object]) -> list[Row]:
    """The rows whose values from column `first` on are those that were asked for."""
    wanted = [(first + at, value) for at, value in enumerate(asked) if value is not None]
    return [row for row in rows if all(row[at] == value for at, value in wanted)]
