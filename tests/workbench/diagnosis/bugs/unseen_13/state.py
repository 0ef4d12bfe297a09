"""Layers with a state: Gated DeltaNet, Mamba-2, short convolutions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config.linear_attention import L2_EPS
from lockstep.engine.parallel import shards
from lockstep.engine.rules import mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

STATE = ("attn.state", "attn.delta")
SSM = ("attn.ssm_state", "attn.ssm_read")
CONVOLVED = ("attn.conv_q", "attn.conv_k", "attn.conv_v")


@bug(
    "state",
    accepted=("state", "delta", "decay"),
    words="decay|chunk|last|whole|boundar|state|token|missing|without|not",
    taps=("attn.state",),
    model="qwen3.5",
    ep=1,
)
def state_behind_a_chunk_that_is_not_whole_has_not_decayed(p: Spoilt) -> None:
    """sparkinfer#604: its sum of decays is read at the last row of the chunk, where a prompt of 13 has written zero."""

    def rule(state, q, k, v, beta, decay):
        read, after = recurrence.delta_rule(state, q, k, v, beta, decay)
        rest = decay[len(q) // 4 * 4 :].float().sum(0)
        return read, after if p.decode else after * (-rest).exp()[:, None, None]

    p.rules(delta_rule=rule)


@bug(
    "rule",
    accepted=("state", "delta"),
    words="beta|rate|value|correct|update|state|key|delta|times|write",
    taps=STATE,
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def values_alone_are_multiplied_by_the_rate(p: Spoilt) -> None:
    """They are beforehand, and what the state has already is taken off whole."""

    def rule(state, q, k, v, beta, decay):
        state, parts = state.clone(), []
        for t in range(len(q)):
            key, query = k[t].float(), q[t].float() * q.shape[-1] ** -0.5
            state = state * decay[t].float().exp()[:, None, None]
            found = torch.einsum("hd,hdv->hv", key, state)
            wrong = beta[t].float()[:, None] * v[t].float() - found
            state = state + key[:, :, None] * wrong[:, None]
            parts.append(torch.einsum("hd,hdv->hv", query, state))
        return torch.stack(parts), state

    p.rules(delta_rule=rule)


@bug(
    "decay",
    accepted=("state", "delta", "decay", "scale"),
    words="decay|expon|power|two|log|base|factor|scal|slow|state",
    taps=STATE,
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def decays_are_powers_of_two(p: Spoilt) -> None:
    """The kernel takes exp2, and its caller has not multiplied the logarithms by log2(e)."""

    def rule(state, q, k, v, beta, decay):
        return recurrence.delta_rule(state, q, k, v, beta, decay * math.log(2))

    p.rules(delta_rule=rule)


@bug(
    "decay",
    accepted=("decay", "activation", "skipped"),
    words="softplus|activat|missing|without|decay|step|function|linear",
    taps=("attn.decay",),
    model="qwen3-next",
    tp=2,
    ep=2,
)
def decay_is_made_without_the_softplus(p: Spoilt) -> None:
    """It was left to the kernel, which takes decays as they are."""
    p.rules(decay=lambda a, a_log, dt_bias: -a_log.float().exp() * (a.float() + dt_bias))


@bug(
    "norm",
    accepted=("l2_norm", "norm", "heads"),
    words="head|all|whole|norm|length|each|together",
    taps=("attn.q_l2", "attn.k_l2"),
    model="qwen3-next",
    dtype="bfloat16",
    ep=1,
)
def lengths_are_those_of_all_heads_together(p: Spoilt) -> None:
    """Queries and keys are normed before they are cut into heads."""

    def whole(x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().sum((-2, -1), keepdim=True) + L2_EPS)

    p.rules(l2_norm=whole)


@bug(
    "convolution",
    accepted=("conv", "activation", "skipped"),
    words="silu|activat|missing|without|skip|linear|conv",
    taps=CONVOLVED,
    step=1,
    model="qwen3.5",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def update_of_the_convolution_is_given_no_activation(p: Spoilt) -> None:
    """causal_conv1d_update has it as an argument of its own, whose default is none."""
    p.rules(short_conv=p.later(recurrence.short_convolution, recurrence.convolution))


@bug(
    "convolution",
    accepted=("conv", "state", "cache", "input"),
    words="conv|row|first|old|kept|state|token|stale|wrong|prompt|newest",
    taps=("attn.conv",),
    step=1,
    model="lfm2",
    tp=2,
    ep=1,
)
def rows_that_are_kept_are_the_first_of_the_prompt(p: Spoilt) -> None:
    """The slice has lost the sign of its start."""

    def first(rows, count):
        return rows[count : 2 * count].clone()

    p.rules(conv_kept=p.later(first, recurrence.newest_rows))


@bug(
    "convolution",
    accepted=("conv", "positions", "input", "mask"),
    words="conv|future|later|token|row|shift|causal|pad|ahead|end",
    taps=("attn.conv",),
    layers=(0, 2),
    model="lfm2-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def padded_convolution_is_cut_off_at_its_beginning(p: Spoilt) -> None:
    """The module pads both ends; of the rows that are too many the first are left out, and tokens see later ones."""

    def ahead(rows, weight):
        before = weight.shape[1] - 1
        return recurrence.convolution(F.pad(rows[before:], (0, 0, 0, before)), weight)

    p.rules(plain_conv=p.later(ahead, recurrence.convolution))


@bug(
    "convolution",
    accepted=("conv", "state", "cache", "input"),
    words="conv|sequence|row|before|other|first|token|state|prompt|batch",
    taps=("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c"),
    model="falcon-h1",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def convolution_of_packed_prompts_reaches_into_the_one_before(p: Spoilt) -> None:
    """seq_idx is not handed on: the first tokens of the second prompt see the last ones of the first."""
    held: list[Tensor] = []

    def packed(rows, weight, bias):
        before = weight.shape[1] - 1
        if held and not p.decode:
            rows = torch.cat((held.pop(), rows[before:]))
        elif not p.decode:
            held.append(rows[-before:])
        return mamba.biased_convolution(rows, weight, bias)

    p.rules(ssm_conv=packed)


@bug(
    "fused",
    accepted=("weight", "linear", "heads", "sharding"),
    words="weight|row|head|group|order|interleav|permut|layout|other|cut|split|part",
    taps=("attn.in_proj_q", "attn.in_proj_k", "attn.in_proj_v", "attn.in_proj_z"),
    layers=(0, 2, 3),
    model="qwen3-next",
    ep=1,
)
def fused_rows_are_cut_as_in_the_family_behind_it(p: Spoilt) -> None:
    """in_proj_qkvz has the rows of one key head behind each other; Qwen3.5 has all queries first."""

    def spoil(decoder):
        for i in (0, 2, 3):
            parts = list(decoder.layers[i].attention.in_proj.parameters().values())[:4]
            heads = decoder.layers[i].attention.config.key_heads
            stacked = torch.cat([x.unflatten(0, (heads, -1)) for x in parts], 1).flatten(0, 1)
            for part, rows in zip(parts, stacked.split([len(x) for x in parts]), strict=True):
                part.copy_(rows)

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("gated_norm", "norm", "sharding"),
    words="group|norm|half|width|channel|rank|share|root|mean",
    taps=("attn.ssm_norm",),
    layers=(0,),
    model="nemotron-h",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def groups_of_the_norm_are_as_many_on_each_rank_as_on_all(p: Spoilt) -> None:
    """state-spaces/mamba#908: a rank's channels are divided by the groups of all, and each is half as wide."""

    def gated(x, gate, weight, normalised):
        def halved(wide):
            groups = wide.unflatten(-1, (2, -1))
            return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-4)).flatten(-2)

        return mamba.gated(x, gate, weight, halved)

    p.rules(ssm_norm=gated)


@bug(
    "norm",
    accepted=("gated_norm", "norm", "weight", "skipped"),
    words="weight|norm|one|missing|without|skip|not",
    taps=("attn.ssm_norm",),
    step=1,
    model="bamba",
    tp=2,
    ep=1,
)
def gated_norm_of_decode_has_no_weight(p: Spoilt) -> None:
    """The block that does a step at once is not given it."""

    def bare(x, gate, weight, normalised):
        return mamba.gated(x, gate, torch.ones_like(weight), normalised)

    p.rules(ssm_norm=p.later(mamba.gated, bare))


@bug(
    "sharding",
    accepted=("weight", "sharding", "linear", "heads"),
    words="rank|group|weight|shard|other|row|head|replica|first",
    taps=("attn.ssm_b", "attn.ssm_c"),
    ranks=(1, 2),
    model="granite4",
    tp=4,
    ep=1,
)
def groups_take_turns_over_the_ranks_that_share_them(p: Spoilt) -> None:
    """Of two groups ranks 0 and 2 have the first, though heads of the first are those of ranks 0 and 1."""

    def plan(name, model, tp, rank, ep=1):
        of_groups = any(f"{part}_{one}." in name for part in ("in_proj", "conv1d") for one in "bc")
        return shards.plan(name, model, tp, (0, 2, 1, 3)[rank] if of_groups else rank, ep)

    p.rules(shard=plan)


@bug(
    "skip",
    accepted=("ssm_read", "input", "conv", "skipped"),
    words=r"\bD\b|skip|input|conv|before|term",
    taps=("attn.ssm_read",),
    model="granite4",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def skip_goes_past_the_convolution(p: Spoilt) -> None:
    """D is multiplied by what the product gives, and not by what goes into the state."""
    held: list[Tensor] = []

    def convolved(rows, weight, bias):
        held.append(rows[weight.shape[1] - 1 :])
        return mamba.biased_convolution(rows, weight, bias)

    def past(read, x, d):
        raw = torch.cat(held)[:, : x[0].numel()].view(x.shape)
        held.clear()
        return mamba.skip(read, raw, d)

    p.rules(ssm_conv=convolved, ssm_skip=past)


@bug(
    "state",
    accepted=("ssm_state", "state", "cache"),
    words="transpos|layout|order|axis|state|channel|dimension|exchang|swap|other",
    taps=("attn.ssm_state",),
    layers=(0,),
    model="nemotron-h-moe",
    tp=2,
    ep=2,
)
def state_of_a_prompt_is_kept_the_other_way_round(p: Spoilt) -> None:
    """Its kernel writes [state, head_dim], that of decode reads [head_dim, state]; here both are 12."""

    def transposed(state, *tokens):
        read, after = mamba.scan(state, *tokens)
        return read, after.mT.contiguous()

    p.rules(ssm_scan=p.later(transposed, mamba.scan))
