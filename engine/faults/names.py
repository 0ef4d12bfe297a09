"""Which tensor of the checkpoint fills a parameter, and what is done to the residual stream between the blocks."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor

_NUMBER = re.compile(r"(?<=model\.layers\.)\d+")


def gate_for_up(name: str, model: ModelConfig) -> str:
    """gate_proj and up_proj are taken for each other."""
    return _exchanged(name, ".gate_proj.", ".up_proj.")


def k_for_v(name: str, model: ModelConfig) -> str:
    """k_proj and v_proj are taken for each other."""
    return _exchanged(name, ".k_proj.", ".v_proj.")


def norms_exchanged(name: str, model: ModelConfig) -> str:
    """The two norms of a layer are taken for each other."""
    return _exchanged(name, ".input_layernorm.", ".post_attention_layernorm.")


def next_layer(name: str, model: ModelConfig) -> str:
    """Layers are counted from 1: each is filled from the one after it, the last from the first."""
    return _NUMBER.sub(lambda found: str((int(found[0]) + 1) % model.num_layers), name)


def _exchanged(name: str, one: str, other: str) -> str:
    if one in name:
        return name.replace(one, other)
    return name.replace(other, one)


def update_alone(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is replaced by the block's output."""
    return update


def residual_twice(residual: Tensor, update: Tensor) -> Tensor:
    """The stream is added once more."""
    return 2 * residual + update


def scaled_rows(rows: Tensor, model: ModelConfig) -> Tensor:
    """Embeddings are multiplied by the root of the width, as Gemma's are."""
    return rows * math.sqrt(model.hidden_size)


def _layers(model: ModelConfig, tp: int) -> str | None:
    return None if model.num_layers > 1 else "the model has a single layer"


FAULTS = (
    Fault(
        id="gate-up-exchanged",
        rule="tensor_of",
        value="gate_up_swapped",
        correct="own",
        title="gate and up loaded from each other's tensors",
        group="loading",
        level="load",
        first_tap="layers.*.mlp.gate",
        symptom="gate is what up should be, and the reverse",
        source="nntrainer/nntrainer#4194",
        patch={"tensor_of": gate_for_up},
    ),
    Fault(
        id="k-v-exchanged",
        rule="tensor_of",
        value="k_v_swapped",
        correct="own",
        title="k and v loaded from each other's tensors",
        group="loading",
        level="load",
        first_tap="layers.*.attn.k_proj",
        symptom="k is what v should be, and the reverse; q is right",
        patch={"tensor_of": k_for_v},
    ),
    Fault(
        id="norms-exchanged",
        rule="tensor_of",
        value="norms_swapped",
        correct="own",
        title="a layer's two norms loaded from each other's tensors",
        group="loading",
        level="load",
        first_tap="layers.*.attn_norm",
        symptom="every channel is off by a factor: one norm's weight over the other's",
        patch={"tensor_of": norms_exchanged},
    ),
    Fault(
        id="next-layers-weights",
        rule="tensor_of",
        value="next_layer",
        correct="own",
        title="layers filled from the layer after them",
        group="loading",
        level="load",
        first_tap="layers.*.attn_norm",
        symptom="embedding and head are right, every layer is another one",
        source="tenstorrent/tt-metal#54884",
        patch={"tensor_of": next_layer},
        needs=_layers,
    ),
    Fault(
        id="residual-missing",
        rule="residual",
        value="missing",
        correct="added",
        title="residual connection left out",
        group="mlp",
        level="step",
        first_tap="layers.*.attn_residual",
        symptom="the stream is the last block's output alone",
        patch={"residual": update_alone},
    ),
    Fault(
        id="residual-twice",
        rule="residual",
        value="twice",
        correct="added",
        title="residual added twice",
        group="mlp",
        level="step",
        first_tap="layers.*.attn_residual",
        symptom="the stream is there once too often after every block",
        source="deepspeedai/DeepSpeed#2834",
        patch={"residual": residual_twice},
    ),
    Fault(
        id="embedding-scaled",
        rule="embedding",
        value="scaled",
        correct="rows",
        title="embeddings scaled by the root of the width",
        group="loading",
        level="step",
        first_tap="embed",
        symptom="every embedding is too large by one factor",
        patch={"embedding": scaled_rows},
    ),
)
