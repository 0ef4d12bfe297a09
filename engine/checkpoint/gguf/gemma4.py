"""Gemma-4 as the metadata of GGUF files has it, and what llama.cpp's program (`src/models/gemma4.cpp`) has in it alone.
Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.engine.checkpoint.gguf.expert_architectures import EXPERT_KEYS, softmax_experts
from lockstep.engine.checkpoint.gguf.stated_sizes import Own, StatedSizes
from lockstep.engine.checkpoint.gguf.windows import PATTERN, WINDOW, by_layer, windows
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.layer_shapes import LayerInputs, LayerShape, kv_sources
from lockstep.engine.config.rope_scaling import Rope, RopeScaling

_KV_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"
#: Lists of a number for each layer.
GEMMA4_KEYS = (PATTERN, _KV_HEADS, _WIDTH, *EXPERT_KEYS)
_SHARED = "attention.shared_kv_layers"
#: By what the frequency of a pair that does not turn is divided.
_NEVER = 1e30


def gemma4(fields: Fields, of: StatedSizes) -> Own:
    """Layers that see everything have heads of another width, and rotate a part of each; the last layers read the keys
    and values of others."""
    own = windows(fields, of.layers, fields.size(WINDOW), 6)
    shapes = _shapes(fields, of, own)
    width = fields.size("embedding_length_per_layer_input", 0, least=0)
    full = Rope(of.rope.theta, _proportional(fields, of))
    local = Rope(fields.number("rope.freq_base_swa", 10_000.0, above=0.0), RopeScaling())
    borrowed = [i for i, one in enumerate(shapes) if one.kv_from is not None and _has(of, i, "k")]
    reported = f"ignored blk.{borrowed[0]}.attn_k and others" if borrowed else ""
    return {
        "norm": "wide",
        "post_norms": True,
        "qk_norm": True,
        "value_norm": True,
        "activation": "gelu_tanh",
        "score_scale": 1.0,
        "logit_cap": fields.number("final_logit_softcapping", 0.0),
        "embedding_multiplier": of.hidden**0.5,
        "head_dim": max(one.head_dim for one in shapes),
        "shapes": shapes,
        "windows": own,
        "rope_scaling": full.scaling,
        "layer_ropes": tuple(full if window is None else local for window in own),
        "layer_scalar": "blk.0.layer_output_scale.weight" in of.tensors,
        "layer_inputs": LayerInputs(width, of.layers) if width else None,
        "experts": _experts(fields, of),
        "notes": (f"{reported}: the layer reads the keys and values of another one",) if reported else (),
    }


def _experts(fields: Fields, of: StatedSizes) -> ExpertsConfig | None:
    """Those beside the MLP; None where the file has none."""
    if not fields.size("expert_count", 0, least=0):
        return None
    return replace(softmax_experts(fields, of, True), wide_weights=True, beside_mlp=True)


def _shapes(fields: Fields, of: StatedSizes, own: tuple[int | None, ...]) -> tuple[LayerShape, ...]:
    narrow = _local_width(fields, of)
    kv_heads, widths = (by_layer(fields, key, of.layers) for key in (_KV_HEADS, _WIDTH))
    types = ["full" if window is None else "sliding" for window in own]
    sources = kv_sources(fields, types, _SHARED)
    for heads in kv_heads:
        if of.heads % heads:
            raise fields.error(_KV_HEADS, f"{heads} does not divide attention.head_count = {of.heads}")
    return tuple(
        LayerShape(
            of.head_dim if own[i] is None else narrow,
            kv_heads[i],
            widths[i],
            sources[i] is None and not _has(of, i, "v"),
            sources[i],
        )
        for i in range(of.layers)
    )


def _has(of: StatedSizes, layer: int, product: str) -> bool:
    return f"blk.{layer}.attn_{product}.weight" in of.tensors


def _local_width(fields: Fields, of: StatedSizes) -> int:
    """Channels of each head in layers with a window, all of which turn."""
    key = "attention.key_length_swa"
    size = fields.size(key, of.head_dim)
    for other in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if fields.size(other, size) != size or size % 2:
            raise fields.error(other, f"{key} is {size}: another width, or an odd one, is not supported")
    return size


def _proportional(fields: Fields, of: StatedSizes) -> RopeScaling:
    """Of each head the first pairs turn, at the frequencies that whole heads would have. A file gives it by factors."""
    scaling = of.rope.scaling
    turning = scaling.factors.count(1.0)
    others = scaling.factors[turning:]
    if scaling.kind != "none" or 1.0 in others or any(one < _NEVER / 10 for one in others):
        raise fields.error(
            "rope.scaling.type", "not the rotation of a Gemma-4, of whose pairs the first turn"
        )
    return RopeScaling("proportional", share=turning / len(scaling.factors)) if others else scaling
