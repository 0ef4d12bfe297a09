"""Tensors of a text model under the names that checkpoints which read images give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.verify import verify
from lockstep.engine.checkpoint.wrapped import other_part, text_name
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from tests.wrapped_checkpoints import wrapped_checkpoint

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.self_attn.q_proj.weight", QUERY),  # gemma-3-4b-it, Mistral-Small-3.1
        ("model.language_model.layers.0.self_attn.q_proj.weight", QUERY),  # Qwen3-VL, Qwen3.5, GLM-4.5V
        ("language_model.layers.0.self_attn.q_proj.weight", QUERY),
        (QUERY, QUERY),  # Qwen2.5-VL
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("mtp.norm.weight", "mtp.norm.weight"),
    ],
)
def test_names_of_the_text_model(stored: str, name: str) -> None:
    assert (text_name(stored), other_part(name)) == (name, "")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", "vision_tower"),
        ("model.visual.blocks.0.attn.qkv.weight", "model.visual"),
        ("multi_modal_projector.norm.weight", "multi_modal_projector"),
        ("mm_projector.proj.0.weight", "mm_projector"),
    ],
)
def test_names_of_other_parts(name: str, part: str) -> None:
    assert (text_name(name), other_part(name)) == (name, part)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wrapped_checkpoint(tmp_path_factory.mktemp("gemma"), "gemma3")


def copied(path: Path, target: Path, named: Callable[[str], str]) -> Path:
    """The checkpoint with other names, without the tensors whose name becomes empty."""
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = {named(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(
        {name: one for name, one in tensors.items() if name}, target / "model.safetensors", {"format": "pt"}
    )
    return target


def test_both_styles_of_names_are_the_same_model(gemma: Path, tmp_path: Path) -> None:
    def as_of_5(name: str) -> str:
        return name.replace("language_model.model.", "model.language_model.").replace(
            "vision_tower.", "model.vision_tower."
        )

    model, source = open_checkpoint(gemma)
    other_model, other = open_checkpoint(copied(gemma, tmp_path / "other", as_of_5))
    verify(source, model)
    verify(other, other_model)
    assert torch.equal(source.read(QUERY), other.read(QUERY))
    assert source.info(QUERY).stored_as != other.info(QUERY).stored_as
    (note,) = other_model.notes
    assert note.startswith("ignored model.vision_tower")
    assert note.endswith("of gemma3 the text model alone is run, images are not read")
    assert source.digest() != other.digest()


def test_only_what_reads_images(gemma: Path, tmp_path: Path) -> None:
    model, source = open_checkpoint(
        copied(gemma, tmp_path / "vision", lambda name: name if other_part(name) else "")
    )
    with pytest.raises(CheckpointError, match="hold nothing of the text model, only what reads images"):
        verify(source, model)


def test_only_the_text_model(gemma: Path, tmp_path: Path) -> None:
    model, source = open_checkpoint(
        copied(gemma, tmp_path / "text", lambda name: "" if other_part(name) else name)
    )
    verify(source, model)
    assert model.notes == ("of gemma3 the text model alone is run, images are not read",)


def test_two_tensors_of_one_name_are_refused(gemma: Path, tmp_path: Path) -> None:
    first = "language_model.model.norm.weight"
    path = copied(
        gemma, tmp_path / "two", lambda name: "model.norm.weight" if "layers.0.input" in name else name
    )
    with pytest.raises(
        CheckpointError, match=rf"{first} and model\.norm\.weight are both|both model\.norm\.weight"
    ):
        open_checkpoint(path)


def test_experts_that_lie_transposed_as_they_are_published(tmp_path: Path) -> None:
    """The shape shows it: transformers saves them as it has them."""
    path = wrapped_checkpoint(tmp_path, "qwen3_vl_moe")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    _, source = open_checkpoint(path)
    before = source.read(name)
    file = path / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file, {"format": "pt"})
    model, source = open_checkpoint(path)
    verify(source, model)
    assert torch.equal(source.read(name), before)
    assert torch.equal(source.read(name, 0, Span(8, 16)), before[8:16])


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    path = wrapped_checkpoint(tmp_path, "qwen3_5")
    tensors = load_file(path / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model, source = open_checkpoint(path)
    verify(source, model)
    assert any(note.startswith("ignored mtp.fc.weight: a layer that predicts") for note in model.notes)


def test_a_head_of_its_own_where_nothing_reports_it(tmp_path: Path) -> None:
    """As Mistral-Small-3.1 is published, whose class assumes that the head is the embedding."""
    path = wrapped_checkpoint(tmp_path, "mistral3")
    config = json.loads((path / "config.json").read_text())
    for one in (config, config["text_config"]):
        one.pop("tie_word_embeddings", None)
    (path / "config.json").write_text(json.dumps(config))
    model, source = open_checkpoint(path)
    verify(source, model)
    assert not model.tie_embeddings
    assert any("config.json does not have tie_word_embeddings: false" in note for note in model.notes)
