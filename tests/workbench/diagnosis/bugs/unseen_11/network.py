"""Norms of queries and keys, norms around blocks, multipliers and fused checkpoints."""

from __future__ import annotations

from lockstep.engine.rules.norm import rms_norm
from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

NORMED = ("attn.q_norm", "attn.k_norm")


@bug(
    "norm",
    accepted=("norm", "weight"),
    words="1|one|offset|weight|plus|add",
    taps=NORMED,
    model="gemma3",
    dtype="bfloat16",
    ep=1,
)
def norms_of_heads_multiply_by_w_and_not_by_one_more(p: Spoilt) -> None:
    """Only the norms of the stream were ported with 1 + w."""

    def norm(x, weight, eps, form):
        return rms_norm(x, weight, eps, "wide" if x.dim() == 3 else form)

    p.rules(norm=norm)


@bug(
    "norm",
    accepted=("norm", "reduce", "scale", "sharding"),
    words="rank|sum|mean|average|squar|variance|scal|times|width|divid|root",
    taps=NORMED,
    model="olmo2",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def squares_of_the_ranks_are_averaged(p: Spoilt) -> None:
    """The mean over a rank's channels would be averaged; these are sums."""
    p.rules(sum_squares=lambda squares, comm: comm.all_reduce(squares) / comm.size)


@bug(
    "norm",
    accepted=("weight", "norm"),
    words="weight|norm|other|exchang|swap|name|stand|taken|instead",
    taps=("post_attn_norm",),
    layers=(1,),
    model="gemma2",
    tp=2,
    ep=1,
)
def norm_behind_attention_gets_the_weight_of_the_one_before_the_mlp(p: Spoilt) -> None:
    """In Llama the norm of that name stands before the MLP; one layer was converted by the older map."""

    def spoil(decoder):
        behind, before = (decoder.layers[1].norms[tap].weight for tap in ("post_attn_norm", "mlp_norm"))
        first = behind.clone()
        behind.copy_(before)
        before.copy_(first)

    p.loaded(spoil)


@bug(
    "multiplier",
    accepted=("residual", "scale", "multiplier"),
    words="multipl|factor|scal|times|0\\.22|residual|4\\.5",
    taps=("attn_residual",),
    layers=(1,),
    model="granite",
    tp=2,
    ep=1,
)
def one_layer_adds_to_the_stream_without_the_multiplier(p: Spoilt) -> None:
    """The fused kernel of norm and sum has no such argument."""
    p.rules((1,), residual_factor=lambda model: 1.0)


@bug(
    "fused",
    accepted=("weight", "heads", "linear", "sharding"),
    words="order|head|permut|layout|interleav|group|fused|row|other|q|split|pack",
    taps=QKV,
    model="phi3",
    ep=1,
)
def fused_rows_of_q_k_and_v_are_cut_group_by_group(p: Spoilt) -> None:
    """As in the checkpoints of InternLM2: each KV head's queries, its key, its value."""

    def by_group(packed, sizes, model, tp):
        own = model.head_dim
        group = model.num_heads // model.num_kv_heads * own
        groups = packed.unflatten(-1, (model.num_kv_heads, -1))
        return tuple(part.flatten(-2) for part in groups.split((group, own, own), -1))

    p.rules(qkv_sizes=by_group)


@bug(
    "fused",
    accepted=("weight", "linear"),
    words="gate|up|swap|exchang|other|order|half|halves|weight",
    taps=("mlp.gate", "mlp.up"),
    layers=(2,),
    ranks=(1,),
    model="phi3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def one_rank_takes_the_fused_halves_for_up_and_gate(p: Spoilt) -> None:
    def spoil(decoder):
        gate, up = decoder.layers[2].mlp.gate_up.parameters().values()
        first = gate.clone()
        gate.copy_(up)
        up.copy_(first)

    if p.rank == 1:
        p.loaded(spoil)


@bug(
    "norm",
    accepted=("norm", "weight", "unit_norm"),
    words="norm|weight|key|value|scal",
    taps=("attn.v_norm",),
    model="gemma4",
    ep=1,
)
def values_go_through_the_norm_of_the_keys(p: Spoilt) -> None:
    p.rules(value_norm=lambda values, k_norm, eps: k_norm(values))
