"""The KV cache: what is written, moved between workers, and read."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import CACHES, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "cache",
    accepted=("cache",),
    words="cache|own|current|new|past|row|empty|length|token",
    taps=(*CACHES, "attn.scores"),
    layers=(1,),
    step=1,
    model="qwen3",
    dtype="bfloat16",
)
def one_layer_decodes_from_a_fresh_cache(p: Patched) -> None:
    def fresh(k, v):
        return (k[:, :, -1:], v[:, :, -1:]) if p.decode else (k, v)

    p.cache((1,), read=fresh)


@bug(
    "cache",
    accepted=("cache", "context"),
    words="key|K cache|k and v|swap|exchang|same|for the value|in place",
    taps=("attn.v_cache",),
    layers=(2,),
    step=1,
    model="qwen2-untied",
    tp=2,
)
def last_layer_reads_its_keys_as_values_in_decode(p: Patched) -> None:
    """ik_llama.cpp#1592"""
    p.cache((2,), read=lambda k, v: (k, k) if p.decode else (k, v))


@bug(
    "cache",
    accepted=("cache", "heads", "sharding"),
    words="head|zero|empty|never|copied|stale|rank|row|written",
    taps=CACHES,
    heads=(1, 3),
    step=1,
    model="mistral-full",
    tp=2,
)
def transfer_to_the_decode_worker_copies_one_head_of_each_rank(p: Patched) -> None:
    """vllm#52516: the rest of the prompt's rows is as it was allocated."""

    def read(k, v):
        if not p.decode:
            return k, v
        prompt = p.past - p.step + 1
        k, v = k.clone(), v.clone()
        k[:, 1:, :prompt] = v[:, 1:, :prompt] = 0
        return k, v

    p.cache(read=read)


@bug(
    "cache",
    accepted=("cache",),
    words="sequence|row|other|prefix|page|block|slot|stale|request",
    taps=CACHES,
    model="llama",
    tp=2,
)
def second_page_of_another_prompt_found_by_its_own_text_alone(p: Patched) -> None:
    """nano-vllm#163: pages of four tokens; what stands before the page is left out of its hash."""
    for i, _ in p.layers():
        held = {}

        def written(k, v, held=held):
            if p.decode:
                return k, v
            if p.seq == 0:
                held.update(k=k, v=v)
                return k, v
            page = slice(4, k.shape[2])
            k, v = k.clone(), v.clone()
            k[:, :, page], v[:, :, page] = held["k"][:, :, page], held["v"][:, :, page]
            return k, v

        p.cache([i], written=written)


@bug(
    "cache",
    accepted=("cache", "scale"),
    words="scale|factor|times|value",
    taps=("attn.v_cache",),
    layers=(2,),
    model="mistral-full",
    dtype="bfloat16",
)
def value_scale_of_the_last_layer_left_at_one(p: Patched) -> None:
    """Written in eight bits by the scale that was calibrated, and read by the default."""
    p.cache((2,), read=lambda k, v: (k, v / 0.043))


@bug(
    "cache",
    accepted=("cache",),
    words="V|value|row|slot|shift|order|stale|moved",
    taps=("attn.v_cache",),
    step=2,
    model="llama-mha",
)
def defragmentation_moves_the_keys_and_leaves_the_values(p: Patched) -> None:
    """After llama.cpp#12253: the first sequence moves up by three slots, where the old values still are."""

    def read(k, v):
        if p.step < 2 or p.seq == 1:
            return k, v
        moved = v[:, :, : p.past]
        return k, torch.cat([moved[:, :, 3:], moved[:, :, -3:], v[:, :, p.past :]], 2)

    p.cache(read=read)
