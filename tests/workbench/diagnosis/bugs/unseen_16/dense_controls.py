"""What is computed otherwise in dense models, and right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _norms(p: Patched) -> list[Any]:
    """All that are on the stream."""
    found = [p.decoder.norm]
    for _, layer in p.layers():
        found += [layer.input_layernorm, layer.post_attention_layernorm]
    return found


# -- attention -----------------------------------------------------------------------------------------------


@control("context", model="llama", tp=2)
def context_is_summed_over_two_runs_of_keys(p: Patched) -> None:
    """As a split of the keys over several blocks does it."""

    def in_runs(probs: Tensor, values: Tensor) -> Tensor:
        return probs[..., 3:] @ values[:, :, 3:] + probs[..., :3] @ values[:, :, :3]

    p.attention(context=in_runs)


@control("scale", model="llama", dtype="bfloat16")
def queries_are_scaled_before_their_product(p: Patched) -> None:
    """As llama.cpp does."""
    p.attention(product=lambda q, k: (q * 8**-0.5) @ k.transpose(2, 3), scale=lambda scores, scaling: scores)


@control("softmax", model="mistral-window")
def softmax_is_made_of_powers_of_two(p: Patched) -> None:
    """As FlashAttention's kernels do: exp2 is what the hardware has."""

    def in_base_two(scores: Tensor) -> Tensor:
        powers = torch.exp2((scores - scores.amax(-1, keepdim=True)) * 1.4426950408889634)
        return powers / powers.sum(-1, keepdim=True)

    p.attention(softmax=in_base_two)


@control("rotation", model="llama")
def angles_of_the_rotation_are_made_in_double_precision(p: Patched) -> None:
    """A table that is made once may well be exact."""

    def exact(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].double() * rotary.inv_freq.double()
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    p.angles(exact)


@control("rotation", model="qwen2-untied", dtype="bfloat16", tp=2)
def pairs_are_rotated_as_complex_numbers(p: Patched) -> None:
    """In float32, as Meta's own code does, and rounded at the end."""

    def product(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turn = torch.complex(cos[:, None, :, :half].float(), sin[:, None, :, :half].float())
        found = torch.complex(x[..., :half].float(), x[..., half:].float()) * turn
        return torch.cat((found.real, found.imag), -1).to(x.dtype)

    p.rotate(lambda apply, q, k, cos, sin: (product(q, cos, sin), product(k, cos, sin)))


@control("cap", model="gemma2", tp=2, ep=1)
def cap_of_the_scores_is_computed_in_double_precision(p: Spoilt) -> None:
    """A tanh of another library."""
    p.rules(soft_cap=lambda scores, cap: ((scores.double() / cap).tanh() * cap).to(scores.dtype))


# -- norms ---------------------------------------------------------------------------------------------------


@control("norm", model="qwen2-tied")
def norms_are_computed_in_double_precision(p: Patched) -> None:
    """Sums of squares in float64."""

    def around(_forward: Any, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x.double(), x.shape[-1:], norm.weight.double(), norm.variance_epsilon).to(x.dtype)

    for norm in _norms(p):
        p.wrap(norm, lambda forward, x, norm=norm: around(forward, x, norm))


@control("norm", model="llama", dtype="bfloat16", tp=2)
def weights_of_norms_are_applied_before_the_rounding(p: Patched) -> None:
    """One kernel, which rounds its result alone."""

    def around(_forward: Any, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(x.dtype)

    for norm in _norms(p):
        p.wrap(norm, lambda forward, x, norm=norm: around(forward, x, norm))


@control("norm", model="olmo2", tp=2, ep=1)
def squares_are_summed_from_the_last_rank_in_double_precision(p: Spoilt) -> None:
    """A collective in another order."""

    def total(squares: Tensor, comm: Any) -> Tensor:
        parts = comm.ring.gather(comm.rank, squares.clone()) if comm.size > 1 else [squares]
        scaled = [part.double() * 1.7 for part in reversed(parts)]
        return (torch.stack(scaled).sum(0) / 1.7).to(squares.dtype)

    p.rules(sum_squares=total)


# -- feed-forward and stream ---------------------------------------------------------------------------------


@control("activation", model="qwen3", tp=2)
def silu_is_a_quotient(p: Patched) -> None:
    """x / (1 + exp(-x))."""
    for _, layer in p.layers():
        layer.mlp.act_fn = Activation(lambda x: x / (1 + (-x).exp()))


@control("activation", model="gemma")
def gelu_by_tanh_is_made_of_a_sigmoid(p: Patched) -> None:
    """1 + tanh(y) is twice the sigmoid of 2y."""

    def by_sigmoid(x: Tensor) -> Tensor:
        return x * (2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).sigmoid()

    for _, layer in p.layers():
        layer.mlp.act_fn = Activation(by_sigmoid)


@control("linear", model="qwen3-kv4", dtype="bfloat16")
def products_are_split_along_what_they_sum(p: Patched) -> None:
    """Split-K, whose parts are summed in the model's dtype."""

    def around(_forward: Any, x: Tensor, linear: Any) -> Tensor:
        parts = zip(x.split(40, -1), linear.weight.split(40, -1), strict=True)
        return sum(F.linear(*part) for part in parts)  # type: ignore[return-value]

    for _, layer in p.layers():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            p.wrap(linear, lambda forward, x, linear=linear: around(forward, x, linear))


@control("bias", model="llama-bias", dtype="bfloat16", tp=2)
def bias_of_the_output_is_added_by_the_first_rank(p: Patched) -> None:
    """Before the sum, and by one rank alone."""
    for _, layer in p.layers():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            bias, whole, linear.bias = linear.bias, linear.reduce, None
            if p.rank == 0:
                linear.reduce = lambda partial, bias=bias, whole=whole: whole(partial + bias)


@control("sum", model="llama", tp=4)
def ranks_are_summed_in_pairs(p: Patched) -> None:
    """A tree in the place of a chain."""

    def in_pairs(partial: Tensor) -> Tensor:
        a, b, c, d = p.ring.gather(p.rank, partial)
        return (a + c) + (b + d)

    for _, layer in p.layers():
        layer.self_attn.o_proj.reduce = layer.mlp.down_proj.reduce = in_pairs


@control("residual", model="qwen2-deep", dtype="bfloat16")
def second_product_is_added_to_the_stream_before_it_is_rounded(p: Patched) -> None:
    """The residual as the accumulator of the product."""
    for i, layer in p.layers():
        held: dict[str, Tensor] = {}

        def around(forward: Any, x: Tensor, held: dict[str, Tensor] = held) -> Tensor:
            held["x"] = x
            return forward(x)

        def fused(
            stream: Tensor, _down: Tensor, layer: Any = layer, held: dict[str, Tensor] = held
        ) -> Tensor:
            return (stream.float() + F.linear(held["x"].float(), layer.mlp.down_proj.weight.float())).to(
                stream.dtype
            )

        p.wrap(layer.mlp.down_proj, around)
        p.residuals(i, mlp=fused)
