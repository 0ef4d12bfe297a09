"""GGUF files held against llama.cpp: quantisation loss is distinguished from bugs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lockstep.engine.config import EngineConfig
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.pipeline import Reference
from lockstep.workbench.export.check_text import render
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from lockstep.workbench.references.llamacpp import library
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin

PROMPTS = [[5, 6, 7, 8, 9, 130], [20, 21, 22]]
STEPS = 2

needs_llamacpp = pytest.mark.skipif(not library.is_installed(), reason=library.INSTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    root = tmp_path_factory.mktemp("gguf")
    keys = {"tokenizer.ggml.model": "none"}
    return open_model(str(gguf_twin(tiny_variant(root, "qwen2-tied"), root / "tiny.gguf", "Q8_0", keys=keys)))


@pytest.fixture(scope="module")
def inferior(model: OpenedModel) -> Iterator[Inferior]:
    config = plan(model, EngineConfig(tp=2), PROMPTS, STEPS + 1, FULL)
    with Inferior(model.path, model.config, config) as inferior:
        yield inferior


@pytest.fixture(scope="module")
def reference(model: OpenedModel) -> Reference:
    return record_reference(model.path, PROMPTS, STEPS, "float32", reference="llama.cpp")


def reported(result: object, capsys: pytest.CaptureFixture[str]) -> str:
    render(result.event, result.judgement.taps, Console(width=500))  # type: ignore[attr-defined]
    return capsys.readouterr().out


@needs_llamacpp
@pytest.mark.llamacpp
def test_quantised_blocks_match_and_the_loss_of_llamacpp_itself_is_reported(
    inferior: Inferior, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = check(inferior, reference, tmp_path / "a.session", rules={})
    assert result.matches, result.event.words
    assert (result.event.reference, result.event.tolerance) == ("llama.cpp", "floor")
    assert result.event.max_abs_logits < 1e-4
    loss = result.event.quantisation
    assert loss is not None
    assert loss.tokens == len(PROMPTS) * (STEPS + 1)
    assert loss.max_abs > 100 * result.event.max_abs_logits  # what it would be blamed for otherwise
    np.testing.assert_allclose(loss.engine_max_abs, loss.max_abs, rtol=0.05)
    stated = reported(result, capsys)
    assert "from llama.cpp in float32" in stated
    assert "llama.cpp on the blocks as stored is off by max abs" in stated
    assert "right on the blocks dequantised" in stated


@needs_llamacpp
@pytest.mark.llamacpp
def test_a_bug_is_no_quantisation_loss(
    inferior: Inferior, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = check(inferior, reference, tmp_path / "a.session", rules={"load_bias": "false"})
    assert not result.matches
    first = result.event.first_divergence
    assert first is not None
    assert (first.tap, first.step) == ("layers.0.attn.q_proj", 0)
    assert result.causes[0].name == "bias_dropped"  # the bias is read from the GGUF file
    assert "no quantisation loss but a kernel or a loading bug" in reported(result, capsys)


@pytest.mark.slow
def test_transformers_judges_gguf_files_as_well(
    model: OpenedModel, inferior: Inferior, tmp_path: Path
) -> None:
    recorded = record_reference(model.path, PROMPTS[1:], 1, "float32")
    result = check(inferior, recorded, tmp_path / "a.session", rules={})
    assert result.matches, result.event.words
    assert (result.event.reference, result.event.quantisation) == ("transformers", None)


def test_llamacpp_needs_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ReferenceFailure, match=r"llama\.cpp reads GGUF files, and this is none") as refused:
        record_reference(tiny_variant(tmp_path, "llama"), PROMPTS, 1, "float32", reference="llama.cpp")
    assert refused.value.exit_code == 2
