"""Two sides beside each other: what differs first, what cannot be compared and why, how far two choices are apart."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import Session, SessionError, SessionWriter
from lockstep.sessions.meta import ConfigMeta, SessionMeta
from lockstep.sessions.records import STATISTICS, SequenceStep, StepRecord, Tap, TensorRecord, VerdictRecord
from lockstep.workbench.views.compared_logits import compared_logits, divergence
from lockstep.workbench.views.compared_step import compared_step
from lockstep.workbench.views.compared_tensors import compared_attention, compared_tensor
from lockstep.workbench.views.sides import GOLDEN, SidesReader, other_sides, sides, usual_side
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where

RECORDED = Path(__file__).parents[3] / "sessions" / "recorded"
TAPS = ("embed", "layers.0.attn.q_proj", "layers.0.attn.probs", "logits")
RANKS = 2


@pytest.fixture(autouse=True)
def no_golden_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have recorded is no side of the recordings."""
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))


def _source(name: str) -> SessionSource:
    return SessionSource(Session.open(RECORDED / f"{name}.session"))


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("load_bias-false", "layers.0.attn.q_proj"),
        ("mask-additive", "layers.0.attn.scores"),
        ("rope-interleaved", "layers.0.attn.q_rope"),
        ("lm_head-missing", "logits"),
    ],
)
def test_the_first_row_is_the_operation_that_the_recording_names(name: str, first: str) -> None:
    """Against `sessions/recorded/README.md`, which was written from judgements against the reference."""
    found = compared_step(_source(name), Where(branch=0, step=0), 1)
    assert found.rows[0].name == first
    assert found.first == found.rows[0].tap
    assert first in found.headline
    order = [row.tap for row in found.rows if row.difference == "beyond"]
    assert order == sorted(order), "rows that differ stand in execution order"
    assert all(row.difference == "equal" for row in found.rows[len(order) :])


def test_steps_that_read_different_tokens_are_not_compared() -> None:
    source = _source("load_bias-false")
    tokens = SidesReader().all_tokens(source, Where(branch=0), 1)
    assert tokens.parted == 0
    found = compared_step(source, Where(branch=0, step=1), 1, tokens.parted)
    assert found.headline == "different tokens went in from step 1 on: step 0 is the last to compare"
    assert found.first is None
    assert compared_logits(source, Where(branch=0, step=1), 1, 0).divergence is None
    # Even where the history is not asked about, the ids that go in show it.
    assert "token ids" in sides(source, Where(branch=0, step=1), 1).why_not


def test_a_branch_that_ends_earlier_is_reported_and_ours_is_still_shown() -> None:
    source = _source("load_bias-false")
    found = compared_step(source, Where(branch=0, step=5), 1)
    assert found.headline == "load_bias=true ends at step 1"
    assert found.rows[0].ours is not None
    assert found.rows[0].theirs is None
    attention = compared_attention(source, Where(branch=0, step=5), 1, None, 0, "probs")
    assert attention.ours.values is not None
    assert attention.theirs is None
    logits = compared_logits(source, Where(branch=0, step=5), 1)
    assert logits.rows
    assert all(row.theirs is None for row in logits.rows)


def test_the_usual_other_side() -> None:
    source = _source("load_bias-false")
    assert usual_side(source, 1) == 0, "a fork stands beside its parent"
    assert usual_side(source, 0) == 1, "the only other one"
    assert [side.name for side in other_sides(source, 0)] == ["load_bias=true"]
    with pytest.raises(SessionError, match="no golden reference"):
        compared_step(source, Where(), GOLDEN)


def test_attention_differs_by_what_the_arrays_differ_by() -> None:
    source = _source("load_bias-false")
    found = compared_attention(source, Where(branch=1), 0, None, 0, "probs")
    session = source.session
    ours, theirs = (session.rebuilt("layers.0.attn.probs", step=0, seq=0, branch=b).array for b in (1, 0))
    assert found.difference is not None
    assert ours is not None
    assert theirs is not None
    exact = ours.astype(np.float64) - theirs
    hidden = np.isneginf(found.difference)
    np.testing.assert_allclose(found.difference[~hidden], exact[~hidden], atol=1e-7)
    future = np.triu(np.ones(exact.shape[1:], bool), 1)
    assert (hidden == future).all(), "what a causal mask hides on both sides"


def _step(emitted: int, tensors: dict[str, list[np.ndarray]], sums: list[int]) -> StepRecord:
    stats = np.ones((len(TAPS), RANKS, len(STATISTICS)), np.float32)
    stats[..., [STATISTICS.index("nan"), STATISTICS.index("inf"), STATISTICS.index("zeros")]] = 0
    reported = SequenceStep(
        0, [1, 2], [0, 1], [[2]] * RANKS, block_table=[0], emitted=emitted,
        topk_ids=[emitted, 7], topk_logits=[2.0, 1.0], logsumexp=2.4,
    )  # fmt: skip
    found = [
        TensorRecord(tap, rank, 0, part.astype(np.float32), "float32")
        for tap, parts in tensors.items()
        for rank, part in enumerate(parts)
    ]
    checksums = np.repeat(np.array(sums, np.uint64)[:, None], RANKS, 1)
    return StepRecord(0, "prefill", [reported], 0.1, stats, checksums, found)


def _written(path: Path, ours: StepRecord, theirs: StepRecord) -> SessionSource:
    layouts = ("replicate", "shard(1)", "shard(0)", "shard(1)")
    taps = [Tap(i, name, layout) for i, (name, layout) in enumerate(zip(TAPS, layouts, strict=True))]
    meta = SessionMeta(config=ConfigMeta(dtype="float32", tp=RANKS))
    with SessionWriter.create(path, taps=taps, ranks=RANKS, meta=meta) as writer:
        writer.step(0, ours)
        other = writer.branch("other", parent=0, fork_step=0)
        writer.step(other, theirs)
    return SessionSource(Session.open(path))


def test_rounding_is_distinguished_from_more_and_bits_from_both(tmp_path: Path) -> None:
    base = [np.ones((2, 2)), 2 * np.ones((2, 2))]
    noise = [part * (1 + 1e-7) for part in base]
    source = _written(
        tmp_path / "rounding.session",
        _step(3, {"layers.0.attn.q_proj": base}, [1, 1, 1, 1]),
        _step(3, {"layers.0.attn.q_proj": noise}, [1, 2, 2, 1]),
    )
    rows = {row.name: row for row in compared_step(source, Where(), 1).rows}
    assert rows["embed"].difference == "equal"
    assert rows["layers.0.attn.q_proj"].difference == "rounding"
    assert rows["layers.0.attn.q_proj"].rel_l2 == pytest.approx(1.2e-7, rel=0.2)
    assert rows["layers.0.attn.probs"].difference == "bits", "checksums differ, statistics do not"
    found = compared_step(source, Where(), 1)
    assert found.first is None
    assert "none of 4 operations differs beyond rounding; 1 differ in bits" in found.headline


@pytest.mark.parametrize(("floor", "difference"), [(1e-6, "rounding"), (1e-8, "beyond"), (None, "rounding")])
def test_rounding_is_what_the_noise_floor_leaves_room_for(
    tmp_path: Path, floor: float | None, difference: str
) -> None:
    """Of either side; a relative 1e-7 is below the fixed tolerance."""
    path, base = tmp_path / "floor.session", [np.ones((2, 2)), 2 * np.ones((2, 2))]
    tensors = {"layers.0.attn.q_proj": [part * (1 + 1e-7) for part in base]}
    _written(path, _step(3, {"layers.0.attn.q_proj": base}, [1] * 4), _step(3, tensors, [1, 2, 1, 1])).close()
    with SessionWriter.reopen(path) as writer:
        writer.verdicts(
            [VerdictRecord(1, 0, "layers.0.attn.q_proj", "pass", {"rel_l2": 0.0, "floor": floor})]
        )
    found = compared_step(SessionSource(Session.open(path)), Where(), 1)
    rows = {row.name: row for row in found.rows}
    assert rows["layers.0.attn.q_proj"].difference == difference
    assert ("noise floor golden measured" in found.rounding) == (floor is not None)
    assert "a fixed 1.0e-5" in found.rounding, "of the taps without a floor"


def test_nan_on_one_side_is_beyond_rounding_and_drawn(tmp_path: Path) -> None:
    base, broken = [np.ones((2, 2)), np.ones((2, 2))], [np.ones((2, 2)), np.array([[1, math.nan], [1, 1]])]
    source = _written(
        tmp_path / "nan.session",
        _step(3, {"layers.0.attn.q_proj": base}, [1, 1, 1, 1]),
        _step(3, {"layers.0.attn.q_proj": broken}, [1, 2, 1, 1]),
    )
    found = compared_step(source, Where(), 1)
    assert (found.rows[0].name, found.rows[0].rel_l2) == ("layers.0.attn.q_proj", math.inf)
    both = compared_tensor(source, Where(tap=1), 1)
    assert both.difference is not None
    assert np.isnan(both.difference).sum() == 1
    assert both.metrics is not None
    assert both.metrics.nan_golden == 1


def test_a_tensor_that_one_side_lacks_names_that_side(tmp_path: Path) -> None:
    base = [np.ones((2, 2)), np.ones((2, 2))]
    source = _written(
        tmp_path / "lacking.session",
        _step(3, {"layers.0.attn.q_proj": base}, [1] * 4),
        _step(3, {}, [1] * 4),
    )
    both = compared_tensor(source, Where(tap=1), 1)
    assert (both.lacking, both.why_not) == (("other",), "no tensor of it in other")
    assert both.ours.array is not None
    assert compared_attention(source, Where(), 1, None, 0, "probs").lacking == ("main", "other")


def test_shapes_that_differ_are_reported(tmp_path: Path) -> None:
    source = _written(
        tmp_path / "shapes.session",
        _step(3, {"layers.0.attn.q_proj": [np.ones((2, 2))] * 2}, [1] * 4),
        _step(3, {"layers.0.attn.q_proj": [np.ones((2, 3))] * 2}, [2] * 4),
    )
    assert compared_tensor(source, Where(tap=1), 1).why_not == "the shapes differ: (2, 4) and (2, 6)"
    found = compared_step(source, Where(), 1)
    row = next(row for row in found.rows if row.name == "layers.0.attn.q_proj")
    assert row.difference == "beyond"
    assert "shapes (2, 4) and (2, 6)" in row.note


def test_golden_of_another_tp_is_compared_by_its_tensors_and_else_by_the_verdicts(tmp_path: Path) -> None:
    """A golden has one rank, whole tensors and no statistics; the run has two ranks and few tensors."""
    base = [np.ones((2, 2)), 2 * np.ones((2, 2))]
    run = tmp_path / "run.session"
    source = _written(run, _step(3, {"layers.0.attn.q_proj": base}, [1] * 4), _step(3, {}, [1] * 4))
    source.close()
    whole = {"layers.0.attn.q_proj": [np.concatenate(base, 1) * 1.5], "logits": [np.ones((2, 4))]}
    taps = [Tap(i, name, "replicate") for i, name in enumerate(TAPS)]
    meta = SessionMeta(config=ConfigMeta(dtype="float32", tp=1))
    with SessionWriter.create(tmp_path / "golden.session", taps=taps, ranks=1, meta=meta) as writer:
        step = _step(5, {tap: parts[:1] for tap, parts in whole.items()}, [1] * 4)
        reported = step.sequences[0]
        reported = replace(reported, emitted=3, forced=True, topk_ids=[5, 3], kv_lens=[[2]])
        writer.step(0, StepRecord(0, "prefill", [reported], 0.1, None, None, step.tensors))
    with SessionWriter.reopen(run) as writer:
        writer.event(0, 0, "golden", "", {"verdict": "diverged", "golden_session": "golden.session"})
        writer.verdicts([VerdictRecord(0, 0, "logits", "fail", {"rel_l2": 0.5, "ratio": 9.0})])
    source = SessionSource(Session.open(run))
    rows = {row.name: row for row in compared_step(source, Where(), GOLDEN).rows}
    assert rows["layers.0.attn.q_proj"].rel_l2 == pytest.approx(1 / 3)
    assert rows["logits"].difference == "beyond"
    assert "9 × the noise floor" in rows["logits"].note
    assert rows["embed"].note == "no tensor of it in main nor in golden"
    # The reference was given the run's tokens; what it would have chosen itself is reported.
    tokens = SidesReader().all_tokens(source, Where(), GOLDEN)
    assert tokens.parted == 0
    assert tokens.pair.theirs.tokens.cells[-1].token == 5
    assert usual_side(source, 0) is None, "a branch and a golden: which is meant has to be asked"


@pytest.mark.parametrize("seed", range(8))
def test_divergence_of_candidates_is_a_lower_bound_that_gets_near(seed: int) -> None:
    """Against the exact divergence in float64 over the whole vocabulary."""
    random = np.random.default_rng(seed)
    logits = [random.normal(0, 3, 200) for _ in range(2)]
    log_p, log_q = (one - np.log(np.exp(one).sum()) for one in logits)
    exact = float((np.exp(log_p) * (log_p - log_q)).sum())
    bounds = [divergence(_top(logits[0], count), _top(logits[1], count)) for count in (2, 20, 200)]
    assert all(bound is not None and -1e-9 <= bound <= exact + 1e-5 for bound in bounds)
    assert bounds[-1] == pytest.approx(exact, abs=1e-4)


def test_divergence_of_what_is_not_finite() -> None:
    sure, other = np.array([9.0, 0, 0, 0]), np.array([0, 9.0, 0, 0])
    assert divergence(_top(sure, 1), _top(other, 1)) == pytest.approx(9, abs=2), "nothing shared, far apart"
    assert divergence(_top(sure, 4), _top(sure, 4)) == 0
    assert math.isnan(divergence(_top(sure, 2), _top(np.full(4, math.nan), 2)) or 0)
    assert divergence(_top(sure, 2), None) is None


def _top(logits: np.ndarray, count: int) -> SequenceStep:
    order = np.argsort(-logits)[:count]
    total = float(np.log(np.exp(logits).sum()))
    return SequenceStep(
        0, [1], [0], [[1]], block_table=[0], emitted=int(order[0]), topk_ids=[int(i) for i in order],
        topk_logits=[float(logits[i]) for i in order], logsumexp=total,
    )  # fmt: skip
