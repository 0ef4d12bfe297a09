"""Gemma-4: what each layer has of its own, and whose keys and values it reads. Torch-free, as transformers 5
(`models/gemma4`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.engine.config.fields import Fields

_FULL = "full_attention"
#: What a layer has where it has not both.
Block = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of a model whose layers differ in size. `keys_as_values`: values are made by the product of keys.
    `kv_from`: the layer whose cached keys and values it reads; None: its own."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    keys_as_values: bool
    kv_from: int | None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs: a second embedding gives each token a vector of `width` channels for each of `layers`;
    `layer` is that of which the model is, None outside of the layers."""

    width: int
    layers: int
    layer: int | None = None

    @property
    def total(self) -> int:
        """Channels of all layers' inputs side by side."""
        return self.width * self.layers


def layer_inputs(fields: Fields) -> LayerInputs | None:
    """The per-layer inputs of a configuration; None where they are switched off."""
    width = fields.size("hidden_size_per_layer_input", 256, least=0)
    if not width:
        return None
    vocab = fields.size("vocab_size")
    if fields.size("vocab_size_per_layer_input", 262_144) != vocab:
        raise fields.error(
            "vocab_size_per_layer_input", f"another number than vocab_size = {vocab} is not supported"
        )
    return LayerInputs(width, fields.size("num_hidden_layers"))


def layer_shapes(
    fields: Fields, types: Sequence[str], kv_heads: int, head_dim: int
) -> tuple[LayerShape, ...]:
    """Of each layer, by its type. ConfigError for what layers cannot be."""
    heads = fields.size("num_attention_heads")
    width = fields.size("intermediate_size")
    as_values = fields.flag("attention_k_eq_v", False)
    wide = fields.flag("use_double_wide_mlp", False)
    sources = kv_sources(fields, types, "num_kv_shared_layers")
    found = []
    for layer, kind in enumerate(types):
        own = _sizes(fields, layer, kind, kv_heads, head_dim, as_values)
        for key, size in (("num_key_value_heads", heads % own[1]), ("head_dim", own[0] % 2)):
            if size:
                problem = "does not divide num_attention_heads" if key == "num_key_value_heads" else "is odd"
                raise fields.error(key, f"{own} (head_dim, KV heads) of layer {layer} {problem}")
        source = sources[layer]
        found.append(
            LayerShape(
                *own,
                width * (2 if wide and source is not None else 1),
                as_values and kind == _FULL and source is None,
                source,
            )
        )
    return tuple(found)


def _sizes(
    fields: Fields, layer: int, kind: str, kv_heads: int, head_dim: int, as_values: bool
) -> tuple[int, int]:
    """A layer's head_dim and KV heads: as transformers writes them, by layer, or as published, by type."""
    if (stated := fields.object("per_layer_config")) is not None:
        by_number = Fields({str(key): own for key, own in stated.data.items()}, stated.where)
        own = by_number.object(str(layer)) or Fields({}, stated.where)
        if other := sorted(set(own.data) - {"head_dim", "num_key_value_heads"}):
            raise own.error(other[0], "layers that differ in that are not supported")
        return own.size("head_dim", head_dim), own.size("num_key_value_heads", kv_heads)
    if kind != _FULL:
        return head_dim, kv_heads
    own_kv = fields.size("num_global_key_value_heads", kv_heads) if as_values else kv_heads
    return fields.size("global_head_dim", 512), own_kv


def kv_sources(fields: Fields, types: Sequence[str], key: str) -> list[int | None]:
    """The layer whose keys and values each reads: of the last ones, as many as `key` states, the last one before them
    of the same type."""
    shared = fields.size(key, 0, least=0)
    first = len(types) - shared
    if (shared and first < 1) or set(types[first:]) - set(types[:first]):
        raise fields.error(key, "a layer that shares keys and values has none of its type before it to read")
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    return [None if layer < first else last[kind] for layer, kind in enumerate(types)]
