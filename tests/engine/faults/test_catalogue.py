"""The catalogue is right: each fault acts where it states that it can, first where it states, and nowhere
else does it do anything. Held against the correct engine, bit by bit."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.engine.checkpoint.block_types import TYPES
from lockstep.engine.checkpoint.dequantise.encodings import ENCODINGS
from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.faults.catalogue import DEFAULTS, FAULTS, check_faults, faults_of, parse_fault
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.quantisation import WITH_NIBBLES, WITH_OFFSET
from lockstep.engine.faults.resolve import resolve
from lockstep.engine.ranks.messages import RebindRules
from lockstep.engine.rules import CORRECT, Rules
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling
from lockstep.engine.taps.hub import CapturePolicy
from tests.checkpoints import FAMILY_VARIANTS, tiny_checkpoint, tiny_config
from tests.engine.harness import Engine, local_runner, model_config
from tests.gguf_twins import gguf_twin

pytestmark = pytest.mark.sampled_file(2)

PROMPT = [3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56]  # longer than the window (8)
#: Which differ in a prompt alone: no key comes after a decode step's token.
OF_PROMPTS = ("index-sight-bidirectional",)
FORCED = [9, 110, 23]  # the same continuation, right or wrong

#: Between them, each fault of the catalogue can act on one of these.
MODELS = {
    "windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                           "num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "normed": ("qwen3", {"num_key_value_heads": 4, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}}),
    "post-normed": ("olmo2", {}),
    "capped": ("gemma2", {}),
    "by-layer": ("gemma3_text", {}),
    "multiplied": ("granite", {}),
    "in-part": ("glm4", {}),
    "experts": ("glm4_moe", {}),
    "beside": FAMILY_VARIANTS["gemma4-moe"],
    "gated-expert": ("qwen2_moe", {}),
    "renormalised": ("qwen3_moe", {}),
    "latent": ("deepseek_v3", {}),
    "indexed": ("deepseek_v32", {}),
    "sinks": ("gpt_oss", {}),
    "states": ("qwen3_5_text", {"linear_num_key_heads": 4}),
    "inputs-by-layer": ("gemma4_text", {}),
    "chunked": ("llama4_text", {}),
    "mixer": ("phimoe", {}),
    "trained-activation": ("apertus", {}),
    "clamped": ("olmo", {}),
    "short-convolutions": ("lfm2", {}),
    "mamba": ("granitemoehybrid", {}),
    "side-by-side": ("falcon_h1", {}),
    "quantised": ("llama", {"attention_bias": True}),  # as a GGUF file
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {
        name: tiny_checkpoint(tmp_path_factory.mktemp(name), family, **overrides)
        for name, (family, overrides) in MODELS.items()
    }
    quantised = found["quantised"]
    return found | {"quantised": gguf_twin(quantised, quantised / "model.gguf", "Q4_1")}


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> dict[str, ModelConfig]:
    return {name: model_config(path) for name, path in paths.items()}


def test_the_catalogue_is_consistent() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.seam, fault.value) for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.seam, fault.correct) for fault in FAULTS}) == len(DEFAULTS)
    assert not [fault for fault in FAULTS if fault.value == fault.correct]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_rule_is_named_after_the_seam_that_its_faults_replace(fault: Fault) -> None:
    assert fault.seam in fault.patch
    assert set(fault.patch) <= {field.name for field in fields(Rules)}


def test_defaults_are_the_correct_rules() -> None:
    assert resolve(DEFAULTS) == resolve({}) == CORRECT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_rule_replaces_its_seams_and_no_other(fault: Fault) -> None:
    rules = resolve({fault.seam: fault.value})
    seams = [field.name for field in fields(Rules)]
    changed = {seam for seam in seams if getattr(rules, seam) != getattr(CORRECT, seam)}
    assert changed == set(fault.patch)
    assert faults_of({fault.seam: fault.value}) == [fault]
    assert parse_fault(f"{fault.seam}={fault.value}") == (fault.seam, fault.value)


def test_what_the_catalogue_does_not_know_is_refused_with_what_it_knows() -> None:
    with pytest.raises(ConfigError, match=r"^there is no fault 'nonsense': `lockstep faults` lists all \d+$"):
        faults_of({"nonsense": "1"})
    with pytest.raises(
        ConfigError, match=r"'lode_bias': did you mean load_bias[^,]{0,50}\? `lockstep faults`"
    ):
        faults_of({"lode_bias": "false"})
    with pytest.raises(
        ConfigError, match=r"fault rope has no value 'sideways': use one of half_split, swallowed"
    ):
        faults_of({"rope": "sideways"})
    with pytest.raises(ConfigError, match="NAME=VALUE, not 'rope': for example rope=swallowed"):
        parse_fault("rope")
    with pytest.raises(ConfigError, match=r"cache_heads and kv_expand act on the same seam"):
        resolve({"cache_heads": "repeated", "kv_expand": "tiled"})


def run_engine(engine: Engine, rules: Mapping[str, str], reload: bool) -> np.ndarray:
    """Checksums [steps, ranks, taps] of the prompt and its forced continuation."""
    engine.rules(rules, reload=reload)
    engine.add(PROMPT)
    return np.stack([engine.step({0: token}).checksums for token in FORCED])


@pytest.fixture(scope="module")
def correct() -> dict[str, np.ndarray]:
    """Checksums of the correct engine, by model."""
    return {}


@pytest.fixture
def engine(engine_of: Callable[[int], Engine]) -> Iterator[Engine]:
    """Two ranks; the same model stays loaded from test to test."""
    engine = engine_of(2)
    yield engine
    engine.rules({}, reload=True)


def use(engine: Engine, path: Path, correct: dict[str, np.ndarray]) -> np.ndarray:
    """Load `path` if it is not loaded, and give what the correct engine computes."""
    if correct.get("loaded") != str(path):
        engine.load(path)
        engine.capture(statistics=True)
        correct["loaded"] = str(path)
        correct[str(path)] = run_engine(engine, {}, reload=False)
    return correct[str(path)]


@pytest.mark.sampled(60)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_shows_first_where_the_catalogue_states(
    fault: Fault,
    engine: Engine,
    paths: dict[str, Path],
    models: dict[str, ModelConfig],
    correct: dict[str, np.ndarray],
) -> None:
    able = [name for name, model in models.items() if fault.needs(model, 2) is None]
    assert able, "no model of this test lets the fault act"
    golden = use(engine, paths[able[0]], correct)
    found = run_engine(engine, {fault.seam: fault.value}, reload=fault.level == "load")
    steps, _, taps = (found != golden).nonzero()
    assert len(steps), "the fault changes nothing"
    first = min(zip(steps, taps, strict=True))
    assert first[0] == fault.step
    tap = engine.specs[first[1]].name
    assert fnmatch.fnmatch(tap, fault.first_tap), f"shows first at {tap}, not at {fault.first_tap}"
    if fault.level != "load":
        assert (run_engine(engine, {}, reload=False) == golden).all(), "the correct rules do not restore it"


@pytest.mark.sampled(30)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.level == "step"], ids=lambda fault: fault.id)
def test_a_fault_of_level_step_acts_from_the_next_step_on_the_cache_as_it_is(
    fault: Fault,
    engine: Engine,
    paths: dict[str, Path],
    models: dict[str, ModelConfig],
    correct: dict[str, np.ndarray],
) -> None:
    able = [name for name, model in models.items() if fault.needs(model, 2) is None]
    golden = use(engine, paths[able[0]], correct)
    engine.rules({})
    engine.add(PROMPT)
    before = engine.step({0: FORCED[0]}).checksums
    engine.client.call(RebindRules({fault.seam: fault.value}))
    after = engine.step({0: FORCED[1]}).checksums
    assert (before == golden[0]).all()
    assert (after != golden[1]).any() == (fault.id not in OF_PROMPTS)


def run_alone(path: Path, rules: Mapping[str, str]) -> np.ndarray:
    """Checksums [steps, taps] with one rank, in this process."""
    runner: Runner = local_runner(path, rules)
    runner.watch(CapturePolicy(statistics=True))
    runner.add(0, PROMPT, Sampling())
    return np.stack([runner.step({0: token}).checksums for token in FORCED])


def check_alone(path: Path, faults: Sequence[Fault]) -> None:
    """With one rank each of `faults` acts if and only if it states that it can."""
    model, golden = model_config(path), run_alone(path, {})
    for fault in faults:
        rule = {fault.seam: fault.value}
        # What is refused of layers of several sizes would not run at all.
        fits = not model.shapes or fault.needs(model, 1) is None
        acts = fits and bool((run_alone(path, rule) != golden).any())
        assert acts == (fault.needs(model, 1) is None), fault.id
        if not acts:
            with pytest.raises(ConfigError, match=f"{fault.seam}={fault.value} cannot act here: "):
                check_faults(rule, model, 1)


@pytest.mark.slow
def test_where_a_toggle_states_that_it_cannot_act_it_does_nothing(
    paths: dict[str, Path], models: dict[str, ModelConfig]
) -> None:
    """Each fault on the first model of which it states so."""
    left = list(FAULTS)
    for name, path in paths.items():
        unable = [fault for fault in left if fault.needs(models[name], 1) is not None]
        check_alone(path, unable)
        left = [fault for fault in left if fault not in unable]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-mha", "biased", "windowed", "normed", "quantised"])
def test_with_one_rank_a_fault_acts_just_where_it_is_stated_to(
    name: str, paths: dict[str, Path], variant: Callable[[str], Path]
) -> None:
    check_alone(paths[name] if name in paths else variant(name), FAULTS)


def test_replicated_heads_leave_tiling_nothing_to_mix_up(models: dict[str, ModelConfig]) -> None:
    (tiled,) = (fault for fault in FAULTS if fault.id == "kv-tiled")
    assert tiled.needs(models["windowed"], 2) is None
    assert tiled.needs(models["windowed"], 4) == "each rank holds a single KV head"
    (repeated,) = (fault for fault in FAULTS if fault.id == "repeated-heads-cached")
    assert repeated.needs(models["windowed"], 4) is None
    assert "a single head" in str(repeated.needs(models["windowed"], 8))


@given(
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([2, 8, 64]),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
)
def test_mixed_offsets_are_offered_just_where_they_move_a_column(
    kv_heads: int, group: int, head_dim: int, tp: int
) -> None:
    model = replace(model_of_nothing(), num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=head_dim)
    assume(model.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0))
    (mixed,) = (fault for fault in FAULTS if fault.id == "qkv-sizes-mixed")
    q, kv = model.num_heads // tp * head_dim, max(1, kv_heads // tp) * head_dim
    packed = torch.arange(q + 2 * kv)[None]
    moved = mixed.patch["qkv_sizes"](packed, (q, kv, kv), model, tp)
    acts = not torch.equal(torch.cat(moved, -1), packed)
    assert acts == (mixed.needs(model, tp) is None)


def model_of_nothing() -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("qwen2").to_dict())


def test_the_types_that_faults_of_blocks_name_are_those_of_the_decoder() -> None:
    assert {name for name, one in ENCODINGS.items() if one.nibbles[1]} == WITH_NIBBLES
    blocks = {
        name: torch.zeros((1, kind.nbytes), dtype=torch.uint8)
        for kind in TYPES.values()
        for name in [kind.name]
    }
    with_offset = {name for name, one in ENCODINGS.items() if one.scales(blocks[name])[1] is not None}
    assert with_offset == WITH_OFFSET
