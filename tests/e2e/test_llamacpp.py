"""llama.cpp as the reference of the commands, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.workbench.cli import check, generate
from lockstep.workbench.references.llamacpp import library
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import tiny_variant
from tests.gguf_twins import gguf_twin

pytestmark = pytest.mark.llamacpp
needs_llamacpp = pytest.mark.skipif(not library.is_installed(), reason=library.INSTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return gguf_twin(
        tiny_variant(root, "qwen2-tied"), root / "tiny.gguf", keys={"tokenizer.ggml.model": "none"}
    )


@needs_llamacpp
def test_generated_text_is_that_of_llamacpp_sampled_alike(model: Path) -> None:
    words = [str(model), "--ids", "5,6,7", "--max-tokens", "6", "--temperature", "0.8", "--seed", "7"]
    result = CliRunner().invoke(generate.app, [*words, "--compare", "llama.cpp"])
    assert result.exit_code == 0, result.output
    assert "llama.cpp: the same 6 tokens" in result.stdout


@needs_llamacpp
def test_a_bug_parts_the_texts(model: Path) -> None:
    words = [str(model), "--ids", "5,6,7", "--max-tokens", "6", "--fault", "load_bias=false", "--json"]
    result = CliRunner().invoke(generate.app, [*words, "--compare", "llama.cpp"])
    assert result.exit_code == 1, result.output
    (parting,) = json.loads(result.stdout)["compared"]["partings"]
    assert parting["engine_top"][0][0] == parting["engine_token"] != parting["reference_token"]
    assert parting["reference_top"][0][0] == parting["reference_token"]


@needs_llamacpp
def test_a_checkpoint_that_is_none_of_gguf_is_refused_before_anything_runs(tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path, "qwen2-tied")
    for app, option in ((generate.app, "--compare"), (check.app, "--reference")):
        result = CliRunner().invoke(app, [str(checkpoint), "--ids", "5,6,7", option, "llama.cpp"])
        assert isinstance(result.exception, ReferenceFailure)
        assert result.exception.exit_code == 2
        assert "llama.cpp reads GGUF files, and this is none" in str(result.exception)
        assert not result.stdout


def test_without_the_extra_nothing_is_started(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    for app, option in ((generate.app, "--compare"), (check.app, "--reference")):
        result = CliRunner().invoke(app, [str(model), "--ids", "5,6,7", option, "llama.cpp"])
        assert isinstance(result.exception, ReferenceFailure)
        assert "pip install 'lockstep-llm[llamacpp]'" in str(result.exception)
