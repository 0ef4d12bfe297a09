"""What a source keeps between questions: never anything that the session does not hold any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.sessions import SessionWriter
from lockstep.sessions.session import Session
from lockstep.workbench.views import source as sources
from lockstep.workbench.views.attention import attention
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.where import Where
from tests.workbench.tui.synthetic import HAIKU, HEADS, PROMPT, RANKS, build

TAP = "layers.1.attn.probs"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return build(tmp_path / "kept.session", nan_from=None)


def fresh(path: Path, where: Where) -> dict[int, np.ndarray]:
    """What a session that was just opened reports, step by step."""
    with Session.open(path) as session:
        found = {
            step: session.rebuilt(TAP, step=step, branch=where.branch).array for step in range(where.step + 1)
        }
        return {step: array for step, array in found.items() if array is not None}


@pytest.mark.parametrize("branch", [0, 1])
def test_going_back_over_steps_gives_what_each_step_holds(path: Path, branch: int) -> None:
    source, where = SessionSource(Session.open(path)), Where(step=len(HAIKU) - 1, branch=branch)
    try:
        for _ in range(2):  # read, then kept
            found = dict(source.back_from(TAP, where, 0))
            assert list(found) == list(range(where.step, -1, -1))
            for step, array in fresh(path, where).items():
                assert found[step].array is not None
                np.testing.assert_array_equal(found[step].array, array)
    finally:
        source.close()


def test_what_is_captured_later_is_seen(path: Path) -> None:
    scores = "layers.1.attn.scores"
    source, where = SessionSource(Session.open(path)), Where(step=5)
    try:
        assert dict(source.back_from(scores, where, 0))[3].array is None
        with SessionWriter.reopen(path) as writer:
            shards = [source.session.capture(TAP, step=3, rank=rank) for rank in range(RANKS)]
            writer.tensors(0, 3, [replace(one, tap=scores, array=2 * one.array) for one in shards if one])
        source.refresh()
        found = dict(source.back_from(scores, where, 0))
        np.testing.assert_array_equal(found[3].array, 2 * fresh(path, where)[3])
        assert found[4].array is None
    finally:
        source.close()


def test_what_is_kept_has_a_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_KEPT_BYTES", 4096)
    source, where = SessionSource(Session.open(path)), Where(step=len(HAIKU) - 1)
    try:
        found = {step: rebuilt.array for step, rebuilt in source.back_from(TAP, where, 0)}
        assert sum(array.nbytes for array in found.values() if array is not None) > 4096
        assert source._rebuilt_bytes <= 4096
        assert len(source._rebuilt) < len(found)
    finally:
        source.close()


def test_the_rows_of_earlier_steps_stand_above_the_present_one(path: Path) -> None:
    source, where = SessionSource(Session.open(path)), Where(step=4)
    try:
        layer = attention(source, where, 1, "probs")
        assert layer.values is not None
        keys = len(PROMPT) + 4
        assert layer.values.shape == (HEADS, keys, keys)
        assert layer.first_query == 0
        for step, rows in fresh(path, where).items():
            at = slice(0, len(PROMPT)) if step == 0 else slice(len(PROMPT) + step - 1, len(PROMPT) + step)
            shown = layer.values[:, at, : rows.shape[2]]
            np.testing.assert_array_equal(np.where(np.isneginf(shown), 0, shown), rows)
        future = np.triu(np.ones((keys, keys), bool), 1)
        assert np.isneginf(layer.values[:, future]).all()
        assert np.isfinite(layer.values[:, ~future]).all()
    finally:
        source.close()
