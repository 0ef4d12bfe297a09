"""Layers with a state: Gated DeltaNet, Mamba-2, short convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.engine.parallel import shards
from lockstep.engine.rules import mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

CONVOLVED = ("attn.conv_q", "attn.conv_k", "attn.conv_v")
STATE = ("attn.state", "attn.delta")
SSM = ("attn.ssm_state", "attn.ssm_read")


@bug(
    "slots",
    accepted=("conv", "state", "cache", "input", "delta"),
    words="sequence|other|slot|swap|exchang|state|neighbour|kept|before",
    taps=CONVOLVED,
    step=1,
    model="qwen3.5",
    ep=1,
)
def slots_of_two_sequences_are_exchanged_in_decode(p: Spoilt) -> None:
    """The batch is sorted by length for decode, the indices of the states are not."""

    def spoil(runner):
        states = runner.pool.states
        right = states.of
        states.of = lambda seq, layer: right(1 - seq if p.decode else seq, layer)

    p.running(spoil)


@bug(
    "slots",
    accepted=("state", "ssm_state", "cache", "conv", "input"),
    words="state|reset|sequence|other|left|fresh|stale|kept|begin|before",
    taps=("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c", *SSM),
    layers=(2,),
    model="granite4-moe",
    dtype="bfloat16",
    ep=1,
)
def last_layer_s_state_is_not_reset_between_prompts(p: Spoilt) -> None:
    """The second begins with what the first has left."""

    def stale(held, left, fresh, new):
        return held or left or fresh

    p.rules((2,), state_before=stale)


@bug(
    "decay",
    accepted=("decay", "activation"),
    words="decay|bias|softplus|order|after|outside",
    taps=("attn.decay",),
    model="qwen3.5",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def dt_bias_is_added_behind_the_softplus(p: Spoilt) -> None:
    p.rules(decay=lambda a, a_log, dt_bias: -a_log.float().exp() * (F.softplus(a.float()) + dt_bias))


@bug(
    "decay",
    accepted=("decay", "scale"),
    words="decay|sign|negat|positive|grow|minus|-1",
    taps=("attn.decay",),
    layers=(3,),
    model="qwen3-next",
    ep=1,
)
def decay_of_the_last_layer_has_the_other_sign(p: Spoilt) -> None:
    p.rules((3,), decay=lambda *args: -recurrence.log_decay(*args))


@bug(
    "decay",
    accepted=("decay", "weight", "sharding"),
    words="decay|head|rank|shard|first|weight|A_log|other",
    taps=("attn.decay",),
    layers=(0, 2, 3),
    ranks=(1,),
    model="qwen3-next",
    tp=2,
    ep=2,
)
def second_rank_decays_with_the_rates_of_the_first(p: Spoilt) -> None:
    """`A_log` is taken for a replicated vector and cut to the rank's size."""
    if p.rank == 1:

        def plan(name, model, tp, rank, ep=1):
            return shards.plan(name, model, tp, 0 if name.endswith("A_log") else rank, ep)

        p.rules(shard=plan)


@bug(
    "convolution",
    accepted=("conv", "cache", "input", "state"),
    words="conv|order|revers|kept|state|row|token|backward",
    taps=CONVOLVED,
    layers=(0, 2, 3),
    step=1,
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rows_kept_for_the_convolution_are_newest_first(p: Spoilt) -> None:
    p.rules(conv_kept=lambda rows, count: recurrence.newest_rows(rows, count).flip(0))


@bug(
    "convolution",
    accepted=("conv", "weight"),
    words="conv|order|revers|kernel|weight|backward|newest|tap",
    taps=CONVOLVED,
    layers=(3,),
    ranks=(0,),
    model="qwen3.5",
    tp=2,
    ep=1,
)
def kernel_of_one_rank_is_the_other_way_round(p: Spoilt) -> None:
    if p.rank == 0:
        p.rules((3,), short_conv=lambda rows, weight: recurrence.short_convolution(rows, weight.flip(-1)))


@bug(
    "convolution",
    accepted=("conv", "cache", "state", "input"),
    words="conv|zero|kept|state|before|row|shift|lost",
    taps=("attn.conv",),
    layers=(0, 2),
    step=1,
    model="lfm2-moe",
    dtype="bfloat16",
    ep=1,
)
def right_padded_prompts_leave_zeros_for_the_convolution(p: Spoilt) -> None:
    """transformers#47651: the last rows are those of the padding."""
    p.rules(conv_kept=lambda rows, count: torch.zeros_like(rows[:count]))


@bug(
    "convolution",
    accepted=("weight", "input", "times"),
    words="gate|swap|exchang|other|order|weight|in_proj|B|C",
    taps=("attn.conv_in_gate", "attn.conv_out_gate"),
    layers=(0, 2),
    model="lfm2",
    tp=2,
    ep=1,
)
def gates_before_and_behind_the_convolution_are_exchanged(p: Spoilt) -> None:
    def spoil(decoder):
        for i in (0, 2):
            before, behind, _ = decoder.layers[i].attention.in_proj.parameters().values()
            first = before.clone()
            before.copy_(behind)
            behind.copy_(first)

    p.loaded(spoil)


@bug(
    "norm",
    accepted=("gated_norm", "norm"),
    words="gate|norm|before|after|order",
    taps=("attn.gated_norm",),
    model="qwen3.5",
    dtype="bfloat16",
    ep=1,
)
def gate_is_multiplied_before_the_norm(p: Spoilt) -> None:
    """As Mamba-2 has it."""

    def gated(x, weight, gate, eps):
        through = x.float() * F.silu(gate.float())
        return (weight * F.rms_norm(through, x.shape[-1:], None, eps)).to(x.dtype)

    p.rules(gated_norm=gated)


@bug(
    "norm",
    accepted=("gated_norm", "activation", "norm", "gate"),
    words="gate|sigmoid|silu|activat",
    taps=("attn.gated_norm",),
    layers=(0, 2, 3),
    step=1,
    model="qwen3-next",
    ep=1,
)
def gate_of_the_norm_is_a_sigmoid_in_decode(p: Spoilt) -> None:
    def gated(x, weight, gate, eps):
        return (weight * F.rms_norm(x.float(), x.shape[-1:], None, eps) * gate.float().sigmoid()).to(x.dtype)

    p.rules(gated_norm=p.later(recurrence.gated_norm, gated))


@bug(
    "norm",
    accepted=("gated_norm", "norm"),
    words="norm|group|width|all|mean|square|root",
    taps=("attn.ssm_norm",),
    layers=(0,),
    model="nemotron-h-moe",
    ep=1,
)
def gated_norm_takes_both_groups_together(p: Spoilt) -> None:
    def whole(x, gate, weight, normalised):
        through = x.float() * F.silu(gate.float())
        return (weight * F.rms_norm(through, through.shape[-1:], None, 1e-4)).to(x.dtype)

    p.rules(ssm_norm=whole)


@bug(
    "scan",
    accepted=("state", "delta", "decay"),
    words="chunk|decay|boundary|state|first|token|lost|carr",
    taps=STATE,
    model="qwen3-next",
    tp=2,
    ep=1,
)
def decay_of_the_first_token_of_a_chunk_is_lost(p: Spoilt) -> None:
    """Chunks of four: the sum over a chunk begins at its second token."""

    def rule(state, q, k, v, beta, decay):
        decay = decay.clone()
        decay[4::4] = 0
        return recurrence.delta_rule(state, q, k, v, beta, decay)

    p.rules(delta_rule=rule)


@bug(
    "scan",
    accepted=("state", "delta"),
    words="chunk|state|restart|reset|zero|fresh|carr|begin|lost",
    taps=STATE,
    layers=(2,),
    model="qwen3.5",
    dtype="bfloat16",
    ep=1,
)
def state_restarts_at_zero_in_every_chunk_of_a_prompt(p: Spoilt) -> None:
    """sparkinfer#1071, with chunks of eight."""

    def rule(state, *tokens):
        parts, left = [], state
        for start in range(0, len(tokens[0]), 8):
            met = state if start == 0 else torch.zeros_like(state)
            part, left = recurrence.delta_rule(met, *(x[start : start + 8] for x in tokens))
            parts.append(part)
        return torch.cat(parts), left

    p.rules((2,), delta_rule=rule)


@bug(
    "scan",
    accepted=("sigmoid", "scale", "state"),
    words="beta|rate|sigmoid|twice|2|times|scale|factor",
    taps=("attn.beta",),
    layers=(0,),
    ranks=(1,),
    model="qwen3.5-moe",
    tp=2,
    ep=2,
)
def one_rank_allows_negative_eigenvalues(p: Spoilt) -> None:
    """Its rate goes from 0 to 2."""
    if p.rank == 1:
        p.rules((0,), beta=lambda b: 2 * b.sigmoid())


@bug(
    "scan",
    accepted=("precision", "ssm_state", "state", "cache"),
    words="precis|round|float16|half|bits|dtype|state",
    taps=("attn.ssm_state",),
    model="bamba",
    ep=1,
)
def state_of_mamba_is_kept_in_half_precision(p: Spoilt) -> None:
    p.rules(state_kept=lambda state: state.half().float())


@bug(
    "scan",
    accepted=("ssm_state", "ssm_read", "heads", "state"),
    words="B|C|swap|exchang|state|other|order",
    taps=SSM,
    step=1,
    model="bamba",
    dtype="bfloat16",
    ep=1,
)
def b_and_c_are_exchanged_in_the_kernel_for_one_token(p: Spoilt) -> None:
    def exchanged(state, x, b, c, step, rate):
        return mamba.scan(state, x, c, b, step, rate)

    p.rules(ssm_scan=p.later(mamba.scan, exchanged))


@bug(
    "heads",
    accepted=("heads", "ssm_state", "ssm_read", "state"),
    words="group|head|repeat|interleav|tiled|modulo|other|share",
    taps=SSM,
    layers=(0,),
    step=1,
    model="nemotron-h-moe",
    dtype="bfloat16",
    ep=1,
)
def decode_repeats_the_groups_where_it_should_repeat_each(p: Spoilt) -> None:
    def tiled(keys, heads):
        return keys.repeat(1, heads // keys.shape[1], 1)

    p.rules(key_heads=p.later(recurrence.shared_by_neighbours, tiled))


@bug(
    "skip",
    accepted=("ssm_read", "weight", "sharding"),
    words="D|skip|head|rank|other|shift|shard|weight|next",
    taps=("attn.ssm_read",),
    layers=(0, 2),
    ranks=(1,),
    model="granite4-moe",
    tp=2,
    ep=2,
)
def second_rank_skips_with_the_d_of_the_next_head(p: Spoilt) -> None:
    if p.rank == 1:
        p.rules(ssm_skip=lambda read, x, d: mamba.skip(read, x, d.roll(-1)))


@bug(
    "scale",
    accepted=("delta", "scale", "l2_norm"),
    words="scale|root|sqrt|factor|times|query|D",
    taps=("attn.delta",),
    layers=(0,),
    model="qwen3-next",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def one_layer_reads_its_state_with_unscaled_queries(p: Spoilt) -> None:
    """The kernel's own default, where the caller gives none."""

    def rule(state, q, *rest):
        return recurrence.delta_rule(state, q * q.shape[-1] ** 0.5, *rest)

    p.rules((0,), delta_rule=rule)
