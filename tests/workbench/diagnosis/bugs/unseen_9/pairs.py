"""Two mistakes in one engine. What is said of each is its first; the other lies at the same tap or behind it."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import ROTATED, bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _neighbours(x, cos, sin):
    """Pairs (2i, 2i + 1) turned by the table of pairs (i, i + d/2)."""
    cos, sin = (table[:, None, :, : x.shape[-1] // 2] for table in (cos, sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


@bug(
    "pairs",
    accepted=("positions", "rope"),
    words="position|offset|one too",
    taps=ROTATED,
    step=1,
    model="qwen3",
)
def decode_turns_and_writes_one_slot_too_far(p: Patched) -> None:
    """onnxruntime-genai#2354: the length counts the token; the slot behind the prompt stays empty and is read."""

    def gapped(rows):
        prompt = rows.shape[2] - p.step
        return torch.cat([rows[:, :, :prompt], torch.zeros_like(rows[:, :, :1]), rows[:, :, prompt:]], 2)

    p.positions(lambda at: at + 1 if p.decode else at)
    p.cache(read=lambda k, v: (gapped(k), gapped(v)) if p.decode else (k, v))


@bug(
    "pairs",
    accepted=("bias", "weight"),
    words="bias|permut|order|interleav|row",
    taps=("attn.q_proj",),
    model="qwen2-untied",
)
def q_loses_its_bias_and_the_order_of_its_rows(p: Patched) -> None:
    """A converter for Llama: no biases, and rows in the order of the original release."""
    for i, _ in p.layers():
        p.weight(p.attn(i).q_proj, lambda w: w.view(8, 2, 4, 64).swapaxes(1, 2).reshape(64, 64))
        p.bias(p.attn(i).q_proj, torch.zeros_like)


@bug(
    "pairs",
    accepted=("scores", "scale", "mask"),
    words="scale|sqrt|factor|window|mask|key",
    taps=("attn.scores",),
    model="mistral-window",
    tp=2,
)
def fallback_kernel_knows_neither_scale_nor_window(p: Patched) -> None:
    def allow(allowed):
        new, keys = allowed.shape[-2:]
        return torch.ones(new, keys, dtype=torch.bool).tril(keys - new)[None, None]

    p.attention(scale=lambda scores, scaling: scores, allow=allow)


@bug(
    "pairs",
    accepted=("rope",),
    words="interleav|neighbour|pair|halves|theta|base|frequenc",
    taps=ROTATED,
    model="qwen3",
    dtype="bfloat16",
)
def neighbours_are_turned_and_by_the_default_base(p: Patched) -> None:
    """Both are read from a part of the configuration that is not there."""

    def rotate(apply, q, k, cos, sin):
        return _neighbours(q, cos, sin), _neighbours(k, cos, sin)

    p.rotate(rotate)
    p.frequencies(lambda inverse: 1e4 ** -(torch.arange(0, 16, 2) / 16))


@bug(
    "pairs",
    accepted=("reduce", "sharding"),
    words="reduc|sum|partial",
    taps=("attn.o_proj",),
    layers=(1,),
    model="llama-deep",
    dtype="bfloat16",
    tp=2,
)
def one_o_is_not_summed_and_the_final_norm_has_no_weight(p: Patched) -> None:
    p.attn(1).o_proj.reduce = lambda partial: partial
    p.weight(p.decoder.norm, torch.ones_like)


@bug(
    "pairs",
    accepted=("embedding", "scale"),
    words="scale|sqrt|root|width|times|8|factor|multipl",
    taps=("embed",),
    model="mistral-full",
)
def run_as_if_it_were_a_gemma(p: Patched) -> None:
    """The embedding times the root of the width, and one added to the weight of every norm."""
    p.output(p.decoder.embed_tokens, lambda rows: rows * 8)
    norms: list[nn.Module] = [p.decoder.norm]
    for _, layer in p.layers():
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        p.weight(norm, lambda w: w + 1)
