"""The sentinels: one answer each, whoever asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.sessions import STATISTICS, SequenceStep, Session, SessionWriter, StepRecord, Tap
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import StepInFlight
from lockstep.workbench.debugger.core import sentinels as catching
from lockstep.workbench.debugger.core.timeline import open_timeline
from lockstep.workbench.views import sentinels
from lockstep.workbench.views.branch_sentinel import BranchSentinel
from lockstep.workbench.views.operations import operations
from lockstep.workbench.views.request import Request
from lockstep.workbench.views.sentinel_watch import SentinelWatch
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.story import story_of
from lockstep.workbench.views.where import Where
from tests.workbench.export import made


def _watched(path: Path, branch: int = 0) -> dict[str, BranchSentinel]:
    """What the Sentinels pane shows, once it has looked at every step."""
    source, scan = SessionSource(Session.open(path)), SentinelWatch()
    try:
        while (watch := scan.watch(source, Where(branch=branch))).scanned < watch.total:
            pass
    finally:
        source.close()
    return {one.kind: one for one in watch.sentinels if one.step is not None}


def _reported(path: Path) -> dict[str, BranchSentinel]:
    """What the report shows."""
    with Session.open(path) as session:
        return {one.kind: one for one in story_of(session, Request()).sentinels if one.step is not None}


def test_eight_equal_tokens_are_a_collapse_for_all_who_look(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session", tokens=[10, 11, *[40] * 8])
    with Session.open(path) as session:
        timeline = open_timeline(session)
        caught = [catching.repetition(timeline, 0, step, lambda token: f" t{token}") for step in range(10)]
    words = "one token over and over: “ t40”"
    assert [found and found.words for found in caught] == [*[None] * 9, words]
    pane, report = _watched(path)["repetition"], _reported(path)["repetition"]
    assert (pane.step, pane.what) == (report.step, report.what) == (9, words)


@pytest.mark.parametrize(("tokens", "length"), [([1, 2] * 4, 2), ([1, 2, 3, 4, 5] * 3, 0), ([7] * 7, 0)])
def test_a_phrase_is_reported_often_enough(tokens: list[int], length: int) -> None:
    assert sentinels.repeated_phrase(tokens) == length


def _shared_heads(path: Path) -> Path:
    """Four ranks, of which two each hold the same KV heads; at step 1 rank 3 differs from rank 2."""
    taps = [Tap(0, "embed", "replicate"), Tap(1, "layers.0.attn.k_proj", "shard(1,replicas=2)")]
    with SessionWriter.create(path, taps=taps, ranks=4, meta=SessionMeta()) as writer:
        for step in range(2):
            sums = np.array([[9, 9, 9, 9], [5, 5, 6, 6 + step]], np.uint64)
            reported = SequenceStep(0, [1], [step], [[step + 1]] * 4, emitted=3 + step)
            writer.step(0, StepRecord(step, "decode", [reported], 0.1, np.zeros((2, 4, 8), np.float32), sums))
    return path


def test_kv_heads_that_ranks_share_must_agree_for_all_who_look(tmp_path: Path) -> None:
    path = _shared_heads(tmp_path / "a.session")
    words = "layers.0.attn.k_proj: rank 3 differs bit for bit"
    pane, report = _watched(path)["desync"], _reported(path)["desync"]
    assert (pane.step, pane.what, pane.tap) == (report.step, report.what, report.tap)
    assert (pane.step, pane.what, pane.ranks) == (1, words, (3,))
    with Session.open(path) as session:
        timeline = open_timeline(session)
        assert timeline.desync(0, 0) is None
        found = timeline.desync(0, 1)
        assert found is not None
        assert (found.words, found.tap, found.ranks) == (words, 1, (3,))
    source = SessionSource(Session.open(path))
    assert [operations(source, Where(step=step)).agreement for step in range(2)] == [("=", "="), ("=", "≠")]
    source.close()


def test_the_first_failure_is_one_that_is_wrong_by_itself(tmp_path: Path) -> None:
    path = made.build(tmp_path / "a.session")
    made.judge(path)
    pane, report = _watched(path)["golden"], _reported(path)["golden"]
    assert (pane.step, pane.what) == (report.step, report.what)
    assert pane.what == "layers.0.attn.probs is the first to leave the golden reference"
    with Session.open(path) as session:
        found = catching.golden(open_timeline(session), 0, 3, None)
        assert found is not None
        assert (found.words, found.tap) == (pane.what, session.tap("layers.0.attn.probs").index)


def test_cache_lengths_are_reported_alike(tmp_path: Path) -> None:
    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        if step == 4:
            sequence["kv_lens"] = [[7, 7], [7, 6]]

    path = made.build(tmp_path / "a.session", change=change)
    pane, report = _watched(path)["cache"], _reported(path)["cache"]
    assert (pane.step, pane.what, pane.ranks) == (report.step, report.what, report.ranks)
    assert pane.what == "sequence 0 has 6 rows in layer 1 on rank 1, its positions ask for 7"


def test_a_count_that_is_no_number_is_reported(tmp_path: Path) -> None:
    """A stranger's statistics: infinitely many NaN ended the pane and the report with an OverflowError."""

    def change(step: int, stats: np.ndarray, sums: np.ndarray, sequence: dict[str, Any]) -> None:
        stats[0, 0, STATISTICS.index("nan")] = np.inf

    path = made.build(tmp_path / "a.session", change=change)
    assert _watched(path)["nan"].what == _reported(path)["nan"].what == "embed (rank 0: inf)"


def _nan_at(path: Path, q_absmax: float) -> Path:
    """At steps 1 and 3 the scores of layer 0 hold NaN, on rank 1 and on rank 0; a stop is noted past the end."""
    names = ["layers.0.attn.q_rope", "layers.0.attn.k_cache", "layers.0.attn.scores", "layers.0.attn.probs"]
    taps = [Tap(i, name, "shard(0)") for i, name in enumerate(names)]
    with SessionWriter.create(path, taps=taps, ranks=2, meta=SessionMeta()) as writer:
        for step in range(5):
            stats = np.ones((4, 2, len(STATISTICS)), np.float32)
            stats[..., [STATISTICS.index("nan"), STATISTICS.index("inf")]] = 0
            stats[0, :, STATISTICS.index("absmax")] = q_absmax
            if step in (1, 3):
                stats[2:, int(step == 1), STATISTICS.index("nan")] = 8
            reported = SequenceStep(0, [step], [step], [[step + 1]] * 2, emitted=step + 1)
            writer.step(0, StepRecord(step, "decode", [reported], 0.1, stats))
        writer.event(0, 10**15, "stop", "catch nan", {"reason": "exception"})
    return path


def test_the_history_has_every_step_and_every_rank(tmp_path: Path) -> None:
    with Session.open(_nan_at(tmp_path / "a.session", 2.0)) as session:
        watch = SentinelWatch().watch(SessionSource(session), Where())
    assert watch.scanned == watch.total == 5
    assert (list(watch.histories["nan"].steps), watch.histories["nan"].ranks) == ([0, 1, 0, 1, 0], (0, 1))
    assert not any(watch.histories["desync"].steps)
    assert len(watch.histories["stop"].steps) == 5


@pytest.mark.parametrize(("q_absmax", "why"), [(2.0, ": 0 × -inf in the mask"), (1e35, "")])
def test_nan_in_the_scores_of_finite_q_and_k_came_with_the_mask(
    q_absmax: float, why: str, tmp_path: Path
) -> None:
    path = _nan_at(tmp_path / "a.session", q_absmax)
    assert (
        _watched(path)["nan"].what == _reported(path)["nan"].what == f"layers.0.attn.scores (rank 1: 8){why}"
    )


def test_a_sentinel_that_sees_nothing_is_not_clear(tmp_path: Path) -> None:
    with Session.open(_nan_at(tmp_path / "a.session", 2.0)) as session:
        looked = {
            one.kind: one.looked for one in SentinelWatch().watch(SessionSource(session), Where()).sentinels
        }
    assert looked["golden"] == "not compared"
    assert looked["repetition"] == ""


def test_the_step_under_way_is_watched_and_counts_once_when_it_is_over(tmp_path: Path) -> None:
    path = _nan_at(tmp_path / "a.session", 2.0)
    stats = np.ones((4, 2, len(STATISTICS)), np.float32)
    stats[..., [STATISTICS.index("nan"), STATISTICS.index("inf")]] = 0
    stats[2, 0, STATISTICS.index("nan")] = 8
    writer = SessionWriter.reopen(path)
    try:
        writer.in_flight(0, StepInFlight(5, 2, [SequenceStep(0, [5], [5], ())], stats))
        with Session.open(path) as session:
            source, scan = SessionSource(session), SentinelWatch()
            watch = scan.watch(source, Where(step=5))
            assert (watch.scanned, watch.total) == (6, 6)
            assert list(watch.histories["nan"].steps) == [0, 1, 0, 1, 0, 1]
            writer.step(
                0, StepRecord(5, "decode", [SequenceStep(0, [5], [5], [[6]] * 2, emitted=6)], 0.1, stats)
            )
            session.refresh()
            over = scan.watch(SessionSource(session), Where(step=5))
            assert list(over.histories["nan"].steps) == [0, 1, 0, 1, 0, 1]
            assert (over.scanned, over.total) == (6, 6)
    finally:
        writer.close()
