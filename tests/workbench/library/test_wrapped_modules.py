"""A model that a trainer has wrapped is recorded as it is without wrappers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import lockstep
from tests.checkpoints import tiny_checkpoint

PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("wrapped"), "qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def layers_in(module: Any, wrap: Callable[[nn.Module], Any]) -> Any:
    for i, layer in enumerate(module.model.layers):
        module.model.layers[i] = wrap(layer)
    return module


def compiled(module: Any) -> Any:
    """With what was compiled before hooks were there."""
    found = torch.compile(layers_in(module, lambda one: torch.compile(one, backend="eager")), backend="eager")
    found(PROMPT, use_cache=False)
    return found


def sharded(module: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    for part in (*module.model.layers, module):
        fully_shard(part, mesh=mesh)
    return module


def sharded_flat(module: Any) -> Any:
    policy = ModuleWrapPolicy({type(module.model.layers[0])})
    return FullyShardedDataParallel(
        module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


class Peft(nn.Module):
    """As PEFT names modules, and calls the model's `forward` alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self) -> Any:
        return self.base_model.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_base_model().forward(*args, **kwargs)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "compiled": compiled,
    "fsdp2": sharded,
    "fsdp1": sharded_flat,
    "checkpointed": lambda module: layers_in(module, checkpoint_wrapper),
    "peft": Peft,
}


def recorded(module: Any, target: Path) -> dict[str, Any]:
    """Every tap's tensor of one call."""
    with lockstep.record(module, target) as recording, torch.no_grad():
        module(PROMPT, use_cache=False)
    with lockstep.open(recording.session) as run:
        assert run.session.meta.source.startswith("transformers ")
        assert run.session.meta.model.num_layers == 2
        return {tap: run.tensor(tap) for tap in run.captured}


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return recorded(loaded(checkpoint), tmp_path_factory.mktemp("plain") / "a.session")


def loaded(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_recorded_as_it_is_without(
    checkpoint: Path, plain: dict[str, Any], tmp_path: Path, name: str
) -> None:
    found = recorded(WRAPPERS[name](loaded(checkpoint)), tmp_path / "a.session")
    assert found.keys() == plain.keys()
    for tap, rows in plain.items():
        np.testing.assert_array_equal(found[tap], rows, tap)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", "peft"])
def test_weights_of_a_wrapped_model_are_compared(checkpoint: Path, name: str) -> None:
    module = loaded(checkpoint)
    assert lockstep.weights(WRAPPERS[name](module), model=checkpoint)
    module = loaded(checkpoint)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    (wrong,) = lockstep.weights(WRAPPERS[name](module), model=checkpoint).wrong
    assert (wrong.parameter, wrong.mistake.text) == (
        "model.layers.1.mlp.up_proj.weight", "1.5 times the checkpoint's",
    )  # fmt: skip
