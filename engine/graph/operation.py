"""What one operation of a model is: what it reads, what it gives, and which of the checkpoint's tensors it takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "embedding", "norm", "linear", "rope", "cache", "scores", "softmax", "context", "reduce", "residual", "activation",
    "head",
]  # fmt: skip
#: What the channels of a tensor are, which are split over the ranks but for `hidden`.
Width = Literal["hidden", "heads", "kv_heads", "intermediate", "vocab"]
#: T new tokens, K positions attended to: [T, width] · [T, heads, head_dim] · [K, heads, head_dim] · [heads, T, K].
Form = Literal["rows", "heads", "cache", "cells"]
#: Flags of `ModelConfig` by which products have biases.
Bias = Literal["", "qkv_bias", "o_bias", "mlp_bias", "norm_bias"]
#: What only some models or engines have.
Part = Literal["qk_norm", "partial", "bare_inputs", "post_norm", "ungated"]

#: In place of an input's name: the stream that enters the layer, or the last norm.
STREAM = "<"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, by the name of its tap within the layer (outside of all layers: its whole name).

    `inputs` are taps of the same layer by role. `module` is the checkpoint's, whose parameters it reads, by its name
    within `model.layers.{i}.` (outside: its whole name), `gguf` the same in a GGUF file, within `blk.{i}.`; of a
    product split over the ranks by what goes in, each rank's term has the weight and the sum the bias. `bias` names the
    flag of `ModelConfig` with which it has one. `part`: what a model must have for it, `unless`: what it must not have;
    where it is not there, its first input takes its place (of the MLP's gate: nothing).
    """

    tap: str
    kind: Kind
    inputs: Mapping[str, str] = field(default_factory=dict)
    width: Width = "hidden"
    form: Form = "rows"
    module: str = ""
    gguf: str = ""
    bias: Bias = ""
    part: Part | None = None
    unless: Part | None = None

    def is_in(self, parts: Collection[Part]) -> bool:
        """Whether a layer with these parts has it."""
        return (self.part is None or self.part in parts) and self.unless not in parts

    @property
    def remembers(self) -> bool:
        """Whether it holds what earlier steps have written as well."""
        return self.kind == "cache"

    @property
    def sharded(self) -> bool:
        """Whether each rank has only its part of the channels, or heads."""
        return self.width != "hidden"
