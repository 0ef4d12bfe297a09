"""The mark of a session whose writer has not closed it: `recording` in its meta table.

It distinguishes a session that was closed from one whose writer was killed just after the log had been moved into the
file. Files that an earlier Lockstep wrote have none.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from lockstep.sessions.format import rows
from lockstep.sessions.format.json_text import json_text

RECORDING: Final = "recording"
_SET: Final = json_text(True)


def marked() -> rows.Row:
    """The mark as a row."""
    return RECORDING, _SET


def write(db: sqlite3.Connection) -> None:
    """Put the mark, inside a transaction."""
    rows.insert(db, "meta", [marked()], replace=True)


def clear(db: sqlite3.Connection) -> None:
    """Take the mark back where it is, in a transaction of its own. sqlite3.Error, `SessionDamaged`."""
    if db.execute("SELECT count(*) FROM meta WHERE key = ? AND value = ?", marked()).fetchone() == (0,):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        rows.insert(db, "meta", [(RECORDING, json_text(False))], replace=True)
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
