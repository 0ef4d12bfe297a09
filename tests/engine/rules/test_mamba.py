"""The scan of Mamba-2 by products of matrices against token by token in float64, and against transformers' function."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid

from lockstep.engine.graph import recurrence
from lockstep.engine.rules.mamba import CHUNK, negative_rate, scan, skip, step_size

HEADS, DIM, STATE = 4, 5, 6


def given(tokens: int, groups: int = HEADS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "x": (tokens, HEADS, DIM), "b": (tokens, groups, STATE), "c": (tokens, groups, STATE), "dt": (tokens, HEADS),
        "state": (HEADS, DIM, STATE), "a_log": (HEADS,), "dt_bias": (HEADS,), "d": (HEADS,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("tokens", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
@pytest.mark.parametrize("rate", [0.01, 1.0, 60.0])
def test_chunks_give_what_single_tokens_do(tokens: int, rate: float) -> None:
    one = given(tokens)
    step, rates = (
        step_size(one["dt"], one["dt_bias"], (0.0, float("inf"))),
        rate * negative_rate(one["a_log"]),
    )
    read, last = scan(one["state"], one["x"], one["b"], one["c"], step, rates)
    x, b, c, wide, kept = (
        part.double().numpy() for part in (one["x"], one["b"], one["c"], step, (step * rates).double().exp())
    )
    before = one["state"].double().numpy()
    np.testing.assert_allclose(last.numpy(), recurrence.scanned(before, x, b, wide, kept), atol=5e-5)
    np.testing.assert_allclose(read.numpy(), recurrence.scan_read(c, before, x, b, wide, kept), atol=5e-5)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
def test_step_sizes_states_and_skip_are_those_of_transformers(limits: tuple[float, float]) -> None:
    """Longer than its chunks; groups of two heads each share B and C."""
    one = given(11, groups=2)
    theirs = inspect.unwrap(modeling_granitemoehybrid.mamba2_chunk_scan)
    rates = negative_rate(one["a_log"])
    out, state = theirs(
        *(one[name][None] for name in ("x", "dt")), rates, one["b"][None], one["c"][None], chunk_size=4, D=one["d"],
        dt_bias=one["dt_bias"], initial_states=one["state"][None], dt_softplus=True, dt_limit=limits,
        return_final_states=True,
    )  # fmt: skip
    step = step_size(one["dt"], one["dt_bias"], limits)
    b, c = (one[name].repeat_interleave(2, 1) for name in "bc")
    read, last = scan(one["state"], one["x"], b, c, step, rates)
    torch.testing.assert_close(skip(read, one["x"], one["d"]), out[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(last, state[0], atol=2e-5, rtol=1e-5)
