"""Rotations as engines get them wrong, made with transformers' own rotation and torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import Rope, RopeScaling
from lockstep.engine.rules.rope import frequencies
from lockstep.workbench.diagnosis.operations.recorded import Row
from tests.workbench.diagnosis.variants.made import (
    DECODE,
    MODEL,
    POSITIONS,
    ROWS,
    Array,
    accepted,
    best,
    drawn,
    made_site,
    names,
    of_model,
)

pytestmark = pytest.mark.sampled_file(3)

X = drawn(np.random.default_rng(0), len(ROWS), 4, 16)
FREQ = frequencies(MODEL, 5e5)[0].double().numpy()
PROMPTS = np.array([12.0 if row.seq == 0 else 5.0 for row in ROWS])
STEP = np.array([row.step for row in ROWS])
SEQ = np.array([row.seq for row in ROWS])
YARN = of_model(rope_scaling=RopeScaling("yarn", 4.0, 64))
LLAMA3 = of_model(rope_scaling=RopeScaling("llama3", 8.0, 32, low_freq_factor=1.0, high_freq_factor=4.0))
OWN = frequencies(YARN, 5e5)[1]
LLAMA3_BY_32 = of_model(rope_scaling=replace(LLAMA3.rope_scaling, factor=32.0))
LINEAR = of_model(rope_scaling=RopeScaling("linear", 4.0))


def turned(
    at: Array,
    model: ModelConfig = MODEL,
    x: Array = X,
    *,
    theta: float | None = None,
    factor: float | None = None,
    freq: Array | None = None,
) -> Array:
    """transformers' rotation of x [N, heads, D] by positions [N] (or [N, heads])."""
    inv_freq, own = frequencies(model, theta or model.rope_theta)
    f = torch.tensor(freq) if freq is not None else inv_freq.double()
    positions = torch.tensor(np.broadcast_to(at.reshape(len(at), -1), x.shape[:2]).copy())
    angle = positions[..., None] * f
    both = torch.cat([angle, angle], -1) * 1.0
    by = own if factor is None else factor
    out, _ = apply_rotary_pos_emb(
        torch.tensor(x)[None],
        torch.tensor(x)[None],
        both.cos()[None] * by,
        both.sin()[None] * by,
        unsqueeze_dim=0,
    )
    return out[0].reshape(x.shape).numpy()


def site(seen: Array, model: ModelConfig = MODEL, x: Array = X, **options: Any) -> Any:
    return made_site(
        "rope", "layers.1.attn.q_rope", {"x": x.reshape(len(x), -1)}, seen, model=model, **options
    )


@pytest.mark.parametrize("model", [MODEL, YARN, LLAMA3, LINEAR], ids=["plain", "yarn", "llama3", "linear"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_rotation_is_no_deviation(model: ModelConfig, dtype: str) -> None:
    assert site(turned(POSITIONS, model), model, dtype=dtype).deviation is None


REVERSED = np.where(STEP == 0, PROMPTS - 1 - POSITIONS, POSITIONS)
IN_BATCH = np.concatenate([np.arange((step == STEP).sum()) for step in range(4)]).astype(float)
WRONG_POSITIONS: dict[str, tuple[Array, set[str], str]] = {
    "stuck in decode": (np.where(DECODE, 0, POSITIONS), {"position_stuck"}, "position 0"),
    "stuck at the prompt's end": (np.where(DECODE, PROMPTS - 1, POSITIONS), {"position_stuck"}, "prompt's last token"),
    "one too far": (POSITIONS + 1, {"position_offset"}, "1 position too far"),
    "two early in decode": (np.where(DECODE, POSITIONS - 2, POSITIONS), {"position_offset"}, "2 positions too early"),
    "clamped": (np.minimum(POSITIONS, 7), {"positions_clamped"}, "beyond 7"),
    "per chunk": (POSITIONS % 4, {"positions_restart"}, "after every 4"),
    "through the batch": (IN_BATCH, {"positions_of_batch"}, "packed batch"),
    "padded from the left": (POSITIONS + np.where(SEQ == 1, 7, 0), {"positions_padded"}, "padded"),
    "halved": (POSITIONS / 2, {"positions_scaled"}, "divided by 2"),
    "reversed": (REVERSED, {"positions_reversed"}, "backwards"),
    "twice a step": (POSITIONS + STEP, {"positions_drift"}, "grows"),
    "fraction": (POSITIONS + 0.5, {"position_offset"}, "0.5 positions too far"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model", [MODEL, YARN, LLAMA3], ids=["plain", "yarn", "llama3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", WRONG_POSITIONS)
def test_wrong_positions_are_read_as_their_rule(model: ModelConfig, dtype: str, case: str) -> None:
    at, expected, words = WRONG_POSITIONS[case]
    found = site(turned(at, model), model, dtype=dtype)
    assert {one.variant.name for one in best(found)} >= expected
    reported = [one.variant for one in best(found) if one.variant.name in expected]
    assert any(words in one.text for one in reported), [one.text for one in reported]
    kinds = {one.variant.kind for one in best(found)}
    also = {"rope"} if case == "halved" and model is MODEL else set()  # as by linear scaling
    assert kinds == {"positions"} | also, [one.variant.text for one in best(found)]


@pytest.mark.parametrize("model", [MODEL, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize(
    ("queries", "name"), [("right", "rope_not_applied"), ("still", "position_stuck"), ("", "position_stuck")]
)
def test_keys_of_decode_that_are_not_rotated_stand_still_where_queries_do(
    model: ModelConfig, queries: str, name: str
) -> None:
    """Position 0 rotates nothing. Queries that are rotated right have the positions; without them it is the counter."""
    still, q = np.where(DECODE, 0, POSITIONS), drawn(np.random.default_rng(1), len(ROWS), 4, 16)
    others = {"layers.1.attn.q_proj": q.reshape(len(q), -1)}
    if queries:
        others["layers.1.attn.q_rope"] = turned(POSITIONS if queries == "right" else still, model, q)
    inputs = {"x": X.reshape(len(X), -1)}
    seen = turned(still, model)
    found = best(made_site("rope", "layers.1.attn.k_rope", inputs, seen, model=model, others=others))
    assert {"rope_not_applied", "position_stuck"} & {one.variant.name for one in found} == {name}


@pytest.mark.parametrize("last", [6, 7])
@pytest.mark.parametrize(("windows", "name"), [((7, None), "positions_of_window"), ((), "position_stuck")])
def test_positions_may_count_the_keys_that_a_window_keeps(
    windows: tuple[int | None, ...], name: str, last: int
) -> None:
    """Of 7 the cache keeps 6 keys between passes, or 7; a model without a window has no such count."""
    at = np.where(DECODE, np.minimum(POSITIONS, last), POSITIONS)
    reported = {
        one.variant.name: one.variant.text for one in best(site(turned(at), of_model(windows=windows)))
    }
    assert name in reported
    assert ("positions_of_window" in reported) == bool(windows)
    assert not windows or "its window of 7, not the tokens that were read" in reported[name]


@pytest.mark.parametrize("holds", ["numbers", "nan"])
def test_what_is_read_behind_a_table_of_angles_is_no_angle(holds: str) -> None:
    """Of a table of 8 positions, without a check of the index: NaN in some pairs, any numbers in the others."""
    random, at = np.random.default_rng(3), POSITIONS[:, None, None] * FREQ
    cos, sin = np.cos(at), np.sin(at)
    for table in (cos, sin):
        behind = random.normal(scale=3, size=table[POSITIONS >= 8].shape)
        behind[..., ::3] = np.nan if holds == "nan" else behind[..., ::3]
        table[POSITIONS >= 8] = behind
    first, second = X[..., :8], X[..., 8:]
    seen = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    (found,) = best(site(seen, of_model(max_position=8)))
    assert found.variant.name == "rope_behind_table"
    assert "ends at position 7, after 8 positions (max_position_embeddings)" in found.variant.text


def test_a_table_that_ends_early_may_lack_dynamic_scaling_too() -> None:
    """As vLLM builds it: of the trained length alone, and so never scaled. Texts beyond it turn otherwise from their
    second token on."""
    scaled = of_model(max_position=8, rope_scaling=RopeScaling("dynamic", 4.0))
    seen = turned(POSITIONS, MODEL)
    late = POSITIONS >= 8
    seen[late] = X[late] * np.tile(drawn(np.random.default_rng(5), int(late.sum()), 1, 8), 2) * 1e20
    (found,) = best(site(seen, scaled))
    assert found.variant.name == "rope_behind_table"
    assert found.variant.text.startswith(
        "dynamic scaling of the frequencies is not applied; the engine's table"
    )


def test_rows_that_went_in_as_no_numbers_do_not_hide_how_others_turn() -> None:
    x = X.copy()
    x[POSITIONS >= 9] = np.nan
    assert "rope_theta" in names(site(turned(POSITIONS, x=x, theta=1e4), x=x))


def test_rows_off_by_numbers_of_each_head_are_not_said_to_be_read_behind_a_table() -> None:
    seen = turned(POSITIONS)
    late = POSITIONS >= 8
    seen[late] += drawn(np.random.default_rng(4), int(late.sum()), 4, 16)
    assert not accepted(site(seen))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_that_should_not_rotate_at_all(dtype: str) -> None:
    unrotated = of_model(rotary=0)
    assert not accepted(site(X, unrotated))
    seen = torch.tensor(turned(POSITIONS)).to(getattr(torch, dtype)).double().numpy()
    (found,) = best(site(seen, unrotated, dtype=dtype))
    assert found.variant.text == "heads are rotated, which this model does not do in this layer"


def test_a_part_whose_pairs_are_those_of_whole_heads() -> None:
    """Tables of 8 channels, padded to 16: a channel's partner is 8 away, not 4."""
    in_part = of_model(rotary=8)
    freq = 5e5 ** -(np.arange(0, 8, 2) / 8)
    seen = turned(POSITIONS, freq=np.concatenate([freq, np.zeros(4)]))
    (found,) = best(site(seen, in_part))
    assert found.variant.name == "rope_padded_tables"
    assert "pairs (i, i + 8) of whole heads" in found.variant.text


@pytest.mark.parametrize("by", [4, 12])
def test_parts_of_a_head_in_the_other_order_are_named(by: int) -> None:
    """4 of 16 channels are rotated: those that come first when the parts are exchanged."""
    in_part = of_model(rotary=4)
    x = np.roll(X, by, -1)
    freq = 5e5 ** -(np.arange(0, 4, 2) / 4)
    a, b, angle = x[..., :2], x[..., 2:4], POSITIONS[:, None, None] * freq
    seen = np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), x[..., 4:]], -1
    )
    assert names(site(seen, in_part)) == {"rope_parts_exchanged"}


def test_positions_that_follow_no_rule_are_reported() -> None:
    at = POSITIONS.copy()
    at[[3, 5, 9]] = [8, 1, 2]
    (found,) = best(site(turned(at)))
    assert found.variant.name == "positions"
    assert found.variant.fitted["positions"] == {"3": 8.0, "5": 1.0, "9": 2.0}


def test_long_prompts_rounded_to_bfloat16_share_positions() -> None:
    rows = tuple(Row(0, 0, position, 1, position) for position in range(250, 290))
    x, at = drawn(np.random.default_rng(1), 40, 4, 16), np.arange(250.0, 290.0)
    low = torch.tensor(at).bfloat16().double().numpy()
    assert names(site(turned(low, x=x), x=x, rows=rows)) == {"positions_rounded"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 123_456.0])
@pytest.mark.parametrize("model", [MODEL, YARN, LLAMA3], ids=["plain", "yarn", "llama3"])
def test_the_base_is_reported_with_its_value(model: ModelConfig, theta: float) -> None:
    found = best(site(turned(POSITIONS, model, theta=theta), model))
    reported = next(one.variant for one in found if one.variant.name == "rope_theta")
    assert reported.fitted["theta"] == pytest.approx(theta, rel=1e-3)
    assert {one.variant.kind for one in found} == {"rope"}


SCALINGS: dict[str, tuple[ModelConfig, ModelConfig, float | None, str]] = {
    "llama3 missing": (LLAMA3, MODEL, None, "llama3 scaling of the frequencies is not applied"),
    "yarn missing": (YARN, MODEL, None, "yarn scaling of the frequencies is not applied, nor is the attention factor"),
    "yarn missing, factor kept": (YARN, MODEL, OWN, "yarn scaling of the frequencies is not applied"),
    "linear missing": (LINEAR, MODEL, None, "linear scaling of the frequencies is not applied"),
    "wrong factor": (LLAMA3, LLAMA3_BY_32, None, "factor 32 instead of 8"),
    "linear for yarn": (YARN, LINEAR, 1.0, "divided by 4 (linear scaling) instead of yarn"),
    "linear turned round": (
        LINEAR, of_model(rope_scaling=RopeScaling("linear", 1 / 4)), None, "multiplied by 4, not divided"
    ),
    "degrees, a linear factor": (
        MODEL, of_model(rope_scaling=RopeScaling("linear", 180 / np.pi)), None, "are taken for degrees"
    ),
    "ntk": (MODEL, of_model(rope_theta=5e5 * 4 ** (16 / 14)), None, "NTK"),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALINGS)
def test_stretched_contexts_are_reported(case: str) -> None:
    model, used, factor, words = SCALINGS[case]
    found = best(site(turned(POSITIONS, used, factor=factor), model))
    assert "rope_scaling" in {one.variant.name for one in found}
    assert any(words in one.variant.text for one in found), [one.variant.text for one in found]
    assert {one.variant.kind for one in found} <= {"rope"} | ({"positions"} if "linear" in case else set())


OTHER = RopeScaling("linear", 8.0)


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (of_model(rope_theta=3.3e5, rope_scaling=OTHER), "the rotation is that of layers 0, 2"),
        (of_model(rope_theta=3.3e5), "theta is that of layers 0, 2"),
        (of_model(rope_scaling=OTHER), "the scaling of the frequencies is that of layers 0, 2"),
    ],
    ids=["both", "theta", "scaling"],
)
def test_the_rotation_of_layers_of_another_type(used: ModelConfig, words: str) -> None:
    """Of a window's layer in the middle of others."""
    others, own = Rope(3.3e5, OTHER), Rope(MODEL.rope_theta, MODEL.rope_scaling)
    found = best(site(turned(POSITIONS, used), of_model(layer_ropes=(others, own, others))))
    assert any(one.variant.text.startswith(words) for one in found)


@pytest.mark.parametrize(
    ("factor", "words"), [(1.0, "not applied"), (OWN**2, "twice"), (1 / OWN, "divided by")]
)
def test_the_attention_factor(factor: float, words: str) -> None:
    (found,) = best(site(turned(POSITIONS, YARN, factor=factor), YARN))
    assert (found.variant.name, words in found.variant.text) == ("attention_factor", True)


def heads(at: Array) -> Array:
    return turned(at)


def interleaved(x: Array) -> Array:
    """GPT-J's rotation."""
    z = torch.view_as_complex(torch.tensor(x).reshape(*x.shape[:-1], -1, 2).contiguous())
    angle = torch.tensor(POSITIONS)[:, None, None] * frequencies(MODEL, 5e5)[0].double()
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2).numpy()


def partial(pairs: slice) -> Array:
    out, right = X.copy(), turned(POSITIONS)
    for part in (slice(pairs.start, pairs.stop), slice(pairs.start + 8, pairs.stop + 8)):
        out[..., part] = right[..., part]
    return out


def small_head() -> Array:
    out = X.copy()
    model = of_model(head_dim=8)
    out[..., :8] = turned(POSITIONS, model, X[..., :8])
    return out


def three_quarters() -> Array:
    out = X.copy()
    out[..., :12] = turned(POSITIONS, x=X[..., :12], freq=FREQ[:6])
    return out


FORMS: dict[str, tuple[Callable[[], Array], str]] = {
    "not applied": (lambda: X, "rope_not_applied"),
    "interleaved": (lambda: interleaved(X), "rope_interleaved"),
    "backwards": (lambda: turned(-POSITIONS), "rope_reversed"),
    "twice": (lambda: turned(POSITIONS, x=turned(POSITIONS)), "rope_twice"),
    "in place": (lambda: in_place(), "rope_in_place"),
    "first pairs only": (lambda: partial(slice(0, 3)), "rope_partial"),
    "last pairs only": (lambda: partial(slice(4, 8)), "rope_partial"),
    "as a head of half the size": (small_head, "rope_partial"),
    "three quarters": (three_quarters, "rope_partial"),
    "head index added": (lambda: turned(POSITIONS[:, None] + np.arange(4.0)), "position_of_head"),
    "head index instead": (lambda: turned(np.zeros((len(ROWS), 1)) + np.arange(4.0)), "position_of_head"),
    "cos and sin exchanged": (lambda: np.concatenate(_exchanged(), -1), "rope_cos_sin_exchanged"),
    "without the minus": (lambda: np.concatenate(_plus(), -1), "rope_sign"),
    "exponent over half": (lambda: turned(POSITIONS, freq=5e5 ** -(np.arange(0, 16, 2) / 8)), "rope_dimension"),
    "reversed frequencies": (lambda: turned(POSITIONS, freq=FREQ[::-1].copy()), "rope_frequencies_reversed"),
}  # fmt: skip


def in_place() -> Array:
    """The second half reads the first one after its rotation."""
    cos, sin = _tables()
    first = X[..., :8] * cos - X[..., 8:] * sin
    return np.concatenate([first, X[..., 8:] * cos + first * sin], -1)


def _tables() -> tuple[Array, Array]:
    angle = POSITIONS[:, None, None] * FREQ
    return np.cos(angle), np.sin(angle)


def _exchanged() -> tuple[Array, Array]:
    cos, sin = _tables()
    a, b = X[..., :8], X[..., 8:]
    return a * sin - b * cos, b * sin + a * cos


def _plus() -> tuple[Array, Array]:
    cos, sin = _tables()
    a, b = X[..., :8], X[..., 8:]
    return a * cos + b * sin, b * cos + a * sin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", FORMS)
def test_other_forms_of_the_rotation(case: str, dtype: str) -> None:
    make, name = FORMS[case]
    found = best(site(make(), dtype=dtype))
    assert name in {one.variant.name for one in found}
    assert len({one.variant.name for one in found}) <= 2, [one.variant.text for one in found]


def test_whole_turns_by_a_pi_of_three_digits() -> None:
    angles = np.fmod(POSITIONS[:, None, None] * FREQ, 6.28)
    a, b = X[..., :8], X[..., 8:]
    seen = np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
    )
    assert [one.variant.name for one in best(site(seen))] == ["rope_whole_turns"]


def test_frequencies_of_no_rule_are_reported_by_pair() -> None:
    freq = FREQ.copy()
    freq[3:5] *= [1.7, 0.6]
    (found,) = best(site(turned(POSITIONS, freq=freq)))
    assert (found.variant.name, found.variant.fitted["pairs"]) == ("rope_frequencies", [3, 4])


def _in_bfloat16(at: Array, freq: Array = FREQ, *, coarse: bool) -> Array:
    """The rotation of a bfloat16 engine as transformers has it; `coarse`: the angles are of that dtype as well."""
    x = torch.tensor(X).bfloat16()
    dtype = torch.bfloat16 if coarse else torch.float32
    angle = torch.tensor(at)[:, None].to(dtype) * torch.tensor(freq)[None].to(dtype)
    both = torch.cat([angle, angle], -1)
    cos, sin = both.cos().bfloat16(), both.sin().bfloat16()
    out, _ = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None], unsqueeze_dim=2)
    return out[0].double().numpy()


LATE = tuple(replace(row, position=row.position + 90) for row in ROWS)
LATE_POSITIONS = POSITIONS + 90


def test_angles_in_the_16_bits_of_the_engine_are_named() -> None:
    seen = _in_bfloat16(LATE_POSITIONS, coarse=True)
    first = best(site(seen, dtype="bfloat16", rows=LATE))[0].variant
    assert (first.name, first.kind) == ("rope_precision", "precision")
    assert "the angles are computed in bfloat16, not in float32" in first.text
    assert np.linalg.norm(np.asarray(first.predicted) - seen) == 0


def test_other_rotations_of_a_bfloat16_engine_are_not_taken_for_coarse_angles() -> None:
    assert site(_in_bfloat16(LATE_POSITIONS, coarse=False), dtype="bfloat16", rows=LATE).deviation is None
    for at, freq in ((LATE_POSITIONS + 1, FREQ), (LATE_POSITIONS, FREQ * 1.01), (LATE_POSITIONS / 2, FREQ)):
        seen = _in_bfloat16(at, freq, coarse=False)
        texts = [one.variant.text for one in accepted(site(seen, dtype="bfloat16", rows=LATE))]
        assert not any("angles are computed" in text for text in texts), texts


def test_tables_in_bfloat16_of_a_float32_engine() -> None:
    cos, sin = (torch.tensor(t).bfloat16().double().numpy() for t in _tables())
    a, b = X[..., :8], X[..., 8:]
    found = best(site(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)))
    assert [one.variant.text for one in found] == ["cosine and sine are rounded to bfloat16"]


def test_one_head_alone_is_named() -> None:
    seen = turned(POSITIONS)
    seen[:, 2] = turned(POSITIONS + 3)[:, 2]
    found = site(seen)
    assert found.deviation.heads == (2,)
    assert names(found) == {"position_offset"}


def test_noise_beyond_the_floor_is_not_given_a_name() -> None:
    rng = np.random.default_rng(3)
    seen = turned(POSITIONS)
    assert accepted(site(seen + rng.normal(0, 1e-3, seen.shape))) == []
    assert accepted(site(seen + rng.normal(0, 1.0, seen.shape))) == []


def test_a_position_and_the_attention_factor_are_told_together() -> None:
    (found,) = best(site(turned(np.where(DECODE, 0, POSITIONS), YARN, factor=1.0), YARN, x=X))[:1]
    assert found.variant.kind in ("positions", "rope")


def test_fewer_channels_of_pairs_of_neighbours_are_named() -> None:
    """As where the rotary width is halved again for each layer: four of 16 channels turn, as a head of four."""
    model = of_model(neighbours=True)
    turns = np.array([1.0, model.rope_theta**-0.5, *[0.0] * 6])
    x, angle = X.reshape(len(X), 4, 8, 2), (POSITIONS[:, None] * turns)[:, None]
    first, second = x[..., 0], x[..., 1]
    seen = np.stack(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    ).reshape(X.shape)
    (found,) = best(site(seen, model))
    assert found.variant.name == "rope_partial"
    assert found.variant.text.startswith("the first 4 of the 16 channels that rotate do")


def test_halves_that_an_engine_rotates_and_weaves_are_named() -> None:
    """As where an engine gives halves for neighbours, and what comes in is not put apart before."""
    halves = turned(POSITIONS)
    woven = np.stack([halves[..., :8], halves[..., 8:]], -1).reshape(X.shape)
    model = of_model(neighbours=True)
    assert [one.variant.name for one in best(site(woven, model))] == ["rope_halves"]


def test_the_scaling_of_other_layers_comes_before_a_factor_that_gives_the_same() -> None:
    """Layer 1 has none of its own, layers 0 and 2 are stretched by 4."""
    plain, stretched = (Rope(MODEL.rope_theta, one) for one in (RopeScaling(), RopeScaling("linear", 4.0)))
    model = of_model(layer_ropes=(stretched, plain, stretched))
    found = best(site(turned(POSITIONS / 4), model))
    assert [one.variant.name for one in found] == ["rope_of_other_layers"]
