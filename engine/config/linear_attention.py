"""Linear attention as a model's configuration describes it: layers that keep a state of fixed size instead of keys and
values (Gated DeltaNet, arXiv:2412.06464). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError

LINEAR = "linear_attention"
#: Added to the sum of squares that queries and keys are divided by the root of.
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Each of `value_heads` has a state [key_dim, value_dim]; `value_heads / key_heads` neighbouring ones share a query
    and a key. `conv`: tokens that the causal convolution before it sees. `layers` states for each layer whether it has
    this in place of attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    layers: tuple[bool, ...]

    def __post_init__(self) -> None:
        """ConfigError where heads cannot be paired."""
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear_num_key_heads = {self.key_heads} does not divide "
                f"linear_num_value_heads = {self.value_heads}"
            )

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads


def linear_attention(fields: Fields) -> LinearAttentionConfig:
    """As Qwen3-Next's and Qwen3.5's configuration has it. ConfigError for what does not fit together."""
    layers, every = fields.size("num_hidden_layers"), fields.size("full_attention_interval", 4)
    types = fields.words("layer_types") or [LINEAR if (i + 1) % every else "" for i in range(layers)]
    if LINEAR not in types:
        raise ConfigError(f"{fields.where}: no layer has linear attention")
    return LinearAttentionConfig(
        key_heads=fields.size("linear_num_key_heads", 16),
        value_heads=fields.size("linear_num_value_heads", 32),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        conv=fields.size("linear_conv_kernel_dim", 4, least=2),
        layers=tuple(kind == LINEAR for kind in types),
    )
