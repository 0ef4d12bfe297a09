"""Mamba-2 as a model's configuration describes it: layers that keep a state of fixed size (arXiv:2405.21060).
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.engine.config.fields import Fields
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.errors import ConfigError

#: Names of layer types that older configurations have, and what they are called now.
_RENAMED = {"mamba": LINEAR, "attention": "full_attention"}


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Each of `heads` has a state [head_dim, state]; `heads / groups` neighbouring ones share B and C. `conv`: tokens
    that the causal convolution before it sees. `limits` of the step size. `norm_width`: channels that the gated norm
    normalises together. `layers` states for each layer whether it has this in place of attention, or `beside` it. What
    is read goes through its gate and the norm, the norm first where that is so (`norm_first`), or the gate alone
    (`normed` False)."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    layers: tuple[bool, ...]
    norm_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    beside: bool = False
    normed: bool = True
    norm_first: bool = False

    def __post_init__(self) -> None:
        """ConfigError where heads cannot be grouped."""
        if self.heads % self.groups:
            raise ConfigError(f"{self.groups} groups of B and C do not divide {self.heads} heads of Mamba-2")

    @property
    def channels(self) -> int:
        """Of all heads."""
        return self.heads * self.head_dim

    @property
    def limited(self) -> bool:
        """Whether a step size, which is positive, may lie beyond its limits."""
        return self.limits[0] > 0.0 or self.limits[1] != math.inf

    @property
    def norm_groups(self) -> int:
        """How many parts of the channels are normalised, each by itself."""
        return self.channels // self.norm_width

    def norm_sharers(self, tp: int) -> int:
        """How many (neighbouring) ranks of `tp` hold the channels that are normalised together."""
        return max(1, tp // self.norm_groups)


def renamed_types(types: list[str]) -> list[str]:
    """Layer types by the names that transformers 5 has."""
    return [_RENAMED.get(kind, kind) for kind in types]


def mamba(fields: Fields, types: list[str], keys: Mapping[str, str], width: int) -> MambaConfig | None:
    """As a configuration has it whose keys are called so, of `width` channels, of which each group is normalised by
    itself; None where no layer has any. ConfigError for what does not fit together."""
    if LINEAR not in types:
        return None
    heads = fields.size(keys["heads"], 128)
    head_dim = _head_dim(fields, keys["head_dim"], width, heads)
    if head_dim * heads != width:
        raise fields.error(keys["head_dim"], f"{heads} heads of it are not the {width} channels of Mamba-2")
    groups = fields.size(keys["groups"], 1)
    return MambaConfig(
        heads,
        head_dim,
        groups,
        fields.size(keys["state"], 256),
        fields.size(keys["conv"], 4, least=2),
        tuple(kind == LINEAR for kind in types),
        norm_width=width // groups,
        conv_bias=fields.flag(keys["conv_bias"], True),
        proj_bias=fields.flag(keys["proj_bias"], False),
        limits=limits(fields),
    )


def _head_dim(fields: Fields, key: str, width: int, heads: int) -> int:
    if fields.data.get(key, "auto") != "auto":
        return fields.size(key)
    if width % heads:
        raise fields.error(key, f"{heads} heads do not divide the {width} channels of Mamba-2")
    return width // heads


def limits(fields: Fields) -> tuple[float, float]:
    """What step sizes lie within."""
    stated = fields.data.get("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    read = [_number(one) for one in stated] if isinstance(stated, list | tuple) else []
    match [one for one in read if one is not None]:
        case [least, largest] if len(read) == 2 and 0 <= least <= largest:
            return least, largest
    raise fields.error("time_step_limit", "expected two numbers, the least and the largest step size")


def _number(value: object) -> float | None:
    """A number; transformers writes {"__float__": "Infinity"} for one that has no end."""
    if isinstance(value, dict):
        return math.inf if value.get("__float__") == "Infinity" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
