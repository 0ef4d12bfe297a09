"""Rotary scaling as a checkpoint states it: `RopeScaling`, read from either style of config. Torch-free.

transformers 4 writes `rope_theta` and `rope_scaling` (whose kind is `type` or `rope_type`), transformers 5
one `rope_parameters`. Which wins follows its `convert_rope_params_to_dict` and `standardize_rope_params`: a
non-empty `rope_scaling` replaces `rope_parameters`, a theta inside the chosen object wins over the one beside
it, and `original_max_position_embeddings` beside it wins over the one inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError
from lockstep.engine.text import printable

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. Only the fields that `kind` uses matter. `factors` (of GGUF files, and the
    short ones of LongRoPE): what each pair's frequency is divided by beforehand, where it is not empty;
    `long_factors` (LongRoPE) take their place in a sequence longer than `original_max_position`."""

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

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on how long the sequence is."""
        return self.kind in ("dynamic", "longrope")


def rope_from_hf(config: Fields, max_position: int, head_dim: int) -> tuple[float, RopeScaling]:
    """(theta, scaling) of a Hugging Face config; ConfigError for a kind that Lockstep does not rotate by."""
    fields = config.object("rope_scaling")
    if fields is None or not fields.data:
        fields = config.object("rope_parameters")
    if fields is None:
        fields = Fields({}, config.where)
    _refuse_partial(config)
    _refuse_partial(fields)
    if nested := [key for key, value in fields.data.items() if isinstance(value, dict)]:
        raise fields.error(nested[0], "rotary parameters of single layer types are not supported")
    theta = fields.number("rope_theta", config.number("rope_theta", DEFAULT_THETA, above=0.0), above=0.0)
    original_from = config if "original_max_position_embeddings" in config else fields
    original = original_from.size("original_max_position_embeddings", max_position)
    kind_key = "rope_type" if "rope_type" in fields else "type"
    kind = fields.word(kind_key, "default")
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", fields.number("factor", above=0.0))
    if kind == "llama3":
        return theta, _llama3(fields, original)
    if kind == "yarn":
        return theta, _yarn(fields, original, max_position)
    if kind == "dynamic":
        if head_dim == 2:
            raise fields.error(kind_key, "dynamic scaling needs a head_dim above 2")
        return theta, RopeScaling("dynamic", fields.number("factor", above=0.0))
    if kind == "longrope":
        return theta, _longrope(fields, original, max_position, head_dim)
    raise ConfigError(
        f"{fields.where}: {kind_key} is {printable(kind)!r}: not a supported rotary scaling; "
        "supported are default, linear, dynamic, llama3, yarn and longrope"
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


def _longrope(fields: Fields, original: int, max_position: int, head_dim: int) -> RopeScaling:
    short, long = (fields.numbers(name, head_dim // 2, above=0.0) for name in ("short_factor", "long_factor"))
    return RopeScaling(
        "longrope",
        fields.number("factor", max_position / original, above=0.0),
        original,
        attention_factor=fields.optional_number("attention_factor"),
        factors=short,
        long_factors=long,
    )


def _refuse_partial(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error(
            "partial_rotary_factor",
            "no two engines agree on it for this family (transformers rotates whole heads all the same, vLLM a part): "
            "only 1.0 is supported",
        )
