"""GGUF files as llama.cpp's converter made them before a fix: the files of `gguf_twins`, with its one step changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests import gguf_twins


def converted(checkpoint: Path, path: Path, bug: str) -> Path:
    """The checkpoint as a GGUF file, with the bug or ("") without."""
    if bug:
        name, make = BUGS[bug]
        with patch.object(gguf_twins, name, make(getattr(gguf_twins, name))):
            return gguf_twins.gguf_twin(checkpoint, path)
    return gguf_twins.gguf_twin(checkpoint, path)


def keys_by_a_quotient(permuted: Any) -> Any:
    """Rows of k are put in order by the number of query heads over that of KV heads: 8 // 2 in place of 2."""
    return lambda weights, heads: permuted(weights, 4 if heads == 2 else heads)


def queries_and_keys_in_place(permuted: Any) -> Any:
    """Rows of q and k stay as Hugging Face has them."""
    return lambda weights, heads: weights


def rope_base_dropped(rotation: Any) -> Any:
    """The base of RoPE is not written, so that readers take 10000."""

    def without(writer: Any, config: dict[str, Any], head_dim: int) -> None:
        with patch.object(writer, "add_rope_freq_base"):
            rotation(writer, config, head_dim)

    return without


def rope_factors_dropped(factors: Any) -> Any:
    """The tensor of Llama 3.1's frequencies is made by a function that nothing calls."""
    return lambda config: {}


def norms_plus_one_again(load: Any) -> Any:
    """The weights of norms have their 1 added twice."""

    def added(file: Path) -> dict[str, torch.Tensor]:
        return {name: x + 1 if name.endswith("norm.weight") else x for name, x in load(file).items()}

    return added


def softcaps_dropped(own: Any) -> Any:
    """The caps of scores and logits are not written, so that readers take 50 and 30."""

    def without(writer: Any, config: dict[str, Any]) -> None:
        with (
            patch.object(writer, "add_attn_logit_softcapping"),
            patch.object(writer, "add_final_logit_softcapping"),
        ):
            own(writer, config)

    return without


def gating_function_dropped(keys: Any) -> Any:
    """The function that scores experts is not written, so that readers take the softmax."""

    def without(writer: Any, config: dict[str, Any]) -> None:
        with patch.object(writer, "add_expert_gating_func"):
            keys(writer, config)

    return without


def value_heads_in_place(linear: Any) -> Any:
    """Heads of values stay in the groups of their key heads, as Hugging Face has them."""
    return lambda tensors, config, apart: linear(tensors, {**config, "model_type": "qwen3_next"}, apart)


def rotary_width_dropped(rotation: Any) -> Any:
    """How many channels rotate is not written, so that readers take all of a head."""

    def without(writer: Any, config: dict[str, Any], head_dim: int) -> None:
        with patch.object(writer, "add_rope_dimension_count"):
            rotation(writer, config, head_dim)

    return without


#: Bug -> the step of `gguf_twins` that it changes, and how.
BUGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "keys_by_a_quotient": ("_permuted", keys_by_a_quotient),
    "queries_and_keys_in_place": ("_permuted", queries_and_keys_in_place),
    "rope_base_dropped": ("_rotation", rope_base_dropped),
    "rope_factors_dropped": ("_rope_factors", rope_factors_dropped),
    "norms_plus_one_again": ("load_file", norms_plus_one_again),
    "softcaps_dropped": ("_of_its_own", softcaps_dropped),
    "gating_function_dropped": ("expert_keys", gating_function_dropped),
    "value_heads_in_place": ("as_linear", value_heads_in_place),
    "rotary_width_dropped": ("_rotation", rotary_width_dropped),
}
