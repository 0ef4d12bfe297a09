"""Make a transformers model compute in float64 from end to end.

Loading with dtype=float64 is not enough: the modelling code asks for float32 by name in its norms,
its softmax and its rotary angles, which would leave float32 noise in what is to be the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def rotary_of(model: Any) -> str | None:
    """What the decoder calls the module that makes rotary angles; None where it rotates nothing."""
    names = ("rotary_emb", "pos_emb")
    return next((name for name in names if getattr(model.model, name, None) is not None), None)


class DoubleWhereFloat(TorchFunctionMode):
    """Inside, every explicit request for float32 (`.float()`, `dtype=torch.float32`) is served in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _widen_multipliers(model: Any) -> None:
    """The same of the vectors by which Falcon-H1 multiplies what goes into its mixers."""
    mixers = [layer.mamba for layer in model.model.layers if hasattr(layer, "mamba")]
    for mixer in mixers:
        if hasattr(mixer, "mup_vector"):
            usual = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                made = sys.modules[type(mixer).__module__].compute_mup_vector(model.config)
            finally:
                torch.set_default_dtype(usual)
            mixer.mup_vector = made.to(model.device)


def widen_rotary(model: Any) -> None:
    """Make the rotary frequencies, and the scales of the embeddings, again in float64: they were rounded to float32."""
    if (rotary := rotary_of(model)) is not None:
        with DoubleWhereFloat():
            made = type(getattr(model.model, rotary))(config=model.config).to(model.device)
        setattr(model.model, rotary, made)
    _widen_multipliers(model)
    for name in ("embed_tokens", "embed_tokens_per_layer"):
        embedding: Any = getattr(model.model, name, None)
        if hasattr(embedding, "scalar_embed_scale"):
            embedding.embed_scale = torch.tensor(
                embedding.scalar_embed_scale, dtype=torch.float64, device=model.device
            )
