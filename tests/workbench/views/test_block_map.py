"""The pool's blocks from block tables, hostile ones included."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap
from lockstep.workbench.views.block_map import pool_of
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where


@pytest.mark.parametrize(
    ("tables", "listed", "beyond"),
    [
        ([[0, 1, 2], [0, 1, 4]], [0, 1, 2, 3, 4], 5),
        ([[2**31 - 1, 3], [7]], [3, 7, 2**31 - 1], 0),  # never one by one up to there
    ],
)
def test_blocks_of_a_pool(tmp_path: Path, tables: list[list[int]], listed: list[int], beyond: int) -> None:
    path = tmp_path / "a.session"
    with SessionWriter.create(
        path, taps=[Tap(0, "embed", "replicate")], ranks=1, meta=SessionMeta()
    ) as writer:
        for step, table in enumerate(tables):
            reported = SequenceStep(0, [7], [step], [[step + 1]], block_table=table)
            writer.step(0, StepRecord(step, "decode", [reported], 0.1))
    with Session.open(path) as session:
        source = SessionSource(session, TokenTexts({}))
        pool = pool_of(source, Where(step=1), session.step(1).sequences, 10, 16)
        assert [block.number for block in pool.blocks] == listed
        assert [block.number for block in pool.blocks if block.owners] == tables[1]
        assert [block.number for block in pool.blocks if block.freed] == sorted({*tables[0]} - {*tables[1]})
        assert pool.beyond == beyond
