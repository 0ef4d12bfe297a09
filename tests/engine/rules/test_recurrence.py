"""The delta rule by products of matrices against token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.engine.graph import recurrence
from lockstep.engine.rules.recurrence import CHUNK, delta_rule, log_decay, shared_by_neighbours


@pytest.mark.parametrize("tokens", [1, 2, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
@pytest.mark.parametrize("decay", [0.01, 5.0, 60.0])
def test_chunks_give_what_single_tokens_do(tokens: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, state = (
        torch.randn(shape, generator=generator)
        for shape in ((tokens, 3, 8), (tokens, 3, 8), (tokens, 3, 5), (3, 8, 5))
    )
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    beta = torch.rand(tokens, 3, generator=generator)
    forgotten = -decay * torch.rand(tokens, 3, generator=generator)
    read, last = delta_rule(state, q, k, v, beta, forgotten)
    given = [x.double().numpy() for x in (state, k, v.flatten(1), beta, forgotten.exp())]
    np.testing.assert_allclose(last.numpy(), recurrence.last_state(*given), atol=2e-5)
    right = recurrence.read_out(q.double().numpy() / 8**0.5, *given)
    np.testing.assert_allclose(read.flatten(1).numpy(), right, atol=2e-5)


def test_a_sequence_may_be_cut_anywhere() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, 2, 4, generator=generator) / 2 for _ in range(3))
    beta, decay = torch.rand(20, 2, generator=generator), -torch.rand(20, 2, generator=generator)
    start = torch.zeros(2, 4, 4)
    whole, last = delta_rule(start, q, k, v, beta, decay)
    parts, state = [], start
    for rows in (slice(0, 7), slice(7, 8), slice(8, 20)):
        part, state = delta_rule(state, *(x[rows] for x in (q, k, v, beta, decay)))
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(state, last)


def test_neighbouring_value_heads_share_a_key_head() -> None:
    keys = torch.arange(2.0).view(1, 2, 1)
    assert shared_by_neighbours(keys, 6).flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_a_decay_is_never_a_growth() -> None:
    found = log_decay(torch.linspace(-30, 30, 7)[:, None], torch.zeros(1), torch.zeros(1))
    assert (found <= 0).all()
    assert np.isclose(float(found[-1]), -30)
