"""Operations that read another tensor than their own, a sum of two, or either behind a norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.other_inputs import other_inputs
from tests.workbench.diagnosis.variants.made import MODEL, ROWS, Array, drawn, fits, made_site

RNG = np.random.default_rng(4)
X, STREAM, BRANCH, AFTER = (drawn(RNG, len(ROWS), 64) for _ in range(4))
GATE, NORM = drawn(RNG, 96, 64, size=0.1), 1 + drawn(RNG, 64, size=0.2)
OWN = "model.layers.1.mlp.gate_proj.weight"
OF_ATTENTION = "model.layers.1.input_layernorm.weight"
OTHERS = {"layers.0.mlp_residual": STREAM, "layers.1.attn.o_proj": BRANCH, "layers.1.mlp.down": AFTER}


def normed(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + MODEL.rms_eps))


def site(read: Array, **options: Any) -> Any:
    weights = {OWN: GATE, OF_ATTENTION: NORM}
    return made_site(
        "linear", "layers.1.mlp.gate", {"x": X}, read @ GATE.T, weights=weights, others=OTHERS, **options
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("read", "name"),
    [
        (STREAM, "layers.0.mlp_residual"),
        (STREAM + BRANCH, "layers.0.mlp_residual + layers.1.attn.o_proj"),
        (normed(STREAM), "layers.0.mlp_residual behind a norm without weight"),
        (
            normed(STREAM + BRANCH) * NORM,
            f"layers.0.mlp_residual + layers.1.attn.o_proj behind {OF_ATTENTION}",
        ),
    ],
)
def test_what_is_read_instead_is_named(read: Array, name: str, dtype: str) -> None:
    first, *_ = fits(site(read, dtype=dtype), (other_inputs,))
    assert first.accepted
    assert (first.variant.kind, first.variant.fitted) == ("input", {"input": name})


def test_what_follows_from_the_operation_is_no_input_of_it() -> None:
    assert fits(site(AFTER), (other_inputs,)) == []


def test_an_input_that_was_not_recorded_is_not_named() -> None:
    assert fits(site(drawn(RNG, len(ROWS), 64)), (other_inputs,)) == []
