"""Records -> file -> the same records, bit for bit; the shape that the file is left in."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.sessions import (
    STATISTICS,
    Session,
    SessionError,
    SessionWriter,
    StepRecord,
    Tap,
    TensorRecord,
    VerdictRecord,
)
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.verify import verify
from tests.sessions.samples import TAPS, create, record, sequence, write
from tests.sessions.strategies import histories

pytestmark = pytest.mark.sampled_file(2)


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Equal bits, or both absent."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(history=histories())
def test_what_was_recorded_is_read_back(history: list[StepRecord]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.session")
        with create(path) as writer:
            for step in history:
                writer.step(0, step)
        assert verify(path) == []
        with Session.open(path) as session:
            assert list(session.steps()) == [step.step for step in history]
            for written in history:
                check_step(session, written)


def check_step(session: Session, written: StepRecord) -> None:
    bare = dataclasses.replace(
        written,
        stats=None,
        checksums=None,
        tensors=(),
        sequences=tuple(sorted(written.sequences, key=lambda s: s.seq)),
    )
    assert repr(session.step(written.step)) == repr(bare)  # repr, because NaN differs from itself
    assert same(session.stats(written.step), written.stats)
    assert same(session.checksums(written.step), written.checksums)
    assert len(session.captured(written.step)) == len(written.tensors)
    for tensor in written.tensors:
        where = {"step": written.step, "rank": tensor.rank, "seq": tensor.seq, "slice": tensor.slice}
        read = session.capture(tensor.tap, **where)
        assert read is not None
        assert read.dtype == tensor.dtype
        assert same(read.array, tensor.array)


@given(
    data=st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    text=st.text(),
)
@settings(deadline=None, max_examples=30)
def test_events_and_verdicts(data: dict, text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.session")
        with create(path, rules={"mask": "additive"}) as writer:
            first = writer.event(0, 0, "command", text, data)
            second = writer.event(0, 3, "stop", "nan")
            writer.verdicts([VerdictRecord(0, 1, "embed", "pass", data), VerdictRecord(0, 0, text, "fail")])
            writer.verdicts([VerdictRecord(0, 1, "embed", "fail")])
        with Session.open(path) as session:
            assert session.branches()[0].rules == {"mask": "additive"}
            events = session.events()
            assert [(e.id, e.step, e.kind, e.text, e.data) for e in events] == [
                (first, 0, "command", text, data),
                (second, 3, "stop", "nan", None),
            ]
            assert session.events(after=first) == events[1:] == session.events(kind="stop")
            assert session.verdicts(tap="embed") == [VerdictRecord(0, 1, "embed", "fail")]
            assert session.verdicts(step=0) == [VerdictRecord(0, 0, text, "fail")]


@pytest.mark.parametrize("steps", [CHUNK_STEPS - 1, CHUNK_STEPS, 3 * CHUNK_STEPS + 5])
def test_statistics_survive_being_packed_into_columns(tmp_path: Path, steps: int) -> None:
    path = write(tmp_path / "a.session", steps, tensors=False)
    with Session.open(path) as session:
        history = [record(step) for step in range(steps)]
        for step in reversed(history):
            assert same(session.stats(step.step), step.stats)
            assert same(session.checksums(step.step), step.checksums)
        for tap in TAPS:
            for column, stat in enumerate(STATISTICS):
                at, values = session.series(tap.name, stat, 1)
                assert at.tolist() == list(range(steps))
                assert same(values, np.array([h.stats[tap.index, 1, column] for h in history], np.float32))
        at, values = session.series("embed", "rms", 0, start=7, stop=steps - 3)
        assert at.tolist() == list(range(7, steps - 3))
        assert values[0] == history[7].stats[0, 0, STATISTICS.index("rms")]
    assert verify(path) == []


def test_a_series_leaves_out_steps_without_statistics(tmp_path: Path) -> None:
    steps = 3 * CHUNK_STEPS
    with create(tmp_path / "a.session") as writer:
        for step in range(steps):
            writer.step(0, record(step, arrays=step % 3 != 1, tensors=False))
    with Session.open(tmp_path / "a.session") as session:
        at, values = session.series("embed", "max", 0)
        assert at.tolist() == [step for step in range(steps) if step % 3 != 1]
        column = STATISTICS.index("max")
        assert values.tolist() == [record(int(step)).stats[0, 0, column] for step in at]
        assert session.stats(4) is None
        assert same(session.stats(5), record(5).stats)
    assert verify(tmp_path / "a.session") == []


def test_branches_share_the_steps_before_their_fork(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with create(path) as writer:
        for step in range(100):
            writer.step(0, record(step))
        child = writer.branch("fixed", parent=0, fork_step=70, rules={"mask": "correct"})
        for step in range(70, 75):
            writer.step(child, record(1000 + step).__class__(**{**fields(record(1000 + step)), "step": step}))
        grandchild = writer.branch("again", parent=child, fork_step=30)
        empty = writer.branch("here", parent=child, fork_step=75)
        alone = writer.branch("from the start")
        writer.step(alone, record(0))
        with pytest.raises(ValueError, match="fork"):
            writer.branch("too late", parent=child, fork_step=76)
        with pytest.raises(ValueError, match="goes on with step 30"):
            writer.step(grandchild, record(31))
        writer.step(grandchild, record(30))
    with Session.open(path) as session:
        assert [b.name for b in session.branches()] == ["main", "fixed", "again", "here", "from the start"]
        assert session.branches()[1].rules == {"mask": "correct"}
        spans = {b.id: session.steps(b.id) for b in session.branches()}
        assert spans == {
            0: range(100),
            child: range(75),
            grandchild: range(31),
            empty: range(75),
            alone: range(1),
        }
        assert same(session.stats(69, child), record(69).stats)
        assert same(session.stats(70, child), record(1070).stats)
        assert same(session.stats(72, empty), record(1072).stats)
        assert session.tensor("embed", step=71, rank=0, branch=child)[0, 0] == 1071
        at, values = session.series("embed", "min", 0, branch=child)
        assert at.tolist() == list(range(75))
        expected = [record(s if s < 70 else 1000 + s).stats[0, 0, 0] for s in range(75)]
        assert values.tolist() == expected
        with pytest.raises(SessionError, match="has no step 75"):
            session.step(75, child)
        with pytest.raises(SessionError, match="no branch 9"):
            session.steps(9)
    assert verify(path) == []


def fields(step: StepRecord) -> dict:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}


def test_bfloat16_is_kept_exactly_and_widened_on_demand(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0, tensors=False))
        writer.tensors(0, 0, [TensorRecord("embed", 0, 0, bits, "bfloat16")])
    with Session.open(tmp_path / "a.session") as session:
        exact = session.capture("embed", step=0, rank=0)
        assert (exact.dtype, exact.array.dtype) == ("bfloat16", np.uint16)
        assert np.array_equal(exact.array, bits)
        wide = session.tensor("embed", step=0, rank=0)
        assert wide.dtype == np.float32
        torch = pytest.importorskip("torch")
        expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
        assert wide.tobytes() == expected.tobytes()


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=100_000)
    with create(tmp_path / "a.session") as writer:
        for step in range(20):
            tensors = [TensorRecord("embed", rank, 0, noise, "float64") for rank in range(2)]
            writer.step(0, dataclasses.replace(record(step), tensors=tensors))
    assert (tmp_path / "a.session").stat().st_size < 2 * noise.nbytes


def test_whole_and_part_of_a_tensor_stand_side_by_side(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0, tensors=False))
        writer.tensors(0, 0, [TensorRecord("embed", 0, 0, whole[-1:], "float32", "-1:")], dropped=["a", "b"])
        assert_part(tmp_path / "a.session", None, whole[-1:])
        writer.tensors(0, 0, [TensorRecord("embed", 0, 0, whole, "float32")])
        assert_part(tmp_path / "a.session", None, whole)
        assert_part(tmp_path / "a.session", "-1:", whole[-1:])
        with pytest.raises(ValueError, match="no step 1"):
            writer.tensors(0, 1, [])
    with Session.open(tmp_path / "a.session") as session:
        assert session.step(0).dropped == ("a", "b")
        assert session.tensor("embed", step=0, rank=1) is None
        assert session.captured_taps() == {"embed"}
        assert session.rebuilt("embed", step=0).missing_ranks == (1,)


def assert_part(path: Path, part: str | None, expected: np.ndarray) -> None:
    with Session.open(path) as session:
        assert np.array_equal(session.tensor("embed", step=0, rank=0, slice=part), expected)


def test_reopened_sessions_go_on_where_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    for start in range(0, 150, 30):  # chunks are completed across writers
        with SessionWriter.reopen(path) if start else create(path) as writer:
            assert writer.next_step(0) == start
            for step in range(start, start + 30):
                writer.step(0, record(step))
    with Session.open(path) as session:
        assert all(same(session.stats(step), record(step).stats) for step in session.steps())
    assert verify(path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


def test_an_existing_file_is_only_overwritten_on_demand(tmp_path: Path) -> None:
    path = write(tmp_path / "a.session", 3)
    with pytest.raises(FileExistsError, match=r"a\.session"):
        create(path)
    with Session.open(path) as old:
        SessionWriter.create(path, taps=TAPS, ranks=1, meta=SessionMeta(), overwrite=True).close()
        assert old.refresh()
        assert (old.ranks, len(old.steps())) == (1, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["a.session"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2}, "goes on with step 1"),
        ({"stats": np.zeros((3, 2, 7), np.float32)}, "statistics of step 1"),
        ({"stats": np.zeros((3, 2, 8))}, "float64"),
        ({"checksums": np.zeros((3, 1), np.uint64)}, "checksums of step 1"),
        ({"tensors": [TensorRecord("nope", 0, 0, np.zeros(1, np.float32), "float32")]}, "no tap 'nope'"),
        ({"tensors": [TensorRecord("embed", 2, 0, np.zeros(1, np.float32), "float32")]}, "rank 2"),
        ({"tensors": [TensorRecord("embed", 0, 0, np.zeros(1), "float32")]}, "numpy float32, not float64"),
        ({"tensors": [TensorRecord("embed", 0, 0, np.zeros(1), "object")]}, "cannot hold dtype 'object'"),
    ],
)
def test_a_record_that_contradicts_the_session_is_refused_whole(
    tmp_path: Path, change: dict, message: str
) -> None:
    with create(tmp_path / "a.session") as writer:
        writer.step(0, record(0))
        with pytest.raises(ValueError, match=message):
            writer.step(0, dataclasses.replace(record(1), **change))
        writer.step(0, record(1))
    assert verify(tmp_path / "a.session") == []


def test_two_sequences_of_one_number_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "a.session") as writer:
        twice = dataclasses.replace(record(0), sequences=[sequence(0), sequence(0)])
        with pytest.raises(ValueError, match="two records of one sequence"):
            writer.step(0, twice)
        writer.step(0, record(0))


@pytest.mark.parametrize(
    ("taps", "ranks"),
    [((Tap(1, "a", "replicate"),), 1), ((Tap(0, "a", "partial"), Tap(1, "a", "partial")), 1), (TAPS, 0)],
)
def test_impossible_sessions_are_not_created(tmp_path: Path, taps: tuple[Tap, ...], ranks: int) -> None:
    with pytest.raises(ValueError, match=r"tap|rank"):
        create(tmp_path / "a.session", taps, ranks)
    with pytest.raises(ValueError, match="no layout"):
        create(tmp_path / "a.session", (Tap(0, "a", "sideways"),))
    assert list(tmp_path.iterdir()) == []


def test_questions_that_a_session_cannot_answer(tmp_path: Path) -> None:
    with Session.open(write(tmp_path / "a.session", 2)) as session:
        for ask, message in (
            (lambda: session.series("nope", "rms", 0), "no tap 'nope'"),
            (lambda: session.series("embed", "mode", 0), "no statistic 'mode'"),
            (lambda: session.series("embed", "rms", 2), "ranks 0 to 1"),
            (lambda: session.stats(2), "steps 0 to 1"),
        ):
            with pytest.raises(SessionError, match=message):
                ask()
        assert session.tensor("layers.0.attn.q_proj", step=0, rank=0) is None
    with pytest.raises(SessionError, match="closed"):
        session.step(0)


def test_reading_and_writing_import_nothing_heavy(tmp_path: Path) -> None:
    others = ("torch", "textual", "lockstep.engine", "lockstep.workbench")
    code = f"import sys, lockstep.sessions; print(sorted(set({others}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shared_step_is_its_ancestors(tmp_path: Path) -> None:
    with create(tmp_path / "a.session") as writer:
        for step in range(3):
            writer.step(0, record(step))
        child = writer.branch("child", parent=0, fork_step=2)
        writer.step(child, record(2))
        writer.step(child, record(3))
        grandchild = writer.branch("grandchild", parent=child, fork_step=3)
    with Session.open(tmp_path / "a.session") as session:
        assert [session.owner(step, child) for step in range(4)] == [0, 0, child, child]
        assert [session.owner(step, grandchild) for step in range(3)] == [0, 0, child]
        assert [session.own_steps(b) for b in (0, child, grandchild)] == [range(3), range(2, 4), range(3, 3)]
        with pytest.raises(SessionError, match="has no step 3"):
            session.owner(3, grandchild)
        with pytest.raises(SessionError, match="no branch 9"):
            session.own_steps(9)
