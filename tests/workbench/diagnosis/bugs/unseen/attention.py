"""Attention: scale, caps, sinks, kernels that split the keys or forget some heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched, softmax

CONTEXT = ("attn.context",)
KERNEL = ("context", "softmax", "attention")


@bug(
    "attention",
    accepted=("scale", "scores"),
    words=r"scale|factor|\blog|position|row|query",
    taps=("attn.scores",),
    model="llama",
)
def log_n_scaling_of_an_older_model(p: Patched) -> None:
    """Qwen 1's: from the trained length (here 8) on, scores grow with the logarithm of the position."""

    def scale(scores: Tensor, scaling: float) -> Tensor:
        places = torch.arange(p.past + 1, p.past + p.new + 1)
        return scores * scaling * (places.log() / math.log(8)).clamp(min=1)[:, None]

    p.attention(scale=scale)


@bug(
    "attention",
    accepted=("scores", "scale", "softmax"),
    words="cap|tanh",
    taps=("attn.scores",),
    step=1,
    model="mistral-full",
)
def soft_cap_in_the_decode_kernel(p: Patched) -> None:
    def scale(scores: Tensor, scaling: float) -> Tensor:
        scores = scores * scaling
        return 30 * (scores / 30).tanh() if p.decode else scores

    p.attention(scale=scale)


@bug(
    "attention",
    accepted=("softmax",),
    words="softmax|sum|sink|denominator|normal",
    taps=("attn.probs",),
    layers=(1,),
    model="qwen3",
)
def one_layer_has_an_attention_sink(p: Patched) -> None:
    """A sink that was never trained: a logit of 0 beside the scores."""

    def sink(scores: Tensor) -> Tensor:
        return softmax(torch.nn.functional.pad(scores, (1, 0)))[..., 1:]

    p.attention((1,), softmax=sink)


@bug(
    "attention",
    accepted=KERNEL,
    words="context|split|merge|part|weight|average|half",
    taps=CONTEXT,
    step=1,
    model="llama",
)
def split_keys_averaged_without_their_weights(p: Patched) -> None:
    """Flash decoding in two parts whose results are averaged, whatever the share of each."""

    def context(probs: Tensor, v: Tensor) -> Tensor:
        if not p.decode:
            return probs @ v
        half = v.shape[2] // 2
        parts = ((probs[..., :half], v[:, :, :half]), (probs[..., half:], v[:, :, half:]))
        return sum(one / one.sum(-1, keepdim=True) @ rows for one, rows in parts) / 2

    p.attention(context=context)


@bug(
    "attention",
    accepted=KERNEL,
    words="context|rescal|softmax|max|value|weight",
    taps=CONTEXT,
    model="qwen2-tied",
)
def accumulator_not_rescaled_by_the_new_maximum(p: Patched) -> None:
    """Online softmax in blocks of 4 keys: the sum of the exponentials is rescaled, that of the values is not."""
    held: dict[str, Tensor] = {}

    def keep(scores: Tensor) -> Tensor:
        held["scores"] = scores
        return softmax(scores)

    def context(probs: Tensor, v: Tensor) -> Tensor:
        scores, total = held["scores"], torch.zeros_like(probs @ v)
        for begin in range(0, v.shape[2], 4):
            top = scores[..., : begin + 4].amax(-1, keepdim=True)
            total += (scores[..., begin : begin + 4] - top).exp() @ v[:, :, begin : begin + 4]
        return total / (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)

    p.attention(softmax=keep, context=context)


@bug(
    "attention",
    accepted=("context", "heads", "attention"),
    words="order|merg|transpos|permut|moved|head|interleav",
    taps=CONTEXT,
    step=1,
    model="llama",
)
def decode_writes_the_heads_innermost(p: Patched) -> None:
    def merge(context: Tensor) -> Tensor:
        joined = context.transpose(1, 2)
        return joined.transpose(2, 3).reshape(joined.shape) if p.decode else joined.contiguous()

    p.attention(merge=merge)


@bug(
    "attention",
    accepted=("context", "heads", "attention"),
    words="head|zero|missing",
    taps=CONTEXT,
    heads=(2, 3, 6, 7),
    step=1,
    model="qwen2-tied",
)
def decode_stores_two_query_heads_of_each_group(p: Patched) -> None:
    """The epilogue writes the first rows of a tile of grouped heads; the rest of the buffer keeps its zeros."""

    def context(probs: Tensor, v: Tensor) -> Tensor:
        out = probs @ v
        if p.decode:
            out[:, [2, 3, 6, 7]] = 0
        return out

    p.attention(context=context)


@bug(
    "attention",
    accepted=("softmax", "scale", "scores"),
    words="softmax|temperature|factor|base|exp2|scale|log",
    taps=("attn.probs",),
    model="qwen3",
)
def exponential_of_two_without_its_logarithm(p: Patched) -> None:
    p.attention(softmax=lambda scores: softmax(scores * math.log(2)))


@bug(
    "attention",
    accepted=("scores", "scale", "attention"),
    words="dim|half|part|product|scores",
    taps=("attn.scores",),
    step=1,
    model="qwen3",
)
def decode_kernel_built_for_half_the_head_dim(p: Patched) -> None:
    def product(q: Tensor, k: Tensor) -> Tensor:
        width = 8 if p.decode else q.shape[-1]
        return q[..., :width] @ k[..., :width].transpose(2, 3)

    p.attention(product=product)


@bug(
    "attention",
    accepted=("context", "heads", "attention"),
    words="head|zero|missing",
    taps=CONTEXT,
    heads=(7,),
    model="mistral-full",
)
def grid_is_one_head_too_small(p: Patched) -> None:
    def context(probs: Tensor, v: Tensor) -> Tensor:
        out = probs @ v
        out[:, 7] = 0
        return out

    p.attention(context=context)
