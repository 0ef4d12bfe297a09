"""The output head: what fills it."""

from __future__ import annotations

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault


def unfilled_head(model: ModelConfig) -> str | None:
    """No tensor fills the head."""
    return None


def embedding_as_head(model: ModelConfig) -> str | None:
    """The head is tied though the checkpoint has one of its own."""
    return "model.embed_tokens.weight"


def _untied(model: ModelConfig, tp: int) -> str | None:
    return "the model's head is the embedding" if model.tie_embeddings else None


FAULTS = (
    Fault(
        id="head-missing",
        seam="lm_head",
        value="missing",
        correct="config",
        title="output head left at its initial values",
        group="loading",
        level="load",
        first_tap="logits",
        symptom="everything up to the final norm is right, the logits are noise",
        patch={"lm_head": unfilled_head},
    ),
    Fault(
        id="head-tied",
        seam="lm_head",
        value="embedding",
        correct="config",
        title="the embedding used for a head that is not tied",
        group="loading",
        level="load",
        first_tap="logits",
        symptom="everything up to the final norm is right, the logits are those of the embedding",
        source="pegainfer-project/pegainfer#544",
        patch={"lm_head": embedding_as_head},
        needs=_untied,
    ),
)
