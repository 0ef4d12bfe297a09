"""The rotation that a GGUF file states: keys, and tensors of factors. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lockstep.engine.checkpoint.gguf.header import GgufTensor
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.engine.errors import ConfigError

Tensors = Mapping[str, GgufTensor]
Floats = Callable[[str], tuple[float, ...]]

#: By what each pair's frequency is divided (Llama 3.1's scaling); in short and in long sequences (LongRoPE).
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)


def rope_scaling(
    fields: Fields, tensors: Tensors, dim: int, max_position: int, floats: Floats
) -> RopeScaling:
    """How the frequencies of `dim` channels are stretched; `floats(name)` reads a small F32 tensor."""
    if LONG_FACTORS in tensors:
        return _longrope(fields, tensors, dim, max_position, floats)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    if factor < 0:
        raise fields.error("rope.scaling.factor", "expected a number above 0")
    kind = fields.word("rope.scaling.type", "linear" if factor != 1.0 else "none")
    factors = _factors(fields, tensors, ROPE_FACTORS, dim, floats) if ROPE_FACTORS in tensors else ()
    if factors and kind == "yarn":
        raise fields.error("rope.scaling.type", f"together with {ROPE_FACTORS} it is not supported")
    if kind in ("none", "linear"):
        linear = kind == "linear" and factor != 1.0
        return RopeScaling("linear" if linear else "none", factor if linear else 1.0, factors=factors)
    if kind != "yarn":
        raise fields.error("rope.scaling.type", "not supported; supported are none, linear and yarn")
    own = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return RopeScaling(
        "yarn",
        factor,
        fields.size("rope.scaling.original_context_length", max_position),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=0.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0.0),
        attention_factor=None if own == 1.0 else own * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )


def _longrope(fields: Fields, tensors: Tensors, dim: int, max_position: int, floats: Floats) -> RopeScaling:
    short, long = (_factors(fields, tensors, name, dim, floats) for name in (SHORT_FACTORS, LONG_FACTORS))
    original = fields.size("rope.scaling.original_context_length", max_position)
    attention = fields.number("rope.scaling.attn_factor", 1.0, above=0.0)
    return RopeScaling(
        "longrope", max_position / original, original, attention_factor=attention, factors=short, long_factors=long
    )  # fmt: skip


def _factors(fields: Fields, tensors: Tensors, name: str, dim: int, floats: Floats) -> tuple[float, ...]:
    """One for each pair."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != (dim // 2,) or tensor.type.name != "F32":
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise ConfigError(f"{fields.where}: {name} is {found}, expected F32 [{dim // 2}]")
    factors = floats(name)
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"{fields.where}: {name} holds a factor that is not finite and above 0")
    return factors
