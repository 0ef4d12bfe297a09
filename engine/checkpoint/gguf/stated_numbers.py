"""Parameters that a GGUF file has as metadata, not as tensors: the numbers of Apertus' activation. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.engine.checkpoint.gguf.metadata import MetadataArray, Scalar
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.fields import Fields
from lockstep.engine.errors import ConfigError
from lockstep.engine.parallel.shards import XIELU


class StatedNumber(NamedTuple):
    """A parameter of one element."""

    value: float
    shape: tuple[int, ...]


def stated_numbers(
    metadata: Mapping[str, Scalar | MetadataArray], model: ModelConfig, where: str
) -> dict[str, StatedNumber]:
    """By Hugging Face's names. `where` opens each message. ConfigError where a layer has none."""
    if model.activation != "xielu":
        return {}
    fields, found = Fields(metadata, where), dict[str, StatedNumber]()
    for role, module in XIELU.items():
        key = f"xielu.{role.removeprefix('xielu_')}"
        shape = () if role.startswith("xielu_") else (1,)
        for layer, value in enumerate(_of_layers(fields, key, model.num_layers)):
            found[f"model.layers.{layer}.{module}"] = StatedNumber(value, shape)
    return found


def _of_layers(fields: Fields, key: str, layers: int) -> list[float]:
    """One number for each layer: a list, or one for all."""
    stated = fields.data.get(key)
    if not isinstance(stated, MetadataArray):
        return [fields.number(key)] * layers
    numbers = [float(one) for one in stated.numbers()] if stated.element == "FLOAT32" else []
    if len(numbers) != layers or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{fields.where}: {key}: expected a finite number for each of {layers} layers")
    return numbers
