"""Norms, residuals, the activation, the embedding, the head."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _norms(p):
    inside = [n for _, layer in p.layers() for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [*inside, p.decoder.norm]


@bug(
    "norm",
    accepted=("norm",),
    words="eps",
    taps=("attn.q_norm", "attn.k_norm"),
    model="qwen3-kv4",
)
def epsilon_of_the_head_norms_never_set(p: Patched) -> None:
    for i, _ in p.layers():
        for norm in (p.attn(i).q_norm, p.attn(i).k_norm):
            norm.variance_epsilon = 1e-3


@bug(
    "norm",
    accepted=("norm",),
    words="\\+ ?1|1 ?\\+|one is added|plus one|Gemma",
    taps=("attn_norm",),
    model="qwen2-tied",
    tp=2,
)
def one_added_to_every_norm_weight(p: Patched) -> None:
    for norm in _norms(p):
        p.weight(norm, lambda w: w + 1)


@bug(
    "norm",
    accepted=("norm", "precision", "weight"),
    words="round|precis|bfloat16|bf16|weight",
    taps=("attn_norm",),
    model="mistral-window",
)
def norm_weights_loaded_in_bfloat16(p: Patched) -> None:
    for norm in _norms(p):
        p.weight(norm, lambda w: w.bfloat16().float())


@bug(
    "norm",
    accepted=("norm",),
    words="rms|root|scale|variance|square|divid|input|other|norm",
    taps=("mlp_norm",),
    model="llama",
)
def second_norm_divides_by_the_root_of_the_first(p: Patched) -> None:
    for _, layer in p.layers():
        held = {}
        p.wrap(layer.input_layernorm, lambda norm, x, held=held: held.update(x=x) or norm(x))

        def forward(x, norm=layer.post_attention_layernorm, held=held):
            return norm.weight * x * torch.rsqrt(held["x"].pow(2).mean(-1, keepdim=True) + 1e-5)

        layer.post_attention_layernorm.forward = forward


@bug(
    "residual",
    accepted=("residual", "scale"),
    words="twice|2|double|two|times|attn|residual",
    taps=("attn_residual",),
    layers=(1,),
    model="llama-bias",
)
def output_of_attention_added_twice(p: Patched) -> None:
    p.residuals(1, attn=lambda r, o: r + 2 * o)


@bug(
    "residual",
    accepted=("residual", "layer", "layers", "skipped"),
    words="skip|layer|unchanged|never ran|missing|not",
    taps=("attn_norm", "mlp_residual"),
    layers=(4, 5),
    model="llama-deep",
)
def last_two_layers_never_run(p: Patched) -> None:
    for _, layer in p.layers((4, 5)):
        layer.forward = lambda hidden_states, **kwargs: hidden_states


@bug(
    "mlp",
    accepted=("activation",),
    words="GELU|gelu",
    taps=("mlp.act",),
    model="mistral-full",
    dtype="bfloat16",
)
def gelu_by_tanh_as_a_default(p: Patched) -> None:
    for _, layer in p.layers():
        layer.mlp.act_fn = nn.GELU(approximate="tanh")


@bug(
    "mlp",
    accepted=("activation",),
    words="up|gate|swap|exchang",
    taps=("mlp.act",),
    ranks=(1,),
    model="qwen3",
    tp=2,
)
def rank_1_activates_up_in_place_of_gate(p: Patched) -> None:
    if p.rank == 1:
        for _, layer in p.layers():
            mlp = layer.mlp
            mlp.forward = lambda x, mlp=mlp: mlp.down_proj(
                mlp.gate_proj(x) * nn.functional.silu(mlp.up_proj(x))
            )


@bug(
    "embedding",
    accepted=("embedding", "weight"),
    words="row|id|stride|offset|token|half|other",
    taps=("embed",),
    model="llama",
)
def rows_of_the_embedding_by_half_their_stride(p: Patched) -> None:
    p.weight(p.decoder.embed_tokens, lambda w: w.as_strided(w.shape, (32, 1)).clone())


@bug(
    "head",
    accepted=("head", "weight"),
    words="tied|embed|weight|random|load|not",
    taps=("logits",),
    model="qwen2-tied",
)
def tied_head_left_at_its_initialisation(p: Patched) -> None:
    p.weight(p.model.lm_head, lambda w: 0.02 * torch.randn_like(w))


@bug(
    "head",
    accepted=("head", "positions"),
    words="token|row|position|first|another",
    taps=("logits",),
    model="llama-mha",
)
def prefill_answers_for_its_first_token(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.norm, lambda forward, x: held.update(y=forward(x)) or held["y"])
    p.wrap(p.model.lm_head, lambda forward, x: forward(x if p.decode else held["y"][:, :1]))


@bug(
    "head",
    accepted=("head", "overflow", "mask"),
    words="inf|top|mask|filter|row|id",
    taps=("logits",),
    model="qwen2-untied",
)
def logits_already_cut_to_the_forty_highest(p: Patched) -> None:
    def cut(y):
        return y.masked_fill(y < y.topk(40).values[..., -1:], -math.inf)

    p.output(p.model.lm_head, cut)
