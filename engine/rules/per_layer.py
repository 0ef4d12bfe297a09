"""What Gemma-4 does beside other models: norms of values, keys and values of another layer, inputs of each layer's own,
a factor of each layer's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.layer_shapes import LayerInputs


def source_of(model: ModelConfig, layer: int) -> int:
    """The layer whose keys and values a layer reads."""
    own = model.of_layer(layer).kv_from
    return layer if own is None else own


def unit_norm(values: Tensor, k_norm: Callable[[Tensor], Tensor], eps: float) -> Tensor:
    """Each head of values [T, kv_heads, D] over its root mean square, in float32 within; `k_norm` is that of keys."""
    return F.rms_norm(values.float(), values.shape[-1:], None, eps).to(values.dtype)


def summed(rows: Tensor, projected: Tensor, norm: Callable[[Tensor], Tensor], model: ModelConfig) -> Tensor:
    """All layers' inputs [T, layers * width]: `rows` of the second embedding, and a product of the first one, divided
    by the root of the model's width and normalised layer by layer."""
    assert model.layer_inputs is not None
    layers = (projected * model.hidden_size**-0.5).unflatten(-1, (-1, model.layer_inputs.width))
    out: Tensor = (norm(layers).flatten(-2) + rows) * 2.0**-0.5
    return out


def own_part(inputs: Tensor, own: LayerInputs) -> Tensor:
    """What the layer reads of all layers' inputs [T, layers * width]: [T, width]."""
    first = own.width * (own.layer or 0)
    return inputs[:, first : first + own.width]


def scaled(stream: Tensor, factor: Tensor) -> Tensor:
    """What leaves a layer: the stream [T, hidden], times the layer's number [1]."""
    return stream * factor
