"""A reference of a long prompt: attention made by rows, of which the newest are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.engine.taps import names
from lockstep.sessions import Session
from lockstep.workbench.references import attention, steps
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import tiny_variant

PROMPTS = (GoldenSequence(tuple(range(3, 40))), GoldenSequence(tuple(range(50, 80)), (1, 2)))


def recorded(path: Path, model_dir: Path, chunk: int | None) -> Session:
    record(GoldenRequest(str(model_dir), PROMPTS, 3, "float64", chunk=chunk), path)
    return Session.open(path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("variant", ["llama", "qwen2-window"])
def test_made_by_rows_it_is_the_same(
    variant: str, chunk: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor to float64's rounding, of attention those rows that are kept, and the statistics of all of them."""
    model_dir = tiny_variant(tmp_path, variant)
    with recorded(tmp_path / "whole.session", model_dir, chunk) as whole:
        monkeypatch.setattr(names, "_WHOLE", 1)
        monkeypatch.setattr(names, "_ELEMENTS", 5 * 37 * (whole.meta.model.num_heads or 0))
        monkeypatch.setattr(attention, "TILE", 700)
        monkeypatch.setattr(steps, "WAITING", 10_000)
        with recorded(tmp_path / "rows.session", model_dir, chunk) as rows:
            cut = set()
            for step in whole.steps():
                stats = [session.stats(step=step)[:, 0] for session in (rows, whole)]
                np.testing.assert_allclose(*stats, rtol=1e-5, atol=1e-6)
                for tap in whole.taps:
                    for seq in range(len(PROMPTS)):
                        ours = rows.rebuilt(tap.name, step=step, seq=seq)
                        theirs = whole.rebuilt(tap.name, step=step, seq=seq)
                        assert (ours.array is None) == (theirs.array is None)
                        if ours.array is None or theirs.array is None:
                            continue
                        expected = theirs.array[:, -ours.array.shape[1] :] if ours.slice else theirs.array
                        np.testing.assert_allclose(ours.array, expected, rtol=1e-9, atol=1e-12)
                        cut |= {tap.name.rpartition(".")[-1]} if ours.slice else set()
            assert cut == {"scores", "probs"}
            assert any("the rows of the last" in line for line in rows.step(0).dropped)
