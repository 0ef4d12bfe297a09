"""Harmless changes of dense models: other orders, other formulas, wider numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules.norm import layer_norm
from lockstep.engine.rules.rope import rotate_half_split
from lockstep.engine.run.runner import Runner
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched


def _in_halves(module: Any) -> Callable[[Tensor], Tensor]:
    """A product over each half of what goes in, added."""

    def forward(x: Tensor) -> Tensor:
        pairs = zip(x.chunk(2, -1), module.weight.chunk(2, 1), strict=True)
        first, second = (part @ weight.T for part, weight in pairs)
        return first + second

    return forward


def _joined(parts: list[Tensor], order: tuple[int, ...]) -> Tensor:
    first, second, third, fourth = (parts[i] for i in order)
    return (first + second) + (third + fourth)


@control("linear", model="qwen3")
def gate_is_a_sum_of_two_products(p: Patched) -> None:
    for i, _ in p.layers():
        p.mlp(i).gate_proj.forward = _in_halves(p.mlp(i).gate_proj)


@control("linear", model="llama", tp=2)
def partial_of_down_is_a_sum_of_two_products(p: Patched) -> None:
    for i, _ in p.layers():
        down = p.mlp(i).down_proj
        product = _in_halves(down)

        def forward(x: Tensor, down: Any = down, product: Any = product) -> Tensor:
            partial = product(x)
            down.see(partial)
            return down.reduce(partial)

        down.forward = forward


@control("reduce", model="llama", tp=4, ep=1)
def four_ranks_are_summed_crosswise(p: Spoilt) -> None:
    def reduce(partial: Tensor, comm: RingComm) -> Tensor:
        return _joined(comm.ring.gather(comm.rank, partial.clone()), (0, 2, 3, 1))

    p.rules(reduce=reduce)


@control("reduce", model="qwen2-untied", dtype="bfloat16", tp=4)
def sums_of_ranks_are_rounded_to_bfloat16_after_each_addition(p: Patched) -> None:
    for i, _ in p.layers():
        for one in (p.attn(i).o_proj, p.mlp(i).down_proj):
            one.reduce = lambda partial: _joined(p.ring.gather(p.rank, partial), (0, 1, 2, 3))


@control("norm", model="olmo2", tp=4, ep=1)
def squares_of_four_ranks_are_joined_from_the_outside(p: Spoilt) -> None:
    def joined(squares: Tensor, comm: Comm) -> Tensor:
        return _joined(comm.ring.gather(comm.rank, squares.clone()), (0, 3, 1, 2))

    p.rules(sum_squares=joined)


@control("norm", model="mistral-window")
def weight_and_inverse_root_are_multiplied_first(p: Patched) -> None:
    def norm(module: Any) -> Callable[[Tensor], Tensor]:
        eps = module.variance_epsilon
        return lambda x: x * (module.weight * (x.square().mean(-1, keepdim=True) + eps).rsqrt())

    for _, layer in p.layers():
        for module in (layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = norm(module)


@control("norm", model="cohere", tp=2, ep=1)
def means_of_a_layer_norm_are_made_in_double_precision(p: Spoilt) -> None:
    def wide(bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: str) -> Tensor:
        bias = None if bias is None else bias.double()
        return layer_norm(bias, x.double(), weight.double(), eps, form).to(x.dtype)

    p.rules(layer_norm=wide)


@control("rope", model="hunyuan", dtype="bfloat16", tp=2, ep=1)
def heads_are_turned_in_float32_and_rounded_once(p: Spoilt) -> None:
    p.rules(rope=lambda x, cos, sin: rotate_half_split(x.float(), cos.float(), sin.float()).to(x.dtype))


@control("scores", model="gemma2", tp=2, ep=1)
def tanh_of_the_cap_is_made_of_a_sigmoid(p: Spoilt) -> None:
    p.rules(soft_cap=lambda scores, cap: (2 * (2 * scores / cap).sigmoid() - 1) * cap)


@control("scores", model="llama-mha")
def scores_are_summed_over_each_half_of_a_head(p: Patched) -> None:
    def product(q: Tensor, k: Tensor) -> Tensor:
        first, second = (a @ b.transpose(2, 3) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
        return first + second

    p.attention(product=product)


@control("context", model="qwen2-tied", tp=2)
def values_are_weighed_from_the_newest_key_to_the_oldest(p: Patched) -> None:
    p.attention(context=lambda probs, v: probs.flip(-1) @ v.flip(-2))


@control("activation", model="qwen3", tp=2, ep=1)
def up_goes_through_the_sigmoid_before_the_gate_is_multiplied(p: Spoilt) -> None:
    p.rules(act=lambda gate, up, activation: up * gate.sigmoid() * gate)


@control("activation", model="gemma", tp=2, ep=1)
def tanh_of_the_gelu_is_made_of_a_sigmoid(p: Spoilt) -> None:
    def act(gate: Tensor, up: Tensor, activation: str) -> Tensor:
        inner = (8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * inner.sigmoid() * up

    p.rules(act=act)


@control("residual", model="granite", dtype="bfloat16", ep=1)
def multiplier_and_sum_are_rounded_once(p: Spoilt) -> None:
    factor = p.model.residual_multiplier

    def begin(runner: Runner) -> None:
        for layer in runner.decoder.layers:
            layer.residual = lambda x, y: (x.float() + factor * y.float()).to(x.dtype)

    p.running(begin)


@control("head", model="qwen2-untied", tp=2)
def logits_are_made_in_double_precision(p: Patched) -> None:
    head = p.model.lm_head
    p.wrap(head, lambda forward, x: F.linear(x.double(), head.weight.double()).to(x.dtype))
