"""Layers with a state: Gated DeltaNet, Mamba-2, short convolutions, and their gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.engine.rules import defaults, mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

CONVOLVED = ("attn.conv_q", "attn.conv_k", "attn.conv_v")
STATE = ("attn.state", "attn.delta")
SSM = ("attn.ssm_state", "attn.ssm_read")


@bug(
    "norm",
    accepted=("l2_norm", "norm", "scale"),
    words="norm|root|mean|width|sum|length|scal|times|factor",
    taps=("attn.q_l2", "attn.k_l2"),
    model="qwen3-next",
    dtype="bfloat16",
    ep=1,
)
def queries_and_keys_are_divided_by_their_root_mean_square(p: Spoilt) -> None:
    """A norm of the stream's kind without a weight, in place of the length."""
    p.rules(l2_norm=lambda x: defaults.unit_heads(x.float(), 1e-6))


@bug(
    "convolution",
    accepted=("conv", "state", "cache", "input"),
    words="state|stale|kept|old|before|row|token|updat|shift|prompt|conv",
    taps=CONVOLVED,
    step=2,
    model="qwen3.5",
    tp=2,
    ep=1,
)
def decode_does_not_move_the_rows_of_the_convolution_on(p: Spoilt) -> None:
    """Each step meets the rows that the prompt has left: a copy was updated."""
    p.rules(conv_kept=p.later(recurrence.newest_rows, lambda rows, count: rows[:count].clone()))


@bug(
    "convolution",
    accepted=("conv", "state", "input"),
    words="chunk|row|zero|state|before|begin|restart|lost|token|conv|position",
    taps=CONVOLVED,
    model="qwen3.5-moe",
    tp=2,
    ep=2,
)
def convolution_begins_with_zeros_in_each_chunk_of_a_prompt(p: Spoilt) -> None:
    """Chunks of eight; the heads' states go on."""

    def in_chunks(rows, weight):
        before, parts = weight.shape[1] - 1, []
        for start in range(0, len(rows) - before, 8):
            chunk = rows[start : start + before + 8].clone()
            if start:
                chunk[:before] = 0
            parts.append(recurrence.short_convolution(chunk, weight))
        return torch.cat(parts)

    p.rules(short_conv=in_chunks)


@bug(
    "decay",
    accepted=("decay", "bias", "weight"),
    words="bias|dt|decay|missing|without|zero",
    taps=("attn.decay",),
    layers=(2,),
    model="qwen3-next",
    tp=2,
    ep=1,
)
def decay_of_one_layer_has_no_dt_bias(p: Spoilt) -> None:
    def without(a, a_log, dt_bias):
        return recurrence.log_decay(a, a_log, torch.zeros_like(dt_bias))

    p.rules((2,), decay=without)


@bug(
    "delta",
    accepted=("delta", "state"),
    words="before|order|old|token|updat|read|state|late|earl|own",
    taps=("attn.delta",),
    step=1,
    model="qwen3.5",
    dtype="bfloat16",
    ep=1,
)
def decode_reads_the_state_before_it_is_updated(p: Spoilt) -> None:
    """A token does not find what it has written itself; the state after it is right."""

    def early(state, q, k, v, beta, decay):
        _, after = recurrence.delta_rule(state, q, k, v, beta, decay)
        found = decay[0].float().exp()[:, None, None] * state
        return (q.float() * q.shape[-1] ** -0.5).transpose(0, 1).matmul(found).transpose(0, 1), after

    p.rules(delta_rule=p.later(recurrence.delta_rule, early))


@bug(
    "delta",
    accepted=("state", "delta", "decay"),
    words="decay|order|behind|after|before|updat|state",
    taps=STATE,
    step=1,
    model="qwen3-next",
    tp=2,
    ep=2,
)
def decode_lets_a_state_decay_behind_its_update(p: Spoilt) -> None:
    def behind(state, q, k, v, beta, decay):
        _, updated = recurrence.delta_rule(state, q, k, v, beta, torch.zeros_like(decay))
        state = decay[0].float().exp()[:, None, None] * updated
        return (q.float() * q.shape[-1] ** -0.5).transpose(0, 1).matmul(state).transpose(0, 1), state

    p.rules(delta_rule=p.later(recurrence.delta_rule, behind))


@bug(
    "gated norm",
    accepted=("gated_norm", "norm", "weight"),
    words="1|one|plus|add|weight|norm|offset",
    taps=("attn.gated_norm",),
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def gated_norm_multiplies_by_one_more_than_its_weight(p: Spoilt) -> None:
    """As all other norms of the family do."""

    def plus_one(x, weight, gate, eps):
        return recurrence.gated_norm(x, 1 + weight, gate, eps)

    p.rules(gated_norm=plus_one)


@bug(
    "gate",
    accepted=("gate", "skipped", "attention"),
    words="gate|sigmoid|missing|skip|without|not|open",
    taps=("attn.gated",),
    layers=(1,),
    step=1,
    model="qwen3-next",
    tp=2,
    ep=1,
)
def decode_leaves_out_the_output_gate(p: Spoilt) -> None:
    p.rules(output_gate=p.later(recurrence.times_sigmoid, lambda context, gate: context.clone()))


@bug(
    "skip",
    accepted=("ssm_read", "skipped", "weight"),
    words="D|skip|missing|without|input|term",
    taps=SSM,
    step=1,
    model="nemotron-h",
    dtype="bfloat16",
    ep=1,
)
def decode_kernel_reads_the_state_alone(p: Spoilt) -> None:
    """D times the input is not added."""
    p.rules(ssm_skip=p.later(mamba.skip, lambda read, x, d: read))


@bug(
    "convolution",
    accepted=("conv", "bias"),
    words="bias|missing|without|zero|load",
    taps=("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c"),
    layers=(2,),
    ranks=(1,),
    model="bamba",
    tp=2,
    ep=1,
)
def second_rank_convolves_one_layer_without_its_bias(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules((2,), ssm_conv=lambda rows, weight, bias: recurrence.short_convolution(rows, weight))


@bug(
    "convolution",
    accepted=("conv", "activation"),
    words="silu|activat|linear|without|missing|B|C",
    taps=("attn.ssm_conv_b", "attn.ssm_conv_c"),
    model="granite4",
    dtype="bfloat16",
    ep=1,
)
def b_and_c_are_convolved_without_the_silu(p: Spoilt) -> None:
    """The activation is applied to what goes in alone, behind the split."""

    def of_x(rows, weight, bias):
        out = recurrence.convolution(rows, weight, bias)
        wide = out.shape[1] - 2 * 2 * 12  # two groups of twelve, of B and of C
        return torch.cat((F.silu(out[:, :wide]), out[:, wide:]), -1)

    p.rules(ssm_conv=of_x)


@bug(
    "multiplier",
    accepted=("multiplier", "scale"),
    words="multipl|factor|scal|times|order|other|exchang|swap|0\\.7|0\\.45",
    taps=("attn.ssm_b_scaled", "attn.ssm_c_scaled"),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def multipliers_of_b_and_c_are_exchanged(p: Spoilt) -> None:
    other = {"attn.ssm_b_scaled": 0.45, "attn.ssm_c_scaled": 0.7}
    p.rules(multiplied=lambda x, factor, tap: x * other.get(tap, factor))


@bug(
    "convolution",
    accepted=("conv", "state", "input"),
    words="row|token|shift|order|late|state|newest|twice|kernel|before|conv|position",
    taps=("attn.conv",),
    step=1,
    model="lfm2",
    ep=1,
)
def decode_convolves_rows_that_have_moved_on_already(p: Spoilt) -> None:
    """The state is shifted, the newest row put in, and the newest row put behind it once more."""

    def moved(rows, weight):
        return recurrence.convolution(torch.cat((rows[1:], rows[-1:])), weight)

    p.rules(plain_conv=p.later(recurrence.convolution, moved))


@bug(
    "gated norm",
    accepted=("gated_norm", "norm", "reduce", "sharding", "scale"),
    words="rank|squar|sum|half|part|own|norm|root|mean|reduc",
    taps=("attn.ssm_norm",),
    model="granite4-moe",
    tp=2,
    ep=1,
)
def ranks_that_share_a_group_norm_it_each_by_its_own_half(p: Spoilt) -> None:
    p.rules(sum_squares=lambda squares, comm: comm.size * squares)


@bug(
    "scan",
    accepted=("ssm_state", "ssm_read", "decay", "state"),
    words="chunk|decay|carr|state|before|boundar|token|position",
    taps=SSM,
    model="nemotron-h-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def state_does_not_decay_from_chunk_to_chunk(p: Spoilt) -> None:
    """What a chunk leaves is added to the state before it, which is not scaled by the chunk's whole decay."""

    def in_chunks(state, x, b, c, step, rate):
        read = []
        for start in range(0, len(x), 4):
            own = [one[start : start + 4] for one in (x, b, c, step)]
            part, _ = mamba.scan(state, *own, rate)
            _, added = mamba.scan(torch.zeros_like(state), *own, rate)
            read.append(part)
            state = state + added
        return torch.cat(read), state

    p.rules(ssm_scan=p.later(in_chunks, mamba.scan))
