"""A noise floor between two libraries: where they disagree beyond rounding there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.sessions.meta import ConfigMeta, SessionMeta
from lockstep.sessions.metrics import metrics
from lockstep.workbench.diagnosis.compare import TapComparison
from lockstep.workbench.diagnosis.measure import MeasuredTap, Recordings, references_apart
from lockstep.workbench.diagnosis.quantisation import quantisation_loss
from lockstep.workbench.diagnosis.recording import Recording
from tests.workbench.diagnosis.synthetic import Case, tiny_case


def side(source: str) -> Any:
    meta = SessionMeta(source=source, config=ConfigMeta(dtype="float32"))
    return Recording(SimpleNamespace(meta=meta))  # type: ignore[arg-type]


def measured(error: float) -> list[MeasuredTap]:
    right = np.ones(4)
    noise = metrics(right + error, right)
    return [MeasuredTap(2, 0, "layers.1.attn.q_rope", TapComparison(None), noise, 1.0)]


def test_two_libraries_that_disagree_give_no_floor() -> None:
    both = Recordings(side("lockstep"), side("llama.cpp"), side("transformers"))
    assert references_apart(both, measured(1e-5)) is None
    stated = references_apart(both, measured(1e-2))
    assert stated is not None
    assert stated.startswith(
        "llama.cpp and transformers themselves disagree: layers.1.attn.q_rope at step 2 is 0.01"
    )
    assert references_apart(both, measured(float("nan"))) is not None


def test_one_library_at_another_dtype_always_does() -> None:
    one = Recordings(side("lockstep"), side("transformers"), side("transformers"))
    assert references_apart(one, measured(1.0)) is None
    assert references_apart(Recordings(side("lockstep"), side("llama.cpp"), None), measured(1.0)) is None


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return tiny_case(tmp_path_factory.mktemp("case"), "llama")


def test_the_loss_is_that_of_the_logits(case: Case, tmp_path: Path) -> None:
    """The float32 run stands for blocks as stored: against float64, and against itself as the engine."""
    loss = quantisation_loss(case.floor, case.floor, case.golden)
    apart, tokens = 0.0, 0
    for step in case.golden.steps():
        for reported in case.golden.step(step).sequences:
            a, b = (s.rebuilt("logits", step=step, seq=reported.seq).array for s in (case.floor, case.golden))
            assert a is not None
            assert b is not None
            apart, tokens = max(apart, float(np.abs(a - b).max())), tokens + 1
    assert loss.max_abs == pytest.approx(apart)
    assert (loss.tokens, loss.same, loss.engine_max_abs) == (tokens, tokens, 0.0)
    assert 0 <= (loss.kl or 0.0) < 1e-9
