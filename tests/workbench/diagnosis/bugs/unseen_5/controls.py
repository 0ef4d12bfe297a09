"""Harmless changes: what engines do otherwise, and rightly. No cause may be reported for any."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import control
from tests.workbench.diagnosis.bugs.patched import Patched

_linear = nn.functional.linear


@control("attention", model="llama")
def scores_from_keys_times_queries(p: Patched) -> None:
    p.attention(product=lambda q, k: (k @ q.transpose(2, 3)).transpose(2, 3).contiguous())


@control("cache", model="mistral-window")
def rows_that_left_the_window_are_cleared(p: Patched) -> None:
    """Nobody reads them again."""

    def read(k, v):
        gone = k.shape[2] - 8
        if p.decode and gone > 0:
            k, v = k.clone(), v.clone()
            k[:, :, :gone] = v[:, :, :gone] = 0
        return k, v

    p.cache(read=read)


@control("linear", model="qwen3-bias")
def o_summed_head_by_head(p: Patched) -> None:
    for _, layer in p.layers():
        o = layer.self_attn.o_proj

        def forward(_, x, o=o):
            heads = zip(x.split(16, -1), o.weight.split(16, 1), strict=True)
            return sum(_linear(one, rows) for one, rows in heads) + o.bias

        p.wrap(o, forward)


@control("bias", model="qwen2-tied")
def bias_of_the_values_moved_behind_o(p: Patched) -> None:
    """The probabilities of a row sum to one, so each context has the bias as it is."""
    for i, _ in p.layers():
        attn = p.attn(i)
        heads = attn.v_proj.bias.detach().view(-1, 8).repeat_interleave(4, 0).flatten()
        moved = _linear(heads, attn.o_proj.weight.detach())
        p.bias(attn.v_proj, torch.zeros_like)
        p.output(attn.o_proj, lambda y, moved=moved: y + moved)


@control("heads", model="mistral-full")
def dimensions_of_the_values_in_another_order(p: Patched) -> None:
    order = torch.randperm(16, generator=torch.Generator().manual_seed(7))
    for i, _ in p.layers():
        p.weight(p.attn(i).v_proj, lambda w: w.unflatten(0, (-1, 16))[:, order].flatten(0, 1))
        p.weight(p.attn(i).o_proj, lambda w: w.unflatten(1, (-1, 16))[:, :, order].flatten(1))


@control("mlp", model="llama-bias")
def mlp_in_tiles_of_four_tokens(p: Patched) -> None:
    for i, _ in p.layers():
        for side in (p.mlp(i).gate_proj, p.mlp(i).up_proj, p.mlp(i).down_proj):
            p.wrap(side, lambda forward, x: torch.cat([forward(tile) for tile in x.split(4, 1)], 1))


@control("mlp", model="qwen3-kv4")
def silu_as_what_is_left_of_its_mirror(p: Patched) -> None:
    for _, layer in p.layers():

        def forward(x, mlp=layer.mlp):
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
            return mlp.down_proj((gate - gate * (-gate).sigmoid()) * up)

        layer.mlp.forward = forward


@control("norm", model="qwen2-untied")
def mean_of_squares_from_variance_and_mean(p: Patched) -> None:
    for _, layer in p.layers():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):

            def forward(x, norm=norm):
                squares = x.var(-1, correction=0, keepdim=True) + x.mean(-1, keepdim=True) ** 2
                return norm.weight * (x * (squares + norm.variance_epsilon).rsqrt())

            norm.forward = forward


@control("residual", model="llama")
def stream_added_in_float64(p: Patched) -> None:
    def add(stream, more):
        return (stream.double() + more.double()).to(stream.dtype)

    for i, _ in p.layers():
        p.residuals(i, add, add)


@control("residual", model="llama", dtype="bfloat16")
def stream_kept_in_float32_in_a_bfloat16_model(p: Patched) -> None:
    def add(stream, more):
        return stream.float() + more.float()

    norms = [p.decoder.norm]
    for i, layer in p.layers():
        p.residuals(i, add, add)
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        p.output(norm, lambda y: y.bfloat16())


@control("head", model="qwen3")
def surplus_ids_of_a_padded_head_at_minus_infinity(p: Patched) -> None:
    p.output(p.model.lm_head, lambda logits: nn.functional.pad(logits, (0, 29), value=-math.inf))


@control("sharding", model="qwen2-untied", tp=2)
def head_cut_along_its_inputs_and_summed(p: Patched) -> None:
    weight = p.full.lm_head.weight.detach().chunk(p.tp, 1)[p.rank]
    mine = slice(0, 66) if p.rank == 0 else slice(66, 131)

    def forward(x):
        return p.ring.sum(p.rank, _linear(x.chunk(p.tp, -1)[p.rank], weight))[..., mine]

    p.model.lm_head.forward = forward


@control("sharding", model="mistral-full", dtype="bfloat16", tp=2)
def embedding_cut_along_its_width(p: Patched) -> None:
    columns = p.full.model.embed_tokens.weight.detach().chunk(p.tp, 1)[p.rank]

    def forward(ids):
        return torch.cat(p.ring.gather(p.rank, columns[ids]), -1)

    p.decoder.embed_tokens.forward = forward


@control("sharding", model="llama", tp=4)
def ranks_summed_in_fixed_point(p: Patched) -> None:
    def reduce(part):
        whole = p.ring.sum(p.rank, (part.double() * 2**40).round().long())
        return (whole.double() / 2**40).to(part.dtype)

    for i, _ in p.layers():
        p.attn(i).o_proj.reduce = reduce
        p.mlp(i).down_proj.reduce = reduce


@control("sharding", model="qwen3", tp=2)
def gate_and_up_whole_on_each_rank_which_keeps_its_part(p: Patched) -> None:
    for i, _ in p.layers():
        whole = p.full.model.layers[i].mlp
        for mine, all_rows in ((p.mlp(i).gate_proj, whole.gate_proj), (p.mlp(i).up_proj, whole.up_proj)):

            def forward(_, x, all_rows=all_rows):
                return _linear(x, all_rows.weight.detach()).chunk(p.tp, -1)[p.rank]

            p.wrap(mine, forward)
