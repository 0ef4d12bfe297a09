"""Layers with a state: Mamba-2, the gated delta rule, short convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.kv.states import LayerState
from lockstep.engine.rules import mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import RingComm, Spoilt

CONVOLVED = ("attn.conv_q", "attn.conv_k", "attn.conv_v")


# -- convolution ---------------------------------------------------------------------------------------------


@bug(
    "convolution",
    accepted=("conv", "state", "cache", "input"),
    words="row|state|stale|old|token|before|moved|shift|updat|newest|kept|earlier|buffer",
    taps=CONVOLVED,
    step=2,
    model="qwen3-next",
    dtype="bfloat16",
    ep=1,
)
def decode_never_moves_the_rows_of_the_convolution_on(p: Spoilt) -> None:
    """The update works on a copy of the conv state that indexing has made, and does not write it back."""
    p.rules(conv_kept=lambda rows, count: rows[:count].clone() if p.decode else rows[-count:].clone())


@bug(
    "convolution",
    accepted=("conv", "state", "cache", "input"),
    words="row|state|zero|fresh|empty|prompt|before|carried|begin|earlier|cache",
    taps=("attn.conv",),
    layers=(0, 2),
    step=1,
    model="lfm2-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def decode_convolves_as_if_nothing_had_been_read(p: Spoilt) -> None:
    """The prompt's path pads with zeros and keeps nothing, as it does in training."""

    def before(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
        return fresh

    p.rules(state_before=before)


# -- what states are made of -----------------------------------------------------------------------------------


@bug(
    "heads",
    accepted=("ssm_state", "ssm_read", "heads", "state"),
    words="group|head|order|repeat|tile|interleav|share",
    taps=("attn.ssm_state", "attn.ssm_read"),
    model="bamba",
    ep=1,
)
def groups_of_b_and_c_are_tiled_over_the_heads(p: Spoilt) -> None:
    """`repeat` in the place of `repeat_interleave`: head h reads group h mod groups."""
    p.rules(key_heads=lambda keys, heads: keys.repeat(1, heads // keys.shape[1], 1))


@bug(
    "decay",
    accepted=("decay", "bias", "weight"),
    words="bias|dt",
    taps=("attn.decay",),
    layers=(0, 2, 3),
    step=1,
    model="qwen3.5",
    tp=2,
    ep=1,
)
def decode_kernel_decays_without_the_bias_of_the_step(p: Spoilt) -> None:
    """Prompts compute the gate outside of their kernel; that of decode is given a and A_log."""

    def decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        return recurrence.log_decay(a, a_log, torch.zeros_like(dt_bias))

    p.rules(decay=p.later(recurrence.log_decay, decay))


@bug(
    "state",
    accepted=("state", "ssm_state", "ssm_read", "cache"),
    words="other|sequence|request|slot|stale|fresh|zero|left|begin|start|initial",
    taps=("attn.ssm_state", "attn.ssm_read"),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def new_request_begins_with_the_state_that_is_in_its_slot(p: Spoilt) -> None:
    """Slots are zeroed when they are allocated, and not when they are given to the next request."""

    def before(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
        own = recurrence.carried(held, left, fresh, new)
        return own if held is not None or left is None else LayerState(own.rows, left.heads)

    p.rules(state_before=before)


# -- what is read from them ------------------------------------------------------------------------------------


@bug(
    "norm",
    accepted=("gated_norm", "norm", "gate"),
    words="gate|order|before|behind|first|after",
    taps=("attn.ssm_norm",),
    layers=(0,),
    model="nemotron-h-moe",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def gated_norm_comes_before_its_gate(p: Spoilt) -> None:
    """norm_before_gate is True by default in the kernel, and Mamba-2 says False."""

    def gated(x: Tensor, gate: Tensor, weight: Tensor, normalised: Callable[[Tensor], Tensor]) -> Tensor:
        return mamba.normed_first(x, gate, weight, normalised)

    p.rules(ssm_norm=gated)


@bug(
    "norm",
    accepted=("gated_norm", "norm", "reduce", "sharding", "scale"),
    words="rank|own|local|part|sum|reduc|all|shard|half",
    taps=("attn.ssm_norm",),
    layers=(0, 2),
    model="granite4-moe",
    tp=4,
    ep=2,
)
def gated_norm_of_one_group_is_over_each_rank_s_channels(p: Spoilt) -> None:
    """n_groups is 1, so that all channels share a root mean square; each rank takes that of its own."""

    def squares(own: Tensor, comm: RingComm) -> Tensor:
        return own * comm.size

    p.rules(sum_squares=squares)


@bug(
    "norm",
    accepted=("gated_norm", "activation", "norm", "gate"),
    words="sigmoid|silu|swish|activat",
    taps=("attn.gated_norm",),
    layers=(0, 2, 3),
    model="qwen3-next",
    tp=2,
    ep=1,
)
def gate_of_the_gated_norm_is_a_sigmoid(p: Spoilt) -> None:
    """The fused norm is that of another linear attention, whose gate has no SiLU."""

    def norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        return (weight * F.rms_norm(x.float(), x.shape[-1:], None, eps) * gate.float().sigmoid()).to(x.dtype)

    p.rules(gated_norm=norm)
