"""Harmless: the same by another formula, in another order, or in another dtype within."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.rules import activation, defaults, recurrence
from lockstep.engine.rules.norm import effective
from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt


def _in_parts(weight: Tensor, cut: int):
    """The product with a matrix, as a sum over both parts of what it reads."""

    def product(x, bias=None):
        parts = (x[..., :cut] @ weight[:, :cut].T, x[..., cut:] @ weight[:, cut:].T)
        return sum(parts) if bias is None else sum(parts) + bias

    return product


def _scores_in_parts(p: Spoilt, cut: int) -> None:
    """Scores are the sum of two products, over the first channels of heads and over the others."""

    def spoil(decoder):
        for layer in decoder.layers:
            attention = layer.attention

            def scores(one, tile, attention=attention):
                q, k = one.q[tile.heads, :, tile.rows], one.k[tile.heads, :, tile.keys].mT
                found = (q[..., :cut] @ k[..., :cut, :] + q[..., cut:] @ k[..., cut:, :]) * attention.scale
                if (bias := one.bias(tile)) is not None:
                    found[..., -bias.shape[1] :] += bias
                return found

            attention._scores = scores

    p.loaded(spoil)


@control("router", model="qwen3-moe", tp=2, ep=2)
def logits_of_the_router_are_summed_in_two_parts(p: Spoilt) -> None:
    def spoil(decoder):
        for i in (0, 2):
            weight = decoder.layers[i].mlp.router.weight
            (matrix,) = weight.parts().values()
            weight.product = _in_parts(matrix, 24)

    p.loaded(spoil)


@control("combine", model="dots1", dtype="bfloat16", tp=2, ep=2)
def weighed_outputs_are_rounded_before_they_are_summed(p: Spoilt) -> None:
    """As transformers' own experts do, and kernels that leave the sum to another one."""
    p.rules(combine=lambda outputs, weights: (outputs * weights.to(outputs.dtype).unsqueeze(-1)).sum(1))


@control("shared", model="qwen2-moe", tp=2, ep=1)
def down_of_the_shared_expert_is_summed_in_two_parts(p: Spoilt) -> None:
    def spoil(decoder):
        for i in (1, 2):
            down = decoder.layers[i].mlp.shared.expert.down
            (matrix,) = down.parts().values()
            down.product = _in_parts(matrix, 10)

    p.loaded(spoil)


@control("reduce", model="glm4-moe", tp=4, ep=4)
def ranks_are_summed_in_double_precision(p: Spoilt) -> None:
    def reduce(partial, comm):
        return partial.copy_(comm.ring.sum(comm.rank, partial.double()))

    p.rules(reduce=reduce)


@control("softmax", model="olmo3", tp=2, ep=1)
def softmax_takes_off_a_whole_number_above_the_maximum(p: Spoilt) -> None:
    def softmax(scores, dtype):
        powers = (scores.float() - scores.float().amax(-1, keepdim=True).ceil()).exp()
        return (powers / powers.sum(-1, keepdim=True)).to(dtype)

    p.rules(softmax=softmax)


@control("scores", model="minimax-m2", tp=2, ep=2)
def scores_are_summed_over_halves_of_the_heads(p: Spoilt) -> None:
    _scores_in_parts(p, 8)


@control("latent", model="deepseek-v2", tp=2, ep=2)
def scores_of_plain_and_rotated_parts_are_added(p: Spoilt) -> None:
    """As kernels with absorbed queries make them."""
    _scores_in_parts(p, 16)


@control("rotation", model="youtu", tp=2, ep=1)
def pairs_are_turned_as_complex_numbers(p: Spoilt) -> None:
    """In double precision, and rounded once."""

    def turned(x, cos, sin):
        first, second = x.double().chunk(2, -1)
        found = torch.complex(first, second) * torch.complex(cos.double(), sin.double())
        return torch.cat((found.real, found.imag), -1).to(x.dtype)

    p.rules(rope=turned)


@control("activation", model="apertus", tp=2, ep=1)
def xielu_in_double_precision(p: Spoilt) -> None:
    def act(x, *numbers):
        return activation.xielu(x.double(), *numbers).to(x.dtype)

    p.rules(xielu=act)


@control("norm", model="exaone4", tp=2, ep=1)
def squares_of_both_halves_of_a_row_are_summed_by_themselves(p: Spoilt) -> None:
    def norm(x, weight, eps, form):
        wide = x.float()
        first, second = (half.square().sum(-1, keepdim=True) for half in wide.chunk(2, -1))
        root = ((first + second) / x.shape[-1] + eps).rsqrt()
        return (wide * root * effective(weight.float(), form)).to(x.dtype)

    p.rules(norm=norm)


@control("head", model="gemma3", dtype="bfloat16", ep=1)
def logits_stay_in_float32(p: Spoilt) -> None:
    def spoil(decoder):
        weight = decoder.head.weight
        (matrix,) = weight.parts().values()
        weight.product = lambda x, bias=None: F.linear(x.float(), matrix.float(), bias)

    p.loaded(spoil)


@control("rate", model="qwen3-next", tp=2, ep=1)
def rates_are_made_by_a_tanh(p: Spoilt) -> None:
    """The sigmoid of b is (1 + tanh(b / 2)) / 2."""
    p.rules(beta=lambda b: (1 + (b / 2).tanh()) / 2)


@control("gated norm", model="qwen3.5", tp=2, ep=1)
def weight_of_the_gated_norm_is_multiplied_by_the_gate_first(p: Spoilt) -> None:
    def gated(x, weight, gate, eps):
        unit = defaults.unit_heads(x, eps)
        return unit * (weight * F.silu(gate))

    p.rules(gated_norm=gated)


@control("convolution", model="lfm2", tp=2, ep=1)
def short_convolution_in_double_precision(p: Spoilt) -> None:
    def convolved(rows, weight):
        return recurrence.convolution(rows.double(), weight.double()).to(rows.dtype)

    p.rules(plain_conv=convolved)


@control("skip", model="granite4-moe", tp=2, ep=1)
def skip_of_mamba_is_rounded_once_with_what_is_read(p: Spoilt) -> None:
    def skip(read, x, d):
        return torch.addcmul(read.double(), d.double().unsqueeze(-1), x.double()).float()

    p.rules(ssm_skip=skip)
