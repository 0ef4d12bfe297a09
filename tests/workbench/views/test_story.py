"""The story: what went wrong is found where it was put, and nothing is found where nothing was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.engine.errors import RequestError
from lockstep.engine.faults.catalogue import FAULTS
from lockstep.sessions import STATISTICS, Session, SessionError
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.request import Limits, Request
from lockstep.workbench.views.series import history
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.story import Story, story_of
from lockstep.workbench.views.where import Where
from tests.sessions.samples import tamper
from tests.workbench.export import made


def _story(path: Path, request: Request | None = None) -> Story:
    with Session.open(path) as session:
        return story_of(session, request or Request(), FAULTS)


def _fired(story: Story) -> dict[str, tuple[int, int | None, str]]:
    return {one.name: (one.branch, one.step, one.what) for one in story.sentinels if one.step is not None}


def test_a_healthy_session_fires_nothing(tmp_path: Path) -> None:
    story = _story(made.build(tmp_path / "a.session"))
    assert _fired(story) == {}
    assert {one.name for one in story.sentinels} == {
        "NaN", "Inf", "rank desync", "KV length ≠ position", "repetition",
    }  # fmt: skip
    assert (story.step, story.branch.id, story.cut, story.identity.faults) == (4, 0, (), ())


@pytest.mark.parametrize(("statistic", "name"), [("nan", "NaN"), ("inf", "Inf")])
@pytest.mark.parametrize("scan", [10**6, 1])
def test_what_is_not_finite_is_found_whichever_way_is_looked(
    tmp_path: Path, statistic: str, name: str, scan: int
) -> None:
    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        if step >= 3:
            stats[2:, 1, STATISTICS.index(statistic)] = 9

    path = made.build(tmp_path / "a.session", change=change)
    story = _story(path, Request(limits=Limits(scan=scan)))
    assert _fired(story)[name] == (0, 3, "layers.0.attn.probs (rank 1: 9)")
    assert story.step == 3


def test_replicas_that_differ_are_found_and_shards_may(tmp_path: Path) -> None:
    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        sums[1, 1] = 99  # a shard: its ranks hold different parts
        if step >= 2:
            sums[3, 1] = 1

    fired = _fired(_story(made.build(tmp_path / "a.session", change=change)))
    assert fired == {"rank desync": (0, 2, "layers.0.mlp_residual: rank 1 differs bit for bit")}


def test_cache_lengths_are_held_against_positions(tmp_path: Path) -> None:
    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        if step == 4:
            sequence["kv_lens"] = [[7, 7], [7, 6]]

    fired = _fired(_story(made.build(tmp_path / "a.session", change=change)))
    assert fired["KV length ≠ position"][:2] == (0, 4)
    words = "sequence 0 has 6 rows in layer 1 on rank 1, its positions ask for 7"
    assert fired["KV length ≠ position"][2] == words


def test_a_branch_is_looked_at_where_it_left_its_parent(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session", tokens=range(10, 24), other=[40] * 12)
    story = _story(path)
    assert _fired(story) == {"repetition": (1, 9, "one token over and over: “ t40”")}
    assert (story.branch.name, story.step) == ("load_bias=false", 9)
    (tokens,) = story.tokens
    assert [line.first_difference for line in tokens.lines] == [None, 2]
    differs = [choice.differs for choice in tokens.lines[1].choices if choice is not None]
    assert differs == [False, False, *[True] * 12]
    assert [choice.own for choice in tokens.lines[1].choices if choice is not None] == [
        False, False, *[True] * 12,
    ]  # fmt: skip
    (rule,) = story.identity.faults
    assert (rule.name, rule.value, rule.correct, rule.branches) == (
        "load_bias", "false", "true", ("load_bias=false",),
    )  # fmt: skip


def test_the_first_divergence_with_its_ranks_and_cause(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session")
    made.judge(path)
    story = _story(path)
    first = story.judgement.first
    assert first is not None
    assert (first.tap, first.step, first.ranks, first.rel_l2) == ("layers.0.attn.probs", 3, (1,), None)
    assert [cause.name for cause in story.judgement.causes] == ["additive mask"]
    assert story.judgement.ledger.startswith("1 operation is wrong by itself: ")
    assert {one.injected for one in story.judgement.map} == {3.25e-8}
    assert story.judgement.notes == ("judged by fixed tolerances",)
    assert len(story.judgement.of("inherited")) == len(made.TAPS) - 3
    assert [step.first for step in story.judgement.steps] == [None, None, None, "layers.0.attn.probs"]
    healthy = _story(path, Request(step=1))
    assert healthy.judgement.step == 1
    assert {one.state for one in healthy.judgement.map} == {"pass"}


def test_probabilities_add_up_from_the_top_k(tmp_path: Path) -> None:
    (tokens,) = _story(made.build(tmp_path / "a.session")).tokens
    choice = tokens.lines[0].choices[0]
    assert choice is not None
    assert choice.probability == pytest.approx(np.exp(4.0 - 4.2))
    assert [one.chosen for one in choice.candidates] == [True, False, False]
    assert tokens.prompt == (" t1", " t2", " t3")


def test_attention_is_gathered_over_the_steps(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session")
    (one,) = _story(path, Request(attention=((1, None),))).attention
    assert (one.first_query, len(one.heads), [head.rank for head in one.heads]) == (0, 4, [0, 0, 1, 1])
    for head in one.heads:
        assert head.values.shape == (7, 7)
        for step in range(5):
            expected = made.probabilities(step)[head.head]
            at = slice(0, 3) if step == 0 else slice(step + 2, step + 3)
            shown = head.values[at, : expected.shape[1]]
            np.testing.assert_array_equal(np.where(np.isneginf(shown), 0, shown), expected)
        assert np.array_equal(~np.isneginf(head.values), np.tril(np.ones((7, 7), bool)))
        last = made.probabilities(4)[head.head, -1].astype(np.float64)
        assert head.figures.entropy == pytest.approx(-(last * np.log(last)).sum(), rel=1e-6)
    missing = _story(path, Request(attention=((1, 9), (7, None)))).attention
    assert ["no head 9" in missing[0].missing, "no tap" in missing[1].missing] == [True, True]


def test_what_is_left_out_is_reported_and_the_trouble_is_kept(tmp_path: Path) -> None:
    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        if step == 250:
            stats[4, 0, STATISTICS.index("nan")] = 1

    path = made.build(
        tmp_path / "a.session", tokens=[10 + i % 57 for i in range(400)], change=change, tensors=False
    )
    story = _story(path, Request(limits=Limits(steps=120, series_points=50)))
    (tokens,) = story.tokens
    assert {0, 1, 226, 250, 274, 398, 399} <= set(tokens.steps)
    assert len(tokens.steps) == 120
    assert len(tokens.steps) + sum(count for _, count in tokens.gaps) == 400
    assert story.cut == ("the tokens of 280 steps of sequence 0",)
    assert all(one.values.shape == (2, 50) for one in story.histories)
    with Session.open(path) as session:
        broken = history(session, session.tap("layers.1.attn.q_proj"), 0, 250, 50)
    assert np.flatnonzero(broken.broken.any(axis=0)).tolist() == [250 * 50 // 400]
    assert broken.not_finite == (1, 0)


def test_a_request_for_what_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session")
    with pytest.raises(RequestError, match="steps 0 to 4, not 9"):
        _story(path, Request(step=9))
    with pytest.raises(RequestError, match="no branch 3"):
        _story(path, Request(branch=3))


def test_a_session_without_steps_has_a_story(tmp_path: Path) -> None:
    story = _story(made.build(tmp_path / "a.session", tokens=()))
    assert (story.step, story.tokens, story.identity.steps) == (None, (), 0)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_keys = st.sampled_from(
    ["model", "config", "rules", "sequences", "versions", "capture", "token_texts", "token_texts.1", "biases",
     "weights", "source", "prompts", "notes", "absent", "something"]
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(_keys, _json, max_size=6))
def test_any_meta_has_a_story(tmp_path: Path, meta: dict[str, Any]) -> None:
    path = tmp_path / "fuzz.session"
    path.unlink(missing_ok=True)
    made.build(path, tokens=(10, 11), meta=meta)
    story = _story(path, Request(attention=((0, None),), biases=(0,)))
    assert story.step == 1


def test_a_damaged_tensor_costs_its_figure_and_not_the_report(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session")
    tamper(path, "UPDATE blobs SET data = x'00'")
    (one,) = _story(path, Request(attention=((1, None),))).attention
    assert (one.heads, bool(one.missing)) == ((), True)
    with Session.open(path) as session, pytest.raises(SessionError):
        attention(SessionSource(session), Where(step=4), 1)
