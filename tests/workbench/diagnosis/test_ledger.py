"""The error ledger on real engines: several faults at once, each named where it acts and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.engine.config import EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.corrections import corrections
from lockstep.workbench.checking.forced_run import ForcedRun, check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.diagnosis.judgement import Judgement, TapVerdict
from lockstep.workbench.diagnosis.ledger import in_words, ledger
from lockstep.workbench.diagnosis.measure import Recordings
from lockstep.workbench.diagnosis.verdict import judge
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.judgements.golden_event import Faulty
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.models.requests import plan
from tests.checkpoints import tiny_checkpoint

PROMPTS = [[5, 6, 7, 8, 9, 130], [20, 21, 22]]
STEPS = 2
Q, K, V = "layers.*.attn.q_proj", "layers.*.attn.k_proj", "layers.*.attn.v_proj"
SUMS = {"layers.*.attn.o_proj", "layers.*.mlp.down"}
SCORES, ACT = "layers.*.attn.scores", "layers.*.mlp.act"

#: rule -> the operations in which it acts, in every layer, as its seam in the engine has them.
ACTS = {
    "load_bias=false": {Q, K, V},
    "rope=twice": {"layers.*.attn.q_rope", "layers.*.attn.k_rope"},
    "mask=additive": {SCORES},
    "scale=hidden": {SCORES},
    "kv_expand=tiled": {SCORES, "layers.*.attn.context"},
    "cache_reuse=false": {"layers.*.attn.k_cache", "layers.*.attn.v_cache"},
    "positions=stuck": {  # the mask follows the positions
        f"layers.*.attn.{name}" for name in ("q_rope", "k_rope", "k_cache", "v_cache", "scores")
    },
    "qkv_sizes=mixed": {K, V},
    "qkv_shard_dim=1": {Q, K, V},
    "reduce=missing": SUMS,
    "reduce=twice": SUMS,
    "row_bias=every_rank": SUMS,
    "norm=plus_one": {"layers.*.attn_norm", "layers.*.mlp_norm", "final_norm"},
    "act=gelu": {ACT},
    "lm_head=missing": {"logits"},
}

PAIRS = {
    ("qwen2", 1): [
        "load_bias=false rope=twice", "mask=additive act=gelu", "kv_expand=tiled norm=plus_one",
        "scale=hidden cache_reuse=false", "positions=stuck lm_head=missing",
    ],
    ("qwen2", 2): [
        "load_bias=false reduce=missing", "rope=twice reduce=twice", "qkv_sizes=mixed act=gelu",
        "qkv_shard_dim=1 mask=additive",
    ],
    ("llama", 2): ["load_bias=false row_bias=every_rank", "act=gelu row_bias=every_rank"],
    ("demo", 1): ["load_bias=false rope=twice"],
    ("demo", 2): ["load_bias=false reduce=twice"],
}  # fmt: skip


@dataclass
class Bench:
    """Engines that are started when first asked for, each with its reference."""

    scratch: Path
    stack: ExitStack
    engines: dict[tuple[str, int], tuple[Inferior, Reference]] = field(default_factory=dict)
    models: dict[str, OpenedModel] = field(default_factory=dict)

    def model(self, name: str) -> OpenedModel:
        if name not in self.models:
            biased = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
            path = "demo" if name == "demo" else str(tiny_checkpoint(self.scratch, name, **biased))
            self.models[name] = open_model(path)
        return self.models[name]

    def get(self, name: str, tp: int) -> tuple[Inferior, Reference]:
        if (name, tp) not in self.engines:
            model = self.model(name)
            reference = record_reference(model.directory, PROMPTS, STEPS, "float32")
            config = plan(model, EngineConfig(tp=tp), PROMPTS, STEPS + 1, FULL)
            inferior = self.stack.enter_context(Inferior(model.path, model.config, config))
            self.engines[name, tp] = inferior, reference
        return self.engines[name, tp]

    def check(self, name: str, tp: int, rules: str) -> CheckResult:
        inferior, reference = self.get(name, tp)
        path = self.scratch / f"{name}-{tp}.session"
        return check(inferior, reference, path, rules=dict(one.split("=") for one in rules.split()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("ledger"), stack)


def expanded(names: set[str], layers: int) -> set[str]:
    return {name.replace("*", str(layer)) for name in names for layer in range(layers)}


def faulty(result: CheckResult) -> set[str]:
    assert result.judgement.faulty is not None
    return {one.tap for one in result.judgement.faulty}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "rules"), [(*place, rules) for place, pairs in PAIRS.items() for rules in pairs]
)
def test_two_faults_are_named_where_they_act(bench: Bench, name: str, tp: int, rules: str) -> None:
    layers = bench.get(name, tp)[0].model.num_layers
    both = faulty(bench.check(name, tp, rules))
    one, other = (bench.check(name, tp, rule) for rule in rules.split())
    assert both == faulty(one) | faulty(other)
    for rule, alone in zip(rules.split(), (one, other), strict=True):
        assert faulty(alone) == expanded(ACTS[rule], layers)
        assert alone.judgement.first_divergence is not None
        assert alone.judgement.first_divergence.tap in both


@pytest.mark.slow
def test_every_judged_tap_has_its_entry_and_a_replay_reads_it(bench: Bench) -> None:
    result = bench.check("qwen2", 2, "load_bias=false reduce=missing")
    with Session.open(result.engine_session) as session:
        (event,) = session.events(kind="golden")
        rows = session.verdicts()
    assert {one["tap"] for one in event.data["faulty"]} == faulty(result)
    assert event.data["ledger"] == (
        "15 operations are wrong by themselves: layers.*.attn.q_proj, layers.*.attn.k_proj, layers.*.attn.v_proj,"
        " layers.*.attn.o_proj, layers.*.mlp.down"
    )
    judged = [row for row in rows if row.verdict != "absent"]
    assert judged
    for row in judged:
        assert row.detail["rel_l2"] >= 0
        own = row.tap in faulty(result)
        assert (row.detail["injected_ratio"] > 3) == own, row.tap
        assert (row.detail["injected"] > 1e-5) == own, row.tap
        assert (row.verdict == "fail" and "inherited" not in row.detail) == own, row.tap
    assert any("inherited" in row.detail for row in judged)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.slow
def test_the_injected_error_of_a_linear_layer_is_that_of_its_golden_input(bench: Bench, layer: int) -> None:
    """Recomputed here in float64 from the checkpoint and the golden recording alone."""
    result = bench.check("qwen2", 2, "load_bias=false reduce=twice")
    (file,) = bench.model("qwen2").directory.glob("*.safetensors")
    weights = {name: x.astype(np.float64) for name, x in load_file(file).items()}
    module = f"model.layers.{layer}.self_attn"

    def without_bias(x: np.ndarray) -> np.ndarray:
        return np.asarray(x @ weights[f"{module}.k_proj.weight"].T)

    def twice(x: np.ndarray) -> np.ndarray:
        return np.asarray(2 * x @ weights[f"{module}.o_proj.weight"].T)

    cases: list[tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = [
        ("attn.k_proj", "attn_norm", without_bias), ("attn.o_proj", "attn.context", twice),
    ]  # fmt: skip
    found = {(one.tap, one.step, one.seq): one for one in result.judgement.taps}
    with Session.open(result.golden_session) as golden:
        for step in range(STEPS + 1):
            for seq in range(len(PROMPTS)):
                for tap, source, wrong in cases:
                    right, given = (
                        golden.rebuilt(f"layers.{layer}.{name}", step=step, seq=seq).array
                        for name in (tap, source)
                    )
                    assert right is not None
                    assert given is not None
                    error = np.linalg.norm(wrong(given) - right) / np.linalg.norm(right)
                    entry = found[f"layers.{layer}.{tap}", step, seq]
                    assert entry.injected == pytest.approx(error, rel=1e-4)
                    assert not entry.inherited
    if layer:  # there the error of the run as it is says something else
        assert entry.rel_l2 != pytest.approx(entry.injected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "dtype"),
    [("qwen2", 2, "float32"), pytest.param("llama", 1, "bfloat16", marks=pytest.mark.slow)],
)
def test_the_ledger_of_a_right_engine_is_empty(
    bench: Bench, tmp_path: Path, name: str, tp: int, dtype: str
) -> None:
    with ExitStack() as stack:
        if dtype == "float32":
            inferior, reference = bench.get(name, tp)
        else:
            model = bench.model(name)
            reference = record_reference(model.directory, PROMPTS, STEPS, dtype)  # type: ignore[arg-type]
            config = plan(model, EngineConfig(tp=tp, dtype=dtype), PROMPTS, STEPS + 1, FULL)  # type: ignore[arg-type]
            inferior = stack.enter_context(Inferior(model.path, model.config, config))
        assert reference.floor is not None
        run = ForcedRun(inferior, reference, tmp_path / "plain.session", {})
        run.record(run.path)
        plain, golden, floor = (
            stack.enter_context(Session.open(path))
            for path in (tmp_path / "plain.session", reference.golden, reference.floor)
        )
        run.record(tmp_path / "again.session", lambda step: corrections(plain, golden, step))
        again = stack.enter_context(Session.open(tmp_path / "again.session"))
        sides = Recordings.of(plain, golden, floor)
        reported = judge(sides)
        assert reported.faulty is None
        assert not reported.failed
        found = ledger(reported, sides.held(again))
        assert found.faulty == ()
        assert all(one.injected_ratio < 1.5 for one in found.taps if one.verdict != "absent")
        assert not inferior.patched  # the next run is the engine's own again
        taken = {patch.place for patch in corrections(plain, golden, 0)}
        left = {tap.name.rpartition(".")[2] for tap in plain.taps if tap.index not in taken}
        assert left == {"partial"}


def test_a_match_asks_for_no_second_run(bench: Bench) -> None:
    seen: list[str] = []
    inferior, reference = bench.get("qwen2", 1)
    path = bench.scratch / "match.session"
    result = check(inferior, reference, path, rules={}, progress=lambda what, done, of: seen.append(what))
    assert result.matches
    assert result.judgement.faulty is None
    assert in_words(result.judgement) == ""
    assert len([what for what in seen if what.startswith("engine")]) == 2 * (STEPS + 1)  # with taps, without


def _judgement(*taps: tuple[str, int]) -> Judgement:
    every = [TapVerdict(f"layers.{i}.mlp.act", 0, 0, "pass") for i in range(3)]
    found = tuple(Faulty(tap, step, 0, 0.5, 9.0) for tap, step in taps)
    return Judgement("diverged", 0.0, True, None, tuple(every), 1, "floor", faulty=found)


def test_operations_are_grouped_over_the_layers() -> None:
    act, up = (tuple(f"layers.{i}.mlp.{name}" for i in range(3)) for name in ("act", "up"))
    assert in_words(_judgement(("logits", 0))) == "1 operation is wrong by itself: logits"
    assert in_words(_judgement(*((tap, 0) for tap in act), (up[0], 1), (up[2], 1), ("embed", 0))) == (
        "6 operations are wrong by themselves: layers.*.mlp.act, layers.{0,2}.mlp.up from step 1, embed"
    )
    assert in_words(_judgement((act[1], 2))).endswith("layers.1.mlp.act from step 2")
    many = [(f"layers.0.attn.{name}", 0) for name in "abcdefgh"]
    assert in_words(_judgement(*many)).endswith("layers.0.attn.f, and 2 more")
    assert in_words(_judgement()) == "no operation is wrong by itself: noise has grown on its way"
