"""What the reading of single architectures starts from. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.engine.config.rope_scaling import Rope

#: Fields of `ModelConfig` that differ from their defaults.
Own = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StatedSizes:
    """What of a model the others are derived from; `rope` is the rotation that its keys state, `tensors` the names of
    the file's."""

    hidden: int
    heads: int
    head_dim: int
    layers: int
    max_position: int
    rope: Rope
    tensors: Collection[str] = ()
