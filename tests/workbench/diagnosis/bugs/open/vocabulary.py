"""The embedding, the output head."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "embedding",
    accepted=("embedding", "scale"),
    words="scale|sqrt|factor|times|Gemma",
    taps=("embed",),
    model="llama",
)
def embedding_scaled_by_the_width(p: Patched) -> None:
    p.output(p.decoder.embed_tokens, lambda y: y * 64**0.5)


@bug(
    "embedding",
    accepted=("embedding",),
    words="id|row|off by one|shift|another token|next",
    taps=("embed",),
    model="qwen2-tied",
)
def ids_off_by_one(p: Patched) -> None:
    p.input(p.decoder.embed_tokens, lambda ids: (ids + 1) % 131)


@bug("embedding", accepted=("embedding",), words="zero|id|row|token|padding", taps=("embed",), model="llama")
def rows_of_the_last_ids_are_zero(p: Patched) -> None:
    def zero(w):
        w[128:] = 0
        return w

    p.weight(p.decoder.embed_tokens, zero)


@bug("head", accepted=("head",), words="tied|embed", taps=("logits",), model="llama")
def head_tied_though_it_is_not(p: Patched) -> None:
    other = p.decoder.embed_tokens.weight.detach().clone()
    p.weight(p.model.lm_head, lambda w: other)


@bug("head", accepted=("head",), words="row|shift|offset|id|order|permut", taps=("logits",), model="qwen3")
def head_rows_shifted(p: Patched) -> None:
    p.weight(p.model.lm_head, lambda w: w.roll(1, 0))


@bug("head", accepted=("head", "norm"), words="norm", taps=("logits",), model="llama")
def head_reads_what_was_not_normed(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.norm, lambda forward, x: held.update(x=x) or forward(x))
    p.wrap(p.model.lm_head, lambda forward, x: forward(held["x"][:, -1:]))


@bug("head", accepted=("head",), words="cap|tanh", taps=("logits",), model="mistral-full")
def logits_capped(p: Patched) -> None:
    p.output(p.model.lm_head, lambda y: 5 * torch.tanh(y / 5))


@bug(
    "head",
    accepted=("head", "scale"),
    words="scale|factor|sqrt|times|temperature",
    taps=("logits",),
    model="llama",
)
def logits_scaled(p: Patched) -> None:
    p.output(p.model.lm_head, lambda y: y / 8)


@bug(
    "head",
    accepted=("head", "scale"),
    words="scale|factor|times|temperature|0\\.7",
    taps=("logits",),
    step=1,
    model="qwen2-tied",
)
def temperature_in_the_decode_logits(p: Patched) -> None:
    p.output(p.model.lm_head, lambda y: y / 0.7 if p.decode else y)


@bug(
    "head",
    accepted=("head", "positions"),
    words="token|row|position|last|previous|another",
    taps=("logits",),
    step=0,
    model="llama",
)
def logits_of_the_token_before(p: Patched) -> None:
    held = {}
    p.wrap(
        p.decoder.norm, lambda forward, x: held.setdefault(p.seq, {}).update(y=forward(x)) or held[p.seq]["y"]
    )
    p.wrap(p.model.lm_head, lambda forward, x: forward(held[p.seq]["y"][:, -2:-1] if not p.decode else x))


@bug(
    "head",
    accepted=("head", "sharding"),
    words="rank|order|shard|swap|vocab",
    taps=("logits",),
    model="qwen2-kv8",
    tp=2,
)
def vocabulary_halves_exchanged(p: Patched) -> None:
    head = p.full.lm_head.weight.detach()
    p.weight(p.model.lm_head, lambda w: head[66:131].clone() if p.rank == 0 else head[:66].clone())


@bug("head", accepted=("head", "weight"), words="row|zero|id|token|7", taps=("logits",), model="llama")
def one_row_of_the_head_zero(p: Patched) -> None:
    def zero(w):
        w[7] = 0
        return w

    p.weight(p.model.lm_head, zero)


@bug(
    "head",
    accepted=("head", "residual", "norm", "layer", "layers"),
    words="layer|early|final_norm|input",
    taps=("final_norm",),
    model="llama-deep",
)
def last_layer_s_output_ignored(p: Patched) -> None:
    held = {}
    p.wrap(p.decoder.layers[4], lambda forward, *a, **k: held.update(x=forward(*a, **k)) or held["x"])
    p.wrap(p.decoder.norm, lambda forward, x: forward(held["x"]))
