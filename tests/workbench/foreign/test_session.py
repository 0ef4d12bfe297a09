"""A foreign run becomes the same session however its rows were packed into passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.sessions import Session
from lockstep.workbench.foreign import survey
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignFacts, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.session import write_session
from lockstep.workbench.foreign.survey import SeenTap
from lockstep.workbench.views.sentinels import desync
from tests.workbench.diagnosis.synthetic import Case, tiny_case
from tests.workbench.foreign.packed import PackedRow, PackedRun, Rows, packed

pytestmark = pytest.mark.sampled_file(2)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("foreign"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def rows(case: Case) -> Rows:
    return Rows.of(case.floor)


def imported(run: PackedRun, path: Path) -> Session:
    path.unlink(missing_ok=True)
    write_session(run, path, form="test")
    return Session.open(path)


def content(session: Session) -> dict[str, Any]:
    """All that a session states of the run, passes apart."""
    steps = {}
    for step in session.steps():
        reported = session.step(step)
        steps[step] = (
            [
                (one.seq, tuple(one.ids), tuple(one.positions), one.emitted, tuple(one.topk_ids))
                for one in reported.sequences
            ],
            {
                (key.tap, key.rank, key.seq, key.slice, key.shape): session.tensor(
                    key.tap, step=step, rank=key.rank, seq=key.seq, slice=key.slice
                ).tobytes()  # type: ignore[union-attr]
                for key in session.captured(step)
            },
            session.stats(step).tobytes(),  # type: ignore[union-attr]
            session.checksums(step).tobytes(),  # type: ignore[union-attr]
        )
    return {"taps": session.taps, "sequences": session.meta.sequences, "steps": steps}


@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("stated", [True, False])
def test_every_tensor_is_that_of_the_reference(
    case: Case, rows: Rows, tmp_path: Path, tp: int, replicas: int, stated: bool
) -> None:
    run = packed(rows, rows.decoding(), tp=tp, kv_replicas=replicas, stated=stated)
    with imported(run, tmp_path / "a.session") as session:
        assert session.ranks == tp
        for step in case.floor.steps():
            for one in case.floor.step(step).sequences:
                for tap in rows.taps:
                    mine = session.rebuilt(tap, step=step, seq=one.seq)
                    right = case.floor.rebuilt(tap, step=step, seq=one.seq).array
                    assert right is not None
                    assert np.array_equal(mine.array, right), (tap, step)  # type: ignore[arg-type]
                    assert not mine.note
                here = next(x for x in session.step(step).sequences if x.seq == one.seq)
                assert here.topk_ids[0] == one.topk_ids[0]
                assert here.logsumexp == pytest.approx(one.logsumexp, rel=1e-5)
                assert here.entropy == pytest.approx(one.entropy, rel=1e-4)
        foreign = session.meta.foreign
        assert foreign is not None
        assert foreign.ranks == tuple(range(tp))
        assert bool(foreign.inferred) == (not stated and tp > 1)
        assert foreign.rows == sum(map(len, rows.ids))
        assert not foreign.dropped
        assert "layers.0.attn.probs" in session.meta.absent


def test_statistics_are_those_of_the_engine_recorder(case: Case, rows: Rows, tmp_path: Path) -> None:
    with imported(packed(rows, rows.decoding()), tmp_path / "a.session") as session:
        for step in case.floor.steps():
            mine, theirs = session.stats(step), case.floor.stats(step)
            assert mine is not None
            assert theirs is not None
            for tap in rows.taps:
                np.testing.assert_allclose(
                    mine[session.tap(tap).index, 0],
                    theirs[case.floor.tap(tap).index, 0],
                    rtol=2e-5,
                    atol=1e-7,
                )


@st.composite
def packings(draw: st.DrawFn, prompts: list[int], lengths: list[int]) -> list[list[PackedRow]]:
    """Passes in which each request reads its prompt in chunks of two or more, or one, and then a token at a time, with
    padding, rows computed twice, and requests that wait."""
    done = [0] * len(prompts)
    passes: list[list[PackedRow]] = []
    while any(at < end for at, end in zip(done, lengths, strict=True)):
        one: list[PackedRow] = []
        for seq in draw(st.permutations(range(len(prompts)))):
            if done[seq] >= lengths[seq] or (one and draw(st.booleans())):
                continue
            left = prompts[seq] - done[seq]
            size = 1 if left <= 1 else draw(st.integers(2, left))
            size = (
                left if left - size == 1 and not done[seq] else size
            )  # else it looks like a prompt of one less
            one += [(seq, done[seq] + i) for i in range(size)]
            done[seq] += size
        passes.append(one + [None] * draw(st.integers(0, 2)))
        if draw(st.integers(0, 5)) == 0:
            passes.append(one)
    return passes


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_packing_of_the_same_rows_gives_the_same_session(
    data: st.DataObject, rows: Rows, tmp_path: Path
) -> None:
    packing = data.draw(packings(rows.prompts, [len(one) for one in rows.ids]))
    first = {at[0]: i for i, one in reversed(list(enumerate(packing))) for at in reversed(one) if at}
    order = sorted(
        first, key=lambda seq: (first[seq], [at and at[0] for at in packing[first[seq]]].index(seq))
    )
    plain = packed(_reordered(rows, order), _reordered(rows, order).decoding(), tp=2)
    again = packed(rows, packing, tp=2, profiling=data.draw(st.integers(0, 1)))
    with imported(plain, tmp_path / "a.session") as a, imported(again, tmp_path / "b.session") as b:
        left, right = content(a), content(b)
        assert [part for part in left if left[part] != right[part]] == []
        foreign = b.meta.foreign
        assert foreign is not None
        total = sum(len(one.ids) for one in again.by_rank[0])
        assert foreign.rows + sum(foreign.dropped.values()) == total


def test_what_continues_a_request_does_so_by_its_place(rows: Rows, tmp_path: Path) -> None:
    """An engine that gives every token of decode position 0, as one that counts a call's tokens alone does."""
    run = packed(rows, rows.decoding())
    whole = imported(run, tmp_path / "a.session")
    run.by_rank[0] = [
        replace(one, positions=(0,) * len(one.ids) if one.index else one.positions, places=one.positions)
        for one in run.by_rank[0]
    ]
    assert content(imported(run, tmp_path / "b.session")) == content(whole)


def test_a_request_whose_positions_are_all_too_far_by_one_number_is_left_out(
    rows: Rows, tmp_path: Path
) -> None:
    """Its padding is counted: all is turned alike, and no row stands where it would be judged."""
    run = packed(rows, rows.decoding())
    run.by_rank[0] = [
        replace(
            one,
            places=one.positions,
            positions=tuple(
                at + 3 * (name == "request 1")
                for at, name in zip(one.positions, one.requests or (), strict=True)
            ),
        )
        for one in run.by_rank[0]
    ]
    session = imported(run, tmp_path / "a.session")
    assert [list(one.prompt_ids) for one in session.meta.sequences.values()] == [
        ids[:size] for seq, (ids, size) in enumerate(zip(rows.ids, rows.prompts, strict=True)) if seq != 1
    ]
    assert session.meta.foreign is not None
    assert session.meta.foreign.dropped == {
        "rows of requests that begin at another position than 0": len(rows.ids[1])
    }


def _reordered(rows: Rows, order: list[int]) -> Rows:
    """The rows with other numbers of the sequences."""
    return Rows(
        rows.model,
        [rows.prompts[seq] for seq in order],
        [rows.ids[seq] for seq in order],
        {tap: [of[seq] for seq in order] for tap, of in rows.taps.items()},
    )


def test_ranks_that_read_different_tokens_are_an_error_by_name(rows: Rows, tmp_path: Path) -> None:
    run = packed(rows, rows.decoding(), tp=2)
    other = packed(rows, list(reversed(rows.decoding())), tp=2)
    run.by_rank[1][1] = other.by_rank[1][0]
    with pytest.raises(ForeignDumpError, match="rank 1, pass 0: read other ids"):
        write_session(run, tmp_path / "a.session", form="test")


def test_a_rank_that_died_leaves_the_passes_that_all_have(rows: Rows, tmp_path: Path) -> None:
    run = packed(rows, rows.decoding(), tp=2)
    del run.by_rank[1][-1]
    with imported(run, tmp_path / "a.session") as session:
        assert session.meta.foreign is not None
        assert session.meta.foreign.cut == {0: 1}
        assert list(session.steps()) == [0, 1]


def test_a_rank_that_wrote_nothing_is_missing(rows: Rows, tmp_path: Path) -> None:
    run = packed(rows, rows.decoding(), tp=2)
    del run.by_rank[1]
    with imported(run, tmp_path / "a.session") as session:
        assert session.ranks == 2
        assert session.meta.foreign is not None
        assert session.meta.foreign.ranks == (0,)
        assert session.rebuilt("layers.0.attn.q_proj", step=0).missing_ranks == (1,)


def test_logits_that_one_rank_gathers_are_no_desync(rows: Rows, tmp_path: Path) -> None:
    run = packed(rows, rows.decoding(), tp=2, stated=False)
    run.by_rank[1] = [
        replace(one, tensors=[x for x in one.tensors if x.tap != "logits"]) for one in run.by_rank[1]
    ]
    with imported(run, tmp_path / "a.session") as session:
        assert session.tap("logits").layout == "replicate"
        for step in session.steps():
            assert desync(session, session.checksums(step)) is None
            assert session.step(step).sequences[0].topk_ids
        assert np.isnan(session.stats(0)[session.tap("logits").index, 1]).all()  # type: ignore[index]


def test_ranks_that_disagree_on_what_all_hold_are_a_desync(rows: Rows, tmp_path: Path) -> None:
    """A sum that was never reduced: shown by the usual layout of that tap, though no dump stated it."""
    run = packed(rows, rows.decoding(), tp=2, stated=False)
    wrong = "layers.0.mlp.down"
    run.by_rank[1] = [
        replace(one, tensors=[replace(x, array=x.array + 1) if x.tap == wrong else x for x in one.tensors])  # type: ignore[operator]
        for one in run.by_rank[1]
    ]
    with imported(run, tmp_path / "a.session") as session:
        found = desync(session, session.checksums(0))
        assert found is not None
        assert found.words == f"{wrong}: rank 1 differs bit for bit"


def test_layouts_of_an_engines_own_taps_follow_from_their_numbers(rows: Rows, tmp_path: Path) -> None:
    """Bit-equal: a replica. Parts that add up to what follows: a sum. Else shards of the last axis."""
    run = packed(rows, rows.decoding(), tp=2, stated=False)
    for rank, passes in run.by_rank.items():
        for i, one in enumerate(passes):
            embed = next(x for x in one.tensors if x.tap == "embed")
            assert embed.array is not None
            share = embed.array * np.float32(0.25 if rank == 0 else 0.75)
            own = [
                replace(embed, tap="engine.same"), replace(embed, tap="engine.sum", array=share),
                replace(embed, tap="engine.part", array=embed.array[:, rank * 32 : rank * 32 + 32].copy()),
                replace(embed, tap="engine.part", array=embed.array[:, rank * 32 : rank * 32 + 32].copy()),
            ]  # fmt: skip
            passes[i] = replace(one, tensors=[*own, *one.tensors])
    with imported(run, tmp_path / "a.session") as session:
        found = {tap.name: tap.layout for tap in session.taps if tap.name.startswith("engine")}
        assert found == {
            "engine.same": "replicate", "engine.sum": "partial", "engine.part": "shard(1)", "engine.part#2": "shard(1)",
        }  # fmt: skip
        whole = session.rebuilt("engine.part", step=0).array
        assert np.array_equal(whole, session.rebuilt("embed", step=0).array)  # type: ignore[arg-type]
        assert session.meta.foreign is not None
        assert session.meta.foreign.inferred["engine.sum"] == "partial"


@pytest.mark.parametrize(
    "array", [np.zeros((0, 4), np.float32), np.float32(1) * np.ones(()), np.zeros((3, 5), np.float32)]
)
def test_a_tensor_whose_rows_cannot_be_reported_is_left_out_by_name(
    rows: Rows, tmp_path: Path, array: Any
) -> None:
    run = packed(rows, rows.decoding())
    run.by_rank[0] = [
        replace(one, tensors=[*one.tensors, ForeignTensor("odd.tap", "", "float32", array)])
        for one in run.by_rank[0]
    ]
    with imported(run, tmp_path / "a.session") as session:
        assert session.meta.foreign is not None
        assert [one.partition(": ")[0] for one in session.meta.foreign.lost] == ["odd.tap"]
        assert session.tensor("odd.tap", step=0, rank=0) is None


def test_rows_of_different_widths_make_no_tensor(rows: Rows, tmp_path: Path) -> None:
    """Two chunks of one prompt."""
    halves: list[list[PackedRow]] = [[(0, p) for p in range(6)], [(0, p) for p in range(6, rows.prompts[0])]]
    run = packed(rows, halves)
    for i, one in enumerate(run.by_rank[0]):
        odd = ForeignTensor("layers.0.odd", "", "float32", np.ones((6, 4 + i), np.float32))
        run.by_rank[0][i] = replace(one, tensors=[*one.tensors, odd])
    with pytest.raises(ForeignDumpError, match=r"layers.0.odd has rows of float32\[5\], and of float32\[4\]"):
        write_session(run, tmp_path / "a.session", form="test")


def test_more_taps_on_more_ranks_than_a_session_holds_are_refused(rows: Rows, tmp_path: Path) -> None:
    run = packed(rows, rows.decoding()[:1])
    one = run.by_rank[0][0]
    array = np.ones((len(one.ids), 1), np.float32)
    run.by_rank[0] = [
        replace(one, tensors=[ForeignTensor(f"t{i}", "", "float32", array) for i in range(1100)])
    ]
    run.facts = replace(run.facts, ranks=1000)
    with pytest.raises(ForeignDumpError, match="1100 taps on 1000 ranks"):
        write_session(run, tmp_path / "a.session", form="test")
    assert not (tmp_path / "a.session").exists()


def test_many_taps_take_time_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tap something is asked a few times, however many there are; new ones are put in their place together."""
    asked = [0]

    class Asked(SeenTap):
        @property
        def summed(self) -> bool:
            asked[0] += 1
            return False

        @summed.setter
        def summed(self, value: bool) -> None:
            pass

    def passed(index: int, names: list[str]) -> ForeignPass:
        tensors = [ForeignTensor(name, "replicate", "float32", np.ones((1, 2), np.float32)) for name in names]
        return ForeignPass(0, index, (index,), (index,), ("r",), tensors)

    monkeypatch.setattr(survey, "SeenTap", Asked)
    names = [f"module.{i}" for i in range(600)]
    run = PackedRun(tmp_path, ForeignFacts(source="test", ranks=1))
    run.by_rank[0] = [passed(0, names[::2]), passed(1, names)]
    write_session(run, tmp_path / "a.session", form="test")
    assert 0 < asked[0] < 10 * len(names)
    with Session.open(tmp_path / "a.session") as session:
        assert [tap.name for tap in session.taps] == names
        assert session.tensor("module.599", step=1, rank=0) is not None
