"""What is odd about a cache is reported: empty, overwritten, repeated and stale rows; what is right is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.sessions import Session, SessionWriter
from lockstep.sessions.meta import SessionMeta
from lockstep.sessions.records import SequenceStep, StepRecord, Tap, TensorRecord
from lockstep.workbench.views.cache_rows import cache_rows
from lockstep.workbench.views.kv_cache import cache
from lockstep.workbench.views.source import SessionSource
from lockstep.workbench.views.token_texts import TokenTexts
from lockstep.workbench.views.where import Where

TAP = "layers.0.attn.k_cache"
RANDOM = np.random.default_rng(3)
PREFILL = RANDOM.normal(size=(4, 4, 8)).astype(np.float32)
NEXT = np.concatenate([PREFILL, RANDOM.normal(size=(1, 4, 8)).astype(np.float32)])


def _source(path: Path, rows: list[np.ndarray], positions: list[list[int]]) -> SessionSource:
    """Two ranks, two heads each; `rows[step]` is the whole cache after a step."""
    with SessionWriter.create(path, taps=[Tap(0, TAP, "shard(1)")], ranks=2, meta=SessionMeta()) as writer:
        for step, (whole, at) in enumerate(zip(rows, positions, strict=True)):
            tensors = [
                TensorRecord(TAP, rank, 0, np.ascontiguousarray(whole[:, 2 * rank : 2 * rank + 2]), "float32")
                for rank in range(2)
            ]
            reported = SequenceStep(0, [7] * len(at), at, [[len(whole)], [len(whole)]])
            writer.step(0, StepRecord(step, "decode", [reported], 0.1, tensors=tensors))
    return SessionSource(Session.open(path), TokenTexts({}))


def _changed(index: Any, value: Any) -> np.ndarray:
    changed = NEXT.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (NEXT, None),
        (_changed(4, 0), "slot 4: nothing but zeros, layer 0"),
        (_changed(1, NEXT[4]), "slot 1: overwritten, an older token's row is lost, layer 0"),
        (_changed(4, NEXT[2]), "slots 2, 4: the same key as in another slot, layer 0"),
        (_changed((slice(None), 3), NEXT[:, 2]), "heads 0–1: the same rows, layer 0"),
        (PREFILL, "nothing was written by this step: the rows are stale, layer 0"),
    ],
)
def test_oddities_are_named(tmp_path: Path, after: np.ndarray, words: str | None) -> None:
    source = _source(tmp_path / "a.session", [PREFILL, after], [[0, 1, 2, 3], [4]])
    found = cache_rows(source, Where(step=1), 1, "k_cache", False)
    assert found.values is not None
    assert found.values.shape == (2, len(after))
    assert found.values[1, 2] == pytest.approx(np.linalg.norm(after[2, 2:]), rel=1e-5)
    assert (words in found.findings) if words else found.findings == ()
    source.close()


def test_a_rank_without_rows_has_nothing_odd(tmp_path: Path) -> None:
    with SessionWriter.create(
        tmp_path / "a.session", taps=[Tap(0, TAP, "shard(1)")], ranks=2, meta=SessionMeta()
    ) as writer:
        tensors = [TensorRecord(TAP, rank, 0, PREFILL[: 4 * rank, :2].copy(), "float32") for rank in range(2)]
        reported = SequenceStep(0, [7] * 4, [0, 1, 2, 3], [[0], [4]])
        writer.step(0, StepRecord(0, "decode", [reported], 0.1, tensors=tensors))
    source = SessionSource(Session.open(tmp_path / "a.session"), TokenTexts({}))
    assert cache_rows(source, Where(), 1, "k_cache", False).findings == ()
    source.close()


def test_lengths_and_positions_are_held_against_the_tokens(tmp_path: Path) -> None:
    source = _source(tmp_path / "a.session", [PREFILL, _changed(0, 1.0)[:4]], [[0, 1, 2, 3], [0]])
    first, second = (cache(source, Where(step=step), 16, 1, "k_cache", False) for step in (0, 1))
    assert first is not None
    assert second is not None
    assert first.sequences[0].agrees
    assert second.sequences[0].wrong == "its positions ask for 1"
    assert second.sequences[0].jumps == ("position 0 after 3",)
    source.close()
