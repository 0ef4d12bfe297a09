"""Experts in place of an MLP: parts that add up to transformers' block, and touch no expert that was not chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from lockstep.engine.checkpoint.stacks import stored_in
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.layers.experts import MixtureOfExperts
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules import CORRECT
from lockstep.engine.taps.names import model_taps
from tests.checkpoints import tiny_config

LAYER = 1
BLOCKS: dict[str, Any] = {
    "qwen2_moe": Qwen2MoeSparseMoeBlock,
    "glm4_moe": Glm4MoeMoE,
    "gpt_oss": GptOssMLP,
    "minimax_m2": MiniMaxM2SparseMoeBlock,
}


class Alone(Comm):
    """One rank of several without the others: its part of a sum is all that it gets."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def block(family: str) -> tuple[Any, ModelConfig]:
    config = tiny_config(family, experts_implementation="eager")
    made, generator = BLOCKS[family](config), torch.Generator().manual_seed(7)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return made, ModelConfig.from_hf(config.to_dict())


def rank_of(theirs: Any, model: ModelConfig, tp: int, rank: int, ep: int) -> MixtureOfExperts:
    """The rank's share of the block."""
    decoder = Decoder(model, EngineConfig(tp=tp, ep=ep), Alone(rank, tp), CORRECT)
    ours = decoder.layers[LAYER].mlp
    assert isinstance(ours, MixtureOfExperts)
    whole = {f"model.layers.{LAYER}.mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    whole |= {
        name: place.of(whole[place.tensor])
        for name, place in stored_in(model).items()
        if place.tensor in whole
    }
    for name, parameter in ours.parameters().items():
        assert isinstance(parameter, torch.Tensor)
        plan = shards.plan(name, model, tp, rank, ep)
        held = (
            whole[name] if plan.dim is None else whole[name].narrow(plan.dim, plan.span.start, plan.span.size)
        )
        parameter.copy_(held)
    places = {spec.name: i for i, spec in enumerate(model_taps(model, tp, ep))}
    ours.bind(Wiring(CORRECT, lambda name: None, places, f"layers.{LAYER}."))
    return ours


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("family", BLOCKS)
def test_the_ranks_parts_add_up_to_transformers(family: str, tp: int, ep: int) -> None:
    theirs, model = block(family)
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = sum(rank_of(theirs, model, tp, rank, ep)(x) for rank in range(tp))
        expected = theirs(x[None])
        expected = expected[0][0] if isinstance(expected, tuple) else expected[0]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_token_touches_the_experts_that_it_goes_to_alone() -> None:
    theirs, model = block("qwen2_moe")
    ours = rank_of(theirs, model, 1, 0, 1)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = ours(x)
        chosen, _ = ours.route(x)
        for number, expert in enumerate(ours.experts):
            if number not in chosen.flatten().tolist():
                for tensor in expert.parameters().values():
                    assert isinstance(tensor, torch.Tensor)
                    tensor.fill_(torch.nan)
        assert torch.equal(ours(x), expected)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_rows_alone_are_those_of_a_batch(rows: int) -> None:
    theirs, model = block("glm4_moe")
    ours = rank_of(theirs, model, 1, 0, 1)
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        apart = torch.cat([ours(some) for some in x.split(rows)])
        torch.testing.assert_close(apart, ours(x), rtol=1e-5, atol=1e-6)
