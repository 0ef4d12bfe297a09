"""What one operation of a model is: what it reads, what it gives, and which of the checkpoint's tensors it takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "embedding", "norm", "linear", "rope", "cache", "scores", "softmax", "context", "reduce", "residual", "activation",
    "head", "choice", "choice_weights", "experts", "combine", "keys", "values", "gate", "conv", "l2_norm", "sigmoid",
    "decay", "state", "delta", "gated_norm", "unit_norm", "step_size", "ssm_state", "ssm_read",
    "layer_inputs", "layer_input", "query_scaling", "expert_input",
    "clip", "times", "channel_scale", "multiplier", "mixed", "index_scores", "key_choice", "shared_choice",
]  # fmt: skip
#: Those that give whole numbers: what was chosen, which is right or wrong, and never off by a little.
CHOICES: tuple[Kind, ...] = ("choice", "key_choice", "shared_choice")
#: What the channels of a tensor are.
Width = Literal[
    "hidden",
    "heads",
    "kv_heads",
    "intermediate",
    "vocab",
    "experts",
    "slots",
    "one",
    "expert",
    "shared_expert",
    "value_heads",
    "query_latent",
    "latent",
    "rope_key",
    "written_latent",
    "expanded_heads",
    "head",
    "linear_keys",
    "linear_values",
    "linear_heads",
    "conv_channels",
    "ssm_channels",
    "ssm_groups",
    "ssm_heads",
    "layer_inputs",
    "layer_input",
    "index_heads",
    "index_key",
    "index_weights",
    "index_slots",
]
#: Those that every rank has whole.
WHOLE: tuple[Width, ...] = (
    "hidden", "experts", "slots", "one", "query_latent", "latent", "rope_key", "written_latent", "layer_inputs",
    "layer_input", "index_heads", "index_key", "index_weights", "index_slots",
)  # fmt: skip
#: T new tokens, K positions attended to, S experts that each token goes to: [T, width] · [T, heads, head_dim] ·
#: [K, heads, head_dim] · [heads, T, K] · [T, S, width] · [K, width] · [1, heads, …, …] of the last token.
Form = Literal["rows", "heads", "cache", "cells", "slots", "cached_rows", "state"]
#: Those that have a row of each position that is attended to.
OF_POSITIONS: tuple[Form, ...] = ("cache", "cached_rows")
#: Flags of `ModelConfig` by which products have biases.
Bias = Literal[
    "",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "norm_bias",
    "latent_bias",
    "expert_bias",
    "head_bias",
    "index_bias",
    "ssm_bias",
    "conv_bias",
]
#: What only some models or engines have.
Part = Literal[
    "qk_norm", "partial", "bare_inputs", "post_norm", "ungated", "experts", "shared_expert", "shared_gate", "latent",
    "query_latent", "output_gate", "linear_attn", "rotated_qk_norm", "parallel", "value_norm", "keys_as_values",
    "shared_kv", "layer_inputs", "layer_scalar", "unit_qk_norm", "query_scaling", "weighed_inputs",
    "clipped_qkv", "delta_net", "short_conv", "indexer", "shared_choice", "mamba", "attention_alone", "mlp_alone",
    "experts_alone", "beside_mlp",
    "state_alone", "gate_alone", "beside", "multiplied",
]  # fmt: skip

#: Kinds that meet the state that a sequence has: as it is after a pass -> what reads it at each token.
READ_FROM: Mapping[Kind, Kind] = {"state": "delta", "ssm_state": "ssm_read"}
STATES: tuple[Kind, ...] = (*READ_FROM, *READ_FROM.values())


def state_of(kind: str) -> str:
    """The tap of the state that an operation of a layer with one meets, by the operation's kind."""
    return "attn.ssm_state" if kind.startswith("ssm") else "attn.state"


#: In place of an input's name: the stream that enters the layer, or the last norm.
STREAM = "<"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, by the name of its tap within the layer (outside of all layers: its whole name).

    `inputs` are taps of the same layer by role, or outside of the layers, or, by the whole name, of another layer.
    `module` is the checkpoint's, whose parameters it reads, by its name within `model.layers.{i}.` (outside: its whole
    name), `gguf` the same in a GGUF file, within `blk.{i}.`; of a
    product split over the ranks by what goes in, each rank's term has the weight and the sum the bias. `bias` names the
    flag of `ModelConfig` with which it has one. `summed`: each rank has a term of it. `part`: what a layer must have
    for it, `unless`: what it must not have; what takes its place where it is not there is named by `instead_of`.
    `optional`: roles of inputs that may not be there, with nothing in their place. `scaled`: what it gives is
    multiplied by a number of the layer's.
    """

    tap: str
    kind: Kind
    inputs: Mapping[str, str] = field(default_factory=dict)
    width: Width = "hidden"
    form: Form = "rows"
    module: str = ""
    gguf: str = ""
    bias: Bias = ""
    summed: bool = False
    part: Part | None = None
    unless: tuple[Part, ...] = ()
    optional: tuple[str, ...] = ()
    scaled: bool = False

    def is_in(self, parts: Collection[Part]) -> bool:
        """Whether a layer with these parts has it."""
        return (self.part is None or self.part in parts) and not any(one in parts for one in self.unless)

    @property
    def remembers(self) -> bool:
        """Whether it holds what earlier steps have written as well."""
        return self.kind in ("cache", "conv", *STATES)

    @property
    def sharded(self) -> bool:
        """Whether each rank has only its part of the channels, heads or experts."""
        return self.width not in WHOLE
