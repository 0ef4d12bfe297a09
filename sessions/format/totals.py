"""Tables that are read as a whole: what is damaged of them is left out and reported, what is missing is noticed."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.sessions.errors import SessionDamaged, SessionError, damaged
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.format.rows import Row
from lockstep.sessions.format.schema import PROTECTED_SINCE

Total = tuple[int, int]  # the number of rows, the sum of their checksums


class Totals:
    """The tables of one session against their rows in `totals`. `problems` names what was wrong with any of them."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        archive.meter.register(self)
        self.problems: dict[str, None] = {}  # in the order in which they were found
        self._kept: dict[str, tuple[object, list[Row]]] = {}

    def forget(self) -> None:
        """Let go of the rows kept."""
        self._kept.clear()

    def rows(self, table: str, clause: str = "", *arguments: object, fewer: int = 0) -> list[Row]:
        """The sound rows of a table; `clause` leaves out `fewer` of them."""
        with self._archive.snapshot():
            good: list[Row]
            try:
                good, bad = self._archive.sift(table, clause, *arguments)
            except SessionDamaged as error:  # SQLite cannot read the table's pages
                good, bad = [], [error]
            self.expect(table, len(set(good)) + fewer, bad=bad)
        return good

    def look(self, *tables: str) -> None:
        """Find out what is wrong with tables that nobody may have asked for."""
        for table in tables:
            try:
                self.rows(table)
            except SessionError as error:  # more than may be read
                self.problems[str(error)] = None

    def kept(self, table: str) -> list[Row]:
        """The sound rows of a table, read again only when it has changed."""
        with self._archive.snapshot():
            try:
                stamp: object = self.of(table) or self._archive.state()
            except SessionDamaged:
                stamp = self._archive.state()
            if table not in self._kept or self._kept[table][0] != stamp:
                found = self.rows(table)
                self._kept[table] = stamp, found
                return found
            return self._kept[table][1]

    def expect(
        self, table: str, number: int, crcs: int | None = None, *, bad: Sequence[SessionDamaged] = ()
    ) -> None:
        """Note the `bad` rows of a table, and what is missing where it has that `number` of sound ones."""
        for error in bad:
            self.problems[str(error)] = None
        try:
            total = self.of(table)
        except SessionDamaged as error:
            self.problems[str(error)] = None
            return
        if total is None:
            return
        missing = total[0] - number - len(bad)
        if missing > 0:
            self._miss(table, f"{missing} of {total[0]} rows are missing")
        elif missing < 0 or crcs not in (None, total[1]):
            self._miss(table, "its rows are not those that were written")

    def _miss(self, table: str, what: str) -> None:
        self.problems[str(damaged(f"table {table!r}", what))] = None

    def of(self, table: str) -> Total | None:
        """The total of a table now; None: the file's version has none."""
        if self._archive.version < PROTECTED_SINCE:
            return None
        where = f"number of rows of {table!r}"
        found = self._archive.rows("totals", "WHERE name = ?", table, where=where)
        if len(found) != 1:
            raise damaged(where, "it is missing")
        return found[0][1], found[0][2]
