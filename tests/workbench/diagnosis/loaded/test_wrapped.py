"""The memory of engines that hold a model which reads images: its text model is compared, the rest is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.places import Parameters
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.workbench.diagnosis.loaded.ranks import State, written
from tests.wrapped_checkpoints import wrapped_checkpoint, wrapped_model


def compared(checkpoint: Path, dump: Path, state: State) -> LoadedWeights:
    with LoadedFrom.open(checkpoint) as opened:
        return compare_weights(read_ranks(written(dump, [state])), opened)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "qwen2_5_vl", "qwen3_vl_moe"])
def test_the_text_model_is_compared_and_nothing_else(name: str, tmp_path: Path) -> None:
    """In transformers' names, `layers.0` of the vision tower beside those of the text model."""
    checkpoint = wrapped_checkpoint(tmp_path, name)
    state: State = dict(wrapped_model(name).named_parameters())
    found = compared(checkpoint, tmp_path / "right", state)
    assert (found.wrong, found.unknown, found.left_out) == ((), (), ())
    assert {part.rpartition(".")[2] for part in found.other_parts} <= {
        "vision_tower", "visual", "multi_modal_projector",
    }  # fmt: skip
    assert found.other_parts
    model, source = open_checkpoint(checkpoint)
    ours = {
        one
        for one in source.names()
        if one.startswith(("model.layers.", "model.norm", "model.embed", "lm_head"))
    }
    assert found.compared == len(ours)
    norm = "model.language_model.layers.1.input_layernorm.weight"
    changed = {
        key: one + 1 if key == norm or not key.startswith("model.language") else one
        for key, one in state.items()
        if key != "lm_head.weight"
    }
    wrong = {one.parameter for one in compared(checkpoint, tmp_path / "wrong", changed).wrong}
    assert wrong - {"lm_head.weight"} == {"model.layers.1.input_layernorm.weight"}
    assert model.wrapper == name


def test_products_of_linear_attention_that_an_engine_stacks(tmp_path: Path) -> None:
    """As vLLM does: its rank's rows of q, k, v and z one below the other."""
    checkpoint = wrapped_checkpoint(tmp_path, "qwen3_5")
    with LoadedFrom.open(checkpoint) as opened:
        parameters = Parameters(opened.source, opened.tied)
        name = "language_model.model.layers.0.linear_attn.in_proj_"
        rows = {
            one: parameters.shapes[f"model.layers.0.linear_attn.in_proj_{one}.weight"][0] for one in "qkvz"
        }
        places = parameters.places(f"{name}qkvz.weight", (sum(rows.values()) // 2, 64), 1, 2)
    assert places is not None
    assert [(one.parameter[-8], one.taken) for one in places] == [
        (one, Span(count // 2, count)) for one, count in rows.items()
    ]
