"""transformers' model of a checkpoint that reads images as well: its text model with its head, alone.

The whole is loaded, by transformers' own conversion of names, and the other parts are let go of.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from lockstep.engine.checkpoint.files import read_json
from lockstep.engine.config.wrappers import TEXT_MODELS, WRAPPERS

#: What transformers has no class for goes by its family's name there.
_NAMED_AS = {name: text.family for name, text in TEXT_MODELS.items() if name not in CONFIG_MAPPING}


def config_of(directory: Path) -> Any:
    """The transformers configuration of a checkpoint."""
    reported = read_json(directory / "config.json")
    if (named := _NAMED_AS.get(str(reported.get("model_type")))) is None:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    own = {key: value for key, value in reported.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(named, **own)


def auto_class(config: Any) -> Any:
    """What loads a checkpoint of that configuration."""
    if config.model_type in WRAPPERS:
        return AutoModelForImageTextToText
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if type(config) in causal else _unmapped(config)


def _unmapped(config: Any) -> Any:
    """The causal language model of a configuration for which transformers' table has none, as Mistral 4's."""
    return getattr(transformers, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")


def empty_model(config: Any, **options: Any) -> Any:
    """A model of that configuration, its weights whatever they are."""
    made_by, mapped = (
        auto_class(config),
        "from_config",
    )  # of a class of transformers' table, else of the model's own
    build = getattr(made_by, mapped if hasattr(made_by, mapped) else f"_{mapped}")
    return build(config, **options)


def import_class(config: Any) -> None:
    """Import the module that defines the model."""
    of_wrapper = config.model_type in WRAPPERS
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if of_wrapper else MODEL_FOR_CAUSAL_LM_MAPPING
    if mapping.get(type(config), None) is None and not of_wrapper:
        _unmapped(config)


def text_model(model: Any) -> Any:
    """The text model of a wrapper; another model as it is."""
    return TextOnly(model) if model.config.model_type in WRAPPERS else model


class TextOnly(nn.Module):
    """A decoder and its head, by the names that causal language models give them."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        if hasattr(whole, "language_model"):  # Llama 4: a causal language model of its own
            self.model, self.lm_head = whole.language_model.model, whole.language_model.lm_head
        else:
            self.model, self.lm_head = whole.model.language_model, whole.lm_head
        self.config = self.model.config
        self.config.tie_word_embeddings = whole.config.tie_word_embeddings
        #: The soft cap of logits, which of these models Gemma-4 alone applies.
        self.cap = self.config.final_logit_softcapping if whole.config.model_type == "gemma4" else None

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        device: torch.device = self.model.device
        return device

    def forward(self, input_ids: Tensor, *, logits_to_keep: int, **options: Any) -> SimpleNamespace:
        """`logits` [1, kept, vocab] of the last tokens of [1, T]; the model makes their positions."""
        rows = self.model(input_ids=input_ids, **options).last_hidden_state
        logits = self.lm_head(rows[:, -logits_to_keep:])
        return SimpleNamespace(
            logits=logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
        )
