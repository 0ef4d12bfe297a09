"""Weights: their names, layouts, packs, quantised storage and shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.model import Decoder
from tests.workbench.diagnosis.bugs.bug import QKV, bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt
from tests.workbench.diagnosis.bugs.patched import Patched
from tests.workbench.diagnosis.bugs.sharded import bounds

WEIGHT = "weight|matrix|layout|order|pack|row|column"


def _linears(layer: Any) -> list[Any]:
    """All products of a layer."""
    attn, mlp = layer.self_attn, layer.mlp
    return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _all_weights(p: Patched, change: Callable[[Tensor], Tensor]) -> None:
    for _, layer in p.layers():
        for linear in _linears(layer):
            p.weight(linear, change)


def _put(module: Any, name: str, tensor: Tensor) -> None:
    setattr(module, name, nn.Parameter(tensor.detach().clone(), requires_grad=False))


# -- layouts and packs ---------------------------------------------------------------------------------------


@bug(
    "layout", accepted=("weight", "heads", "keys", "linear", "rope"),
    words=WEIGHT + "|permut|head|rope|rotary|group", taps=("attn.k_proj",), model="llama",
)  # fmt: skip
def keys_are_permuted_by_the_number_of_query_heads(p: Patched) -> None:
    """A converter brings rows from pairs to halves head by head, and takes keys to have as many heads as queries."""

    def wrong(weight: Tensor) -> Tensor:
        pairs = weight.view(4, 2, 4, -1).transpose(1, 2).reshape(weight.shape)
        return pairs.view(8, 2, 2, -1).transpose(1, 2).reshape(weight.shape)

    for _, layer in p.layers():
        p.weight(layer.self_attn.k_proj, wrong)


@bug(
    "packs", accepted=("weight", "linear", "sharding", "gate", "input"),
    words=WEIGHT + "|interleav|gate|\\bup\\b|alternat|half|halves", taps=("mlp.gate", "mlp.up"), model="llama-mha",
    dtype="bfloat16", tp=2,
)  # fmt: skip
def interleaved_pack_of_gate_and_up_is_cut_in_halves(p: Patched) -> None:
    """gate_up_proj has rows of gate and of up in turn, the loader expects one behind the other."""
    for i, layer in p.layers():
        full = p.full.model.layers[i].mlp
        packed = torch.stack((full.gate_proj.weight, full.up_proj.weight), 1).flatten(0, 1)
        own = bounds(len(packed) // 2, p.tp, p.rank)
        for linear, half in zip((layer.mlp.gate_proj, layer.mlp.up_proj), packed.chunk(2), strict=True):
            _put(linear, "weight", half[own])


@bug(
    "packs", accepted=("weight", "heads", "linear", "sharding", "keys", "values"),
    words=WEIGHT + "|head|group|interleav|q, k|qkv|fus|mix", taps=QKV, model="llama",
)  # fmt: skip
def pack_by_groups_of_heads_is_cut_into_queries_keys_and_values(p: Patched) -> None:
    """wqkv has the queries of a group, its key and its value, then the next group (InternLM2, Megatron)."""
    for _, layer in p.layers():
        linears = _linears(layer)[:3]
        parts = [linear.weight.view(4, -1, linear.in_features) for linear in linears]
        packed = torch.cat(parts, 1).flatten(0, 1)
        for linear, rows in zip(linears, packed.split([len(one.weight) for one in linears]), strict=True):
            _put(linear, "weight", rows)


@bug(
    "layout", accepted=("weight", "linear"), words=WEIGHT + "|transpos", taps=("attn.q_proj",), model="llama-mha",
    dtype="bfloat16",
)  # fmt: skip
def square_matrices_are_transposed(p: Patched) -> None:
    """Matrices are turned where their shape does not fit: the square ones always fit."""
    for _, layer in p.layers():
        for linear in _linears(layer)[:4]:
            p.weight(linear, lambda weight: weight.T.contiguous())


# -- names ---------------------------------------------------------------------------------------------------


@bug(
    "names", accepted=("weight", "layer", "layers", "norm"), words="weight|load|name|other|eleven|11",
    taps=("attn_norm",), layers=(1,), model="llama-twelve", dtype="bfloat16",
)  # fmt: skip
def tensors_of_layer_11_are_loaded_into_layer_1(p: Patched) -> None:
    """Tensors of layer i are those whose name begins with `model.layers.{i}`, without the dot behind it."""
    p.decoder.layers[1].load_state_dict(p.decoder.layers[11].state_dict())


@bug(
    "names", accepted=("norm", "weight"), words="weight|name|exchang|swap|other|load",
    taps=("post_attn_norm",), model="gemma2", tp=2, ep=1,
)  # fmt: skip
def norm_behind_attention_is_loaded_as_the_one_before_the_mlp(p: Spoilt) -> None:
    """post_attention_layernorm stands before the MLP in Llama and behind attention in Gemma 2; both are exchanged."""

    def exchange(decoder: Decoder) -> None:
        for layer in decoder.layers:
            one, other = layer.norms["post_attn_norm"].weight, layer.norms["mlp_norm"].weight
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    p.loaded(exchange)


@bug(
    "head", accepted=("head", "weight", "embedding"), words="\\btie|embed|weight|shar", taps=("logits",),
    model="qwen2-untied", tp=2,
)  # fmt: skip
def head_is_tied_though_the_checkpoint_has_one(p: Patched) -> None:
    """tie_word_embeddings is true in the config's class, and the file that says otherwise is not asked."""
    _put(p.model.lm_head, "weight", p.decoder.embed_tokens.weight)


# -- quantised storage ---------------------------------------------------------------------------------------


@bug(
    "quantisation", accepted=("weight", "linear", "precision"),
    words="weight|zero|quant|offset|shift|bit|bias|round|precis|level", taps=QKV, model="llama", dtype="bfloat16",
)  # fmt: skip
def zero_points_of_gptq_are_one_too_low(p: Patched) -> None:
    """The first format of GPTQ stores zero points minus one; a kernel for the second takes them as they are."""

    def in_groups(weight: Tensor) -> Tensor:
        groups = weight.float().unflatten(-1, (-1, 32))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        levels = ((groups / scale).round() + zero).clamp(0, 15)
        return ((levels - (zero - 1)) * scale).flatten(-2).to(weight.dtype)

    _all_weights(p, in_groups)


@bug(
    "quantisation", accepted=("weight", "linear", "heads"), words=WEIGHT + "|permut|nibble|shuffl|channel|neighbo|awq",
    taps=QKV, model="qwen3", tp=2,
)  # fmt: skip
def nibbles_of_a_word_are_taken_in_their_order(p: Patched) -> None:
    """AWQ packs eight output channels into a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def unpacked(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, 8))[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(0, 1)

    _all_weights(p, unpacked)


@bug(
    "quantisation", accepted=("weight", "scale", "precision", "linear"),
    words="weight|scale|block|transpos|quant|factor|tile", taps=("attn.q_proj",), model="llama", dtype="bfloat16",
)  # fmt: skip
def scales_of_blocks_are_read_transposed(p: Patched) -> None:
    """weight_scale_inv of fp8 blocks is given to a kernel that wants it by columns: square ones fit."""

    def blocks(weight: Tensor) -> Tensor:
        tiles = weight.float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))  # [rows, 16, columns, 16]
        scale = tiles.abs().amax((1, 3), keepdim=True) / 448
        stored = (tiles / scale).to(torch.float8_e4m3fn).float()
        return (stored * scale.transpose(0, 2)).flatten(2).flatten(0, 1).to(weight.dtype)

    for _, layer in p.layers():
        for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            p.weight(linear, blocks)


# -- shards --------------------------------------------------------------------------------------------------


@bug(
    "shards", accepted=("sharding", "heads", "weight", "keys", "values", "linear"),
    words="rank|head|shard|replic|key|kv|wrong|cut", taps=("attn.k_proj", "attn.v_proj"), ranks=(1, 2),
    model="qwen2-tied", dtype="bfloat16", tp=4,
)  # fmt: skip
def replicated_heads_are_dealt_out_in_turn(p: Patched) -> None:
    """More ranks than KV heads: rank r is given head r % 2, its queries want head r // 2."""
    head = p.rank % 2
    for i, layer in p.layers():
        full = p.full.model.layers[i].self_attn
        for own, whole in ((layer.self_attn.k_proj, full.k_proj), (layer.self_attn.v_proj, full.v_proj)):
            for name in ("weight", "bias"):
                _put(own, name, getattr(whole, name).chunk(2)[head])


@bug(
    "shards", accepted=("bias", "sharding", "linear", "heads"), words="bias|rank|shard|first|cut|slice", taps=QKV,
    ranks=(1, 2, 3), model="qwen2-kv8", tp=4,
)  # fmt: skip
def biases_of_every_rank_are_those_of_the_first(p: Patched) -> None:
    """Weights are cut at rank * size; of one-dimensional tensors the loader takes the first rows."""
    for i, layer in p.layers():
        whole = _linears(p.full.model.layers[i])
        for own, full in list(zip(_linears(layer), whole, strict=True))[:3]:
            _put(own, "bias", full.bias[: len(own.bias)])


@bug(
    "shards", accepted=("sharding", "weight", "linear"), words="rank|shard|column|cut|padd|offset|slice|weight|start",
    taps=("mlp.down.partial", "mlp.down"), ranks=(1, 2, 3), model="qwen3", dtype="bfloat16", tp=4,
)  # fmt: skip
def second_product_is_cut_at_multiples_of_a_padded_size(p: Patched) -> None:
    """A rank's part is padded to 32 columns for a kernel, and the loader counts from rank * 32 in the unpadded file."""
    for i, layer in p.layers():
        full = p.full.model.layers[i].mlp.down_proj.weight
        own = layer.mlp.down_proj.weight.shape[1]
        padded = torch.nn.functional.pad(full, (0, 32))
        _put(layer.mlp.down_proj, "weight", padded[:, 32 * p.rank : 32 * p.rank + own])
