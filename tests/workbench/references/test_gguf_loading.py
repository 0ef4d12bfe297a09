"""GGUF files through transformers: every architecture, split files as a whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from lockstep.workbench.library.judging import check
from lockstep.workbench.references.loading import load_golden
from lockstep.workbench.references.request import ReferenceFailure
from tests.checkpoints import VARIANTS, tiny_checkpoint, tiny_variant
from tests.gguf_twins import CONVERTIBLE, gguf_twin, write_keys

PROMPT = [
    3,
    130,
    17,
    99,
    4,
    64,
    5,
    12,
    77,
    120,
    31,
    8,
    56,
    7,
    81,
    44,
    90,
    101,
]  # beyond every window and original context
#: With those of older families that have a counterpart.
MODELS = CONVERTIBLE | {
    name: VARIANTS[name]
    for name in ("llama", "llama-llama3", "llama-yarn", "qwen2-tied", "qwen3", "mistral-window")
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", MODELS)
def test_a_twin_is_loaded_as_its_original(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    original = tiny_checkpoint(tmp_path, family, **overrides)
    expected = load_golden(original, "float32", "cpu")
    found = load_golden(gguf_twin(original, tmp_path / "twin.gguf"), "float32", "cpu")
    assert found.config.model_type == family
    theirs = expected.state_dict()
    for parameter, tensor in found.state_dict().items():
        right = theirs[parameter]  # as the file rounds it
        added = family.startswith(("gemma", "nemotron", "qwen3_5", "qwen3_next")) and family not in (
            "gemma4_text",
            "nemotron_h",
        )
        added = added and parameter.endswith("norm.weight")
        if added and "linear_attn" not in parameter:
            right = (right + 1) - 1
        if parameter.endswith("A_log"):
            right = right.exp().double().log().float()
        assert torch.equal(tensor, right), parameter
    with torch.inference_mode():
        ours, right = (model(torch.tensor([PROMPT])).logits for model in (found, expected))
    torch.testing.assert_close(ours, right, rtol=0, atol=2e-5 * float(right.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_the_engine_matches_it(name: str, tmp_path: Path) -> None:
    family, overrides = CONVERTIBLE[name]
    twin = gguf_twin(tiny_checkpoint(tmp_path, family, **overrides), tmp_path / "twin.gguf", "Q8_0")
    result = check(twin, ids=PROMPT, steps=2, tp=2, save=tmp_path / "run.session")
    assert result.matches, str(result)


@pytest.mark.slow
def test_a_gemma_2_whose_file_states_no_caps_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the first weeks have none: llama.cpp takes 50 and 30 (llama-hparams.h), and so do both sides here."""
    original = tiny_checkpoint(
        tmp_path, "gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, num_hidden_layers=2
    )
    for cap in ("attn", "final"):
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{cap}_logit_softcapping", lambda *cap: None)
    twin = gguf_twin(original, tmp_path / "twin.gguf")
    config = load_golden(twin, "float32", "cpu").config
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    assert check(twin, ids=PROMPT, steps=2).matches


def test_an_architecture_that_is_not_mapped_is_refused(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "other.gguf", {"mamba.block_count": 1}, "mamba")
    with pytest.raises(ReferenceFailure, match="architecture 'mamba' is not mapped for transformers"):
        load_golden(path, "float32", "cpu")


def test_a_split_model_is_loaded_from_all_its_files(tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path, "llama-llama3")
    whole = load_golden(gguf_twin(checkpoint, tmp_path / "whole.gguf", "Q8_0"), "float32", "cpu")
    gguf_twin(checkpoint, tmp_path / "split", "Q8_0", split_tensors=10)
    first, *others = sorted(tmp_path.glob("split-*.gguf"))
    assert others
    split = load_golden(first, "float32", "cpu")
    expected = whole.state_dict()
    assert split.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in split.state_dict().items())
    assert torch.equal(split.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert gguf.GGUFReader.__module__ == "gguf.gguf_reader"  # as it was
