"""The diagnosis held against bugs that were built without knowing it. The figures: `python -m benchmarks.diagnosis`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sessions import Session
from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import Score, diagnose_recorded, score

#: A few of each kind, which the fast suite asks for; most share a model and prompts.
QUICK = (
    "cache_of_the_layer_before",
    "epsilon_of_the_final_norm",
    "head_tied_though_it_is_not",
    "kv_heads_tiled",
    "o_never_reduced",
    "positions_one_too_far",
    "positions_restart_with_each_chunk",
    "q_transposed_in_one_layer",
    "residual_missing_after_attention",
)
QUICK_CONTROLS = (
    "unchanged_llama_float32",
    "ranks_summed_backwards",
    "products_summed_in_parts",
    "scale_applied_to_q",
    "context_by_fused_attention",
    "silu_by_its_exponential",
)
ALL = bugs()


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("bugs"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """One decode step: enough for the quick ones."""
    return Recordings(tmp_path_factory.mktemp("short"), steps=1)


def _scored(bug: Bug, recordings: Recordings) -> Score:
    return score(bug, diagnose_recorded(recordings.of(bug)))


def test_there_are_enough_and_each_lies_in_its_half():
    harmless = [bug for bug in ALL.values() if bug.harmless]
    held_out = [bug for bug in ALL.values() if bug.held_out]
    wrong = [bug for bug in ALL.values() if not bug.harmless]
    assert len(wrong) >= 130
    assert len(harmless) >= 45
    assert 0.4 < len(held_out) / len(wrong) < 0.6
    for bug in wrong:
        assert bug.held_out == ("held_out_" in bug.patch.__module__), bug.name


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_named(name: str, short: Recordings):
    assert not ALL[name].held_out
    found = _scored(ALL[name], short)
    assert found.outcome == "named", found


@pytest.mark.parametrize("name", QUICK_CONTROLS)
def test_a_harmless_change_is_not_accused(name: str, short: Recordings):
    found = _scored(ALL[name], short)
    assert found.outcome == "named", found


def test_attention_in_stages_has_the_recorder_s_bits(short: Recordings):
    """What a bug replaces is a part of the recorder's own attention: with nothing replaced nothing moves."""
    same = Bug("staged", "", (), "", Place(()), lambda p: (p.attention(), p.cache())[0], "llama")
    recorded = short.of(same)
    with Session.open(recorded.engine) as ours, Session.open(recorded.floor) as theirs:
        for tap in theirs.taps:
            if tap.name in theirs.meta.absent:
                continue
            for step in (0, 1):
                left, right = (side.rebuilt(tap.name, step=step, seq=0).array for side in (ours, theirs))
                assert np.array_equal(left, right), (tap.name, step)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bug_shows_where_it_was_put(recordings: Recordings):
    """A property of the bugs: at its place each is far above the noise of transformers itself."""
    for bug in ALL.values():
        if not bug.harmless:
            assert _shows(bug, recordings), bug.name


def _shows(bug: Bug, recordings: Recordings) -> bool:
    recorded, place = recordings.of(bug), bug.place
    layer = (place.layers or (0,))[0]
    with (
        Session.open(recorded.engine) as ours,
        Session.open(recorded.golden) as golden,
        Session.open(recorded.floor) as floor,
    ):
        for tap in place.taps:
            name = f"layers.{layer}.{tap}" if "." in tap or tap.endswith(("_norm", "_residual")) else tap
            name = "final_norm" if tap == "final_norm" else name
            if name in golden.meta.absent:
                continue
            for one in golden.step(place.step).sequences:
                at = {"step": place.step, "seq": one.seq}
                seen = ours.rebuilt(name, **at)
                right, near = (side.rebuilt(name, **at).array for side in (golden, floor))
                if seen.array is None or seen.array.shape != right.shape or seen.disagreeing_ranks:
                    return True
                if _apart(seen.array, right) > 4 * max(_apart(near, right), 2e-7):
                    return True
    return False


def _apart(seen: np.ndarray, right: np.ndarray) -> float:
    finite = np.isfinite(right)
    if not (np.isfinite(seen) == finite).all():
        return np.inf
    seen, right = seen[finite].astype(float), right[finite].astype(float)
    return float(np.linalg.norm(seen - right) / max(np.linalg.norm(right), 1e-30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_bugs(recordings: Recordings):
    """Detected, placed, and not accused of something else."""
    scores = {name: _scored(bug, recordings) for name, bug in ALL.items() if not bug.harmless}
    outcomes = Counter(found.outcome for found in scores.values())
    assert outcomes["missed"] == 0, [name for name, found in scores.items() if found.outcome == "missed"]
    assert sum(found.placed for found in scores.values()) >= 0.95 * len(scores)
