"""Where the rows of an engine's cache lie, from its tape to a session and to what that reports on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.sessions import Session
from lockstep.sessions.meta import CacheMeta, ModelMeta, is_companion
from lockstep.workbench.attach.inside.lockstep_tap import Tape
from lockstep.workbench.foreign.passes import ForeignDumpError
from lockstep.workbench.foreign.readers.lockstep import LockstepDump
from lockstep.workbench.foreign.session import write_session
from lockstep.workbench.views.provenance.accesses import CachedRow, CachePass
from lockstep.workbench.views.provenance.findings import cache_audit, cache_passes
from lockstep.workbench.views.provenance.ledger import Misuse
from tests.workbench.views.provenance.paged import Change, PagedEngine, as_recorded, with_reads

SIZE = 4


def run(change: Change = lambda one: one) -> PagedEngine:
    """Two requests in one batch, the second of which goes on alone."""
    made = PagedEngine(SIZE, list(range(1, 20)), change)
    made.begin(0, list(range(10, 16)))
    made.begin(1, list(range(20, 25)))
    made.run({0: 6, 1: 5})
    made.end(0)
    for token in (30, 31):
        made.requests[1].tokens.append(token)
        made.run({1: 1})
    return made


def recorded(folder: Path, passes: list[CachePass], ranks: int = 1) -> LockstepDump:
    """What the tapes of `ranks` write of passes."""
    for rank in range(ranks):
        tape = Tape(folder / "dump", rank, ranks)
        for one in passes:
            names = [f"request {row.request}" if row.request >= 0 else "" for row in one.rows]
            tape.step([row.token for row in one.rows], [row.position for row in one.rows], names)
            tape.cache(as_recorded(one, SIZE))
            tape.tap("embed", torch.tensor([[float(row.token)] for row in one.rows]), "replicate")
        tape.close()
    return LockstepDump.open(folder / "dump")


def imported(folder: Path, passes: list[CachePass], ranks: int = 1) -> Session:
    write_session(recorded(folder, passes, ranks), folder / "run.session", form="lockstep")
    return Session.open(folder / "run.session")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_session_has_every_pass_of_the_cache(tmp_path: Path, ranks: int) -> None:
    made = run()
    with imported(tmp_path, made.passes, ranks) as session:
        assert session.meta.foreign is not None
        assert session.meta.foreign.caches == (CacheMeta(layers=(0, 1), block_size=SIZE),)
        for rank in range(ranks):
            assert list(cache_passes(session, rank)) == made.passes
        report = cache_audit(session)
        assert report is not None
        assert (report.findings, report.rows, report.passes, report.lacking) == ((), 13, 3, "")
        assert [tap.name for tap in session.taps if not is_companion(tap.name)] == ["embed"]


def test_steps_have_the_blocks_and_lengths_of_the_cache(tmp_path: Path) -> None:
    made = run()
    model = ModelMeta(num_layers=2)
    write_session(
        recorded(tmp_path, made.passes, ranks=2), tmp_path / "run.session", form="lockstep", model=model
    )
    with Session.open(tmp_path / "run.session") as session:
        assert session.meta.config.block_size == SIZE
        for step, rows in ((0, 5), (1, 6), (2, 7)):
            (reported,) = (one for one in session.step(step).sequences if one.seq == 1)
            assert list(reported.block_table) == made.requests[1].blocks[: -(-rows // SIZE)]
            assert [list(one) for one in reported.kv_lens] == [[rows, rows], [rows, rows]]


def test_another_requests_block_is_found_in_the_session(tmp_path: Path) -> None:
    taken = run().passes[0].reads[0][0].blocks[0]

    def other(one: CachePass) -> CachePass:
        if one.number == 0:
            return one
        return with_reads(one, lambda read: replace(read, blocks=(taken, *read.blocks[1:])))

    with imported(tmp_path, run(other).passes, ranks=2) as session:
        report = cache_audit(session)
        assert report is not None
        (found,) = report.findings
    assert (found.kind, found.requests, found.passes) == (Misuse.FOREIGN, (1,), (1, 2))
    assert (found.ranks, found.layers) == ((0, 1), (0, 1))
    assert found.in_words() == (
        "sequence 1 reads block 1 (positions 0–3), which sequence 0 wrote (its positions 0–3, pass 0): another "
        "request's block; its own rows begin in block 3"
    )


def test_positions_one_too_far_in_decode_leave_a_request_whole(tmp_path: Path) -> None:
    """The scheduler counts what a request has by itself; that the model is given other positions is for diagnosis."""
    passes = [
        replace(one, rows=tuple(replace(row, position=row.position + (one.number > 0)) for row in one.rows))
        for one in run().passes
    ]
    with imported(tmp_path, passes) as session:
        assert session.meta.foreign is not None
        assert not session.meta.foreign.dropped
        reported = [one for step in session.steps() for one in session.step(step).sequences if one.seq == 1]
        assert [(list(one.ids), list(one.positions)) for one in reported] == [
            (list(range(20, 25)), [0, 1, 2, 3, 4]), ([30], [5]), ([31], [6]),
        ]  # fmt: skip


def test_padding_has_slots_too(tmp_path: Path) -> None:
    first = run().passes[0].rows[-1].slots
    passes = run(lambda one: replace(one, rows=(*one.rows, CachedRow(-1, 0, 0, 0, first)))).passes
    with imported(tmp_path, passes) as session:
        report = cache_audit(session)
        assert report is not None
        assert {one.kind for one in report.findings} == {Misuse.PADDING}


def test_a_recording_without_them_reports_nothing(tmp_path: Path) -> None:
    tape = Tape(tmp_path / "dump")
    tape.step([1], [0], "a")
    tape.cache(None)
    tape.tap("embed", torch.ones(1, 1), "replicate")
    tape.close()
    write_session(LockstepDump.open(tmp_path / "dump"), tmp_path / "run.session", form="lockstep")
    with Session.open(tmp_path / "run.session") as session:
        assert cache_audit(session) is None
        assert not session.meta.foreign.caches  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": [1]}, "1 and 0 slots for 11 rows of 11"),
        ({"blocks": [[1]]}, "1 block tables for 2 requests"),
        ({"block_size": 0}, "not what lockstep_tap writes"),
        ({"slots": [-5] * 11}, "not what lockstep_tap writes"),
    ],
)
def test_a_damaged_line_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    dump = recorded(tmp_path, run().passes)
    log = dump.folder / "rank0" / "passes.jsonl"
    first, *rest = log.read_text().splitlines()
    line = json.loads(first)
    line["cache"]["groups"][0] |= change
    log.write_text("\n".join([json.dumps(line), *rest, ""]))
    with pytest.raises(ForeignDumpError, match=words):
        list(LockstepDump.open(dump.folder).passes(0))
