"""Rotary scaling as a checkpoint states it: `RopeScaling`, read from either style of config. Torch-free.

transformers 4 writes `rope_theta` and `rope_scaling` (whose kind is `type` or `rope_type`), transformers 5
one `rope_parameters`. Which wins follows its `convert_rope_params_to_dict` and `standardize_rope_params`: a
non-empty `rope_scaling` replaces `rope_parameters`, a theta inside the chosen object wins over the one beside
it, and `original_max_position_embeddings` beside it wins over the one inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.huggingface import SLIDING, rotated_layers, window_of
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. Only the fields that `kind` uses matter. `factors` (of GGUF files, and the
    short ones of LongRoPE): what each pair's frequency is divided by beforehand, where it is not empty;
    `long_factors` (LongRoPE) take their place in a sequence longer than `original_max_position`. `share`
    (proportional): of the pairs the first that turn at all, at the frequencies that whole heads would have."""

    kind: RopeKind = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on how long the sequence is."""
        return self.kind in ("dynamic", "longrope")


def magnitude(factor: float, weight: float) -> float:
    """YaRN's factor on what is rotated in a context stretched by `factor`: 1 + 0.1 weight ln(factor)
    (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class Rope(NamedTuple):
    """The base of rotary angles, and how their frequencies are stretched."""

    theta: float
    scaling: RopeScaling


def ropes_from_hf(
    config: Fields, rules: FamilyRules, types: Sequence[str], max_position: int, dim: int
) -> tuple[Rope, *tuple[Rope | None, ...]]:
    """The rotation of a Hugging Face config, of `dim` channels; where layer types have their own, those of each layer
    behind it. ConfigError for a kind that Lockstep does not rotate by."""
    if rules.unrotated_every is not None or rules.unrotated_full:
        rope = _rope(config, _parameters(config), rules.theta, max_position, dim)
        rotated = _rotated(config, rules, types)
        return (rope,) if all(rotated) else (rope, *(rope if one else None for one in rotated))
    if rules.rotates is not None:
        rope = _rope(config, _parameters(config), rules.theta, max_position, dim)
        return (rope,) if rules.rotates(config) else (rope, *(None for _ in types))
    if rules.local_theta is None:
        assumed = Fields(rules.rope or {}, config.where)
        parameters = _parameters(config, assumed)
        if (
            rules.ntk_alpha
            and "alpha" in parameters
            and parameters.word(_kind_key(parameters), "") == "dynamic"
        ):
            return (_stretched_once(config, parameters, rules.theta, dim),)
        return (_rope(config, parameters, rules.theta, max_position, dim),)
    stated, scaling = config.object("rope_parameters"), config.object("rope_scaling")
    by_kind = Fields({"full_attention": dict(rules.rope or {})}, config.where) if stated is None else stated
    full, sliding = (
        {} if (one := by_kind.object(kind)) is None else dict(one.data)
        for kind in ("full_attention", "sliding_attention")
    )
    full |= {} if scaling is None else dict(scaling.data)
    key, default = rules.local_theta
    local = config.number(key, default, above=0.0) if key else default
    where = f"{config.where}: rope_parameters"
    by_type = {
        "full_attention": _rope(config, Fields(full, where), rules.theta, max_position, dim),
        "sliding_attention": _rope(Fields({}, where), Fields(sliding, where), local, max_position, dim),
    }
    ropes = tuple(by_type[kind] for kind in types)
    return (ropes[0],) if len(set(ropes)) == 1 else (by_type["full_attention"], *ropes)


def _rotated(config: Fields, rules: FamilyRules, types: Sequence[str]) -> list[bool]:
    """Which layers rotate."""
    if rules.unrotated_full:
        return [kind == SLIDING or window_of(config, rules) is None for kind in types]
    return rotated_layers(config, rules, len(types))


def rotary_dim(config: Fields, head_dim: int, share: float | None) -> int | None:
    """How many channels of each head are rotated, None: all. `share` is what the family assumes; None: that it cannot
    be anything but 1."""
    fields, key = _parameters(config), "partial_rotary_factor"
    if share is None:
        for one in (config, fields):
            if one.number(key, 1.0) != 1.0:
                raise one.error(
                    key,
                    "no two engines agree on it for this family (transformers rotates whole heads all the same, vLLM a "
                    "part): only 1.0 is supported",
                )
        return None
    one = fields if key in fields else config
    if "rotary_dim" in config and key not in one:  # as MiniMax-M2 states it
        share = config.size("rotary_dim") / head_dim
    size = int(head_dim * one.number(key, share, above=0.0))
    if size % 2 or not 0 < size <= head_dim:
        raise one.error(key, f"{size} of {head_dim} channels: expected an even number of them, at most all")
    return None if size == head_dim else size


def query_scaling(
    config: Fields, assumed: Mapping[str, Any] | None, max_position: int
) -> QueryScaling | None:
    """How Ministral-3 and Mistral 4 scale their queries: by the context that they were stretched from."""
    fields = _parameters(config, Fields(assumed or {}, config.where))
    if not (beta := fields.number("llama_4_scaling_beta", 0.0)):
        return None
    return QueryScaling(beta, fields.size("original_max_position_embeddings", max_position))


def _parameters(config: Fields, assumed: Fields | None = None) -> Fields:
    fields = config.object("rope_scaling")
    if fields is None or not fields.data:
        fields = config.object("rope_parameters")
    if fields is None:
        return Fields({}, config.where) if assumed is None else assumed
    return fields


def _rope(config: Fields, fields: Fields, default: float, max_position: int, dim: int) -> Rope:
    if nested := [key for key, value in fields.data.items() if isinstance(value, dict)]:
        raise fields.error(nested[0], "rotary parameters of single layer types are not supported")
    return Rope(_theta(config, fields, default), _scaling(config, fields, max_position, dim))


def _stretched_once(config: Fields, fields: Fields, default: float, dim: int) -> Rope:
    """Hunyuan's: whatever the sequence's length, the base times alpha ^ (dim / (dim - 2))."""
    stretch = fields.number("alpha", above=0.0) ** (dim / max(dim - 2, 1))
    return Rope(_theta(config, fields, default) * stretch, RopeScaling())


def _theta(config: Fields, fields: Fields, default: float) -> float:
    return fields.number("rope_theta", config.number("rope_theta", default, above=0.0), above=0.0)


def _kind_key(fields: Fields) -> str:
    return "rope_type" if "rope_type" in fields else "type"


def _scaling(config: Fields, fields: Fields, max_position: int, head_dim: int) -> RopeScaling:
    original_from = config if "original_max_position_embeddings" in config else fields
    original = original_from.size("original_max_position_embeddings", max_position)
    kind_key = _kind_key(fields)
    kind = fields.word(kind_key, "default")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", fields.number("factor", above=0.0))
    if kind == "llama3":
        return _llama3(fields, original)
    if kind == "yarn":
        return _yarn(fields, original, max_position)
    if kind == "dynamic":
        if head_dim == 2:
            raise fields.error(kind_key, "dynamic scaling needs a head_dim above 2")
        return RopeScaling("dynamic", fields.number("factor", above=0.0))
    if kind == "proportional":
        share = fields.number("partial_rotary_factor", 1.0, above=0.0)
        if share > 1:
            raise fields.error("partial_rotary_factor", "expected a share of each head, at most 1")
        return RopeScaling("proportional", fields.number("factor", 1.0, above=0.0), share=share)
    if kind == "longrope":
        return _longrope(config, fields, original, max_position, head_dim)
    raise ConfigError(
        f"{fields.where}: {kind_key} is {printable(kind)!r}: not a supported rotary scaling; "
        "supported are default, linear, dynamic, llama3, yarn, longrope and proportional"
    )


def _llama3(fields: Fields, original: int) -> RopeScaling:
    scaling = RopeScaling(
        "llama3",
        fields.number("factor", above=0.0),
        original,
        low_freq_factor=fields.number("low_freq_factor", above=0.0),
        high_freq_factor=fields.number("high_freq_factor", above=0.0),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error("high_freq_factor", f"must exceed low_freq_factor ({scaling.low_freq_factor:g})")
    return scaling


def _yarn(fields: Fields, original: int, max_position: int) -> RopeScaling:
    if "factor" not in fields.data:
        raise ConfigError(f"{fields.where}: factor is missing (expected a number, or null to derive it)")
    return RopeScaling(
        "yarn",
        fields.number("factor", max_position / original, above=0.0),
        original,
        # transformers reads `get("beta_fast") or 32`, so that zero means the default as well
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", "truncate" not in fields.data),  # null counts as false there
    )


def _with_magnitude(
    fields: Fields, factors: tuple[float, ...], original: int, max_position: int
) -> RopeScaling:
    """Phi-3.5-MoE's: the factor on what is rotated is stated."""
    magnitude = fields.number("short_mscale")
    if fields.number("long_mscale") != magnitude:
        raise fields.error(
            "long_mscale", f"another number than short_mscale = {magnitude:g} is not supported"
        )
    factor = fields.number("factor", max_position / original, above=0.0)
    return RopeScaling(
        "longrope", factor, original, attention_factor=magnitude, factors=factors, long_factors=factors
    )


def _longrope(config: Fields, fields: Fields, original: int, max_position: int, head_dim: int) -> RopeScaling:
    short, long = (fields.numbers(name, head_dim // 2, above=0.0) for name in ("short_factor", "long_factor"))
    if config.data.get("model_type") == "phimoe":  # whose class never comes to the long factors
        return _with_magnitude(fields, short, original, max_position)
    return RopeScaling(
        "longrope",
        fields.number("factor", max_position / original, above=0.0),
        original,
        attention_factor=fields.optional_number("attention_factor"),
        factors=short,
        long_factors=long,
    )
