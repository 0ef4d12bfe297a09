"""Layers with a state: Gated DeltaNet, Mamba-2, short convolutions."""

from __future__ import annotations

import torch.nn.functional as F

from lockstep.engine.rules import mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

STATE = ("attn.state", "attn.delta")
SSM = ("attn.ssm_state", "attn.ssm_read")


@bug(
    "norm",
    accepted=("l2_norm", "norm", "skipped"),
    words="norm|length|missing|skip|without|not",
    taps=("attn.q_l2", "attn.k_l2"),
    step=1,
    model="qwen3-next",
    tp=2,
    ep=1,
)
def kernel_of_decode_is_not_asked_to_norm_queries_and_keys(p: Spoilt) -> None:
    """use_qk_l2norm_in_kernel is given to that of prompts alone."""
    p.rules(l2_norm=p.later(recurrence.l2_normalised, lambda x: x.float()))


@bug(
    "heads",
    accepted=("heads", "delta", "state", "keys"),
    words="head|repeat|interleav|tiled|modulo|group|share|other|order",
    taps=STATE,
    model="qwen3-next",
    dtype="bfloat16",
    ep=1,
)
def key_heads_are_tiled_over_the_heads_of_values(p: Spoilt) -> None:
    """sglang#38363: value head h reads key head h % 2."""
    p.rules(key_heads=lambda keys, heads: keys.repeat(1, heads // keys.shape[1], 1))


@bug(
    "decay",
    accepted=("ssm_state", "ssm_read", "decay", "weight", "state"),
    words="decay|A_log|rate|expon|twice|again|state|A ",
    taps=SSM,
    model="bamba",
    tp=2,
    ep=1,
)
def rate_is_taken_for_a_logarithm_once_more(p: Spoilt) -> None:
    """Other files have -exp(A_log) already under that name."""
    p.rules(ssm_rate=lambda a_log: -mamba.negative_rate(a_log).exp())


@bug(
    "step",
    accepted=("step_size", "clip"),
    words="limit|clamp|clip|max|step|0\\.1|bound|large",
    taps=("attn.ssm_step",),
    model="nemotron-h-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def steps_are_limited_by_the_range_of_their_initial_values(p: Spoilt) -> None:
    """time_step_max, 0.1, is for the initialisation; the limit is the second of time_step_limit."""

    def step(dt, dt_bias, limits):
        return mamba.step_size(dt, dt_bias, (limits[0], 0.1))

    p.rules(ssm_step=step)


@bug(
    "step",
    accepted=("step_size", "activation"),
    words="softplus|twice|again|step|activat",
    taps=("attn.ssm_step",),
    layers=(0, 2),
    step=1,
    model="granite4",
    ep=1,
)
def decode_takes_the_softplus_of_the_step_twice(p: Spoilt) -> None:
    """dt_softplus is set in the kernel, and its caller has done it."""

    def twice(dt, dt_bias, limits):
        return F.softplus(mamba.step_size(dt, dt_bias, limits))

    p.rules(ssm_step=p.later(mamba.step_size, twice))


@bug(
    "state",
    accepted=("state", "delta", "cache"),
    words="chunk|token|last|early|before|whole|boundar|state|kept|missing|lost",
    taps=STATE,
    layers=(0,),
    model="qwen3.5",
    tp=2,
    ep=1,
)
def state_that_is_kept_is_that_of_the_last_whole_chunk(p: Spoilt) -> None:
    """Chunks of four, as the prefix cache takes them; the tokens behind it are read and forgotten."""

    def rule(state, *tokens):
        read, after = recurrence.delta_rule(state, *tokens)
        whole = len(tokens[0]) // 4 * 4
        if p.decode or whole == len(tokens[0]):
            return read, after
        return read, recurrence.delta_rule(state, *(one[:whole] for one in tokens))[1]

    p.rules((0,), delta_rule=rule)


@bug(
    "slots",
    accepted=("conv", "state", "ssm_state", "cache", "input"),
    words="state|stale|step|before|old|kept|token|row|rewind|conv",
    taps=("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c", *SSM),
    layers=(2,),
    step=2,
    model="granite4-moe",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def rejected_draft_takes_the_accepted_token_with_it(p: Spoilt) -> None:
    """One layer goes a token too far back in every step: its slot is counted from the draft."""

    def spoil(runner):
        states = runner.pool.states
        right = states.of

        def of(seq, layer):
            held = states._held.get(seq, {})
            if layer == 2 and len(held) > 1:
                return held[sorted(held)[-2]][layer]
            return right(seq, layer)

        states.of = of

    p.running(spoil)


@bug(
    "state",
    accepted=("state", "delta", "decay"),
    words="pad|decay|length|token|sequence|short|second|state|behind|more",
    taps=("attn.state",),
    model="qwen3-next",
    tp=4,
    ep=1,
)
def padding_behind_the_shorter_prompt_lets_its_state_decay(p: Spoilt) -> None:
    """transformers#47086: nothing is written by it, for its rates are masked, and its decay is not."""

    def rule(state, q, k, v, beta, decay):
        read, after = recurrence.delta_rule(state, q, k, v, beta, decay)
        longest = max(span.stop - span.start for span in p.batch.spans)
        behind = longest - len(q)
        return read, after * (decay[-1].float() * behind).exp()[:, None, None]

    p.rules(delta_rule=rule)


@bug(
    "convolution",
    accepted=("conv", "weight", "sharding"),
    words="conv|kernel|weight|exchang|swap|other|order|rank|query|key|q|k",
    taps=("attn.conv_q", "attn.conv_k"),
    layers=(2, 3),
    ranks=(1,),
    model="qwen3.5",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def one_rank_convolves_queries_by_the_kernels_of_keys(p: Spoilt) -> None:
    """Its rows of the fused kernel are found by sizes in another order than those of the product."""

    def spoil(decoder):
        for i in (2, 3):
            attention = decoder.layers[i].attention
            q, k, _ = attention.conv.split(attention.sizes)
            first = q.clone()
            q.copy_(k)
            k.copy_(first)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "gate",
    accepted=("times", "gate", "activation"),
    words="silu|sigmoid|activat|gate|linear",
    taps=("attn.conv_in",),
    layers=(2,),
    model="lfm2-moe",
    tp=2,
    ep=2,
)
def gate_before_one_convolution_is_activated(p: Spoilt) -> None:
    """The kernel of another family multiplies by SiLU of its gate."""
    p.rules((2,), conv_in_gate=lambda x, gate: x * F.silu(gate))


@bug(
    "convolution",
    accepted=("conv", "weight", "state", "cache", "input"),
    words="conv|row|oldest|first|zero|column|kernel|width|state|missing|token|lost|kept",
    taps=("attn.conv",),
    step=1,
    model="lfm2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def kernel_of_decode_keeps_one_row_fewer_than_it_convolves(p: Spoilt) -> None:
    """The oldest column of the weight meets nothing."""

    def fewer(rows, weight):
        rows = rows.clone()
        rows[0] = 0
        return recurrence.convolution(rows, weight)

    p.rules(plain_conv=p.later(recurrence.convolution, fewer))


@bug(
    "skip",
    accepted=("ssm_read", "weight"),
    words="D|skip|expon|log|input|term|weight",
    taps=("attn.ssm_read",),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def skip_takes_the_exponential_of_d(p: Spoilt) -> None:
    """Both vectors of heads are taken for logarithms, as A_log is one."""
    p.rules(ssm_skip=lambda read, x, d: mamba.skip(read, x, d.float().exp()))


@bug(
    "norm",
    accepted=("gated_norm", "norm", "gate"),
    words="gate|norm|before|after|behind|order|first",
    taps=("attn.ssm_norm",),
    layers=(2,),
    model="bamba",
    dtype="bfloat16",
    ep=1,
)
def norm_of_one_layer_stands_before_its_gate(p: Spoilt) -> None:
    """norm_before_gate has the default of the library, which is not the model's."""
    p.rules((2,), ssm_norm=mamba.normed_first)


@bug(
    "weights",
    accepted=("weight", "linear"),
    words="swap|exchang|other|order|weight|row|split|in_proj|beta|decay|b|a",
    taps=("attn.in_proj_b", "attn.in_proj_a"),
    layers=(3,),
    model="qwen3.5-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rates_and_decays_of_one_layer_are_split_in_the_other_order(p: Spoilt) -> None:
    """in_proj_ba has both behind each other, and one path of loading splits it as ab."""

    def spoil(decoder):
        *_, b, a = decoder.layers[3].attention.in_proj.parameters().values()
        first = b.clone()
        b.copy_(a)
        a.copy_(first)

    p.loaded(spoil)
