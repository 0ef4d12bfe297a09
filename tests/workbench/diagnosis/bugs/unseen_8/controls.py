"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched, softmax
from tests.workbench.diagnosis.bugs.sharded import bounds

_linear = nn.functional.linear


@control("attention", model="qwen2-untied")
def scale_folded_into_weight_and_bias_of_q(p: Patched) -> None:
    for i, _ in p.layers():
        attn = p.attn(i)
        p.weight(attn.q_proj, lambda w, attn=attn: w * attn.scaling)
        p.bias(attn.q_proj, lambda b, attn=attn: b * attn.scaling)
    p.attention(scale=lambda scores, scaling: scores)


@control("attention", model="mistral-full", dtype="bfloat16")
def scores_and_context_by_einsum(p: Patched) -> None:
    p.attention(
        product=lambda q, k: torch.einsum("bhtd,bhkd->bhtk", q, k),
        context=lambda probs, v: torch.einsum("bhtk,bhkd->bhtd", probs, v),
    )


@control("attention", model="qwen3-kv4")
def mean_of_the_values_taken_off_and_added_again(p: Patched) -> None:
    """The probabilities of a row sum to one."""

    def context(probs, v):
        mean = v.mean(2, keepdim=True)
        return probs @ (v - mean) + mean

    p.attention(context=context)


@control("attention", model="llama-bias", tp=2)
def mean_of_the_keys_taken_off_before_the_product(p: Patched) -> None:
    """A constant for each query, which its softmax does not see."""
    p.attention(product=lambda q, k: q @ (k - k.mean(2, keepdim=True)).transpose(2, 3))


@control("mask", model="mistral-window", tp=2)
def window_and_triangle_computed_from_positions(p: Patched) -> None:
    def allow(allowed):
        new, keys = allowed.shape[-2:]
        queries, keys = torch.arange(keys - new, keys)[:, None], torch.arange(keys)
        return ((keys <= queries) & (keys > queries - 8))[None, None]

    p.attention(allow=allow, softmax=lambda scores: softmax(scores.contiguous()))


@control("cache", model="llama-llama3")
def rows_kept_in_the_cache_in_float64(p: Patched) -> None:
    p.cache(written=lambda k, v: (k.double(), v.double()), read=lambda k, v: (k.float(), v.float()))


@control("rope", model="llama-yarn")
def angles_added_from_a_coarse_and_a_fine_table(p: Patched) -> None:
    """Position 8a + b by the theorem of addition."""

    def table(rotary, x, at):
        factor = rotary.attention_scaling
        (cos_a, sin_a), (cos_b, sin_b) = rotary(x, at // 8 * 8), rotary(x, at % 8)
        return (cos_a * cos_b - sin_a * sin_b) / factor, (sin_a * cos_b + cos_a * sin_b) / factor

    p.angles(table)


@control("norm", model="mistral-full")
def weight_multiplied_in_before_the_division(p: Patched) -> None:
    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):

            def forward(x, norm=norm):
                root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                return (norm.weight * x) * root

            norm.forward = forward


@control("norm", model="qwen3", tp=2)
def norms_by_torch_s_own_function(p: Patched) -> None:
    norms = [norm for _, one in p.layers() for norm in (one.input_layernorm, one.post_attention_layernorm)]
    for norm in (*norms, p.decoder.norm):
        norm.forward = lambda x, norm=norm: nn.functional.rms_norm(
            x, norm.weight.shape, norm.weight, norm.variance_epsilon
        )


@control("linear", model="qwen2-tied")
def channels_smoothed_by_the_norm_and_raised_in_the_weights(p: Patched) -> None:
    factor = 2 ** torch.randn(64, generator=torch.Generator().manual_seed(11))
    for i, layer in p.layers():
        attn, mlp = p.attn(i), p.mlp(i)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            p.weight(norm, lambda w: w / factor)
        for side in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj):
            p.weight(side, lambda w: w * factor)


@control("quantisation", model="llama", dtype="bfloat16")
def rows_of_the_weights_scaled_down_and_their_products_up(p: Patched) -> None:
    """By powers of two, as a format of eight bits wants them."""
    for i, _ in p.layers():
        for side in (p.attn(i).q_proj, p.mlp(i).gate_proj, p.mlp(i).down_proj):
            factor = 2.0 ** side.weight.detach().abs().amax(1).log2().ceil()
            p.weight(side, lambda w, factor=factor: w / factor[:, None])
            p.output(side, lambda y, factor=factor: y * factor)


@control("head", model="llama-mha")
def head_summed_over_two_halves_of_the_width(p: Patched) -> None:
    head = p.model.lm_head
    head.forward = lambda x: (
        _linear(x[..., :32], head.weight[:, :32]) + _linear(x[..., 32:], head.weight[:, 32:])
    )


@control("sharding", model="qwen3", tp=2)
def units_of_the_mlp_dealt_from_the_last_rank(p: Patched) -> None:
    for i, _ in p.layers():
        whole, mlp = p.full.model.layers[i].mlp, p.mlp(i)
        mine = bounds(96, p.tp, p.tp - 1 - p.rank)
        for name in ("gate_proj", "up_proj"):
            rows = getattr(whole, name).weight.detach()[mine]
            p.weight(getattr(mlp, name), lambda w, rows=rows: rows.clone())
        p.weight(mlp.down_proj, lambda w, whole=whole, mine=mine: whole.down_proj.weight[:, mine].clone())


@control("collectives", model="qwen3-bias", dtype="bfloat16", tp=4)
def first_rank_looks_all_tokens_up_and_sends_their_rows(p: Patched) -> None:
    table = p.full.model.embed_tokens.weight.detach()

    def forward(ids):
        rows = nn.functional.embedding(ids, table)
        return p.ring.gather(p.rank, rows if p.rank == 0 else torch.zeros_like(rows))[0].clone()

    p.decoder.embed_tokens.forward = forward


@control("rope", model="qwen2-kv8", dtype="bfloat16", tp=2)
def minus_of_the_rotation_folded_into_the_sines(p: Patched) -> None:
    def rotate(_, q, k, cos, sin):
        left, right = sin.chunk(2, -1)
        cos, sin = cos[:, None], torch.cat([-left, right], -1)[:, None]
        q, k = (x * cos + x.roll(x.shape[-1] // 2, -1) * sin for x in (q, k))
        return q, k

    p.rotate(rotate)
