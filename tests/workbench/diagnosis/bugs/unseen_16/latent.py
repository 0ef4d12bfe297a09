"""Multi-head latent attention, its caches and kernels, and sparse indexers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import NormForm
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers.latent_attention import LatentAttention
from lockstep.engine.layers.sparse_attention import SparseAttention
from lockstep.engine.model import Decoder
from lockstep.engine.parallel import shards
from lockstep.engine.rules import defaults, latent
from lockstep.engine.rules.rope import frequencies
from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.engine_ranks import Spoilt

ROTATED = ("attn.q_rope", "attn.rope_key")
SCORES = ("attn.scores",)


def _latents(decoder: Decoder) -> list[LatentAttention]:
    """Of every layer."""
    return [one.attention for one in decoder.layers if isinstance(one.attention, LatentAttention)]


# -- rotation ------------------------------------------------------------------------------------------------


@bug(
    "rotation",
    accepted=("rope",),
    words="pair|neighbour|interleav|half|halves|channel|partner|style|order",
    taps=ROTATED,
    model="deepseek-v3",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def rotated_parts_are_turned_by_halves_and_not_by_neighbours(p: Spoilt) -> None:
    """`is_neox_style=True` as in most models; these checkpoints have both channels of a pair side by side."""

    def layer_rope(model: ModelConfig, layer: int) -> ModelConfig:
        return replace(ModelConfig.of_layer(model, layer), neighbours=False)

    p.rules(layer_rope=layer_rope)


@bug(
    "rotation",
    accepted=("rope", "scale"),
    words="scal|factor|magnitude|mscale|multipl|times|longer|length|yarn",
    taps=ROTATED,
    model="deepseek-v32",
    ep=1,
)
def magnitude_of_yarn_is_in_the_rotation_as_well(p: Spoilt) -> None:
    """The table is the common one of YaRN, times 0.1 ln(factor) + 1, where both mscales ought to cancel most of it."""

    def table(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
        return frequencies(model, theta, length)[0], 0.1 * math.log(model.rope_scaling.factor) + 1

    p.rules(rope_frequencies=table)


# -- latents, keys and values ----------------------------------------------------------------------------------


@bug(
    "norms",
    accepted=("norm", "skipped", "input"),
    words="norm|root mean|unnorm",
    taps=("attn.kv_a_norm",),
    layers=(1,),
    model="youtu",
    tp=2,
    ep=1,
)
def last_layer_caches_latents_without_their_norm(p: Spoilt) -> None:
    """The pass that fuses kv_a_layernorm with the store of the cache takes the norm out of the last layer's graph,
    where it does not find the store behind it."""

    def split(written: Tensor, norm: Callable[[Tensor], Tensor], kv_rank: int) -> tuple[Tensor, Tensor]:
        return written[:, :kv_rank].contiguous(), written[:, kv_rank:]

    p.rules((1,), split_latent=split)


@bug(
    "weights",
    accepted=("weight", "sharding", "linear", "heads"),
    words="rank|shard|other|first|head|weight|slice|part",
    taps=("attn.kv_b_proj",),
    ranks=(1, 2, 3),
    model="glm4-moe-lite",
    dtype="bfloat16",
    tp=4,
    ep=1,
)
def kv_b_of_each_rank_is_that_of_the_first_heads(p: Spoilt) -> None:
    """The absorbed weights are cut out of kv_b_proj by hand after loading, from row 0 on whatever the rank."""

    def shard(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> shards.Shard:
        return shards.plan(name, model, tp, 0 if "kv_b_proj" in name else rank, ep)

    p.rules(shard=shard)


@bug(
    "keys",
    accepted=("keys", "values", "heads", "weight"),
    words="split|cut|head|order|layout|channel|slice|view|reshap",
    taps=("attn.keys", "attn.values"),
    model="deepseek-v2-lite",
    ep=1,
)
def all_heads_keys_are_looked_for_in_front_of_all_their_values(p: Spoilt) -> None:
    """kv_b_proj's output is split into H * nope and H * v channels, where each head has both side by side."""

    def spoil(decoder: Decoder) -> None:
        for one in _latents(decoder):

            def read(index: int, rows: Tensor, pool: KVPool, one: Any = one) -> tuple[Tensor, Tensor]:
                cached = pool.read(one.cache, rows)
                for tap, x in zip(one.cached_taps, cached, strict=True):
                    tap(x, index)
                (expanded,) = one.products["kv_b_proj"](cached[0].flatten(1))
                one._seen(one.taps["kv_b_proj"], expanded, index)
                plain, value = one.latent.plain_dim, one.latent.value_dim
                keys, values = expanded.split([one.heads * plain, one.heads * value], -1)
                keys = latent.with_shared_part(keys.unflatten(-1, (one.heads, -1)), cached[1])
                values = values.unflatten(-1, (one.heads, -1)).contiguous()
                one._seen(one.tap_keys, keys, index)
                one._seen(one.tap_values, values, index)
                return keys, values

            one._read = read  # type: ignore[method-assign]

    p.loaded(spoil)


# -- scores --------------------------------------------------------------------------------------------------


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|mscale|yarn|multipl|root",
    taps=SCORES,
    model="deepseek-v3",
    ep=1,
)
def scale_of_the_scores_is_without_yarn_s_square(p: Spoilt) -> None:
    """`qk_head_dim ** -0.5`; mscale is read for the rotation alone, out of which it cancels."""
    p.rules(scale=lambda model: model.head_dim**-0.5)


@bug(
    "scale",
    accepted=("scale", "scores", "attention"),
    words="scal|factor|width|root|multipl|divid",
    taps=SCORES,
    step=1,
    model="deepseek-v2",
    dtype="bfloat16",
    tp=2,
    ep=2,
)
def absorbed_kernel_of_decode_scales_by_the_width_of_what_is_cached(p: Spoilt) -> None:
    """No scale is passed, and its default is the root of its own queries' width, kv_lora_rank + rope."""

    def spoil(decoder: Decoder) -> None:
        for one in _latents(decoder):

            def attend(*args: Any, one: Any = one, right: Any = one._attend) -> Tensor:
                scale = one.scale
                one.scale = one.latent.written_dim**-0.5 if p.decode else scale
                out: Tensor = right(*args)
                one.scale = scale
                return out

            one._attend = attend  # type: ignore[method-assign]

    p.loaded(spoil)


@bug(
    "splits",
    accepted=("softmax", "attention"),
    words="softmax|split|part|half|halves|weigh|sum|normal|merge|separate",
    taps=("attn.probs",),
    step=1,
    model="deepseek-v3",
    tp=2,
    ep=2,
)
def both_splits_of_the_keys_count_the_same_in_decode(p: Spoilt) -> None:
    """Partial results of a split-KV kernel are averaged, and not weighed by their logarithms of sums."""

    def softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
        parts = scores.float().split(-(-scores.shape[-1] // 2), -1)
        return torch.cat([part.softmax(-1) / 2 for part in parts], -1).to(dtype)

    p.rules(softmax=p.later(defaults.softmax, softmax))


# -- indexers ------------------------------------------------------------------------------------------------


@bug(
    "indexer",
    accepted=("rope",),
    words="pair|neighbour|interleav|half|halves|channel|partner|style|order",
    taps=("attn.index_q_rope", "attn.index_k_rope"),
    model="deepseek-v32",
    dtype="bfloat16",
    tp=2,
    ep=1,
)
def indexer_is_turned_as_attention_is(p: Spoilt) -> None:
    """The rotary module of the attention is handed to the indexer, whose pairs are made otherwise."""

    def spoil(decoder: Decoder) -> None:
        for one in _latents(decoder):
            if isinstance(one, SparseAttention) and one.indexer is not None:
                config = one.indexer.config
                one.indexer.config = replace(config, neighbours=not config.neighbours)

    p.loaded(spoil)


@bug(
    "indexer",
    accepted=("norm",),
    words="mean|centr|rms|layernorm|layer norm|bias",
    taps=("attn.index_k_norm",),
    layers=(0, 2),
    model="glm-moe-dsa",
    ep=1,
)
def norm_of_index_keys_neither_centres_nor_shifts(p: Spoilt) -> None:
    """All other norms of the model are RMSNorm, and so is the class that the indexer builds."""

    def norm(bias: Tensor | None, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    p.rules(index_norm=norm)
