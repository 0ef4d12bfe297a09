"""The tap names: one stable namespace for engines, references and foreign engines (torch-free).

A tap is a point of the forward pass at which a tensor can be seen. Each declares its *layout* in
DTensor's terms, so that the tensor that one rank alone would have had can be rebuilt from all ranks.
Shapes are those of one sequence of T new tokens with K positions attended to (K = cached + T):

    hidden            [T, hidden]
    *_proj, context   [T, heads * head_dim]
    q_norm … k_rope   [T, heads, head_dim]
    k_cache, v_cache  [K, kv_heads, head_dim]
    scores, probs     [heads, T, K]
    gate, up, act     [T, intermediate]
    topk_*            [T, S]                S: experts that each token goes to, in the order of their numbers
    experts.*         [T, S, width]
    layer_inputs      [T, layers * width]   of per-layer inputs; layer_input [T, width]
    latent_cache      [K, 1, kv_rank]       of latent attention, as rope_key [T, 1, rope], rope_cache [K, 1, rope]
    kv_b_proj         [K, heads * (plain + value_dim)]
    keys, values      [K, heads, head_dim or value_dim]
    state             [1, value_heads, key_dim, value_dim]    after the last of the tokens
    ssm_state         [1, heads, head_dim, state]             the same of Mamba-2
    logits            [1, vocab]            the last token's row, the one that is sampled from
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import (
    LAYER,
    OUTSIDE,
    Operation,
    Part,
    Width,
    layer_operations,
    outside_of,
    parts_of,
)
from lockstep.engine.parallel import shards

#: The statistics of one tensor, in the order of a ring row. Minimum to absmax are over the finite
#: elements (NaN when there are none); `inf` at `attn.scores` does not count what the mask put there.
STATISTICS = ("min", "max", "mean", "rms", "absmax", "nan", "inf", "zeros")
#: Operations behind the layers.
_BEHIND = 2
#: Queries times keys up to which attention that is captured with all else is whole: a prompt of 1,024 tokens. Of more
#: it has about so many elements, all heads together.
_WHOLE, _ELEMENTS = 1 << 20, 1 << 21
#: Names whose parts are kept: a stranger's dump may have as many (`workbench.foreign.survey.MOST_TAPS`).
_NAMES = 1 << 17


@dataclass(frozen=True, slots=True)
class TapLayout:
    """How one tap's tensor is spread over the ranks.

    `replicate`: the same bits on every rank. `shard`: concatenate along `dim`; groups of `replicas`
    neighbouring ranks hold the same shard (KV heads when tp > kv_heads); each of several `groups` of
    neighbouring ranks has all shards of its own experts' rows, zeros elsewhere: the whole is their sum.
    `partial`: sum over the ranks.
    """

    kind: Literal["replicate", "shard", "partial"]
    dim: int = 0
    replicas: int = 1
    groups: int = 1

    def __str__(self) -> str:
        if self.kind != "shard":
            return self.kind
        more = {"replicas": self.replicas, "groups": self.groups}
        return f"shard({self.dim}{''.join(f',{name}={count}' for name, count in more.items() if count > 1)})"


REPLICATE = TapLayout("replicate")
PARTIAL = TapLayout("partial")


@dataclass(frozen=True, slots=True)
class TapSpec:
    """One tap of one model: its full name and its layout."""

    name: str
    layout: TapLayout


def layout_of(operation: Operation, kv_replicas: int = 1, ep: int = 1, key_replicas: int = 1) -> TapLayout:
    """How what an operation gives is spread over the ranks. `kv_replicas` = ranks that share each KV head,
    `ep` = groups of ranks among which the experts are divided, `key_replicas` = ranks that share each key head of
    linear attention, or each group of B and C of Mamba-2."""
    if operation.summed:
        return PARTIAL
    if not operation.sharded:
        return REPLICATE
    shared: dict[Width, int] = {
        "kv_heads": kv_replicas, "linear_keys": key_replicas, "ssm_groups": key_replicas,
    }  # fmt: skip
    replicas = shared.get(operation.width, 1)
    dim = {"cells": 0, "slots": 2}.get(operation.form, 1)
    return TapLayout("shard", dim, replicas, ep if operation.form == "slots" else 1)


def layer_taps(
    parts: Collection[Part] = (), kv_replicas: int = 1, ep: int = 1, key_replicas: int = 1
) -> dict[str, TapLayout]:
    """The taps of one decoder layer (names without the `layers.{i}.` prefix) in execution order."""
    operations = layer_operations({*parts, "partial"})
    return {one.tap: layout_of(one, kv_replicas, ep, key_replicas) for one in operations}


def tap_specs(num_layers: int, parts: Collection[Part] = (), kv_replicas: int = 1) -> tuple[TapSpec, ...]:
    """Every tap of a model whose layers all have these parts, in execution order."""
    return _specs([layer_taps(parts, kv_replicas)] * num_layers, parts)


def model_taps(model: ModelConfig, tp: int, ep: int = 1) -> tuple[TapSpec, ...]:
    """Every tap of `model` split over `tp` ranks, in `ep` groups where it has experts, in execution order."""
    layers = map(model.of_layer, range(model.num_layers))
    taps = [
        layer_taps(parts_of(layer), shards.kv_replicas(layer, tp), ep, shards.key_replicas(layer, tp))
        for layer in layers
    ]
    return _specs(taps, parts_of(model))


def _specs(layers: Sequence[Mapping[str, TapLayout]], parts: Collection[Part] = ()) -> tuple[TapSpec, ...]:
    outside = [TapSpec(one.tap, layout_of(one)) for one in outside_of(parts)]
    inside = (TapSpec(f"layers.{i}.{name}", to) for i, taps in enumerate(layers) for name, to in taps.items())
    return (*outside[:-_BEHIND], *inside, *outside[-_BEHIND:])


@lru_cache(_NAMES)
def operation_at(tap: str) -> Operation | None:
    """The operation of a tap by its full name; None for a name that is none of ours."""
    return (OUTSIDE if layer_of(tap) is None else LAYER).get(local_name(tap))


@lru_cache(_NAMES)
def layer_of(tap: str) -> int | None:
    """ "layers.3.attn.q_proj" -> 3; None outside the layers. A stranger's tap may have any name."""
    head, _, rest = tap.partition(".")
    number, dot, _ = rest.partition(".")
    return int(number) if head == "layers" and dot and number.isdecimal() and len(number) < 6 else None


@lru_cache(_NAMES)
def local_name(tap: str) -> str:
    """A tap's name within its layer: "layers.3.attn.q_proj" -> "attn.q_proj"; all of it outside the layers."""
    return tap if layer_of(tap) is None else tap.split(".", 2)[2]


def layer_path(tap: str) -> str:
    """ "layers.3.attn.q_proj" -> "layers.3"; a tap outside the layers stands for itself."""
    layer = layer_of(tap)
    return tap if layer is None else f"layers.{layer}"


def count_layers(taps: Iterable[str]) -> int:
    """How many layers the taps belong to: 1 + the highest."""
    return 1 + max((layer for tap in taps if (layer := layer_of(tap)) is not None), default=-1)


def matches(tap: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs (`layers.*.attn.probs`; case counts) selects a tap."""
    return any(fnmatchcase(tap, glob) for glob in globs)


def is_kept_whole(new: int, keys: int) -> bool:
    """Whether attention that is captured with all else is whole: it grows with the square of a prompt."""
    return new * keys <= _WHOLE


def newest_rows(heads: int, new: int, keys: int) -> int:
    """How many of the newest rows of scores or probabilities [heads, new, keys] are captured with all else."""
    return new if is_kept_whole(new, keys) else max(1, min(new, _ELEMENTS // (heads * keys)))
