"""A LoRA adapter in the memory of two ranks: merged once it is right; all else is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep.engine.errors import CheckpointError, ConfigError
from lockstep.workbench.diagnosis.loaded.adapter import Adapter
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.loaded.ranks import State, shard, whole_of, written

RANK, ALPHA = 4, 8.0
TARGETS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 2)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.up_proj")
]
_V = "model.layers.1.self_attn.v_proj"
#: By module what is added to its weight.
Additions = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(
        path, "qwen2", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def factors(checkpoint: Path) -> State:
    """Both matrices of each target, as PEFT names them; their product is some hundredths of a weight."""
    whole, made = whole_of(checkpoint), State()
    random = torch.Generator().manual_seed(5)
    for module in TARGETS:
        rows, columns = whole[f"{module}.weight"].shape
        for name, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            drawn = torch.randn(shape, generator=random) * 0.02
            made[f"base_model.model.{module}.lora_{name}.weight"] = drawn
    return made


@pytest.fixture(scope="module")
def adapter(factors: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("adapter"), factors)


def saved(path: Path, factors: State, **config: object) -> Path:
    """The folder that PEFT writes."""
    save_file(factors, path / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config}
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return path


def additions(factors: State, scale: float = ALPHA / RANK) -> Additions:
    named = {module: f"base_model.model.{module}.lora_" for module in TARGETS}
    return {
        module: scale * factors[f"{name}B.weight"].double() @ factors[f"{name}A.weight"].double()
        for module, name in named.items()
    }


def compared(
    checkpoint: Path,
    adapter: Path,
    tmp_path: Path,
    added: Additions,
    *,
    size: int = 2,
    dtype: torch.dtype = torch.float32,
    change: Callable[[list[State]], None] = lambda states: None,
    **facts: object,
) -> LoadedWeights:
    """What is found where ranks hold the checkpoint with `added` merged into it."""
    whole = whole_of(checkpoint)
    for module, one in added.items():
        whole[f"{module}.weight"] = (whole[f"{module}.weight"].double() + one).float()
    states = [shard(whole, rank, size, 2, dtype) for rank in range(size)]
    change(states)
    with LoadedFrom.open(checkpoint) as opened:
        ranks = read_ranks(written(tmp_path / "dump", states, **facts))
        return compare_weights(ranks, opened, adapter=Adapter.open(adapter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_merged_is_not_accused(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path, size: int, dtype: torch.dtype
) -> None:
    found = compared(checkpoint, adapter, tmp_path, additions(factors), size=size, dtype=dtype)
    assert (found.wrong, found.unknown, found.left_out) == ((), (), ())
    assert found.adapted == {"merged into": len(TARGETS) * size}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("times", "kind", "words"),
    [
        (0.0, "no adapter", "the checkpoint's alone: the adapter is neither merged nor held beside it"),
        (2.0, "adapter twice", "the adapter is merged 2 times"),
        (1 / (ALPHA / RANK), "adapter scale", "by 1 instead of 2, which its alpha and rank make"),
    ],
)
def test_an_adapter_that_counts_otherwise(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path, times: float, kind: str, words: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    added = {module: times * one for module, one in additions(factors).items()}
    found = compared(checkpoint, adapter, tmp_path, added, dtype=dtype)
    assert {one.parameter.rpartition("layers.*.")[2] for one in found.wrong} == {
        f"{module.partition('.1.')[2]}.weight" for module in TARGETS if ".1." in module
    }
    assert {one.mistake.kind for one in found.wrong} == {kind}
    assert all(words in one.mistake.text for one in found.wrong)
    assert all((one.layers, one.ranks) == ((0, 1, 2), (0, 1)) for one in found.wrong)


def test_one_target_that_has_another_s(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path
) -> None:
    added = additions(factors)
    added[_V] = added[_V.replace("v_proj", "k_proj")]
    (one,) = compared(checkpoint, adapter, tmp_path, added).wrong
    assert (one.parameter, one.mistake.kind) == (f"{_V}.weight", "another adapter")
    assert one.mistake.text == "what is added is the adapter's for layers.1.self_attn.k_proj.weight"


def test_one_target_is_left_out(checkpoint: Path, adapter: Path, factors: State, tmp_path: Path) -> None:
    """A name that the engine did not know, as of keys in a fused product."""
    added = additions(factors)
    del added[_V]
    (one,) = compared(checkpoint, adapter, tmp_path, added).wrong
    assert (one.parameter, one.mistake.kind, one.ranks) == (f"{_V}.weight", "no adapter", (0, 1))


def test_a_weight_that_is_another_anyway(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path
) -> None:
    def change(states: list[State]) -> None:
        states[1]["model.layers.0.mlp.down_proj.weight"].zero_()

    (one,) = compared(checkpoint, adapter, tmp_path, additions(factors), change=change).wrong
    assert (one.parameter, one.mistake.kind, one.ranks) == (
        "model.layers.0.mlp.down_proj.weight",
        "zeros",
        (1,),
    )


def _beside(factors: State, **changes: object) -> tuple[Callable[[list[State]], None], dict[str, object]]:
    """What a rank holds of an adapter that is not merged, and what its modules say of themselves."""

    def change(states: list[State]) -> None:
        for state in states:
            for name, one in factors.items():
                module = name.removeprefix("base_model.model.")
                state[module.replace(".weight", ".default.weight")] = one.clone()

    stated = {"scale": ALPHA / RANK, "active": True, "merged": False, **changes}
    return change, dict.fromkeys(TARGETS, stated)


def test_what_is_held_beside_the_weights_is_not_accused(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path
) -> None:
    change, adapters = _beside(factors)
    found = compared(checkpoint, adapter, tmp_path, {}, size=1, change=change, adapters=adapters)
    assert (found.wrong, found.unknown) == ((), ())
    assert found.adapted == {"beside": len(TARGETS)}


@pytest.mark.parametrize(
    ("changes", "merged", "kind", "words"),
    [
        ({"active": False}, False, "no adapter", "held beside it, and switched off"),
        ({"scale": 0.5}, False, "adapter scale", "by 0.5 instead of 2"),
        ({}, True, "adapter twice", "merged, and applied beside the weight as well"),
        ({"merged": True}, False, "no adapter", "was merged by the engine's account"),
    ],
)
def test_an_adapter_beside_the_weights_that_does_something_else(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path, changes: dict[str, object], merged: bool,
    kind: str, words: str,
) -> None:  # fmt: skip
    change, adapters = _beside(factors, **changes)
    added = additions(factors) if merged else {}
    found = compared(checkpoint, adapter, tmp_path, added, size=1, change=change, adapters=adapters)
    assert {one.mistake.kind for one in found.wrong} == {kind}
    assert len(found.wrong) == len(TARGETS) // 3
    assert all(words in one.mistake.text and one.layers == (0, 1, 2) for one in found.wrong)


def test_a_factor_that_was_never_loaded(
    checkpoint: Path, adapter: Path, factors: State, tmp_path: Path
) -> None:
    """PEFT makes B of zeros: an adapter of which it is left so does nothing."""
    beside, adapters = _beside(factors)

    def change(states: list[State]) -> None:
        beside(states)
        states[0][f"{_V}.lora_B.default.weight"].zero_()

    (one,) = compared(checkpoint, adapter, tmp_path, {}, size=1, change=change, adapters=adapters).wrong
    assert (one.parameter, one.mistake.kind) == (f"{_V}.lora_B.default.weight", "zeros")


def test_scales_by_the_root_of_the_rank_and_by_module(
    checkpoint: Path, factors: State, tmp_path: Path
) -> None:
    path = saved(tmp_path, factors, use_rslora=True, alpha_pattern={"v_proj": 2.0})
    found = Adapter.open(path).additions
    assert found["layers.0.self_attn.q_proj.weight"].scale == ALPHA / 2
    assert found["layers.0.self_attn.v_proj.weight"].scale == 1.0


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3: plain LoRA alone"),
        ({"use_dora": True}, "use_dora: plain LoRA alone"),
        ({"lora_alpha": "much"}, "Expected `float`"),
    ],
)
def test_what_is_no_plain_lora_is_refused(
    factors: State, tmp_path: Path, config: dict[str, object], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        Adapter.open(saved(tmp_path, factors, **config))


def test_an_adapter_of_another_model_is_refused(checkpoint: Path, factors: State, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.7.self_attn.q_proj.lora_"
    pair = {f"{name}A.weight": torch.ones(4, 64), f"{name}B.weight": torch.ones(64, 4)}
    with pytest.raises(
        CheckpointError, match=r"another model: it adds \[64, 64\] to layers\.7\.self_attn\.q_proj"
    ):
        compared(checkpoint, saved(tmp_path, pair), tmp_path, {})


def test_pickles_are_refused(factors: State, tmp_path: Path) -> None:
    saved(tmp_path, factors)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle checkpoint"):
        Adapter.open(tmp_path)
    with pytest.raises(CheckpointError, match="no LoRA adapter"):
        Adapter.open(tmp_path / "nowhere")
