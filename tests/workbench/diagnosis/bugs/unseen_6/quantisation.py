"""Quantised weights and inputs: scales, zero points, what is left alone."""

from __future__ import annotations

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|times|constant|magnitude",
    taps=("attn.o_proj",),
    layers=(1,),
    model="mistral-full",
    dtype="bfloat16",
)
def eight_bit_floats_of_o_used_without_their_scale(p: Patched) -> None:
    p.weight(p.attn(1).o_proj, lambda w: w / (w.abs().max() / 448))


@bug(
    "quantisation",
    accepted=("weight", "scale", "bias"),
    words="zero.point|offset|group|constant|scale|shift|quant|minimum|sum of|weight",
    taps=("mlp.up",),
    layers=(2,),
    model="llama",
)
def unsigned_four_bit_weights_read_without_their_zero_point(p: Patched) -> None:
    def change(w):
        groups = w.unflatten(1, (-1, 32))
        scale = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        return (groups + 8 * scale).flatten(1)

    p.weight(p.mlp(2).up_proj, change)


@bug(
    "quantisation",
    accepted=("scale", "input", "weight"),
    words="scale|factor|times|token|row|constant|quant",
    taps=("mlp.down",),
    step=1,
    model="qwen2-tied",
)
def scale_of_the_decoded_input_never_multiplied_back(p: Patched) -> None:
    for i, _ in p.layers():

        def around(forward, x):
            return forward(x) / (x.abs().amax(-1, keepdim=True) / 127) if p.decode else forward(x)

        p.wrap(p.mlp(i).down_proj, around)


@bug(
    "quantisation",
    accepted=("weight", "scale"),
    words="scale|factor|row|channel|layer|times|quant",
    taps=("mlp.down",),
    layers=(1, 2),
    model="qwen3",
)
def scales_of_down_are_those_of_the_layer_before(p: Patched) -> None:
    scales = [p.mlp(i).down_proj.weight.abs().amax(1, keepdim=True) for i, _ in p.layers()]
    for i in (1, 2):
        p.weight(p.mlp(i).down_proj, lambda w, i=i: w / scales[i] * scales[i - 1])


@bug(
    "quantisation",
    accepted=("weight", "precision"),
    words="round|precis|int4|4.bit|four|quant|bits|weight",
    taps=QKV,
    layers=(0,),
    model="qwen2-untied",
)
def first_layer_quantised_though_it_is_to_be_left_alone(p: Patched) -> None:
    """To four bits in groups of 32: the list of exceptions has another prefix."""

    def change(w):
        groups = w.unflatten(1, (-1, 32))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        return ((groups / scale).round() * scale).flatten(1)

    attn, mlp = p.attn(0), p.mlp(0)
    for side in (
        attn.q_proj,
        attn.k_proj,
        attn.v_proj,
        attn.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ):
        p.weight(side, change)
