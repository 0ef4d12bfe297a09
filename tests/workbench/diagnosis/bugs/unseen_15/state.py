"""Layers that keep a state: Mamba, the gated delta rule, short convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.mamba import Mamba2
from lockstep.engine.layers.short_convolution import ShortConvolution
from lockstep.engine.model import Decoder
from lockstep.engine.rules import defaults, mamba, recurrence
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

CONVOLVED = ("attn.conv_q", "attn.conv_k", "attn.conv_v")
SSM_CONVOLVED = ("attn.ssm_conv_x", "attn.ssm_conv_b", "attn.ssm_conv_c")
STEP = ("attn.ssm_step",)


# -- convolution ---------------------------------------------------------------------------------------------


@bug(
    "convolution",
    accepted=("conv", "weight", "cache"),
    words="order|flip|revers|newest|backward|mirror|turned",
    taps=CONVOLVED,
    step=1,
    model="qwen3-next",
    dtype="bfloat16",
    ep=1,
)
def update_of_the_convolution_has_its_kernel_backwards(p: Spoilt) -> None:
    """The buffer of decode has its newest row first, and weights turned round for that are turned once more."""

    def convolve(rows: Tensor, weight: Tensor) -> Tensor:
        return recurrence.short_convolution(rows, weight.flip(1))

    p.rules(short_conv=p.later(recurrence.short_convolution, convolve))


@bug(
    "convolution",
    accepted=("conv", "bias"),
    words="bias",
    taps=SSM_CONVOLVED,
    step=1,
    model="falcon-h1",
    dtype="bfloat16",
    ep=1,
)
def update_of_the_convolution_is_given_no_bias(p: Spoilt) -> None:
    """causal_conv1d_update has its bias as an optional argument behind the one for the activation."""

    def convolve(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return mamba.biased_convolution(rows, weight, torch.zeros_like(bias))

    p.rules(ssm_conv=p.later(mamba.biased_convolution, convolve))


@bug(
    "convolution",
    accepted=("conv", "weight", "sharding"),
    words="kernel|exchang|other|channel|swap|weight|order",
    taps=SSM_CONVOLVED[1:],
    ranks=(1,),
    model="bamba",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def second_rank_loads_the_kernels_of_c_before_those_of_b(p: Spoilt) -> None:
    """The loader of a packed conv1d goes through its parts by a table of offsets, of which one rank sorts the keys."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            if isinstance(layer.attention, Mamba2):
                _, b, c = layer.attention.conv.split(layer.attention.sizes)
                held = b.clone()
                b.copy_(c)
                c.copy_(held)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "gates",
    accepted=("linear", "weight", "input"),
    words="order|exchang|other|weight|row|gate|part|swap|cut|slice",
    taps=("attn.conv_out_gate", "attn.conv_x"),
    model="lfm2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rows_of_the_short_convolution_are_read_as_gate_input_and_gate(p: Spoilt) -> None:
    """`B, x, C = in_proj(x).chunk(3, -1)` where the checkpoint has B, C, x."""

    def spoil(decoder: Decoder) -> None:
        for layer in decoder.layers:
            if isinstance(layer.attention, ShortConvolution):
                _, c, x = layer.attention.in_proj.weight.parts().values()
                held = c.clone()
                c.copy_(x)
                x.copy_(held)

    p.loaded(spoil)


# -- step sizes and multipliers ------------------------------------------------------------------------------


@bug(
    "step size",
    accepted=("step_size", "clip"),
    words="clamp|limit|softplus|step|order|before|clip|least",
    taps=STEP,
    model="nemotron-h-moe",
    tp=2,
    ep=2,
)
def step_sizes_are_limited_before_their_softplus(p: Spoilt) -> None:
    """time_step_limit is applied to dt + dt_bias."""

    def step(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
        return F.softplus((dt.float() + dt_bias.float()).clamp(*limits))

    p.rules(ssm_step=step)


@bug(
    "step size",
    accepted=("step_size", "activation"),
    words="softplus|activat|positiv",
    taps=STEP,
    model="granite4",
    tp=2,
    ep=1,
)
def step_sizes_go_without_their_softplus(p: Spoilt) -> None:
    """The scan is called with dt_softplus=False; sizes below zero are cut off by their limits."""
    p.rules(ssm_step=lambda dt, dt_bias, limits: (dt.float() + dt_bias.float()).clamp(*limits))


@bug(
    "multipliers",
    accepted=("multiplier", "scale", "times"),
    words="scal|factor|multipl|times|number|without|0\\.35",
    taps=("attn.ssm_z_scaled",),
    layers=(1,),
    model="falcon-h1",
    tp=2,
    ep=1,
)
def gate_of_the_last_layer_s_mamba_is_not_multiplied(p: Spoilt) -> None:
    """The vector of multipliers is made for x, B, C and dt, as the gate is cut off before in this path."""

    def times(x: Tensor, factor: float, tap: str) -> Tensor:
        return defaults.times_number(x, 1.0 if tap == "attn.ssm_z_scaled" else factor, tap)

    p.rules((1,), multiplied=times)


# -- states --------------------------------------------------------------------------------------------------


@bug(
    "state",
    accepted=("state", "ssm_state", "ssm_read", "cache"),
    words="other|sequence|request|slot|stale|prompt|exchang|carried",
    taps=("attn.ssm_state", "attn.ssm_read"),
    step=1,
    model="bamba",
    tp=2,
    ep=1,
)
def decode_finds_states_by_the_slots_of_the_other_request(p: Spoilt) -> None:
    """State indices have prompts first where the batch has decode first (vllm #40766); the other state's are right."""

    def before(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
        own = recurrence.carried(held, left, fresh, new)
        return own if held is None or left is None else LayerState(own.rows, left.heads)

    p.rules(state_before=before)


@bug(
    "state",
    accepted=("state", "precision", "cache"),
    words="round|precision|bfloat16|half|bit|dtype|coarse",
    taps=("attn.state",),
    ranks=(1,),
    model="qwen3.5",
    tp=2,
    ep=1,
)
def second_rank_keeps_its_states_in_bfloat16(p: Spoilt) -> None:
    """mamba_ssm_dtype is read where the engine starts and not by the worker, whose pool has the model's dtype."""
    if p.rank == 1:
        p.rules(state_kept=lambda heads: heads.bfloat16().float())


@bug(
    "delta rule",
    accepted=("delta", "scale"),
    words="scal|factor|width|root|times|multipl|divid|value",
    taps=("attn.delta",),
    model="qwen3-next",
    ep=1,
)
def what_is_read_from_a_state_is_scaled_by_the_width_of_values(p: Spoilt) -> None:
    """`scale = v.shape[-1] ** -0.5`: in published models keys are as wide."""

    def rule(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        read, state = recurrence.delta_rule(state, q, k, v, beta, decay)
        return read * (q.shape[-1] / v.shape[-1]) ** 0.5, state

    p.rules(delta_rule=rule)


@bug(
    "lengths",
    accepted=("l2_norm", "norm", "heads"),
    words="norm|length|head|root|sum|divid|squar",
    taps=("attn.q_l2", "attn.k_l2"),
    model="qwen3.5",
    tp=2,
    ep=1,
)
def heads_of_a_rank_are_divided_by_one_length(p: Spoilt) -> None:
    """The norm goes over the flattened row: right where a rank has one head of keys."""

    def norm(x: Tensor) -> Tensor:
        return recurrence.l2_normalised(x.flatten(1)).view(x.shape)

    p.rules(l2_norm=norm)
