"""Causes named from a recording and its golden reference: spoilt sessions, engines' faults, and what must not be
accused. All faults of the catalogue are in `checking/test_catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.workbench.diagnosis.causes import Extent, causes_of
from lockstep.workbench.diagnosis.diagnose import diagnose
from lockstep.workbench.diagnosis.findings import survey
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.merging import groups
from lockstep.workbench.diagnosis.naming import named
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.sites import sites_of
from lockstep.workbench.diagnosis.operations.weights import CheckpointWeights
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.judgements.cause import UNNAMED, Cause
from tests.workbench.diagnosis.synthetic import Case, Place, halves, synthetic, tiny_case

pytestmark = pytest.mark.sampled_file(2)

Q = "layers.1.attn.q_proj"


def causes(case: Case, path: Path, spoil: dict[str, Any], **options: Any) -> list[Cause]:
    """The causes of what was spoilt, each on its own inputs: nothing follows from it here, so that it does no harm."""
    engine = synthetic(path / "engine.session", case.floor, spoil=spoil, **options)
    taps, facts = RecordedTaps(Recording(engine)), Facts.of(case.model_dir, "float32")
    seen = survey((site for tap in spoil for site in sites_of(tap, taps, facts)), taps)
    assert not seen.unjudged
    return [cause for group in groups(seen.findings) for cause in causes_of(group, seen, Extent.of(taps))]


def bias_of(case: Case, tap: str) -> np.ndarray:
    layer, part = tap.split(".")[1], tap.split(".")[-1]
    bias = CheckpointWeights(case.model_dir)(f"model.layers.{layer}.self_attn.{part}.bias")
    assert bias is not None
    return bias.astype(np.float64)


def test_the_rows_of_a_cache_that_are_wrong_are_reported(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Place) -> np.ndarray:
        return np.concatenate([x[:2], 2 * x[2:4], x[4:]])

    (cause,) = causes(case, tmp_path, {"layers.1.attn.v_cache": spoil})
    assert (cause.name, cause.place) == ("cache_scaled", "layers.1.attn.v_cache, rows 2, 3")


def test_a_bias_dropped_on_one_rank_only(case: Case, tmp_path: Path) -> None:
    bias = bias_of(case, Q)[32:]
    spoil = {Q: lambda x, at: halves(x, 1, lambda part: part - bias)}
    (cause,) = causes(case, tmp_path, spoil, tp=2)
    assert (cause.name, cause.ranks) == ("bias_dropped", (1,))
    assert cause.transform == {"bias": "model.layers.1.self_attn.q_proj.bias", "times": 0}
    assert cause.residual is not None
    assert cause.residual < 1e-4


def test_a_rank_that_adds_rank_0s_part_of_the_bias(case: Case, tmp_path: Path) -> None:
    bias = bias_of(case, Q)
    spoil = {Q: lambda x, at: halves(x, 1, lambda part: part - bias[32:] + bias[:32])}
    (cause,) = causes(case, tmp_path, spoil, tp=2)
    assert (cause.name, cause.ranks) == ("bias_of_other_rank", (1,))
    assert "rank 0's part of" in cause.text


def test_a_constant_row_that_is_no_known_bias_is_reported_as_such(case: Case, tmp_path: Path) -> None:
    row = np.random.default_rng(0).normal(size=64)
    (cause,) = causes(case, tmp_path, {Q: lambda x, at: x + row})
    assert cause.name == "constant_row"


def test_a_rank_that_loads_rank_0s_shard(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Any) -> dict[int, np.ndarray]:
        part = np.split(x, 2, axis=1)[0]
        return {0: part, 1: part}

    (cause,) = causes(case, tmp_path, {Q: spoil}, tp=2)
    assert (cause.name, cause.ranks) == ("shard_of_another_rank", (1,))
    assert "rank 1 computes with rank 0's shard" in cause.text


def test_gate_and_up_swapped_by_the_loader(case: Case, tmp_path: Path) -> None:
    gate, up = "layers.0.mlp.gate", "layers.0.mlp.up"

    def other(tap: str) -> Callable[[np.ndarray, Any], np.ndarray]:
        def spoil(x: np.ndarray, at: Any) -> np.ndarray:
            array = case.floor.rebuilt(tap, step=at.step, seq=at.seq).array
            assert array is not None
            return array

        return spoil

    (cause,) = causes(case, tmp_path, {gate: other(up), up: other(gate)})
    assert (cause.name, cause.place) == ("weight_of_sibling", "layers.0.mlp.{gate,up}")
    assert cause.fault == "tensor_of=gate_up_swapped"


def test_a_square_weight_used_transposed(case: Case, tmp_path: Path) -> None:
    weight = CheckpointWeights(case.model_dir)("model.layers.1.self_attn.q_proj.weight")

    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        normed = case.floor.rebuilt("layers.1.attn_norm", step=at.step, seq=at.seq).array
        assert normed is not None
        assert weight is not None
        return normed @ weight + bias_of(case, Q)

    assert [cause.name for cause in causes(case, tmp_path, {Q: spoil})] == ["transposed"]


def test_shards_cut_along_in_features_that_keep_their_own_heads(case: Case, tmp_path: Path) -> None:
    weight = CheckpointWeights(case.model_dir)("model.layers.1.self_attn.q_proj.weight")

    def spoil(x: np.ndarray, at: Any) -> dict[int, np.ndarray]:
        normed = case.floor.rebuilt("layers.1.attn_norm", step=at.step, seq=at.seq).array
        assert normed is not None
        assert weight is not None
        bias = bias_of(case, Q)
        part = [slice(0, 32), slice(32, 64)]
        return {rank: normed[:, p] @ weight[p][:, p].T + bias[p] for rank, p in enumerate(part)}

    (cause,) = causes(case, tmp_path, {Q: spoil}, tp=2)
    assert cause.name == "sharded_on_in_features"


def test_the_residual_added_once_per_rank(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        stream = case.floor.rebuilt("layers.0.mlp_residual", step=at.step, seq=at.seq).array
        assert stream is not None
        return x + 3 * stream

    (cause,) = causes(case, tmp_path, {"layers.1.attn.o_proj": spoil})
    assert (cause.name, cause.transform) == ("residual_in_sum", {"times": 3})


def test_the_final_hidden_state_passed_off_as_logits(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        hidden = case.floor.rebuilt("final_norm", step=at.step, seq=at.seq).array
        assert hidden is not None
        return hidden[-1:]

    (cause,) = causes(case, tmp_path, {"logits": spoil})
    assert cause.name == "head_is_hidden"


def test_a_head_that_was_never_filled(case: Case, tmp_path: Path) -> None:
    assert [cause.name for cause in causes(case, tmp_path, {"logits": lambda x, at: x * 0})] == ["head_zero"]


@pytest.mark.parametrize(("row", "fill", "held"), [(3, 0.0, None), (5, None, 2)])
def test_a_cache_row_that_is_stale(
    case: Case, tmp_path: Path, row: int, fill: float | None, held: int | None
) -> None:
    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        spoilt = x.copy()
        if at == Place(step=1, seq=0):
            spoilt[row] = x[2] if fill is None else fill
        return spoilt

    (cause,) = causes(case, tmp_path, {"layers.2.attn.v_cache": spoil})
    name, words = (
        ("cache_rows_zero", "zero") if held is None else ("cache_rows_wrong", f"sequence 0's row {held}")
    )
    assert (cause.name, cause.steps) == (name, (1,))
    assert words in cause.text


DAMAGED = ["attn.q_proj", "attn.q_rope", "attn.k_cache", "attn.scores", "attn.o_proj", "mlp.act", "mlp_norm"]


@pytest.mark.parametrize("tap", [*(f"layers.1.{kind}" for kind in DAMAGED), "logits"])
@pytest.mark.parametrize("size", [pytest.param(1e-3, marks=pytest.mark.slow), 1.0])
@pytest.mark.sampled(4)
def test_random_damage_is_not_blamed_on_anything(case: Case, tmp_path: Path, tap: str, size: float) -> None:
    rng = np.random.default_rng(1)

    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        scale = np.sqrt(np.mean(x[np.isfinite(x)] ** 2))
        return x + np.where(np.isfinite(x), rng.normal(0, size * scale, x.shape), 0)

    assert {cause.kind for cause in causes(case, tmp_path, {tap: spoil}, tp=2)} == {UNNAMED}


def on_golden_inputs(
    case: Case, path: Path, lacks: tuple[str, ...], spoil: dict[str, Any], tp: int
) -> list[Cause]:
    """The causes at the first divergence of a spoilt session in which no tap of those kinds was recorded."""
    lacking = {"spoil": spoil, "tp": tp, "skip": lambda tap: tap.endswith(lacks)}
    engine, facts = (
        synthetic(path / "engine.session", case.floor, **lacking),
        Facts.of(case.model_dir, "float32"),
    )
    first = judge(Recordings.of(engine, case.golden, case.floor), facts).first_divergence
    assert first is not None
    assert first.tap in spoil
    found = diagnose(engine, facts, golden=case.golden)
    return [cause for cause in named(found, engine, case.golden, first, facts) if cause.tap == first.tap]


STAND_INS = {
    # what was not recorded, tap, what is done to it, ranks, name
    "input of a projection": (("attn_norm",), "attn.q_proj", "bias", 2, "bias_dropped"),
    "in features of all ranks": (("attn.context",), "attn.o_proj", "thrice", 2, "factor"),
    "queries": (("attn.q_rope", "attn.q_proj"), "attn.scores", "twice", 1, "scores_scale"),
    "what was cached": (("attn.v_proj",), "attn.v_cache", "zero", 1, "cache_rows_zero"),
    "hidden state": (("final_norm",), "logits", "twice", 1, "factor"),
}


@pytest.mark.parametrize(("lacks", "kind", "how", "tp", "name"), STAND_INS.values(), ids=STAND_INS)
@pytest.mark.sampled(5)
def test_golden_inputs_stand_in_for_those_that_were_not_recorded(
    case: Case, tmp_path: Path, lacks: tuple[str, ...], kind: str, how: str, tp: int, name: str
) -> None:
    tap = kind if kind == "logits" else f"layers.1.{kind}"
    changes = {"bias": lambda x: x - bias_of(case, tap), "twice": lambda x: 2 * x}
    changes |= {"thrice": lambda x: 3 * x, "zero": lambda x: 0 * x}  # by two ranks, twice may be a second sum
    found = on_golden_inputs(case, tmp_path, lacks, {tap: lambda x, at: changes[how](x)}, tp)
    assert found[0].name == name
    assert "its own inputs were not recorded" in found[0].evidence[0]


def test_damage_to_an_operation_without_its_inputs_is_not_blamed_on_anything(
    case: Case, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    spoil = {Q: lambda x, at: x + rng.normal(0, 1, x.shape)}
    (cause,) = on_golden_inputs(case, tmp_path, ("attn_norm",), spoil, 1)
    assert (cause.kind, cause.layers) == (UNNAMED, (1,))
    assert "as neither it nor its inputs (layers.1.attn_norm) were captured" in cause.text


@pytest.mark.slow
def test_large_legitimate_biases_are_not_accused(tmp_path: Path) -> None:
    """Qwen2.5's k-biases of such sizes are load-bearing: no fault by themselves, and a fault when dropped."""

    def enlarge(weights: dict[str, Any]) -> None:
        weights["model.layers.1.self_attn.k_proj.bias"][:3] = torch.tensor([-34.0, -15.0, 12.0])

    case = tiny_case(tmp_path / "model", edit=enlarge)
    engine = synthetic(tmp_path / "same.session", case.floor, tp=2)
    assert judge(Recordings.of(engine, case.golden, case.floor)).verdict == "match"
    tap = "layers.1.attn.k_proj"
    (cause,) = causes(case, tmp_path, {tap: lambda x, at: x - bias_of(case, tap)})
    assert cause.name == "bias_dropped"
    # A small error on another rank does not hide behind the large bias.
    spoil = {tap: lambda x, at: halves(x, 1, lambda part: part + 1e-3)}
    accused = synthetic(tmp_path / "b.session", case.floor, tp=2, spoil=spoil)
    found = judge(Recordings.of(accused, case.golden, case.floor))
    assert found.first_divergence is not None
    assert (found.first_divergence.tap, found.first_divergence.rank) == (tap, 1)


def test_weights_are_read_as_they_are(case: Case, tmp_path: Path) -> None:
    read = CheckpointWeights(case.model_dir)
    for name, weight in load_file(case.model_dir / "model.safetensors").items():
        found = read(name)
        assert found is not None
        np.testing.assert_array_equal(found, weight.numpy())
    np.testing.assert_array_equal(read("lm_head.weight"), read("model.embed_tokens.weight"))  # tied
    assert read("model.layers.9.nothing") is None
