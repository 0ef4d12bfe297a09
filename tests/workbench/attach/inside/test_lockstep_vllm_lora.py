"""The adapter that vLLM holds beside its weights, on stand-ins of its managers and layers: written with the first
request's, and compared by the effective weight of each target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.engine.errors import CheckpointError
from lockstep.workbench.attach.inside import lockstep_vllm_lora, lockstep_weights
from lockstep.workbench.attach.reports import weights_are_there
from lockstep.workbench.diagnosis.loaded.adapter import Adapter
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom
from lockstep.workbench.diagnosis.loaded.compare import LoadedWeights, compare_weights
from lockstep.workbench.diagnosis.loaded.rank_weights import read_ranks
from tests.checkpoints import tiny_checkpoint
from tests.workbench.diagnosis.loaded.ranks import shard, whole_of, written
from tests.workbench.diagnosis.loaded.test_adapted import ALPHA, RANK, saved

SIZE, SLOTS, MOST_RANK, PREFIX = 2, 2, 8, "base_model.model."
#: vLLM's modules -> the slices of their rows, and how each is cut: by rows of B or by columns of A.
MODULES = {
    "model.layers.{}.self_attn.qkv_proj": ("rows", ("q_proj", "k_proj", "v_proj")),
    "model.layers.{}.self_attn.o_proj": ("columns", ("o_proj",)),
    "model.layers.{}.mlp.gate_up_proj": ("rows", ("gate_proj", "up_proj")),
}
TARGETS = [
    f"model.layers.{layer}.{module}"
    for layer in range(2)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
]
#: Changes a rank's factors before they are laid into its slots: by (module, slice number), A and B.
Change = Callable[[int, dict[tuple[str, int], tuple[Tensor, Tensor]]], None]


class Manager:
    """What is read of vLLM's LoRAModelManager."""

    def __init__(self, modules: dict[str, SimpleNamespace], slot: int) -> None:
        self.modules, self.lora_index_to_id = modules, [None] * slot + [7]

    def get_adapter(self, lora_id: int) -> str:
        return f"adapter {lora_id}"

    def _get_lora_layer_weights(self, adapter: str, name: str) -> bool:
        return adapter == "adapter 7" and "experts" in name


class WorkerLoRAManager:
    """What is wrapped of vLLM's."""

    def __init__(self, manager: Manager) -> None:
        self._adapter_manager = manager

    def add_adapter(self, request: SimpleNamespace) -> bool:
        return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(
        path, "qwen2", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole, random, made = whole_of(checkpoint), torch.Generator().manual_seed(3), {}
    for module in TARGETS:
        rows, columns = whole[f"{module}.weight"].shape
        made[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) * 0.05
        made[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.05
    return saved(tmp_path_factory.mktemp("adapter"), made)


def cut(checkpoint: Path, adapter: Path, rank: int) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """By module and slice the factors as vLLM cuts them for a rank, B by the scale; zeros where nothing is added."""
    factors, whole, found = load_file(adapter / "adapter_model.safetensors"), whole_of(checkpoint), {}
    for layer in range(2):
        for pattern, (way, parts) in MODULES.items():
            module = pattern.format(layer)
            for number, part in enumerate(parts):
                name = f"{module.rpartition('.')[0]}.{part}"
                rows, columns = whole[f"{name}.weight"].shape
                a = factors.get(f"{PREFIX}{name}.lora_A.weight", torch.zeros(RANK, columns))
                b = factors.get(f"{PREFIX}{name}.lora_B.weight", torch.zeros(rows, RANK)) * (ALPHA / RANK)
                a = a.chunk(SIZE, 1)[rank] if way == "columns" else a
                b = b.chunk(SIZE)[rank] if way == "rows" else b
                found[module, number] = a, b
    return found


def held(factors: dict[tuple[str, int], tuple[Tensor, Tensor]], slot: int) -> dict[str, SimpleNamespace]:
    """vLLM's layers: a tensor of all slots for each slice, as wide as the widest adapter."""
    modules: dict[str, SimpleNamespace] = {}
    config = SimpleNamespace(fully_sharded_loras=False)
    for (module, _), (a, b) in factors.items():
        wide_a, wide_b = (
            torch.zeros(SLOTS, 1, MOST_RANK, a.shape[1]),
            torch.zeros(SLOTS, 1, len(b), MOST_RANK),
        )
        wide_a[slot, 0, : len(a)], wide_b[slot, 0, :, : b.shape[1]] = a, b
        one = modules.setdefault(
            module, SimpleNamespace(lora_a_stacked=(), lora_b_stacked=(), lora_config=config, tp_size=SIZE)
        )
        one.lora_a_stacked += (wide_a,)
        one.lora_b_stacked += (wide_b,)
    return modules


def keep(
    dump: Path, monkeypatch: pytest.MonkeyPatch, rank: int, modules: dict[str, SimpleNamespace], slot: int
) -> None:
    """What a rank does once it has put a request's adapter into force."""
    group = SimpleNamespace(rank_in_group=rank, world_size=SIZE)
    distributed = ModuleType("vllm.distributed")
    distributed.parallel_state = SimpleNamespace(get_tp_group=lambda: group)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setenv("LOCKSTEP_TAP", str(dump))
    monkeypatch.setenv("LOCKSTEP_TAP_CAPTURE", "weights")
    managers = SimpleNamespace(
        WorkerLoRAManager=type("Plain", (WorkerLoRAManager,), {"add_adapter": WorkerLoRAManager.add_adapter}),
        LRUCacheWorkerLoRAManager=type("Cached", (WorkerLoRAManager,), {}),
    )
    lockstep_vllm_lora.vllm_adapters(managers)
    request = SimpleNamespace(lora_int_id=7, lora_path="adapters/seven")
    assert managers.WorkerLoRAManager(Manager(modules, slot)).add_adapter(request) is True


def compared(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Change = lambda rank, factors: None, *, modules: dict[str, SimpleNamespace] | None = None, slot: int = 1,
) -> LoadedWeights:  # fmt: skip
    whole = whole_of(checkpoint)
    states = [shard(whole, rank, SIZE, 2) for rank in range(SIZE)]
    dump = written(tmp_path / "dump", states, awaits_adapter=True)
    assert not weights_are_there(dump)
    for rank in range(SIZE):
        factors = cut(checkpoint, adapter, rank)
        change(rank, factors)
        keep(dump, monkeypatch, rank, held(factors, slot) | (modules or {}), slot)
    assert weights_are_there(dump)
    with LoadedFrom.open(checkpoint) as opened:
        ranks = read_ranks(dump)
        assert {rank.adapter_path for rank in ranks} == {"adapters/seven"}
        return compare_weights(ranks, opened, adapter=Adapter.open(adapter))


@pytest.mark.parametrize("slot", [0, 1])
def test_what_is_right_is_not_accused(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    found = compared(checkpoint, adapter, tmp_path, monkeypatch, slot=slot)
    assert (found.wrong, found.left_out) == ((), ())
    assert found.adapted == {"beside": len(TARGETS) * SIZE}


QKV, O_PROJ = "model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.o_proj"


def _unscaled(rank: int, factors: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
    for key, (a, b) in factors.items():
        factors[key] = a, b / (ALPHA / RANK)


def _lost(rank: int, factors: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
    a, b = factors[QKV, 2]
    factors[QKV, 2] = torch.zeros_like(a), torch.zeros_like(b)


def _scaled_twice(rank: int, factors: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
    a, b = factors[O_PROJ, 0]
    factors[O_PROJ, 0] = a, 2 * b


@pytest.mark.parametrize(
    ("change", "kind", "words", "targets"),
    [
        (_unscaled, "adapter scale", "by 1 instead of 2", len(TARGETS)),
        (_lost, "no adapter", "has nothing for this weight", 1),
        (_scaled_twice, "adapter twice", "2 times", 1),
    ],
)
def test_what_is_wrong_is_named(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, kind: str,
    words: str, targets: int,
) -> None:  # fmt: skip
    found = compared(checkpoint, adapter, tmp_path, monkeypatch, change)
    assert {one.mistake.kind for one in found.wrong} == {kind}
    assert sum(len(one.layers) for one in found.wrong) == targets
    assert all(words in str(one) for one in found.wrong)


def test_another_rank_s_part_is_named(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cut(checkpoint, adapter, 0)

    def change(rank: int, factors: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
        factors[QKV, 0], factors[O_PROJ, 0] = first[QKV, 0], first[O_PROJ, 0]

    found = compared(checkpoint, adapter, tmp_path, monkeypatch, change)
    assert [("rank 0's part of the adapter" in str(one), one.ranks) for one in found.wrong] == [
        (True, (1,))
    ] * 2


def test_what_cannot_be_read_is_left_out_not_accused(
    checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(rank: int, factors: dict[tuple[str, int], tuple[Tensor, Tensor]]) -> None:
        del factors[O_PROJ, 0]

    own = SimpleNamespace(lora_a_stacked=None)
    monkeypatch.setattr(Manager, "_get_lora_layer_weights", lambda self, adapter, name: name == O_PROJ)
    found = compared(checkpoint, adapter, tmp_path, monkeypatch, change, modules={O_PROJ: own})
    assert found.wrong == ()
    assert len(found.left_out) == 1
    assert "o_proj" in found.left_out[0]
    assert "form of its own" in found.left_out[0]


def test_without_a_request_for_it_nothing_is_in_force(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    states = [shard(whole_of(checkpoint), rank, SIZE, 2) for rank in range(SIZE)]
    dump = written(tmp_path / "dump", states, awaits_adapter=True)
    with LoadedFrom.open(checkpoint) as opened:
        ranks = read_ranks(dump)
        found = compare_weights(ranks, opened, adapter=Adapter.open(adapter))
    assert all(rank.awaits_adapter for rank in ranks)
    assert {one.mistake.kind for one in found.wrong} == {"no adapter"}


def test_weights_alone_are_not_held_back_where_no_adapter_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCKSTEP_TAP_ADAPTER", raising=False)
    able = SimpleNamespace(lora_config=object())
    assert not lockstep_weights._adapter_awaited(able)
    monkeypatch.setenv("LOCKSTEP_TAP_ADAPTER", "1")
    assert lockstep_weights._adapter_awaited(able)
    assert not lockstep_weights._adapter_awaited(SimpleNamespace(lora_config=None))


def test_factors_that_do_not_fit_are_refused(tmp_path: Path, checkpoint: Path, adapter: Path) -> None:
    dump = written(tmp_path / "dump", [shard(whole_of(checkpoint), 0, 1, 2)])
    save_file(
        {"m.0.a": torch.zeros(2, 4), "m.0.b": torch.zeros(4, 3)}, dump / "rank0" / "adapter.safetensors"
    )
    with pytest.raises(CheckpointError, match="slice 0 of m has no factors that fit"):
        read_ranks(dump)
    assert json.loads((dump / "rank0" / "weights.json").read_text())["size"] == 1
