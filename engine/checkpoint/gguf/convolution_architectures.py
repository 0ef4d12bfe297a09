"""Short convolutions as the metadata of GGUF files has them, and what llama.cpp's programs (`src/models/lfm2.cpp`,
`lfm2moe.cpp`) have in them alone. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.engine.checkpoint.gguf.expert_architectures import EXPERT_KEYS, sigmoids
from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import WINDOW, by_layer, of_layers
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.lfm2 import SHARES_EPS
from lockstep.engine.config.short_convolution import ShortConvolutionConfig

#: A list: layers with a convolution have no key/value heads.
KV_HEADS = "attention.head_count_kv"
CONVOLUTION_KEYS = (KV_HEADS,)
CONVOLUTION_EXPERT_KEYS = (*CONVOLUTION_KEYS, *EXPERT_KEYS)


def lfm2(fields: Fields, of: StatedSizes) -> Own:
    """Layers with a short convolution, and others with attention."""
    attending = of_layers(fields, KV_HEADS, of.layers)
    if attending is None or all(attending):
        raise fields.error(KV_HEADS, "no layer has a short convolution")
    if len({*by_layer(fields, KV_HEADS, of.layers, least=0)} - {0}) > 1:
        raise fields.error(KV_HEADS, "layers with attention that differ in it are not supported")
    if fields.size(WINDOW, 0, least=0):
        raise fields.error(WINDOW, "not supported for this architecture")
    width = fields.size("shortconv.l_cache", least=2)
    short = ShortConvolutionConfig(width, tuple(not one for one in attending))
    return {"qk_norm": True, "short_conv": short}


def lfm2_moe(fields: Fields, of: StatedSizes) -> Own:
    """The same with experts, whose weights are renormalised always and never scaled."""
    experts = replace(sigmoids(fields, of, True), wide_weights=False, shares_eps=SHARES_EPS, factor=1.0)
    return {**lfm2(fields, of), "experts": experts}
