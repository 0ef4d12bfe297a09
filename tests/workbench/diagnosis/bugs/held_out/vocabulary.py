"""Held out: the embedding, the output head."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "embedding",
    accepted=("embedding",),
    words="id|clamp|highest|row|vocab|token",
    taps=("embed",),
    model="llama",
)
def ids_clamped(p: Patched) -> None:
    p.input(p.decoder.embed_tokens, lambda ids: ids.clamp(max=99))


@bug(
    "embedding",
    accepted=("embedding",),
    words="id|modulo|wrap|row|vocab|token",
    taps=("embed",),
    model="qwen3",
)
def ids_wrap_around(p: Patched) -> None:
    p.input(p.decoder.embed_tokens, lambda ids: ids % 64)


@bug(
    "embedding",
    accepted=("embedding", "positions"),
    words="position|sinus|added|learned",
    taps=("embed",),
    model="mistral-full",
)
def absolute_positions_added(p: Patched) -> None:
    def embed(forward, ids):
        at = torch.arange(p.past, p.past + ids.shape[1])[:, None].float()
        inv = 1 / 1e4 ** (torch.arange(0, 64, 2).float() / 64)
        return forward(ids) + torch.cat([(at * inv).sin(), (at * inv).cos()], -1) * 0.1

    p.wrap(p.decoder.embed_tokens, embed)


@bug(
    "embedding",
    accepted=("embedding", "sharding"),
    words="rank|vocab|zero|id|row|last",
    taps=("embed",),
    model="llama",
    tp=2,
)
def last_ids_on_no_rank(p: Patched) -> None:
    if p.rank == 1:
        p.weight(p.decoder.embed_tokens, lambda w: w[:-1])


@bug(
    "embedding",
    accepted=("embedding", "sharding"),
    words="rank|offset|id|row|vocab|shift|off by one",
    taps=("embed",),
    model="qwen2-untied",
    tp=2,
)
def vocabulary_offset_of_one_rank_wrong(p: Patched) -> None:
    if p.rank == 1:
        p.decoder.embed_tokens.first += 1


@bug(
    "embedding",
    accepted=("embedding", "input", "positions"),
    words="token|shift|previous|id|next|order",
    taps=("embed",),
    step=0,
    model="qwen3",
)
def ids_shifted_in_the_prefill(p: Patched) -> None:
    p.input(p.decoder.embed_tokens, lambda ids: ids.roll(1, -1))


@bug(
    "embedding",
    accepted=("embedding", "input"),
    words="token|id|previous|stale|same|first",
    taps=("embed",),
    step=2,
    model="llama",
)
def the_token_before_is_read_again(p: Patched) -> None:
    held = {}

    def embed(ids):
        old, held[p.seq] = held.get(p.seq, ids), ids
        return old if p.step >= 2 else ids

    p.input(p.decoder.embed_tokens, embed)


@bug(
    "embedding",
    accepted=("embedding", "precision"),
    words="round|precis|float16|bf16|bfloat16|8|fp8",
    taps=("embed",),
    model="llama",
)
def embedding_rounded(p: Patched) -> None:
    p.weight(p.decoder.embed_tokens, lambda w: w.bfloat16().float())


@bug("embedding", accepted=("embedding", "norm"), words="norm", taps=("embed",), model="qwen2-untied")
def embedding_normed(p: Patched) -> None:
    p.output(p.decoder.embed_tokens, lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True)))


@bug("head", accepted=("head",), words="zero|fill|load", taps=("logits",), model="qwen2-tied")
def head_left_at_zero(p: Patched) -> None:
    p.weight(p.model.lm_head, torch.zeros_like)


@bug("head", accepted=("head", "bias"), words="bias|constant|added", taps=("logits",), model="qwen3")
def bias_added_to_the_logits(p: Patched) -> None:
    bias = 0.3 * torch.randn(131)
    p.output(p.model.lm_head, lambda y: y + bias)


@bug(
    "head",
    accepted=("head", "sharding"),
    words="rank|shard",
    taps=("logits",),
    ranks=(1,),
    model="llama",
    tp=2,
)
def head_shard_of_rank_0(p: Patched) -> None:
    head = p.full.lm_head.weight.detach()
    p.weight(p.model.lm_head, lambda w: head[: len(w)].clone())
