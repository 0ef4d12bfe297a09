"""What became of sinks, against a softmax over keys and sinks side by side."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.workbench.diagnosis.hypotheses.attention.sinks import sink_forms
from tests.workbench.diagnosis.variants.made import MODEL, Array, drawn, made_site

RNG = np.random.default_rng(5)
SCORES, SINKS = drawn(RNG, 4, 3, 6), drawn(RNG, 4)


def beside(*sinks: Array) -> Array:
    """Probabilities of the keys, with each of these sinks beside them."""
    scores = torch.tensor(SCORES)
    columns = [torch.tensor(one)[:, None, None].expand(-1, 3, 1) for one in sinks]
    return torch.cat((scores, *columns), -1).softmax(-1)[..., :6].numpy()


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        (("counted", 2.0), beside(SINKS, SINKS)),
        (("counted", 3.0), beside(SINKS, SINKS, SINKS)),
        (("scaled", MODEL.scale), beside(SINKS * 16**-0.5)),
        (("divided", MODEL.scale), beside(SINKS * 4)),
        (
            ("in_front", 0.0),
            np.concatenate([1 - beside(SINKS).sum(-1, keepdims=True), beside(SINKS)[..., :-1]], -1),
        ),
    ],
)
def test_sinks_that_are_counted_again_or_scaled(detail: tuple[str, float], expected: Array) -> None:
    x = drawn(RNG, 22, 64)
    site = made_site("residual", "layers.0.attn_residual", {"x": x, "y": x}, 2 * x)
    part = replace(site.parts[0], inputs={"scores": SCORES, "sinks": SINKS})
    site = replace(site, operation="softmax", parts=(part,))
    form = next(form for found, form in sink_forms(site) if found == detail)
    np.testing.assert_allclose(form(SCORES), expected, rtol=1e-9)
