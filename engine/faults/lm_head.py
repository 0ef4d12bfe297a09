"""The output head: what fills it."""

from __future__ import annotations

from engine.config import ModelConfig
from engine.faults.fault import Fault


def unfilled_head(model: ModelConfig) -> str | None:
    """No tensor fills the head."""
    return None


FAULTS = (
    Fault(
        id="head-missing",
        rule="lm_head",
        value="missing",
        correct="config",
        title="output head left at its initial values",
        group="loading",
        level="load",
        first_tap="logits",
        symptom="everything up to the final norm is right, the logits are noise",
        patch={"lm_head": unfilled_head},
    ),
)
