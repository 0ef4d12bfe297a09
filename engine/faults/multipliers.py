"""Numbers that only some families have: multipliers of the stream, divisors and soft caps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor


def unscaled_rows(rows: Tensor, model: ModelConfig) -> Tensor:
    """The embedding's rows go on as they are."""
    return rows


def scaled_rows(rows: Tensor, model: ModelConfig) -> Tensor:
    """Embeddings are multiplied by the root of the width, as Gemma's are."""
    return rows * math.sqrt(model.hidden_size)


def _scaled(model: ModelConfig, tp: int) -> str | None:
    return None if model.embedding_multiplier != 1 else "the model's embeddings have no multiplier"


def _not_by_width(model: ModelConfig, tp: int) -> str | None:
    same = math.isclose(model.embedding_multiplier, math.sqrt(model.hidden_size), rel_tol=1e-6)
    return "the model's embeddings are scaled so" if same else None


def uncapped(x: Tensor, cap: float) -> Tensor:
    """Scores and logits go on as they are."""
    return x


def _score_cap(model: ModelConfig, tp: int) -> str | None:
    return None if model.score_cap else "the model's scores have no soft cap"


def raw_logits(logits: Tensor, model: ModelConfig) -> Tensor:
    """What the product gives is taken for the logits."""
    return logits


def _changed_logits(model: ModelConfig, tp: int) -> str | None:
    changed = model.logit_cap or model.logit_divisor != 1
    return None if changed else "the model's logits are those of the product"


def factor_of_one(model: ModelConfig) -> float:
    """What a block adds to the stream is added as it is."""
    return 1.0


def _residual_multiplier(model: ModelConfig, tp: int) -> str | None:
    return None if model.residual_multiplier != 1 else "the model's blocks have no multiplier"


FAULTS = (
    Fault(
        id="embedding-scaled",
        seam="embedding",
        value="scaled",
        correct="rows",
        title="embeddings scaled by the root of the width",
        group="loading",
        level="step",
        first_tap="embed",
        symptom="every embedding is too large by one factor",
        patch={"embedding": scaled_rows},
        needs=_not_by_width,
    ),
    Fault(
        id="embedding-unscaled",
        seam="embedding",
        value="unscaled",
        correct="rows",
        title="the multiplier of the embeddings left out",
        group="loading",
        level="step",
        first_tap="embed",
        symptom="every embedding is too small by one factor; norms hide it, sums do not",
        patch={"embedding": unscaled_rows},
        needs=_scaled,
    ),
    Fault(
        id="soft-cap-missing",
        seam="soft_cap",
        value="missing",
        correct="tanh",
        title="scores without their soft cap",
        group="attention",
        level="step",
        first_tap="layers.*.attn.scores",
        symptom="large scores are larger than they should be: attention is too sharp",
        patch={"soft_cap": uncapped},
        needs=_score_cap,
    ),
    Fault(
        id="logits-raw",
        seam="logits",
        value="raw",
        correct="config",
        title="logits neither divided nor capped",
        group="loading",
        level="step",
        first_tap="logits",
        symptom="the same token is the likeliest, every probability is another",
        patch={"logits": raw_logits},
        needs=_changed_logits,
    ),
    Fault(
        id="residual-multiplier-missing",
        seam="residual_factor",
        value="one",
        correct="config",
        title="the multiplier of the blocks' outputs left out",
        group="loading",
        level="step",
        first_tap="layers.*.attn_residual",
        symptom="the stream grows faster than it should, layer by layer",
        patch={"residual_factor": factor_of_one},
        needs=_residual_multiplier,
    ),
)
