"""Embedding, norms, feed-forward, residual stream, sums over ranks and head of dense models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched

LOGITS = ("logits",)
FACTOR = "scal|factor|times|multipl|divi|root|larg|small|number|normali"
SUM = "sum|reduc|rank|partial|added|collect|own|twice|each"


def _norms(p: Patched) -> list[Any]:
    """All that are on the stream."""
    found = [p.decoder.norm]
    for _, layer in p.layers():
        found += [layer.input_layernorm, layer.post_attention_layernorm]
    return found


# -- embedding -----------------------------------------------------------------------------------------------


@bug(
    "embedding", accepted=("embedding", "scale", "multiplier", "skipped"), words=FACTOR + "|skip|left out|missing",
    taps=("embed",), model="gemma2", dtype="bfloat16", tp=2, ep=1,
)  # fmt: skip
def embedding_is_not_multiplied_by_the_root_of_the_width(p: Spoilt) -> None:
    """Gemma in a class for Llama."""
    p.rules(embedding=lambda rows, model: rows)


@bug(
    "embedding", accepted=("embedding", "sharding", "reduce", "input", "weight"),
    words="mask|rank|\\bids?\\b|row|vocab|shard|other|sum", taps=("embed",), model="llama", tp=2,
)  # fmt: skip
def rows_of_ids_that_another_rank_has_are_not_masked(p: Patched) -> None:
    """A vocabulary over ranks: ids beyond a rank's own are clamped to its rows, which nobody sets to zero."""
    table = p.decoder.embed_tokens

    def around(_forward: Any, ids: Tensor) -> Tensor:
        local = (ids - table.first).clamp(0, len(table.weight) - 1)
        return p.ring.sum(p.rank, F.embedding(local, table.weight))

    p.wrap(table, around)


# -- norms ---------------------------------------------------------------------------------------------------


@bug(
    "norm", accepted=("norm",), words="eps|small number|constant|1e-", taps=("attn_norm",), model="llama",
)  # fmt: skip
def norms_have_the_epsilon_of_the_class_and_not_of_the_config(p: Patched) -> None:
    """`RMSNorm(hidden_size)` has 1e-6 by default, the config states 1e-5."""
    for norm in _norms(p):
        norm.variance_epsilon = 1e-6


@bug(
    "norm", accepted=("norm", "weight"), words="1 ?\\+|\\+ ?1|one|plus|offset|add|weight|gemma|minus",
    taps=("attn_norm",), model="gemma", dtype="bfloat16",
)  # fmt: skip
def one_is_not_added_to_the_weights_of_norms(p: Patched) -> None:
    """Gemma's norms multiply by 1 + weight, Llama's by the weight."""
    for norm in _norms(p):
        p.weight(norm, lambda weight: weight - 1)


@bug(
    "norm", accepted=("norm", "reduce", "sharding"),
    words="mean square|rank|own|whole|all heads|shard|part|local|sum|reduc|squares",
    taps=("attn.q_norm", "attn.k_norm"), model="olmo2", tp=2, ep=1,
)  # fmt: skip
def norm_of_all_queries_is_that_of_a_ranks_own(p: Spoilt) -> None:
    """OLMo 2 norms all heads at once; under tensor parallelism each rank takes the mean square of those it has."""
    p.rules(sum_squares=lambda squares, comm: squares * comm.size)


@bug(
    "norm", accepted=("norm", "input", "residual", "linear"),
    words="norm|before|after|behind|post|pre|input|order|place", taps=("attn.q_proj",), model="olmo2",
    dtype="bfloat16",
)  # fmt: skip
def norms_stand_before_the_blocks_instead_of_behind(p: Patched) -> None:
    """OLMo 2 loaded into Llama's layer: the tensors' names fit, their place does not."""
    for _, layer in p.layers():

        def forward(hidden_states: Tensor, layer: Any = layer, **kwargs: Any) -> Tensor:
            x = layer.post_attention_layernorm(hidden_states)
            middle = hidden_states + layer.self_attn(hidden_states=x, **kwargs)[0]
            return middle + layer.mlp(layer.post_feedforward_layernorm(middle))

        layer.forward = forward


# -- stream --------------------------------------------------------------------------------------------------


@bug(
    "residual", accepted=("residual", "input", "norm"), words="residual|stream|norm|sum|add|skip connection",
    taps=("attn_residual",), model="qwen2-untied", dtype="bfloat16",
)  # fmt: skip
def blocks_are_added_to_what_was_normed(p: Patched) -> None:
    """`x = norm(x); x = x + attention(x)`: the residual is taken a line too late."""
    for i, layer in p.layers():
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        p.residuals(
            i,
            attn=lambda x, out, norm=first: norm.forward(x) + out,
            mlp=lambda x, out, norm=second: norm.forward(x) + out,
        )


@bug(
    "sum", accepted=("reduce", "sharding"), words=SUM, taps=("attn.o_proj",), step=1, model="llama", tp=2,
    dtype="bfloat16",
)  # fmt: skip
def sum_over_ranks_for_few_tokens_gives_its_own_input_back(p: Patched) -> None:
    """A collective of its own for small tensors, whose result in another buffer is not what is returned."""
    for _, layer in p.layers():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.reduce = lambda partial, whole=linear.reduce: partial if p.decode else whole(partial)


@bug(
    "bias",
    accepted=("bias", "reduce"),
    words=SUM + "|times|bias",
    taps=("attn.o_proj",),
    model="llama-bias",
    tp=4,
)
def bias_of_the_output_is_added_by_every_rank(p: Patched) -> None:
    """A row-parallel layer adds its bias before the sum over the ranks, and on all of them."""
    for _, layer in p.layers():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            p.bias(linear, lambda bias: p.tp * bias)


# -- feed-forward --------------------------------------------------------------------------------------------


@bug(
    "activation",
    accepted=("activation",),
    words="gelu|tanh|erf|approx|exact|activ",
    taps=("mlp.act",),
    model="gemma",
)
def gelu_is_computed_by_its_error_function(p: Patched) -> None:
    """hidden_act says gelu, and what the model was trained with is the approximation by tanh."""
    for _, layer in p.layers():
        layer.mlp.act_fn = nn.GELU()


@bug(
    "quantisation", accepted=("linear", "input", "clip", "precision", "scale"),
    words="clip|clamp|satur|limit|range|bound|larg|cut|scale|quant|precis|round|overflow",
    taps=("mlp.down", "mlp.down.partial"), model="qwen3", dtype="bfloat16", tp=2,
)  # fmt: skip
def inputs_of_the_second_product_are_quantised_by_the_scale_of_the_first(p: Patched) -> None:
    """Static scales of an fp8 checkpoint, of which one per layer is kept: what is larger is cut off."""
    scale = 0.25 / 448
    for _, layer in p.layers():
        p.input(
            layer.mlp.down_proj,
            lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale,
        )


# -- head ----------------------------------------------------------------------------------------------------


@bug(
    "logits", accepted=("head", "scale", "skipped"), words=FACTOR + "|skip|left out|missing", taps=LOGITS,
    model="granite", dtype="bfloat16", ep=1,
)  # fmt: skip
def logits_of_granite_are_not_divided(p: Spoilt) -> None:
    """Three of Granite's four multipliers are ported, logits_scaling is not: greedy decoding does not show it."""
    p.rules(logits=lambda logits, model: logits)


@bug(
    "logits", accepted=("head", "input", "positions"), words="last|token|row|position|before|previous|index",
    taps=LOGITS, model="qwen2-three", dtype="bfloat16",
)  # fmt: skip
def logits_of_a_prompt_are_those_of_the_token_before_its_last(p: Patched) -> None:
    """Indices of the last tokens are the ends of the sequences minus two: query_start_loc begins with a 0 already."""
    held: list[Tensor] = []

    def hold(x: Tensor) -> Tensor:
        held[:] = [x]
        return x

    p.output(p.decoder.norm, hold)
    p.input(p.model.lm_head, lambda x: x if p.decode else held[0][:, -2:-1])
