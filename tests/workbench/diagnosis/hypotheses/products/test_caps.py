"""The soft cap of logits, and what they are divided by: left out, or another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from lockstep.workbench.diagnosis.hypotheses.products.products import product_edits
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, SequencePass
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import ROWS, MadeTaps, drawn, fits, made_site, of_model

_RNG = np.random.default_rng(4)
X, HEAD = drawn(_RNG, len(ROWS), 64), drawn(_RNG, 131, 64)
RAW = X @ HEAD.T  # of sizes up to some 30


class _OnePass(MadeTaps):
    """Nothing else was recorded of all rows, which one pass has read."""

    passes = (SequencePass(0, 0, ROWS),)


def _site(seen: np.ndarray, **changes: Any) -> Site:
    weights = {"lm_head.weight": HEAD}
    site = made_site("head", "logits", {"x": X}, seen, model=of_model(**changes), weights=weights)
    return replace(site, taps=cast(RecordedTaps, _OnePass()))


@pytest.mark.parametrize(
    ("seen", "changes", "words"),
    [
        (RAW, {"logit_cap": 3.0}, "do not pass through this model's soft cap: 3 * tanh(logit / 3)"),
        (30 * np.tanh(RAW / 30), {"logit_cap": 3.0}, "logits are capped at 30 instead of 3"),
        (7.3 * np.tanh(RAW / 7.3), {"logit_cap": 3.0}, "logits are capped at 7.3 instead of 3"),
        (RAW, {"logit_divisor": 8.0}, "the logits are not divided by 8"),
    ],
)
def test_another_cap_or_divisor_is_named(seen: np.ndarray, changes: dict[str, Any], words: str) -> None:
    found = [one.variant.text for one in fits(_site(seen, **changes), (product_edits,)) if one.accepted]
    assert words in found[0], found


def test_the_right_cap_is_no_deviation() -> None:
    assert _site(3 * np.tanh(RAW / 3), logit_cap=3.0).deviation is None
