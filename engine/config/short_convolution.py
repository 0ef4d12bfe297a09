"""Short gated convolutions as a model's configuration describes them: layers that keep the newest rows of a convolution
instead of keys and values (LFM2, arXiv:2511.23404). Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError

CONVOLUTION = "conv"


@dataclass(frozen=True, slots=True)
class ShortConvolutionConfig:
    """`conv`: tokens that the causal convolution of each channel sees. `layers` states for each layer whether it has
    this in place of attention."""

    conv: int
    layers: tuple[bool, ...]


def short_convolution(fields: Fields) -> ShortConvolutionConfig:
    """As LFM2's configuration has it. ConfigError for what is not supported."""
    layers = fields.size("num_hidden_layers")
    attending = fields.data.get("full_attn_idxs")
    types = fields.words("layer_types")
    if types is None and isinstance(attending, list):
        types = ["" if i in attending else CONVOLUTION for i in range(layers)]
    if CONVOLUTION not in (types or ()):
        raise ConfigError(f"{fields.where}: no layer has a short convolution")
    if fields.flag("conv_bias", False):
        raise fields.error("conv_bias", "biases of short convolutions are not supported")
    kinds = tuple(kind == CONVOLUTION for kind in types or ())
    return ShortConvolutionConfig(fields.size("conv_L_cache", 3, least=2), kinds)
