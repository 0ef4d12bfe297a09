"""Layers with a state that read numbers of other heads, or another slot of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lockstep.engine.config.linear_attention import LinearAttentionConfig
from lockstep.engine.config.mamba import MambaConfig
from lockstep.workbench.diagnosis.hypotheses.recurrent import recurrent_edits
from lockstep.workbench.diagnosis.hypotheses.recurrent_operands import other_slots
from lockstep.workbench.diagnosis.operations.deviation import Part
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import Row, SequencePass
from lockstep.workbench.diagnosis.operations.site import Site
from tests.workbench.diagnosis.variants.made import (
    MODEL,
    ROWS,
    Array,
    best,
    drawn,
    made_site,
    of_model,
)

pytestmark = pytest.mark.sampled_file(2)

RNG = np.random.default_rng(3)
LAYERS = (True, True, True)
LINEAR = of_model(linear=LinearAttentionConfig(2, 4, 16, 16, 4, LAYERS))
MAMBA = of_model(mamba=MambaConfig(4, 16, 2, 8, 4, LAYERS, norm_width=32))
GATED = of_model(output_gate=True)
X, GATE, NUMBERS = drawn(RNG, len(ROWS), 64), drawn(RNG, len(ROWS), 64), drawn(RNG, len(ROWS), 4)
A_LOG, DT_BIAS, HEAD, CHANNELS = drawn(RNG, 4), drawn(RNG, 4), 1 + drawn(RNG, 16) / 4, 1 + drawn(RNG, 64) / 4


def silu(x: Array) -> Array:
    return F.silu(torch.tensor(x)).numpy()


def normed(x: Array, groups: int, weight: Array) -> Array:
    parts = torch.tensor(x).unflatten(-1, (groups, -1))
    return F.rms_norm(parts, parts.shape[-1:], None, MODEL.rms_eps).flatten(1).numpy() * weight


def decay(a_log: Array, dt_bias: Array) -> Array:
    return -np.exp(a_log) * F.softplus(torch.tensor(NUMBERS + dt_bias)).numpy()


def of_decay(seen: Array) -> Site:
    weights = {
        "model.layers.1.linear_attn.A_log": A_LOG,
        "model.layers.1.linear_attn.dt_bias": DT_BIAS,
        "model.layers.0.linear_attn.A_log": A_LOG[::-1] * 2,
    }
    return made_site("decay", "layers.1.attn.decay", {"x": NUMBERS}, seen, model=LINEAR, weights=weights)


def of_norm(seen: Array) -> Site:
    weights = {"model.layers.1.linear_attn.norm.weight": HEAD}
    inputs = {"x": X, "gate": GATE}
    return made_site("gated_norm", "layers.1.attn.gated_norm", inputs, seen, model=LINEAR, weights=weights)


def of_groups(seen: Array) -> Site:
    weights = {"model.layers.1.mamba.norm.weight": CHANNELS}
    inputs = {"x": X, "gate": GATE, "whole": X, "whole_gate": GATE}
    return made_site("gated_norm", "layers.1.attn.ssm_norm", inputs, seen, model=MAMBA, weights=weights)


def of_gate(seen: Array) -> Site:
    inputs = {"x": X, "gate": GATE}
    return made_site("gate", "layers.1.attn.gated", inputs, seen, model=GATED)


def of_beta(seen: Array) -> Site:
    return made_site("sigmoid", "layers.1.attn.beta", {"x": NUMBERS}, seen, model=LINEAR)


def sigmoid(x: Array) -> Array:
    return torch.tensor(x).sigmoid().numpy()


CASES: dict[str, tuple[Callable[[Array], Site], Callable[[], Array], str]] = {
    "rates of the next head": (
        of_decay, lambda: decay(np.roll(A_LOG, -1), DT_BIAS), "A_log of the head 1 further is read",
    ),
    "biases in reverse": (
        of_decay, lambda: decay(A_LOG, DT_BIAS[::-1]), "dt_bias of the heads in reverse order is read",
    ),
    "rates of another layer": (
        of_decay, lambda: decay(A_LOG[::-1] * 2, DT_BIAS), "A_log of layer 0 is read instead of A_log",
    ),
    "gates of the head before": (
        of_gate, lambda: X * sigmoid(np.roll(GATE, 16, -1)), "the gate of the head before is read",
    ),
    "gates of the first head": (
        of_gate, lambda: X * sigmoid(np.tile(GATE[:, :16], 4)), "the gate of the first head is read",
    ),
    "twice the rate": (of_beta, lambda: 2 * sigmoid(NUMBERS), "beta is 2 times its sigmoid"),
    "the gate first": (
        of_norm, lambda: normed(X * silu(GATE), 4, np.tile(HEAD, 4)), "the gate is multiplied before the norm",
    ),
    "the norm first": (
        of_groups, lambda: normed(X, 2, CHANNELS) * silu(GATE), "the gate is multiplied after the norm",
    ),
    "both groups together": (
        of_groups, lambda: normed(X * silu(GATE), 1, CHANNELS), "over the channels of all groups together",
    ),
    "a group a head": (
        of_groups, lambda: normed(X * silu(GATE), 4, CHANNELS), "over each head's own channels",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_gate_or_rate_reads_is_named(case: str) -> None:
    site, seen, words = CASES[case]
    found = best(site(seen()))
    assert found, "nothing fits"
    assert words in found[0].variant.text, [one.variant.text for one in found]


def test_edits_that_give_the_same_numbers_are_one() -> None:
    """A gate that comes after the norm, and one that is left out of its squares alone."""
    seen = normed(X, 2, CHANNELS) * silu(GATE)
    right = [one for one in recurrent_edits(of_groups(seen)) if np.allclose(one.predicted[0], seen)]
    assert [one.text for one in right] == ["the gate is multiplied after the norm, not before it"]


@dataclass(frozen=True)
class _Recorded:
    """Rows that go into the convolutions of two sequences: a prompt of four, and two single tokens."""

    tensors_of: dict[str, list[Array]] = field(default_factory=dict)
    passes: tuple[SequencePass, ...] = tuple(
        SequencePass(step, seq, tuple(Row(step, seq, at, at, at, 0) for at in at_positions))
        for step, at_positions in enumerate((range(4), range(4, 5), range(5, 6)))
        for seq in range(2)
    )
    ranks: range = range(1)

    def tensors(self, tap: str, rank: int) -> list[Array | None]:
        return [*self.tensors_of.get(tap, [None] * len(self.passes))]


def test_what_slots_of_a_batch_hold_when_they_are_read_by_others() -> None:
    """Against a list of rows of each sequence: the number of a row is 10 times its sequence and its position."""
    taps = _Recorded()
    rows = [np.array([[10.0 * one.seq + row.position] for row in one.rows]) for one in taps.passes]
    taps.tensors_of["layers.0.attn.in_proj_q"] = rows
    parts = tuple(
        Part(one.rows, {"before": np.zeros((2, 1)), "x": x}, x + (one.step > 0), x, 0 * x + 1e-6, 1e38)
        for one, x in zip(taps.passes, rows, strict=True)
    )
    site = made_site("sigmoid", "layers.0.attn.beta", {"x": NUMBERS}, NUMBERS, model=LINEAR)
    site = replace(
        site, tap="layers.0.attn.conv_q", operation="conv", parts=parts, taps=cast(Any, taps),
        passes=tuple(range(6)),
    )  # fmt: skip
    met = {key: {name: x[:, 0].tolist() for name, x in one.items()} for key, one in other_slots(site).items()}
    assert met[0, 1]["next slot, read and written"] == [0.0, 0.0]
    assert met[1, 0]["next slot, read and written"] == met[1, 0]["next slot, read alone"] == [12.0, 13.0]
    assert met[2, 0]["next slot, read and written"] == [13.0, 4.0]
    assert met[2, 0]["next slot, read alone"] == [3.0, 14.0]  # which sequence 1 wrote to its own slot
    assert met[2, 1]["next slot, read alone, as this step leaves it"] == [14.0, 5.0]
    assert met[1, 0]["slot before or nobody's, read alone"] == [0.0, 0.0]
    assert met[1, 1]["slot before or nobody's, read alone"] == [2.0, 3.0]
    assert met[2, 1]["slot before or nobody's, read alone"] == [
        0.0,
        4.0,
    ]  # which sequence 0 made of an empty slot
    assert met[1, 1]["its rows, newest first"] == [13.0, 12.0]
    assert met[2, 1]["its rows, newest first"] == [14.0, 12.0]


@pytest.mark.parametrize("handed", [0, 1])
def test_a_sequence_that_was_handed_the_slot_of_another_live_one_is_named(handed: int) -> None:
    """It meets in each decode step what the other one has read before that step, which goes on as it should."""
    taps, kernel = _Recorded(), drawn(RNG, 8, 3)
    rows = [drawn(RNG, len(one.rows), 8) for one in taps.passes]
    taps.tensors_of["layers.0.attn.in_proj_q"] = rows
    kept = {seq: np.zeros((2, 8)) for seq in range(2)}
    parts: list[Part] = []
    for one, x in zip(taps.passes, rows, strict=True):
        if one.seq == 0:  # a step begins
            held = dict(kept)
        met = held[1 - handed] if one.step and one.seq == handed else held[one.seq]
        seen, right = (_convolved(before, x, kernel) for before in (met, held[one.seq]))
        parts.append(Part(one.rows, {"before": held[one.seq], "x": x}, seen, right, 0 * x + 1e-6, 1e38))
        kept[one.seq] = np.concatenate([held[one.seq], x])[-2:]
    site = made_site("sigmoid", "layers.0.attn.beta", {"x": NUMBERS}, NUMBERS, model=LINEAR)
    site = replace(
        site, tap="layers.0.attn.conv_q", operation="conv", parts=tuple(parts), taps=cast(Any, taps),
        passes=tuple(range(6)), weights={"weight": "kernel"},
        facts=Facts(LINEAR, "float32", {"kernel": kernel}.get),
    )  # fmt: skip
    fitting = [
        one.text
        for one in recurrent_edits(site)
        if all(np.allclose(x, part.seen, atol=1e-4) for x, part in zip(one.predicted, parts, strict=True))
    ]
    assert f"a sequence reads another live sequence's kept rows: the slot of sequence {1 - handed}" in fitting
    assert all("another" in text for text in fitting), fitting


def _convolved(before: Array, x: Array, kernel: Array) -> Array:
    rows = torch.tensor(np.concatenate([before, x])).T
    return F.silu(F.conv1d(rows, torch.tensor(kernel)[:, None], groups=len(kernel))).T.numpy()
