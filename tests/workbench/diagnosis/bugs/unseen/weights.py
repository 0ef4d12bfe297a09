"""Weights that are not the checkpoint's: mapped, packed, cut or decoded wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.patched import Patched


@bug(
    "weights",
    accepted=("weight", "sharding"),
    words="swap|other|k_proj|v_proj|exchang|moved",
    taps=("attn.k_proj", "attn.v_proj"),
    layers=(1,),
    model="llama",
)
def keys_and_values_mapped_to_each_other(p: Patched) -> None:
    attn = p.attn(1)
    attn.k_proj.weight, attn.v_proj.weight = attn.v_proj.weight, attn.k_proj.weight


@bug("weights", accepted=("weight",), words="layer|weight", taps=("attn.o_proj",), layers=(1,), model="qwen3")
def o_loaded_under_the_next_layer_s_name(p: Patched) -> None:
    p.attn(1).o_proj.weight = p.full.model.layers[2].self_attn.o_proj.weight


@bug(
    "weights",
    accepted=("weight", "norm"),
    words="layer|weight|norm",
    taps=("attn_norm",),
    layers=(3, 4, 5),
    model="llama-deep",
)
def second_stage_counts_its_layers_from_zero(p: Patched) -> None:
    """A pipeline stage asks the checkpoint for its local layer numbers."""
    for i, layer in p.layers((3, 4, 5)):
        layer.load_state_dict(p.full.model.layers[i - 3].state_dict())


@bug(
    "weights",
    accepted=("weight",),
    words="zero|row|weight|column|channel|missing",
    taps=("mlp.gate",),
    layers=(2,),
    model="qwen3",
)
def last_rows_of_gate_never_copied(p: Patched) -> None:
    """The buffer was allocated with zeros, and the copy ended at a multiple of 64."""

    def cut(weight: Tensor) -> Tensor:
        weight[64:] = 0
        return weight

    p.weight(p.mlp(2).gate_proj, cut)


@bug(
    "weights",
    accepted=("weight", "input", "sharding"),
    words="column|input|zero|weight|channel",
    taps=("mlp.down",),
    model="llama",
)
def product_ends_at_the_last_whole_tile(p: Patched) -> None:
    """A kernel with tiles of 64 along the inner dimension has no code for the 32 that remain."""
    for _, layer in p.layers():
        down = layer.mlp.down_proj
        down.forward = lambda x, down=down: torch.nn.functional.linear(x[..., :64], down.weight[:, :64])


@bug(
    "weights",
    accepted=("weight",),
    words="weight|scale|group|block|quant",
    taps=("attn.q_proj",),
    model="qwen2-tied",
)
def int8_groups_take_the_scale_of_their_neighbour(p: Patched) -> None:
    def misread(weight: Tensor) -> Tensor:
        groups = weight.unflatten(1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scales).round() * scales.roll(1, 1)).flatten(1)

    for _, layer in p.layers():
        p.weight(layer.self_attn.q_proj, misread)


@bug(
    "weights",
    accepted=("weight",),
    words="weight|low.rank|differ",
    taps=("attn.q_proj", "attn.v_proj"),
    model="llama",
)
def adapter_of_the_last_user_still_merged(p: Patched) -> None:
    """A LoRA of rank 2 in q and v that nobody unmerged."""

    def merged(weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        return weight + 0.03 * torch.randn(rows, 2) @ torch.randn(2, columns)

    for _, layer in p.layers():
        p.weight(layer.self_attn.q_proj, merged)
        p.weight(layer.self_attn.v_proj, merged)


@bug(
    "weights",
    accepted=("weight",),
    words="weight|element|entry|row|column|value",
    taps=("attn.k_proj",),
    layers=(2,),
    heads=(0,),
    model="qwen3",
)
def one_bit_of_k_flipped(p: Patched) -> None:
    def flip(weight: Tensor) -> Tensor:
        weight.view(torch.int32)[5, 7] ^= 1 << 24  # of the exponent
        return weight

    p.weight(p.attn(2).k_proj, flip)


@bug(
    "weights",
    accepted=("weight", "sharding"),
    words="permut|moved|order|row|column|channel",
    taps=("mlp.up",),
    model="mistral-full",
)
def up_stays_packed_for_another_kernel(p: Patched) -> None:
    """Tiles of 8 rows, stored in pairs the other way round."""
    for _, layer in p.layers():
        p.weight(layer.mlp.up_proj, lambda weight: weight.unflatten(0, (-1, 2, 8)).flip(1).flatten(0, 2))


@bug(
    "weights",
    accepted=("weight", "sharding"),
    words="interleav|moved|order|pack|fused|gate",
    taps=("mlp.gate", "mlp.up"),
    model="llama",
)
def interleaved_gate_up_cut_in_halves(p: Patched) -> None:
    for _, layer in p.layers():
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        pack = torch.stack((gate.weight, up.weight), 1).flatten(0, 1)
        p.weight(gate, lambda _, pack=pack: pack[:96])
        p.weight(up, lambda _, pack=pack: pack[96:])


@bug(
    "weights",
    accepted=("weight", "sharding"),
    words="moved|order|pack|fused|q_proj|k_proj|v_proj|permut",
    taps=QKV,
    model="llama",
)
def qkv_packed_by_groups_read_as_plain(p: Patched) -> None:
    """InternLM2's and Megatron's wqkv: for each KV head its query heads, its key, its value."""
    for _, layer in p.layers():
        attn = layer.self_attn
        q, k, v = (one.weight.unflatten(0, (4, -1)) for one in (attn.q_proj, attn.k_proj, attn.v_proj))
        pack = torch.cat((q, k, v), 1).flatten(0, 1)
        for module, rows in ((attn.q_proj, pack[:64]), (attn.k_proj, pack[64:96]), (attn.v_proj, pack[96:])):
            p.weight(module, lambda _, rows=rows: rows)


@bug(
    "weights",
    accepted=("weight", "sharding"),
    words="moved|head|offset|k_proj|shift|row|column|pack",
    taps=("attn.v_proj",),
    model="mistral-full",
)
def v_begins_one_head_early_in_the_pack(p: Patched) -> None:
    for _, layer in p.layers():
        attn = layer.self_attn
        pack = torch.cat((attn.k_proj.weight, attn.v_proj.weight))
        begin = attn.k_proj.out_features - attn.head_dim
        p.weight(attn.v_proj, lambda v, pack=pack, begin=begin: pack[begin : begin + len(v)])


@bug(
    "weights",
    accepted=("weight", "heads"),
    words="column|weight|zero|head|input",
    taps=("attn.o_proj",),
    layers=(1,),
    model="llama",
)
def head_pruned_in_an_experiment_still_missing_from_o(p: Patched) -> None:
    def prune(weight: Tensor) -> Tensor:
        weight[:, 40:48] = 0
        return weight

    p.weight(p.attn(1).o_proj, prune)
