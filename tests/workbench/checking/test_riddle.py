"""The first team's riddle at its own size: the biases of q, k and v, of which those of k look too large to be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.model import half_billion
from lockstep.engine.config import DType, EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from tests.workbench.checking.within_noise import over_noise

PROMPT, STEPS = list(range(1000, 1012)), 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    return open_model(str(half_billion(tmp_path_factory.mktemp("riddle"), biased=True)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_dropped_are_named_in_all_24_layers_and_restored_leave_noise(
    dtype: DType, model: OpenedModel, tmp_path: Path
) -> None:
    reference = record_reference(model.path, [PROMPT], STEPS, dtype)
    config = plan(model, EngineConfig(tp=2, dtype=dtype, threads=1), [PROMPT], STEPS + 1, FULL)
    with Inferior(model.path, model.config, config) as inferior:
        dropped = check(inferior, reference, tmp_path / "dropped.session", rules={"load_bias": "false"})
        restored = check(inferior, reference, tmp_path / "restored.session", rules={})
    assert dropped.judgement.verdict == "diverged"
    (cause,) = dropped.causes
    assert cause.fault == "load_bias=false"
    assert "{q,k,v}_proj.bias is not added" in cause.text
    assert cause.place == "layers.*.attn.{q,k,v}_proj"
    assert cause.layers == tuple(range(24))
    assert cause.ranks == (0, 1)
    assert restored.matches
    assert restored.judgement.tokens_identical
    assert restored.causes == ()
    left = over_noise(restored.engine_session, model.path, dtype)
    with Session.open(restored.engine_session) as session:
        assert left.keys() == {tap.name for tap in session.taps}
    assert max(left.values()) <= 1, {tap: ratio for tap, ratio in left.items() if ratio > 1}
