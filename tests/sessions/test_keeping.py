"""Tensors that are read again and again are decoded once, within a bound of bytes."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError
from lockstep.sessions.format import captures, codec
from lockstep.sessions.format.archive import Archive
from lockstep.sessions.keeping import keeping
from lockstep.sessions.limits import ReadLimits
from lockstep.sessions.recently_used import RecentlyUsed
from lockstep.sessions.records import TensorRecord
from tests.sessions.samples import create, record, tamper, write

STEPS = 6


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each content is decoded."""
    counts: Counter[bytes] = Counter()
    decode = codec.decode

    def counting(data: bytes, *args: object) -> object:
        counts[data] += 1
        return decode(data, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(codec, "decode", counting)
    return counts


def read_all(session: Session) -> list[np.ndarray]:
    """Every tensor of every step, tap by tap: by rank, and whole."""
    found = []
    for tap in session.taps:
        for step in session.steps():
            found += [session.tensor(tap.name, step=step, rank=rank) for rank in range(session.ranks)]
            found.append(session.rebuilt(tap.name, step=step).array)
    return [array for array in found if array is not None]


def test_each_tensor_is_decoded_once(tmp_path: Path, decoded: Counter[bytes]) -> None:
    with Session.open(write(tmp_path / "a.session", STEPS)) as session:
        right = read_all(session)
        assert max(decoded.values()) > 1
        decoded.clear()
        with keeping(session, None):
            for _ in range(3):
                for array, expected in zip(read_all(session), right, strict=True):
                    np.testing.assert_array_equal(array, expected)
        assert set(decoded.values()) == {1}
        decoded.clear()
        read_all(session)  # it is over: each is decoded anew
        assert min(decoded.values()) > 1


@pytest.mark.parametrize("few", [True, False])
def test_a_small_steps_contents_are_read_by_one_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Those of a large step one at a time: most of them may not be asked for."""
    asked: list[str] = []
    query = Archive.query

    def counting(archive: Archive, sql: str, *arguments: object, what: str = "") -> object:
        asked.extend(["content"] * sql.startswith("SELECT data"))
        return query(archive, sql, *arguments, what=what)

    monkeypatch.setattr(Archive, "query", counting)
    if not few:
        monkeypatch.setattr(captures, "_CONTENT_BYTES", 1)
    with create(tmp_path / "a.session") as writer:
        for step in range(STEPS):
            parts = [
                TensorRecord(tap, rank, 0, np.full((2, 3), step + rank / 2, np.float32), "float32")
                for tap in ("embed", "layers.0.attn.q_proj")
                for rank in range(2)
            ]
            writer.step(0, replace(record(step), tensors=parts))
    with Session.open(tmp_path / "a.session") as session:
        right = read_all(session)
        asked.clear()
        with keeping(session):
            for array, expected in zip(read_all(session), right, strict=True):
                np.testing.assert_array_equal(array, expected)
    assert len(asked) == STEPS * (1 if few else 2)  # both taps hold the same


def test_each_step_is_decoded_once(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", STEPS)) as session:
        right = session.step(1)
        with keeping(session):
            kept = session.step(1)
            assert kept == right
            assert session.step(1) is kept
            assert session.step(2) is not kept
        assert session.step(1) is not kept


def test_what_is_kept_has_a_bound(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", STEPS)) as session:
        before = session.meter.used
        largest = max(array.nbytes for array in read_all(session))
        with keeping(session, nbytes=largest + 1):
            read_all(session)
            contents = session._kept._contents
            assert contents is not None
            assert 0 < contents.nbytes <= largest + 1
            session._kept.forget()
            assert contents.nbytes == 0
            read_all(session)
        del contents
        session._kept.forget()
        gc.collect()
        assert session.meter.used == before


def test_what_is_kept_goes_where_room_is_needed(tmp_path: Path) -> None:
    """A session that may take little memory is read within it."""
    with (
        Session.open(write(tmp_path / "a.session", 60), ReadLimits(memory=64 << 10)) as session,
        keeping(session),
    ):
        read_all(session)
        assert session.meter.used <= 64 << 10


def test_nobody_changes_what_others_read(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", 1)) as session, keeping(session):
        array = session.tensor("embed", step=0, rank=0)
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_equal_replicas_are_one_array(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", 1)) as session, keeping(session):
        one, other = (session.tensor("embed", step=0, rank=rank) for rank in (0, 1))
        assert one is other
        assert session.rebuilt("embed", step=0).array is one


def test_a_damaged_tensor_is_reported_of(tmp_path: Path) -> None:
    path = tamper(write(tmp_path / "a.session", 1), "UPDATE blobs SET data = x'00'")
    with Session.open(path) as session, keeping(session):
        for _ in range(2):
            with pytest.raises(SessionError):
                session.tensor("embed", step=0, rank=0)


def test_a_session_that_grew_is_read_anew_outside(tmp_path: Path) -> None:
    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0))
        with Session.open(tmp_path / "a.session") as session:
            assert session.tensor("embed", step=0, rank=0) is not None
            with keeping(session):
                session.tensor("embed", step=0, rank=0)
            writer.step(0, record(1))
            session.refresh()
            assert session.tensor("embed", step=1, rank=0) is not None


def test_the_least_recently_used_goes_first() -> None:
    kept = RecentlyUsed[str](10)
    kept.put("a", "A", 4)
    kept.put("b", "B", 4)
    assert kept.get("a") == "A"
    kept.put("c", "C", 4)
    assert (kept.get("a"), kept.get("b"), kept.get("c"), kept.nbytes) == ("A", None, "C", 8)
    kept.put("a", "AA", 6)
    assert (kept.get("a"), kept.get("c"), kept.nbytes) == ("AA", "C", 10)
    kept.put("d", "D", 20)  # the newest is kept, however large
    assert (kept.get("d"), kept.get("a"), kept.nbytes) == ("D", None, 20)
    kept.clear()
    assert (kept.get("d"), kept.nbytes) == (None, 0)
