"""Rotary frequencies that change with a sequence's length, made with transformers' own initialisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep.engine.config import ModelConfig
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row
from lockstep.workbench.diagnosis.recording import Recording
from tests.checkpoints import tiny_config
from tests.workbench.diagnosis.operations.test_sites import GROWING
from tests.workbench.diagnosis.synthetic import Case, synthetic
from tests.workbench.diagnosis.variants.made import POSITIONS, ROWS, Array, best, drawn, made_site

X = drawn(np.random.default_rng(0), len(ROWS), 4, 8)


def turned(name: str, length: Callable[[Row], int], **parameters: int) -> tuple[Array, ModelConfig]:
    """X rotated as transformers rotates in a sequence of that length, and the model."""
    rope = GROWING[name]["rope_parameters"] | parameters
    config = tiny_config("llama", **GROWING[name] | {"rope_parameters": rope})
    out = np.empty_like(X)
    for i, row in enumerate(ROWS):
        freq, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length(row))
        z = (X[i, :, :4] + 1j * X[i, :, 4:]) * np.exp(1j * POSITIONS[i] * freq.double().numpy()) * factor
        out[i] = np.concatenate([z.real, z.imag], -1)
    return out, ModelConfig.from_hf(config.to_dict())


def so_far(row: Row) -> int:
    return (12 if row.seq == 0 else 5) + row.step


LENGTHS: dict[str, tuple[Callable[[Row], int], str]] = {
    "prompt": (lambda row: so_far(replace(row, step=0)), "prompt's length"),
    "batch": (lambda row: 12 + row.step, "longest sequence of the batch"),
}


@pytest.mark.parametrize("name", GROWING)
def test_the_right_length_is_no_deviation(name: str) -> None:
    seen, model = turned(name, so_far)
    assert made_site("rope", "layers.1.attn.q_rope", {"x": X}, seen, model=model).deviation is None


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("by", LENGTHS)
def test_frequencies_of_another_length_are_reported(name: str, by: str) -> None:
    length, words = LENGTHS[by]
    seen, model = turned(name, length)
    found = [
        one.variant for one in best(made_site("rope", "layers.1.attn.q_rope", {"x": X}, seen, model=model))
    ]
    assert {one.kind for one in found} == {"rope"}
    assert any(one.name == "rope_length" and words in one.text for one in found), [one.text for one in found]


def test_factors_of_long_contexts_in_all_requests() -> None:
    """Where each step has a long sequence, the longest of the batch may have decided as well: both are reported."""
    for original, words in ((11, "all steps here have a long one"), (13, "also in short sequences")):
        seen, model = turned("longrope", lambda row: 1000, original_max_position_embeddings=original)
        found = best(made_site("rope", "layers.1.attn.q_rope", {"x": X}, seen, model=model))[0].variant
        assert "those of the long context throughout" in found.text
        assert found.text.endswith(words)


def test_a_chunk_of_a_prompt_belongs_to_the_whole_of_it(case: Case, tmp_path: Path) -> None:
    """Of three passes the first two emit nothing: chunks of one prompt."""
    session = synthetic(
        tmp_path / "a.session",
        case.floor,
        change=lambda sequence: replace(sequence, emitted=None) if sequence.positions[-1] < 13 else sequence,
    )
    passes = RecordedTaps(Recording(session)).passes
    lengths = {(one.step, one.seq): {row.length for row in one.rows} for one in passes}
    assert lengths == {(0, 0): {14}, (1, 0): {14}, (2, 0): {14}, (0, 1): {5}, (1, 1): {6}, (2, 1): {7}}
