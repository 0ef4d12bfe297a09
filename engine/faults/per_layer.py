"""What Gemma-4 has beside other models: norms of values, shared keys and values, inputs of each layer's own, a factor
of each layer's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.layer_shapes import LayerInputs
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor


def not_normalised(values: Tensor, k_norm: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Values as their product gives them."""
    return values


def by_norm_of_keys(values: Tensor, k_norm: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Values go through the norm of keys, which has a weight."""
    return k_norm(values)


def first_of_type(model: ModelConfig, layer: int) -> int:
    """The first layer of the same type, not the last one that writes."""
    own = model.of_layer(layer).kv_from
    return layer if own is None else _writers(model, own)[0]


def of_next_layer(inputs: Tensor, own: LayerInputs) -> Tensor:
    """The next layer's input; the last layer reads the first one's."""
    first = own.width * (((own.layer or 0) + 1) % own.layers)
    return inputs[:, first : first + own.width]


def not_halved(
    rows: Tensor, projected: Tensor, norm: Callable[[Tensor], Tensor], model: ModelConfig
) -> Tensor:
    """The sum of embedding and product as it is."""
    from lockstep.engine.rules.per_layer import summed

    out: Tensor = summed(rows, projected, norm, model) * math.sqrt(2.0)
    return out


def without_product(
    rows: Tensor, projected: Tensor, norm: Callable[[Tensor], Tensor], model: ModelConfig
) -> Tensor:
    """The second embedding alone."""
    out: Tensor = rows * math.sqrt(0.5)
    return out


def unscaled(stream: Tensor, factor: Tensor) -> Tensor:
    """The stream as it is."""
    return stream


def _writers(model: ModelConfig, like: int) -> list[int]:
    """The layers that write keys and values and have the same window."""
    layers = range(model.num_layers)
    return [
        i for i in layers if model.windows[i] == model.windows[like] and model.of_layer(i).kv_from is None
    ]


def has_value_norm(model: ModelConfig, tp: int) -> str | None:
    """Values are normalised."""
    return None if model.value_norm else "the model does not normalise values"


def other_writers(model: ModelConfig, tp: int) -> str | None:
    """A layer that shares keys and values could read those of another one of its type."""
    sources = {one.kv_from for one in model.shapes if one.kv_from is not None}
    several = any(len(_writers(model, source)) > 1 for source in sources)
    return None if several else "no layer shares keys and values of one among several"


def has_layer_inputs(model: ModelConfig, tp: int) -> str | None:
    """Layers have inputs of their own."""
    return None if model.layer_inputs is not None else "the model has no per-layer inputs"


def has_layer_scalar(model: ModelConfig, tp: int) -> str | None:
    """Each layer's output is multiplied by a number."""
    return None if model.layer_scalar else "the model's layers have no scalar"


FAULTS = (
    one_seam(
        "value_norm", "missing", "by_head", not_normalised, "layers.*.attn.v_norm", "norm of values left out",
        "values are too large or too small, head by head", has_value_norm, group="norm",
    ),
    one_seam(
        "value_norm", "keys", "by_head", by_norm_of_keys, "layers.*.attn.v_norm", "values through the norm of keys",
        "each channel of the values has another factor", has_value_norm, group="norm",
    ),
    one_seam(
        "shared_cache", "first", "last", first_of_type, "layers.*.attn.k_cache",
        "layers share the first cache of their type",
        "the layers that share keys and values read those of the first layer of their type", other_writers,
        level="build", group="cache",
    ),
    one_seam(
        "layer_inputs", "unscaled", "halved", not_halved, "layer_inputs", "per-layer inputs not scaled",
        "every layer adds too much of its own input", has_layer_inputs, group="mlp",
    ),
    one_seam(
        "layer_inputs", "embedding_alone", "halved", without_product, "layer_inputs",
        "per-layer inputs without the product of the embedding", "every layer lacks a part of its own input",
        has_layer_inputs, group="mlp",
    ),
    one_seam(
        "layer_input", "next", "own", of_next_layer, "layers.*.layer_input", "per-layer input of the next layer",
        "each layer adds what the next one should", has_layer_inputs, group="mlp",
    ),
    one_seam(
        "layer_scalar", "missing", "applied", unscaled, "layers.*.mlp_residual", "layer scalar left out",
        "each layer's output is off by one factor", has_layer_scalar, group="mlp",
    ),
)  # fmt: skip
