"""A reference whose decode steps are not what its own pass gives accuses nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.contradiction import contradiction
from lockstep.workbench.checking.forced_run import check
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from lockstep.workbench.references import transformers_recorder
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.request import DType, GoldenRequest, GoldenSequence
from tests.checkpoints import tiny_checkpoint, tiny_variant

PROMPT = (3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56)
STEPS = 3


def recorded(
    folder: Path, model: Path, dtype: DType, sequences: tuple[GoldenSequence, ...], steps: int
) -> Path:
    torch.set_num_threads(1)
    path = folder / f"{dtype}.session"
    transformers_recorder.record(GoldenRequest(str(model), sequences, steps, dtype), path)
    return path


def reference_of(
    folder: Path, model: Path, prompt: tuple[int, ...] = PROMPT, steps: int = STEPS
) -> Reference:
    golden = recorded(folder, model, "float64", (GoldenSequence(prompt),), steps)
    sequences = forced_onto(golden)
    return Reference(sequences, steps, golden, recorded(folder, model, "float32", sequences, steps))


def reported(reference: Reference) -> str:
    assert reference.floor is not None
    with Session.open(reference.golden) as golden, Session.open(reference.floor) as floor:
        assert contradiction(golden, None) == contradiction(golden, floor)
        return contradiction(golden, floor)


def checked(folder: Path, model: Path, reference: Reference, **rules: str) -> CheckResult:
    opened = open_model(str(model))
    config = EngineConfig(max_tokens=64, threads=1)
    with Inferior(opened.path, opened.config, config, capture=FULL) as inferior:
        return check(inferior, reference, folder / "run.session", rules=rules)


@pytest.fixture
def odd_when_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, but that a pass of a single token scales what its first MLP gives."""
    load = transformers_recorder.load_golden

    def odd(*asked: Any) -> Any:
        model = load(*asked)
        model.model.layers[0].mlp.register_forward_hook(
            lambda _module, _args, out: out * (1.1 if out.shape[1] == 1 else 1.0)
        )
        return model

    monkeypatch.setattr(transformers_recorder, "load_golden", odd)


def test_one_that_does_not_is_silent(tmp_path: Path) -> None:
    assert reported(reference_of(tmp_path, tiny_variant(tmp_path, "gemma3"))) == ""


@pytest.mark.slow
def test_a_rotation_that_changes_with_the_length_does(tmp_path: Path) -> None:
    """LongRoPE: one pass over more tokens than the original context rotates all of them by the long factors."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 16}  # fmt: skip
    path = tiny_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=16)
    reference = reference_of(tmp_path, path, steps=5)
    assert "the logits of its decode step 1 (sequence 0) are" in reported(reference)
    found = checked(tmp_path, path, reference)
    assert found.event.verdict == "match"  # the engine follows transformers step by step
    assert reported(reference) in found.event.notes


@pytest.mark.slow
@pytest.mark.usefixtures("odd_when_decoding")
def test_the_engine_is_not_accused(tmp_path: Path) -> None:
    path = tiny_variant(tmp_path, "qwen3")
    reference = reference_of(tmp_path, path)
    assert "its decode step 1 (sequence 0)" in reported(reference)
    found = checked(tmp_path, path, reference)
    assert found.event.verdict == "inconclusive"
    assert found.event.first_divergence is None
    assert found.event.causes == ()
    assert reported(reference) in found.event.notes


@pytest.mark.slow
@pytest.mark.usefixtures("odd_when_decoding")
def test_what_it_does_wrong_on_its_own_inputs_is_still_found(tmp_path: Path) -> None:
    path = tiny_variant(tmp_path, "qwen2-tied")
    found = checked(tmp_path, path, reference_of(tmp_path, path), load_bias="false")
    assert found.event.verdict == "diverged"
    assert found.event.first_divergence is not None
    assert found.event.first_divergence.tap == "layers.0.attn.q_proj"
