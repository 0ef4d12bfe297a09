"""Norms, activation, MLP, the residual stream."""

from __future__ import annotations

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched

_linear = nn.functional.linear


def _mlp(p, i, activate):
    """Layer `i`'s MLP with `activate(gate, up)`."""
    mlp = p.mlp(i)
    mlp.forward = lambda x: mlp.down_proj(activate(mlp.gate_proj(x), mlp.up_proj(x)))


@bug(
    "norm",
    accepted=("norm", "input"),
    words="norm|row|stride|token|other|input|packed|order|contiguous",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3",
)
def norms_of_the_heads_step_over_a_packed_row_as_over_their_own(p: Patched) -> None:
    """vllm#24247: q and k are views into rows of q, k and v; each token is sought at a multiple of its own size."""

    def spoil(attn):
        held = {}

        def begin(forward, x):
            held["x"] = x
            return forward(x)

        def around(forward, x, first):
            pack = torch.cat(
                [_linear(held["x"], side.weight) for side in (attn.q_proj, attn.k_proj, attn.v_proj)], -1
            )
            return forward(pack.flatten()[first : first + x.numel()].view_as(x))

        p.wrap(attn.q_proj, begin)
        p.wrap(attn.q_norm, lambda forward, x: around(forward, x, 0))
        p.wrap(attn.k_norm, lambda forward, x: around(forward, x, attn.q_proj.out_features))

    for i, _ in p.layers():
        spoil(p.attn(i))


@bug(
    "norm",
    accepted=("norm",),
    words="norm|head|root|other|rms|variance|mean",
    taps=("attn.q_norm",),
    heads=(1, 3, 5, 7),
    model="qwen3-kv4",
    dtype="bfloat16",
)
def two_query_heads_of_a_warp_normed_by_the_root_of_the_first(p: Patched) -> None:
    """After vllm#51049: what the threads of one head have summed is broadcast to both."""
    for i, _ in p.layers():
        norm = p.attn(i).q_norm

        def forward(x, norm=norm):
            wide = x.float()
            mean = wide.pow(2).mean(-1, keepdim=True)[:, :, torch.arange(8) // 2 * 2]
            return norm.weight * (wide * torch.rsqrt(mean + norm.variance_epsilon)).to(x.dtype)

        norm.forward = forward


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="norm|column|channel|element|first|weight|identity|not normed|skip",
    taps=("attn_norm",),
    model="mistral-full",
)
def first_channel_of_each_further_token_is_not_normed(p: Patched) -> None:
    """aiter#5044: the vector that crosses the end of a row is left as it was."""

    def around(forward, x):
        normed = forward(x)
        normed[:, 1:, 0] = x[:, 1:, 0]
        return normed

    for _, layer in p.layers():
        p.wrap(layer.input_layernorm, around)


@bug(
    "norm",
    accepted=("norm", "scale"),
    words="norm|mean|width|size|padd|sqrt|root|factor|times|scale|divid",
    taps=("final_norm",),
    model="qwen2-kv8",
    tp=2,
)
def final_norm_divides_by_a_padded_width(p: Patched) -> None:
    """The sum of 64 squares over the 128 that its block holds."""
    norm = p.decoder.norm

    def forward(x):
        mean = x.pow(2).sum(-1, keepdim=True) / 128
        return norm.weight * (x * torch.rsqrt(mean + norm.variance_epsilon))

    norm.forward = forward


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="weight|twice|square|norm|again",
    taps=("attn_norm",),
    model="llama-mha",
    dtype="bfloat16",
)
def weights_of_the_norms_multiplied_by_kernel_and_epilogue(p: Patched) -> None:
    for _, layer in p.layers():
        p.weight(layer.input_layernorm, lambda w: w * w)
        p.weight(layer.post_attention_layernorm, lambda w: w * w)


@bug(
    "norm",
    accepted=("norm",),
    words="norm|mean|absolute|magnitude|root|rms|L1|divid",
    taps=("attn.k_norm",),
    model="qwen3",
)
def keys_divided_by_their_mean_magnitude(p: Patched) -> None:
    for i, _ in p.layers():
        norm = p.attn(i).k_norm
        norm.forward = lambda x, norm=norm: norm.weight * (x / x.abs().mean(-1, keepdim=True))


@bug(
    "norm",
    accepted=("norm", "input", "residual", "sharding"),
    words="norm|input|residual|stream|before|attention|rank|without|missing",
    taps=("mlp_norm",),
    layers=(1,),
    ranks=(1,),
    model="llama",
    tp=2,
)
def rank_1_norms_the_stream_from_before_attention(p: Patched) -> None:
    """A kernel that adds and norms in one has the buffers of both in the wrong order there."""
    layer, held = p.decoder.layers[1], {}

    def begin(forward, x):
        held["stream"] = x
        return forward(x)

    if p.rank == 1:
        p.wrap(layer.input_layernorm, begin)
        p.wrap(layer.post_attention_layernorm, lambda forward, x: forward(held["stream"]))


@bug(
    "norm",
    accepted=("norm",),
    words="epsilon|eps",
    taps=("attn_norm",),
    step=1,
    model="qwen2-untied",
)
def second_sequence_decodes_with_the_root_of_epsilon(p: Patched) -> None:
    """The kernel for a row of the batch beside the first squares what it is given."""

    def spoil(norm):
        def around(forward, x):
            known = norm.variance_epsilon
            if p.decode and p.seq == 1:
                norm.variance_epsilon = known**0.5
            normed = forward(x)
            norm.variance_epsilon = known
            return normed

        p.wrap(norm, around)

    for _, layer in p.layers():
        spoil(layer.input_layernorm)
        spoil(layer.post_attention_layernorm)
    spoil(p.decoder.norm)


@bug(
    "mlp",
    accepted=("activation", "input"),
    words="unit|channel|tail|column|last|activat|other|key|stale|left|element",
    taps=("mlp.act",),
    model="llama",
)
def units_behind_the_64th_are_never_written_and_hold_the_keys(p: Patched) -> None:
    """vllm-xpu-kernels#454: the buffer's last use was the pack of q and k, 64 and 32 wide."""

    def spoil(i):
        held = {}

        def begin(forward, x):
            held["keys"] = forward(x)
            return held["keys"]

        p.wrap(p.attn(i).k_proj, begin)
        silu = nn.functional.silu
        _mlp(p, i, lambda gate, up: torch.cat([(silu(gate) * up)[..., :64], held["keys"]], -1))

    for i, _ in p.layers():
        spoil(i)


@bug(
    "mlp",
    accepted=("activation",),
    words="silu|activat|function|mish|gate",
    taps=("mlp.act",),
    ranks=(2,),
    model="mistral-full",
    dtype="bfloat16",
    tp=4,
)
def rank_2_activates_with_mish(p: Patched) -> None:
    """Its table of names takes the next entry."""
    if p.rank == 2:
        for i, _ in p.layers():
            p.mlp(i).act_fn = nn.Mish()


@bug(
    "mlp",
    accepted=("activation", "input"),
    words="token|row|up|before|shift|other|position|pair",
    taps=("mlp.act",),
    model="qwen3-bias",
    tp=2,
)
def gate_multiplied_by_up_of_the_token_before(p: Patched) -> None:
    for i, _ in p.layers():
        _mlp(p, i, lambda gate, up: nn.functional.silu(gate) * torch.cat([up[:, :1], up[:, :-1]], 1))


@bug(
    "quantisation",
    accepted=("input", "precision", "scale", "overflow", "weight"),
    words="round|quant|precis|satur|clamp|clip|scale|bits|input|range",
    taps=("mlp.down",),
    step=1,
    model="llama-three",
)
def input_of_down_scaled_by_the_largest_of_the_step_before(p: Patched) -> None:
    """Eight bits with delayed scaling: the first pass has no step before it, and stays as it is."""

    def spoil(side):
        largest = {}

        def change(x):
            before = largest.get(p.seq) if p.decode else None
            largest[p.seq] = x.abs().max()
            return x if before is None else (x / before * 127).round().clamp(-127, 127) * before / 127

        p.input(side, change)

    for i, _ in p.layers():
        spoil(p.mlp(i).down_proj)


@bug(
    "numbers",
    accepted=("precision", "activation"),
    words="round|precis|fp8|float8|e4m3|bits|quant|eight",
    taps=("mlp.act",),
    layers=(1,),
    ranks=(0,),
    model="qwen2-tied",
    tp=2,
)
def rank_0_writes_one_activation_in_eight_bits(p: Patched) -> None:
    def activate(gate, up):
        return (nn.functional.silu(gate) * up).to(torch.float8_e4m3fn).float()

    if p.rank == 0:
        _mlp(p, 1, activate)


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="residual|twice|double|again|times|2|factor|MLP|added|stream",
    taps=("mlp_residual",),
    layers=(1,),
    model="mistral-window",
)
def second_sequence_adds_one_mlp_twice(p: Patched) -> None:
    p.residuals(1, mlp=lambda stream, down: stream + down * (1 + p.seq))
