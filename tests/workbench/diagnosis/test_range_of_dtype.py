"""What leaves the range of float16 in the reference as well is the dtype's fault: no cause, and no verdict either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.sessions import Session
from lockstep.sessions.limits import UNLIMITED
from lockstep.workbench.checking.pipeline import CheckResult
from lockstep.workbench.checking.recorded_run import diagnose_recording
from lockstep.workbench.diagnosis.operations.attention import AttentionPass, of_hidden_rows, settled
from lockstep.workbench.diagnosis.operations.facts import Facts
from tests.workbench.diagnosis.bugs import recording
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.patched import Patched


@pytest.fixture
def diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Patched], None], str], CheckResult]:
    """The diagnosis of a model whose scores are beyond float16 once it is patched, in some dtype."""

    def huge(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if "q_proj" in name or "k_proj" in name]:
            weights[name] = weights[name] * 120

    monkeypatch.setitem(recording.MODELS, "llama-huge", ("llama", {}, huge))

    def run(patch: Callable[[Patched], None], dtype: str) -> CheckResult:
        recorded = recording.Recordings(tmp_path, steps=1).of(
            Bug("huge", "", (), "", Place(()), patch, "llama-huge", dtype=dtype)
        )
        with Session.open(recorded.engine, UNLIMITED) as ours:
            return diagnose_recording(ours, recorded.checkpoint, golden=recorded.golden, floor=recorded.floor)

    return run


def scaled_late(p: Patched) -> None:
    """As transformers does: the product of query and key before its scale."""
    p.attention()


def test_an_engine_that_overflows_where_the_reference_does_is_not_accused(
    diagnosed: Callable[[Callable[[Patched], None], str], CheckResult],
) -> None:
    found = diagnosed(scaled_late, "float16")
    assert (found.event.verdict, found.causes) == ("inconclusive", ())
    assert any(note.startswith("as the reference in float16: layers.") for note in found.event.notes)


def test_one_that_is_wrong_beside_it_is(
    diagnosed: Callable[[Callable[[Patched], None], str], CheckResult],
) -> None:
    found = diagnosed(lambda p: p.weight(p.decoder.embed_tokens, lambda w: torch.roll(w, 1, 0)), "float16")
    assert found.event.verdict == "diverged"
    assert found.causes[0].tap == "embed"


def test_a_mask_that_is_added_to_what_is_not_finite_hides_nothing_of_the_mask_itself() -> None:
    """NaN + -inf is NaN: as good as -inf in a row whose query is NaN, and a mistake where it is not."""
    q, k = np.ones((2, 1, 4)), np.ones((2, 1, 4))
    q[0, 0, 1] = np.nan
    b = AttentionPass(Facts.without_checkpoint(1, "float16"), {"q": q, "k": k}, np.arange(2), None)
    expected = np.array([[[np.nan, -np.inf], [2.0, 2.0]]])
    seen = np.array([[[np.nan, np.nan], [2.0, 2.0]]])
    assert np.array_equal(settled(b, seen, expected), expected, equal_nan=True)
    finite = AttentionPass(b.facts, {"q": np.ones((2, 1, 4)), "k": k}, np.arange(2), None)
    assert np.isnan(settled(finite, seen, np.array([[[2.0, -np.inf], [2.0, 2.0]]]))[0, 0, 1])


def test_a_row_of_nothing_may_have_equal_shares() -> None:
    scores = np.full((1, 2, 3), -np.inf)
    expected = np.full((1, 2, 3), np.nan)
    seen = np.array([[[0.0, 0.5, 0.5], [0.0, 0.25, 0.75]]])
    found = of_hidden_rows(scores, seen, expected)
    assert found[0, 0].tolist() == [0.0, 0.5, 0.5]
    assert np.isnan(found[0, 1]).all()
