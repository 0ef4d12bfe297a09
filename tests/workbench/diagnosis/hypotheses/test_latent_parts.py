"""What may be taken for a head's key or value, against the cuts that torch makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lockstep.workbench.diagnosis.hypotheses.latent_parts import other_parts

TOKENS, HEADS, KEY, VALUE, ROPE = 5, 4, 6, 3, 2


@pytest.fixture
def expanded() -> torch.Tensor:
    return torch.randn(TOKENS, HEADS, KEY + VALUE, dtype=torch.float64)


def predicted(expanded: torch.Tensor, rope: np.ndarray | None) -> dict[tuple[str, str], np.ndarray]:
    """By name and figures what each hypothesis gives."""
    inputs: dict[str, Any] = {"expanded": expanded.numpy()} | ({} if rope is None else {"rope": rope})
    own = expanded[..., -VALUE:] if rope is None else expanded[..., :KEY]
    width = own.shape[-1] + (0 if rope is None else ROPE)
    site = SimpleNamespace(inputs=inputs, expected=np.zeros((TOKENS, HEADS, width)))
    found = {(one.name, str(dict(one.fitted))): one.predicted for one in other_parts(cast(Any, site))}
    assert all(isinstance(one, np.ndarray) for one in found.values())
    return cast(dict[tuple[str, str], np.ndarray], found)


def test_values_cut_behind_all_keys(expanded: torch.Tensor) -> None:
    _, values = expanded.flatten(1).split([HEADS * KEY, HEADS * VALUE], -1)
    found = predicted(expanded, None)[("latent_split_of_all_heads", "{}")]
    assert np.array_equal(found, values.unflatten(-1, (HEADS, VALUE)).numpy())


def test_values_that_are_the_keys_first_elements(expanded: torch.Tensor) -> None:
    found = predicted(expanded, None)
    assert np.array_equal(found[("latent_part_of_another", "{'first': 0}")], expanded[..., :VALUE].numpy())
    assert ("latent_part_of_another", f"{{'first': {KEY}}}") not in found, "that is where they lie"
    rolled = expanded.roll(-1, 1)[..., -VALUE:].numpy()
    assert any(
        np.array_equal(one, rolled) for (name, _), one in found.items() if name == "values_of_other_heads"
    )


def test_keys_keep_the_part_that_all_heads_share(expanded: torch.Tensor) -> None:
    rope = np.random.default_rng(0).normal(size=(TOKENS, 1, ROPE))
    found = predicted(expanded, rope)
    for one in found.values():
        assert np.array_equal(one[..., KEY:], np.broadcast_to(rope, (TOKENS, HEADS, ROPE)))
    keys, _ = expanded.flatten(1).split([HEADS * KEY, HEADS * VALUE], -1)
    cut = found[("latent_split_of_all_heads", "{}")]
    assert np.array_equal(cut[..., :KEY], keys.unflatten(-1, (HEADS, KEY)).numpy())
    last = found[("latent_part_of_another", f"{{'first': {VALUE}}}")]
    assert np.array_equal(last[..., :KEY], expanded[..., VALUE:].numpy())
