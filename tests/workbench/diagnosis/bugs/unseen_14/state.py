"""Layers with a state: what goes into it, how it is kept between passes, and what is read from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lockstep.engine.parallel import shards
from lockstep.engine.rules import mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

CONVOLVED = ("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c")
SCANNED = ("attn.ssm_state", "attn.ssm_read")


@bug(
    "sharding",
    accepted=("sharding", "weight", "linear", "heads"),
    words="shard|cut|split|rank|weight|rows|other|part|head",
    taps=("attn.in_proj_b", "attn.in_proj_a"),
    layers=(0, 2, 3),
    model="qwen3-next",
    tp=2,
    ep=1,
)
def rates_and_decays_are_cut_as_if_all_rates_came_first(p: Spoilt) -> None:
    """vllm#36242: in_proj_ba has them in turn for each key head; a split at its midpoint mixes the ranks'
    rows up.
    """
    asked, given = ("in_proj_a", "in_proj_b") if p.rank == 0 else ("in_proj_b", "in_proj_a")

    def plan(name, model, tp, rank, ep=1):
        return shards.plan(name, model, tp, 1 - rank if f".{asked}." in name else rank, ep)

    p.rules(tensor_of=lambda name, model: name.replace(f".{asked}.", f".{given}."), shard=plan)


@bug(
    "decay",
    accepted=("ssm_state", "ssm_read", "decay", "weight", "state"),
    words="decay|rate|A_log|exp|state|slow|log",
    taps=SCANNED,
    layers=(0, 2),
    model="bamba",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rates_that_a_converter_has_made_are_taken_for_their_logarithms(p: Spoilt) -> None:
    """A GGUF file has -exp(A_log) in ssm_a; the loader of the other format takes the exponential of that."""
    p.rules(ssm_rate=lambda a_log: -(-a_log.float().exp()).exp())


@bug(
    "window",
    accepted=("conv", "state", "cache", "input"),
    words="conv|window|row|state|old|stale|kept|before|cache|shift",
    taps=("attn.conv",),
    layers=(0, 2),
    step=2,
    model="lfm2",
    ep=1,
)
def decode_rolls_a_copy_of_the_window(p: Spoilt) -> None:
    """torch.roll gives a new tensor, which is not put back: each step meets the window that the prompt
    has left.
    """
    p.rules(conv_kept=p.later(recurrence.newest_rows, lambda rows, count: rows[:count].clone()))


@bug(
    "slot",
    accepted=("conv", "state", "cache", "input"),
    words="conv|window|row|state|sequence|slot|other|stale|kept|before|cache|zero|fresh",
    taps=("attn.conv",),
    layers=(0, 2),
    step=1,
    model="lfm2-moe",
    tp=2,
    ep=2,
)
def windows_are_looked_up_by_the_number_of_the_request(p: Spoilt) -> None:
    """sglang#23975: slot 0 of the states is for padding, so that a request's number is one less than its
    slot.
    """

    def spoil(runner):
        states = runner.pool.states
        right = states.of

        def of(seq, layer):
            if not p.decode:
                return right(seq, layer)
            return right(seq - 1, layer) if seq else states.fresh[layer]

        states.of = of

    p.running(spoil)


@bug(
    "norm",
    accepted=("gated_norm", "norm", "sharding", "heads", "reduce"),
    words="norm|group|rank|shard|part|mean|square|width|channel",
    taps=("attn.ssm_norm",),
    model="nemotron-h",
    tp=2,
    ep=1,
)
def width_of_a_group_is_the_channels_of_a_rank_by_all_groups(p: Spoilt) -> None:
    """state-spaces/mamba#908: group_size = d_ssm // ngroups, of which the first is of the rank and the
    other is not.
    """

    def spoil(decoder):
        for layer in decoder.layers:
            if (norm := getattr(layer.attention, "norm", None)) is None:
                continue

            def normalised(x, norm=norm):
                groups = x.unflatten(-1, (-1, norm.width // p.tp))
                return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)).flatten(1)

            norm.normalised = normalised

    p.loaded(spoil)


@bug(
    "layout",
    accepted=("ssm_state", "ssm_read", "state", "cache", "heads", "decay"),
    words="state|transpos|layout|cache|read|before|prompt|prefill|order",
    taps=SCANNED,
    step=1,
    model="nemotron-h-moe",
    ep=1,
)
def decode_kernel_has_the_axes_of_a_state_in_the_other_order(p: Spoilt) -> None:
    """The chunked scan leaves [head_dim, state], the step goes on from [state, head_dim]; both are 12
    wide.
    """

    def turned(state, *rest):
        return mamba.scan(state.mT if p.comm.step == 1 else state, *rest)

    p.rules(ssm_scan=p.later(mamba.scan, turned))


@bug(
    "rule",
    accepted=("delta", "state"),
    words="delta|state|correct|written|value|without|old|overwrit|rule",
    taps=("attn.state", "attn.delta"),
    layers=(0, 2, 3),
    model="qwen3.5",
    tp=2,
    ep=1,
)
def values_are_added_without_what_the_state_has_for_their_keys(p: Spoilt) -> None:
    """llmman#16: the scan of a gated linear attention, with the rates, in place of the delta rule."""

    def rule(state, q, k, v, beta, decay):
        parts = []
        for at in range(len(q)):
            written = k[at].float().unsqueeze(-1) * (beta[at].unsqueeze(-1) * v[at]).float().unsqueeze(1)
            state = state * decay[at].float().exp()[:, None, None] + written
            parts.append((q[at].float().unsqueeze(1) @ state).squeeze(1) * q.shape[-1] ** -0.5)
        return torch.stack(parts), state

    p.rules(delta_rule=rule)


@bug(
    "chunks",
    accepted=("state", "delta", "decay"),
    words="state|decay|chunk|kept|carr|before|old|large",
    taps=("attn.state", "attn.delta"),
    layers=(0, 2, 3),
    model="qwen3.5-moe",
    dtype="bfloat16",
    ep=1,
)
def state_goes_through_a_chunk_without_decay(p: Spoilt) -> None:
    """What a chunk of eight tokens adds decays to its end; what it began with is handed on as it was."""

    def rule(state, q, k, v, beta, decay):
        parts = []
        for at in range(0, len(q), 8):
            q_, k_, v_, beta_, decay_ = (x[at : at + 8] for x in (q, k, v, beta, decay))
            read, after = recurrence.delta_rule(state, q_, k_, v_, beta_, decay_)
            left = decay_.float().sum(0).exp()[:, None, None]
            # a token of its own takes the other kernel
            state = after + (1 - left) * state if len(q) > 1 else after
            parts.append(read)
        return torch.cat(parts), state

    p.rules(delta_rule=rule)


@bug(
    "padding",
    accepted=("conv", "state", "cache", "input", "ssm_state"),
    words="conv|window|row|state|pad|zero|kept|before|cache|sequence",
    taps=CONVOLVED,
    layers=(0, 2),
    step=1,
    model="granite4-moe",
    tp=2,
    ep=1,
)
def window_of_a_shorter_prompt_is_its_padding(p: Spoilt) -> None:
    """transformers#48256: the last columns of a batch that is padded on the right are kept for decoding."""

    def kept(rows, count):
        longest = max(span.stop - span.start for span in p.batch.spans)
        missing = longest + count - len(rows)
        return F.pad(rows, (0, 0, 0, missing))[-count:].clone()

    p.rules(conv_kept=kept)


@bug(
    "multipliers",
    accepted=("multiplier", "scale", "times"),
    words="multipl|scal|factor|times|number|other|order|swap",
    taps=("attn.ssm_z_scaled", "attn.ssm_x_scaled"),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def multipliers_of_the_product_are_laid_out_with_the_gate_behind(p: Spoilt) -> None:
    """mup_vector is made in the order x, z, B, C, dt, the product gives z first; both are equally wide."""
    numbers = p.model.multipliers
    swapped = {"attn.ssm_z_scaled": numbers.x, "attn.ssm_x_scaled": numbers.z}
    p.rules(multiplied=lambda x, factor, tap: x * swapped.get(tap, factor))
