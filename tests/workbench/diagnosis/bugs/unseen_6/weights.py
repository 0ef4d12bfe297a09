"""Weights: loading, names, packs, adapters."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "linear",
    accepted=("weight", "heads"),
    words="order|permut|row|pack|split|other|group|differ|shift|exchang|head",
    taps=QKV,
    model="llama",
)
def plain_qkv_read_as_packed_by_kv_heads(p: Patched) -> None:
    """The rows of q, k and v lie one after the other, and are split as if each KV head's lay together."""
    for i, _ in p.layers():
        attn = p.attn(i)
        kv_heads, size = attn.k_proj.out_features // attn.head_dim, attn.head_dim
        pack = torch.cat([side.weight for side in (attn.q_proj, attn.k_proj, attn.v_proj)])
        groups = pack.unflatten(0, (kv_heads, -1, size))
        p.weight(attn.q_proj, lambda w, groups=groups: groups[:, :-2].flatten(0, 2).clone())
        p.weight(attn.k_proj, lambda w, groups=groups: groups[:, -2].flatten(0, 1).clone())
        p.weight(attn.v_proj, lambda w, groups=groups: groups[:, -1].flatten(0, 1).clone())


@bug(
    "linear",
    accepted=("weight", "input"),
    words="rank|adapter|LoRA|weight|sequence|low|differ|added",
    taps=("attn.q_proj",),
    model="llama",
)
def adapter_of_one_request_applied_to_another(p: Patched) -> None:
    """The batch's second sequence asked for the base model."""
    for i, _ in p.layers():
        generator = torch.Generator().manual_seed(i)
        down, up = (torch.randn(64, 4, generator=generator) / 8 for _ in range(2))

        def around(forward, x, down=down, up=up):
            return forward(x) + x @ down @ up.t() if p.seq == 1 else forward(x)

        p.wrap(p.attn(i).q_proj, around)


@bug(
    "linear",
    accepted=("weight", "heads", "sharding"),
    words="head|row|twice|repeat|copy|order|other|KV",
    taps=("attn.k_proj", "attn.v_proj"),
    model="mistral-full",
    dtype="bfloat16",
)
def kv_heads_repeated_by_the_converter_and_cut_by_the_loader(p: Patched) -> None:
    """Of 0 0 1 1 2 2 3 3 the first four are kept."""
    for i, _ in p.layers():
        for side in (p.attn(i).k_proj, p.attn(i).v_proj):
            size = p.attn(i).head_dim
            p.weight(
                side,
                lambda w, size=size: w.unflatten(0, (-1, size)).repeat_interleave(2, 0)[:4].flatten(0, 1),
            )


@bug(
    "linear",
    accepted=("weight",),
    words="swap|exchang|k_proj|q_proj|other|mapped|holds",
    taps=("attn.q_proj", "attn.k_proj"),
    model="llama-mha",
    dtype="bfloat16",
    tp=2,
)
def queries_and_keys_mapped_to_each_other(p: Patched) -> None:
    for i, _ in p.layers():
        attn = p.attn(i)
        attn.q_proj.weight, attn.k_proj.weight = attn.k_proj.weight, attn.q_proj.weight


@bug(
    "linear",
    accepted=("weight",),
    words="layer|other|first",
    taps=("mlp.gate",),
    layers=(1, 2),
    model="qwen3-bias",
)
def every_layer_has_the_gate_of_the_first(p: Patched) -> None:
    """The name is formatted once, before the loop."""
    for i in (1, 2):
        p.weight(p.mlp(i).gate_proj, lambda w: p.mlp(0).gate_proj.weight.clone())


@bug(
    "bias",
    accepted=("bias", "sharding"),
    words="bias",
    taps=("mlp.up",),
    ranks=(2,),
    model="llama-bias",
    tp=4,
)
def rank_2_never_loads_the_bias_of_up(p: Patched) -> None:
    if p.rank == 2:
        for i, _ in p.layers():
            p.bias(p.mlp(i).up_proj, torch.zeros_like)
