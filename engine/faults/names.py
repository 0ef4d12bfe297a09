"""Which tensor of the checkpoint fills a parameter."""

from __future__ import annotations

import re

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault
from lockstep.engine.faults.needs import all_of, layers_alike, own_kv, several_experts, several_layers

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
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
    if layers_alike(model, 1) is not None:
        return name
    return _NUMBER.sub(lambda found: str((int(found[0]) + 1) % model.num_layers), name)


def next_expert(name: str, model: ModelConfig) -> str:
    """Experts are counted from 1: each is filled from the one after it, the last from the first."""
    count = 1 if model.experts is None else model.experts.count
    return _EXPERT.sub(lambda found: str((int(found[0]) + 1) % count), name)


def _exchanged(name: str, one: str, other: str) -> str:
    if one in name:
        return name.replace(one, other)
    return name.replace(other, one)


FAULTS = (
    Fault(
        id="gate-up-exchanged",
        seam="tensor_of",
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
        seam="tensor_of",
        value="k_v_swapped",
        correct="own",
        title="k and v loaded from each other's tensors",
        group="loading",
        level="load",
        first_tap="layers.*.attn.k_proj",
        symptom="k is what v should be, and the reverse; q is right",
        patch={"tensor_of": k_for_v},
        needs=own_kv,
    ),
    Fault(
        id="norms-exchanged",
        seam="tensor_of",
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
        seam="tensor_of",
        value="next_layer",
        correct="own",
        title="layers filled from the layer after them",
        group="loading",
        level="load",
        first_tap="layers.*.attn_norm",
        symptom="embedding and head are right, every layer is another one",
        source="tenstorrent/tt-metal#54884",
        patch={"tensor_of": next_layer},
        needs=all_of(several_layers, layers_alike),
    ),
    Fault(
        id="next-experts-weights",
        seam="tensor_of",
        value="next_expert",
        correct="own",
        title="experts filled from the expert after them",
        group="loading",
        level="load",
        first_tap="layers.*.mlp.experts.gate",
        symptom="the router is right, each token's rows go through another expert than was chosen",
        source="vllm-project/vllm#31534",
        patch={"tensor_of": next_expert},
        needs=several_experts,
    ),
)
