"""What lies around attention: norms, residuals, the activation, the embedding, the head."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "residual",
    accepted=("residual", "norm"),
    words="norm",
    taps=("attn_residual",),
    model="qwen3",
)
def output_of_attention_normed_before_it_is_added(p: Patched) -> None:
    """As OLMo 2 and Gemma 2 do."""

    def attn(stream: Tensor, out: Tensor) -> Tensor:
        return stream + out * (out.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    for i, _ in p.layers():
        p.residuals(i, attn=attn)


@bug(
    "residual",
    accepted=("residual", "input"),
    words="residual|sequence|another|batch|attn|attention|added|o_proj",
    taps=("attn_residual",),
    layers=(1,),
    step=1,
    model="llama",
    dtype="bfloat16",
)
def second_sequence_of_the_batch_adds_the_attention_of_the_first(p: Patched) -> None:
    held: dict[int, Tensor] = {}

    def attn(stream: Tensor, out: Tensor) -> Tensor:
        held[p.seq] = out
        return stream + (held[0] if p.decode else out)

    p.residuals(1, attn=attn)


@bug(
    "norm",
    accepted=("norm", "weight", "precision"),
    words="round|quant|weight|precis|bit",
    taps=("attn_norm",),
    layers=(1,),
    model="llama",
    tp=2,
)
def norm_weights_quantised_with_the_rest(p: Patched) -> None:
    """Four bits, one scale."""

    def quantised(w: Tensor) -> Tensor:
        scale = w.abs().amax() / 7
        return (w / scale).round() * scale

    p.weight(p.decoder.layers[1].input_layernorm, quantised)


@bug(
    "mlp",
    accepted=("activation",),
    words="channel|feature|odd|half|silu|not activ|ident|linear|without|every other|second",
    taps=("mlp.act",),
    layers=(1,),
    model="mistral-full",
)
def odd_channels_are_left_unactivated(p: Patched) -> None:
    """The packed kernel activates the lower of the two lanes."""
    mlp = p.mlp(1)

    def forward(x: Tensor) -> Any:
        gate = mlp.gate_proj(x)
        active = nn.functional.silu(gate)
        active[..., 1::2] = gate[..., 1::2]
        return mlp.down_proj(active * mlp.up_proj(x))

    mlp.forward = forward


@bug(
    "embedding",
    accepted=("embedding", "scale", "weight"),
    words="scale|factor|times|row",
    taps=("embed",),
    model="llama",
)
def rows_of_the_embedding_take_the_scale_of_the_first(p: Patched) -> None:
    def read(w: Tensor) -> Tensor:
        scales = w.abs().amax(1, keepdim=True)
        return w / scales * scales[0]

    p.weight(p.decoder.embed_tokens, read)


@bug(
    "head",
    accepted=("head", "scale"),
    words="token|\\bids?\\b|row|scale|factor|penalt|prompt|seen|repet",
    taps=("logits",),
    model="qwen3",
)
def repetition_penalty_left_on(p: Patched) -> None:
    seen: dict[int, set[int]] = {}

    def embed(forward: Any, ids: Tensor) -> Any:
        seen.setdefault(p.seq, set()).update(ids.flatten().tolist())
        return forward(ids)

    def penalised(logits: Tensor) -> Tensor:
        logits, ids = logits.clone(), sorted(seen[p.seq])
        chosen = logits[..., ids]
        logits[..., ids] = chosen.where(chosen < 0, chosen / 1.3).where(chosen > 0, chosen * 1.3)
        return logits

    p.wrap(p.decoder.embed_tokens, embed)
    p.output(p.model.lm_head, penalised)


@bug(
    "head",
    accepted=("head", "overflow"),
    words="\\bids?\\b|token|inf|mask|eos|row|\\b2\\b",
    taps=("logits",),
    model="llama",
    dtype="bfloat16",
)
def end_of_text_suppressed_by_a_minimum_length(p: Patched) -> None:
    def suppressed(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., 2] = -math.inf
        return logits

    p.output(p.model.lm_head, suppressed)


@bug(
    "head",
    accepted=("head", "positions", "input"),
    words="token|row|position|last|another|earlier|before",
    taps=("logits",),
    model="qwen2-untied",
)
def last_token_found_by_the_length_of_the_other_prompt(p: Patched) -> None:
    """The first sequence's logits are those of its sixth token."""
    held: dict[int, Tensor] = {}

    def norm(forward: Any, x: Tensor) -> Tensor:
        held[p.seq] = forward(x)
        return held[p.seq]

    def head(forward: Any, x: Tensor) -> Any:
        return forward(held[0][:, 5:6] if p.seq == 0 and not p.decode else x)

    p.wrap(p.decoder.norm, norm)
    p.wrap(p.model.lm_head, head)
