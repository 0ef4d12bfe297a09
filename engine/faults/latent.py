"""Latent attention: its norms, what is whole on every rank, the shared part of keys, and YaRN's factor in the scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import magnitude
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, latent, several_heads, several_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.parallel.comm import Comm

_Norm = Callable[["Tensor"], "Tensor"]


def _query_latent(model: ModelConfig, tp: int) -> str | None:
    there = model.latent is not None and model.latent.q_rank is not None
    return None if there else "the model makes no queries from latents"


def _stretched(model: ModelConfig, tp: int) -> str | None:
    there = model.scale * math.sqrt(model.head_dim) != 1
    return None if there else "the model's scale has no factor of YaRN (mscale_all_dim)"


def _two_weights(model: ModelConfig, tp: int) -> str | None:
    scaling = model.rope_scaling
    there = scaling.mscale is not None and scaling.mscale != scaling.mscale_all_dim
    return None if there else "mscale and mscale_all_dim are the same"


def _values_narrower(model: ModelConfig, tp: int) -> str | None:
    return None if model.value_dim != model.head_dim else "values are as wide as keys"


def without_mscale(model: ModelConfig) -> float:
    """YaRN's factor is left out of the scale."""
    return 1 / math.sqrt(model.head_dim)


def mscale_twice(model: ModelConfig) -> float:
    """The square of YaRN's factor is squared again."""
    return model.scale**2 * math.sqrt(model.head_dim)


def mscale_of_rotation(model: ModelConfig) -> float:
    """By the weight of the rotation, `mscale`, and not by `mscale_all_dim`."""
    scaling = model.rope_scaling
    return magnitude(scaling.factor, scaling.mscale or 0.0) ** 2 / math.sqrt(model.head_dim)


def scale_of_plain_part(model: ModelConfig) -> float:
    """By the width of the part of a key that is not rotated."""
    plain = model.head_dim if model.latent is None else model.latent.plain_dim
    return model.scale * math.sqrt(model.head_dim / plain)


def scale_of_values(model: ModelConfig) -> float:
    """By the width of a value."""
    return model.scale * math.sqrt(model.head_dim / model.value_dim)


def first_channels(model: ModelConfig, layer: int) -> ModelConfig:
    """The first channels of a query are rotated instead of the last."""
    return replace(model.of_layer(layer), rotary_last=False)


def unnormed_queries(x: Tensor, norm: _Norm) -> Tensor:
    """The norm is left out."""
    return x


def unnormed(written: Tensor, norm: _Norm, kv_rank: int) -> tuple[Tensor, Tensor]:
    """The norm is left out."""
    return written[:, :kv_rank], written[:, kv_rank:]


def normed_together(written: Tensor, norm: _Norm, kv_rank: int) -> tuple[Tensor, Tensor]:
    """The mean square is that of latent and rotated part together."""
    own, whole = (x.float().square().mean(-1, keepdim=True) for x in (written[:, :kv_rank], written))
    apart = (own / whole).sqrt().to(written.dtype)
    return norm(written[:, :kv_rank]) * apart, written[:, kv_rank:]


def normed_rotated_part(written: Tensor, norm: _Norm, kv_rank: int) -> tuple[Tensor, Tensor]:
    """The rotated part of the key is normed as well."""
    import torch

    key = written[:, kv_rank:].float()
    scale = torch.rsqrt(key.square().mean(-1, keepdim=True))
    return norm(written[:, :kv_rank]), (key * scale).to(written.dtype)


def summed(written: Tensor, comm: Comm) -> Tensor:
    """What every rank has whole is summed over the ranks."""
    return comm.all_reduce(written.clone())


def own_part(written: Tensor, comm: Comm) -> Tensor:
    """Each rank has its part of the channels, and nobody gathers them."""
    import torch

    size = -(-written.shape[1] // comm.size)
    kept = torch.zeros_like(written)
    mine = slice(comm.rank * size, (comm.rank + 1) * size)
    kept[:, mine] = written[:, mine]
    return kept


def first_head_alone(own: Tensor, shared: Tensor) -> Tensor:
    """The rotated part is not given to all heads: the first has it, the others zeros."""
    import torch

    parts = torch.zeros_like(shared).repeat(1, own.shape[1], 1)
    parts[:, :1] = shared
    return torch.cat((own, parts), -1)


def shared_part_first(own: Tensor, shared: Tensor) -> Tensor:
    """The rotated part stands before the other."""
    import torch

    return torch.cat((shared.expand(-1, own.shape[1], -1), own), -1)


FAULTS = (
    Fault(
        id="mscale-missing",
        seam="scale",
        value="without_mscale",
        correct="head_dim",
        title="YaRN's factor left out of the scale of scores",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are too small by the square of mscale",
        patch={"scale": without_mscale},
        needs=_stretched,
    ),
    Fault(
        id="mscale-twice",
        seam="scale",
        value="mscale_twice",
        correct="head_dim",
        title="YaRN's factor applied twice to scores",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are too large by the square of mscale",
        patch={"scale": mscale_twice},
        needs=_stretched,
    ),
    Fault(
        id="mscale-of-rotation",
        seam="scale",
        value="mscale",
        correct="head_dim",
        title="scale of scores by mscale instead of mscale_all_dim",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are off by a constant factor, which is near 1",
        patch={"scale": mscale_of_rotation},
        needs=all_of(_stretched, _two_weights),
    ),
    Fault(
        id="scale-of-plain-part",
        seam="scale",
        value="nope_dim",
        correct="head_dim",
        title="scores scaled by the part of a key that is not rotated",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are too large by a constant factor",
        patch={"scale": scale_of_plain_part},
        needs=latent,
    ),
    Fault(
        id="scale-of-values",
        seam="scale",
        value="v_head_dim",
        correct="head_dim",
        title="scores scaled by the width of a value",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="scores are off by a constant factor",
        patch={"scale": scale_of_values},
        needs=all_of(latent, _values_narrower),
    ),
    Fault(
        id="rope-first-channels",
        seam="layer_rope",
        value="first",
        correct="config",
        title="the first channels of queries rotated instead of the last",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="position 0 is right; keys are right everywhere",
        patch={"layer_rope": first_channels},
        needs=latent,
    ),
    Fault(
        id="query-latent-unnormed",
        seam="query_latent",
        value="unnormed",
        correct="normed",
        title="the norm of queries' latents left out",
        group="norm",
        level="step",
        first_tap="layers.*.attn.q_a_norm",
        symptom="queries are off by a factor of each token and channel",
        patch={"query_latent": unnormed_queries},
        needs=_query_latent,
    ),
    Fault(
        id="latent-unnormed",
        seam="split_latent",
        value="unnormed",
        correct="normed",
        title="the norm of latents left out",
        group="norm",
        level="step",
        first_tap="layers.*.attn.kv_a_norm",
        symptom="keys and values are off by a factor of each token and channel; the rotated part of keys is right",
        patch={"split_latent": unnormed},
        needs=latent,
    ),
    Fault(
        id="latent-normed-with-key",
        seam="split_latent",
        value="together",
        correct="normed",
        title="latent and rotated part of the key normed as one vector",
        group="norm",
        level="step",
        first_tap="layers.*.attn.kv_a_norm",
        symptom="latents are off by a factor of each token",
        patch={"split_latent": normed_together},
        needs=latent,
    ),
    Fault(
        id="rotated-part-normed",
        seam="split_latent",
        value="key_too",
        correct="normed",
        title="the rotated part of keys normed",
        group="norm",
        level="step",
        first_tap="layers.*.attn.rope_key",
        symptom="latents are right, the rotated part of keys is off by a factor of each token",
        patch={"split_latent": normed_rotated_part},
        needs=latent,
    ),
    Fault(
        id="latent-summed",
        seam="written_latent",
        value="summed",
        correct="whole",
        title="latents, which every rank has whole, summed over the ranks",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.kv_a_norm",
        symptom="the norm hides it of latents; the rotated part of keys is tp times too large",
        patch={"written_latent": summed},
        needs=all_of(latent, several_ranks),
    ),
    Fault(
        id="latent-sharded",
        seam="written_latent",
        value="shard",
        correct="whole",
        title="latents split over the ranks and not gathered",
        group="sharding",
        level="step",
        first_tap="layers.*.attn.kv_a_norm",
        symptom="ranks disagree; each has zeros in the others' channels",
        patch={"written_latent": own_part},
        needs=all_of(latent, several_ranks),
    ),
    Fault(
        id="rope-key-first-head",
        seam="latent_keys",
        value="first_head",
        correct="shared",
        title="the rotated part of keys given to the first head alone",
        group="rope",
        level="step",
        first_tap="layers.*.attn.keys",
        symptom="the first head of each rank is right, the others do not know positions",
        patch={"latent_keys": first_head_alone},
        needs=all_of(latent, several_heads),
    ),
    Fault(
        id="rope-key-in-front",
        seam="latent_keys",
        value="rotated_first",
        correct="shared",
        title="the rotated part of keys put before the other",
        group="rope",
        level="step",
        first_tap="layers.*.attn.keys",
        symptom="channels of queries and keys do not belong together",
        patch={"latent_keys": shared_part_first},
        needs=latent,
    ),
)
