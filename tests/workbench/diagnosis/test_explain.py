"""Causes named from evidence: the engine's own faults, spoilt sessions, and what must not be accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.resolve import open_checkpoint
from engine.config import EngineConfig
from sessions import Session
from tests.workbench.diagnosis.synthetic import STEPS, Case, Place, halves, synthetic, tiny_case
from workbench.diagnosis.explain import explain
from workbench.diagnosis.verdict import judge
from workbench.diagnosis.weights import checkpoint_weights
from workbench.inferior.inferior import Inferior
from workbench.inferior.session import create_session
from workbench.models.capture import FULL
from workbench.references.golden import forced_onto

Q = "layers.1.attn.q_proj"


@dataclass
class Bench:
    """A real engine of two ranks on the CPU, and what it is judged by."""

    case: Case
    inferior: Inferior
    root: Path

    def run(self, **rules: str) -> Session:
        """The session of a teacher-forced run under `rules`."""
        self.inferior.set_rules(rules)
        path = self.root / "engine.session"
        with create_session(self.inferior, path, overwrite=True):
            forced = forced_onto(self.case.floor.path)
            for step in range(STEPS + 1):
                self.inferior.step({seq: plan.forced[step] for seq, plan in enumerate(forced) if plan.forced})
        self.inferior.recorder.writer = None
        return Session.open(path)


def start(case: Case, root: Path) -> Bench:
    model, source = open_checkpoint(case.model_dir)
    source.close()
    inferior = Inferior(case.model_dir, model, EngineConfig(tp=2, threads=1, max_tokens=64), capture=FULL)
    for plan in forced_onto(case.floor.path):
        inferior.add(list(plan.prompt))
    return Bench(case, inferior, root)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("qwen2")
    bench = start(tiny_case(root, num_key_value_heads=4), root)
    yield bench
    bench.inferior.close()


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("mistral")
    bench = start(tiny_case(root, "mistral", sliding_window=5), root)
    yield bench
    bench.inferior.close()


def test_a_correct_engine_matches_and_nothing_is_explained(qwen2: Bench) -> None:
    found = judge(engine := qwen2.run(), qwen2.case.golden, floor=qwen2.case.floor)
    assert (found.verdict, found.tokens_identical) == ("match", True)
    assert found.max_abs_logits < 1e-4
    assert explain(engine, qwen2.case.golden, found.first_divergence) == []


QWEN2_FAULTS = [
    # rule, where it shows first, step, the cause's name, words of its text
    ({"mask": "additive"}, "attn.scores", 0, "mask_zero_times_inf", "0 * -inf"),
    ({"load_bias": "false"}, "attn.q_proj", 0, "bias_dropped", "layers.0.self_attn.q_proj.bias is not added"),
    ({"qkv_shard_dim": "1"}, "attn.q_proj", 0, "sharded_on_in_features", "partial sum"),
    ({"qkv_sizes": "mixed"}, "attn.k_proj", 0, "columns_moved", "columns hold other columns of the pack"),
    ({"rope": "swallowed"}, "attn.q_rope", 0, "rope_not_applied", "not applied at all"),
    ({"rope": "interleaved"}, "attn.q_rope", 0, "rope_interleaved", "pairs (2i, 2i+1)"),
    ({"rope": "twice"}, "attn.q_rope", 0, "rope_twice", "twice"),
    ({"rope_theta": "10000"}, "attn.q_rope", 0, "rope_frequencies", "theta or scaling"),
    ({"positions": "stuck"}, "attn.q_rope", 1, "position_stuck", "position 0"),
    ({"positions": "ahead"}, "attn.q_rope", 1, "position_offset", "1 position too far"),
    ({"cache_reuse": "false"}, "attn.k_cache", 1, "cache_not_used", "not the cache"),
    ({"cache_layer": "shared"}, "attn.k_cache", 1, "cache_of_another_layer", "layer 2's"),
    ({"cache_heads": "repeated"}, "attn.k_cache", 0, "cache_heads_repeated", "cached 2 times"),
    ({"kv_expand": "tiled"}, "attn.scores", 0, "kv_heads_tiled", "KV head h % n"),
    ({"scale": "one"}, "attn.scores", 0, "factor", "sqrt(head_dim)"),
    ({"mask": "none"}, "attn.scores", 0, "mask_differs", "causal mask is missing"),
    ({"reduce": "missing"}, "attn.o_proj", 0, "not_reduced", "own partial"),
    ({"reduce": "twice"}, "attn.o_proj", 0, "factor", "summed twice"),
    ({"norm": "plus_one"}, "attn_norm", 0, "channel_factor", "norm weight"),
    ({"act": "swapped"}, "mlp.act", 0, "other_activation", "silu(up) * gate"),
    ({"act": "gelu"}, "mlp.act", 0, "other_activation", "gelu(gate) * up"),
    ({"lm_head": "missing"}, "logits", 0, "head_untrained", "initial values"),
]


@pytest.mark.parametrize(
    ("rules", "tap", "step", "name", "words"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, one in enumerate(QWEN2_FAULTS)],
    ids=lambda value: str(value),
)
def test_faults_of_the_engine_are_found_and_named(
    qwen2: Bench, rules: dict[str, str], tap: str, step: int, name: str, words: str
) -> None:
    engine = qwen2.run(**rules)
    found = judge(engine, qwen2.case.golden, floor=qwen2.case.floor)
    first = found.first_divergence
    assert first is not None
    assert (first.tap, first.step, first.rank) == (tap if tap == "logits" else f"layers.0.{tap}", step, None)
    causes = explain(engine, qwen2.case.golden, first, weights=checkpoint_weights(qwen2.case.model_dir))
    assert causes[0].name == name
    assert words in causes[0].text
    assert causes == sorted(causes, key=lambda cause: cause.residual)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"window": "one_more"}, "one token too wide: keys 5 back"),
        ({"window": "ignored"}, "keys 5 and more back"),
    ],
)
def test_window_faults_are_found_and_named(mistral: Bench, rules: dict[str, str], words: str) -> None:
    engine = mistral.run(**rules)
    found = judge(engine, mistral.case.golden, floor=mistral.case.floor)
    assert found.first_divergence is not None
    assert found.first_divergence.tap == "layers.0.attn.scores"
    (cause,) = explain(engine, mistral.case.golden, found.first_divergence)
    assert (cause.name, words in cause.text) == ("mask_differs", True)


def causes(case: Case, path: Path, spoil: dict[str, Any], weights: bool = False, **options: Any) -> list[Any]:
    """The causes of a spoilt session's first divergence."""
    engine = synthetic(path / "engine.session", case.floor, spoil=spoil, **options)
    first = judge(engine, case.golden, floor=case.floor).first_divergence
    assert first is not None
    return explain(
        engine, case.golden, first, weights=checkpoint_weights(case.model_dir) if weights else None
    )


def bias_of(case: Case, tap: str) -> np.ndarray:
    layer, part = tap.split(".")[1], tap.split(".")[-1]
    bias = checkpoint_weights(case.model_dir)(f"model.layers.{layer}.self_attn.{part}.bias")
    assert bias is not None
    return bias.astype(np.float64)


def test_a_bias_dropped_on_one_rank_only(case: Case, tmp_path: Path) -> None:
    bias = bias_of(case, Q)[32:]
    spoil = {Q: lambda x, at: halves(x, 1, lambda part: part - bias)}
    (cause,) = causes(case, tmp_path, spoil, tp=2)
    assert cause.name == "bias_dropped"
    assert cause.transform == {"bias": "model.layers.1.self_attn.q_proj.bias", "times": 0}
    assert cause.residual < 1e-4


def test_a_rank_that_adds_rank_0s_part_of_the_bias(case: Case, tmp_path: Path) -> None:
    bias = bias_of(case, Q)
    spoil = {Q: lambda x, at: halves(x, 1, lambda part: part - bias[32:] + bias[:32])}
    (cause,) = causes(case, tmp_path, spoil, tp=2)
    assert (cause.name, cause.transform["part_of"], cause.transform["ranks"]) == (
        "bias_of_other_rank",
        0,
        [1],
    )


def test_a_constant_row_that_is_no_known_bias_is_told_as_such(case: Case, tmp_path: Path) -> None:
    row = np.random.default_rng(0).normal(size=64)
    (cause,) = causes(case, tmp_path, {Q: lambda x, at: x + row})
    assert cause.name == "constant_row"


def test_a_rank_that_loads_rank_0s_shard(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Any) -> dict[int, np.ndarray]:
        part = np.split(x, 2, axis=1)[0]
        return {0: part, 1: part}

    (cause,) = causes(case, tmp_path, {Q: spoil}, tp=2)
    assert (cause.name, cause.transform["shard_of"]) == ("columns_moved", 0)
    assert cause.text == "ranks [1] compute with rank 0's shard"


def test_gate_and_up_swapped_by_the_loader(case: Case, tmp_path: Path) -> None:
    gate, up = "layers.0.mlp.gate", "layers.0.mlp.up"

    def other(tap: str) -> Callable[[np.ndarray, Any], np.ndarray]:
        def spoil(x: np.ndarray, at: Any) -> np.ndarray:
            array = case.floor.rebuilt(tap, step=at.step, seq=at.seq).array
            assert array is not None
            return array

        return spoil

    (cause,) = causes(case, tmp_path, {gate: other(up), up: other(gate)})
    assert cause.name == "columns_moved"
    assert cause.transform["example"] == {"column": 0, "is": ["mlp.up", 0]}


def test_a_square_weight_used_transposed(case: Case, tmp_path: Path) -> None:
    weight = checkpoint_weights(case.model_dir)("model.layers.1.self_attn.q_proj.weight")

    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        normed = case.floor.rebuilt("layers.1.attn_norm", step=at.step, seq=at.seq).array
        assert normed is not None
        assert weight is not None
        return normed @ weight + bias_of(case, Q)

    assert [cause.name for cause in causes(case, tmp_path, {Q: spoil}, weights=True)] == ["transposed"]
    assert causes(case, tmp_path, {Q: spoil}) == []  # without the weights nobody can tell


def test_shards_cut_along_in_features_that_keep_their_own_heads(case: Case, tmp_path: Path) -> None:
    weight = checkpoint_weights(case.model_dir)("model.layers.1.self_attn.q_proj.weight")

    def spoil(x: np.ndarray, at: Any) -> dict[int, np.ndarray]:
        normed = case.floor.rebuilt("layers.1.attn_norm", step=at.step, seq=at.seq).array
        assert normed is not None
        assert weight is not None
        bias = bias_of(case, Q)
        part = [slice(0, 32), slice(32, 64)]
        return {rank: normed[:, p] @ weight[p][:, p].T + bias[p] for rank, p in enumerate(part)}

    (cause,) = causes(case, tmp_path, {Q: spoil}, weights=True, tp=2)
    assert cause.name == "sharded_on_in_features"


def test_the_residual_added_once_per_rank(case: Case, tmp_path: Path) -> None:
    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        stream = case.floor.rebuilt("layers.0.mlp_residual", step=at.step, seq=at.seq).array
        assert stream is not None
        return x + 3 * stream

    (cause,) = causes(case, tmp_path, {"layers.1.attn.o_proj": spoil})
    assert (cause.name, cause.transform) == ("residual_repeated", {"times": 3})


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
    assert (cause.name, cause.transform) == ("cache_rows_wrong", {"rows": {str(row): held}})


DAMAGED = ["attn.q_proj", "attn.q_rope", "attn.k_cache", "attn.scores", "attn.o_proj", "mlp.act", "mlp_norm"]


@pytest.mark.parametrize("tap", [*(f"layers.1.{kind}" for kind in DAMAGED), "logits"])
@pytest.mark.parametrize("size", [pytest.param(1e-3, marks=pytest.mark.slow), 1.0])
def test_random_damage_is_not_blamed_on_anything(case: Case, tmp_path: Path, tap: str, size: float) -> None:
    rng = np.random.default_rng(1)

    def spoil(x: np.ndarray, at: Any) -> np.ndarray:
        scale = np.sqrt(np.mean(x[np.isfinite(x)] ** 2))
        return x + np.where(np.isfinite(x), rng.normal(0, size * scale, x.shape), 0)

    assert causes(case, tmp_path, {tap: spoil}, weights=True, tp=2) == []


def test_large_legitimate_biases_are_not_accused(tmp_path: Path) -> None:
    """Qwen2.5's k-biases of such sizes are load-bearing: no fault by themselves, and a fault when dropped."""

    def enlarge(weights: dict[str, Any]) -> None:
        weights["model.layers.1.self_attn.k_proj.bias"][:3] = torch.tensor([-34.0, -15.0, 12.0])

    case = tiny_case(tmp_path / "model", edit=enlarge)
    engine = synthetic(tmp_path / "same.session", case.floor, tp=2)
    assert judge(engine, case.golden, floor=case.floor).verdict == "match"
    tap = "layers.1.attn.k_proj"
    (cause,) = causes(case, tmp_path, {tap: lambda x, at: x - bias_of(case, tap)})
    assert cause.name == "bias_dropped"
    # A small error on another rank does not hide behind the large bias.
    spoil = {tap: lambda x, at: halves(x, 1, lambda part: part + 1e-3)}
    found = judge(
        synthetic(tmp_path / "b.session", case.floor, tp=2, spoil=spoil), case.golden, floor=case.floor
    )
    assert found.first_divergence is not None
    assert (found.first_divergence.tap, found.first_divergence.rank) == (tap, 1)


def test_weights_are_read_as_they_are(case: Case, tmp_path: Path) -> None:
    read = checkpoint_weights(case.model_dir)
    for name, weight in load_file(case.model_dir / "model.safetensors").items():
        found = read(name)
        assert found is not None
        np.testing.assert_array_equal(found, weight.numpy())
    np.testing.assert_array_equal(read("lm_head.weight"), read("model.embed_tokens.weight"))  # tied
    assert read("model.layers.9.nothing") is None
