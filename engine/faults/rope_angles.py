"""Rotary position embedding: frequencies, positions and the angles that are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lockstep.engine.batch import Batch


def default_theta(model: ModelConfig) -> float:
    """10000 whatever the configuration states."""
    return 10000.0


def _other_theta(model: ModelConfig, tp: int) -> str | None:
    return "the model's rope_theta is 10000" if model.rope_theta == 10000 else None


def another_theta(model: ModelConfig) -> float:
    """1000000 whatever the configuration states."""
    return 1e6


def unstretched(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
    """The configuration's scaling is never read."""
    from dataclasses import replace

    from lockstep.engine.config.rope_scaling import RopeScaling
    from lockstep.engine.rules.rope import frequencies

    return frequencies(replace(model, rope_scaling=RopeScaling()), theta, length)


def without_attention_factor(model: ModelConfig, theta: float, length: int = 0) -> tuple[Tensor, float]:
    """Frequencies are stretched; the factor on cosine and sine is lost."""
    from lockstep.engine.rules.rope import frequencies

    return frequencies(model, theta, length)[0], 1.0


def positions_of_the_pass(batch: Batch) -> Tensor:
    """Each pass counts its own tokens from 0; the cache's slots are right."""
    import torch

    ranges = [torch.arange(span.stop - span.start) for span in batch.spans]
    return torch.cat(ranges).to(batch.positions.device)


def decode_positions_ahead(batch: Batch) -> Tensor:
    """Generated tokens are rotated one position too far; the cache's slots are right."""
    import torch

    ahead = [span.q_positions + (span.stop - span.start == 1) for span in batch.spans]
    return torch.cat(ahead)


def bfloat16_angles(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Positions and frequencies are rounded to bfloat16 before they are multiplied."""
    import torch

    from lockstep.engine.rules.rope import cos_sin

    return cos_sin(positions.to(torch.bfloat16), inv_freq.to(torch.bfloat16).float(), factor, dtype)


def _theta_of_a_million(model: ModelConfig, tp: int) -> str | None:
    return "the model's rope_theta is 1000000" if model.rope_theta == 1e6 else None


def _scaled(model: ModelConfig, tp: int) -> str | None:
    scaling = model.rope_scaling
    plain = scaling.kind == "none" and not scaling.factors
    return "the model's rotary embedding is not scaled" if plain else None


def _attention_factor(model: ModelConfig, tp: int) -> str | None:
    scaling = model.rope_scaling
    there = scaling.kind in ("yarn", "longrope") and (scaling.attention_factor or scaling.factor) != 1
    return None if there else "the model's rotary embedding has no attention factor"


FAULTS = (
    Fault(
        id="rope-theta-dropped",
        seam="rope_theta",
        value="10000",
        correct="config",
        title="rope_theta lost: the default 10000 is used",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="fast pairs are right, slow pairs turn too fast",
        source="lyogavin/airllm#369",
        patch={"rope_theta": default_theta},
        needs=_other_theta,
    ),
    Fault(
        id="rope-theta-of-another-model",
        seam="rope_theta",
        value="1000000",
        correct="config",
        title="another model's rope_theta: 1000000",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="fast pairs are right, slow pairs turn too slowly or too fast",
        patch={"rope_theta": another_theta},
        needs=_theta_of_a_million,
    ),
    Fault(
        id="rope-scaling-ignored",
        seam="rope_frequencies",
        value="unscaled",
        correct="config",
        title="rotary scaling never read",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="the slower pairs turn too fast",
        source="unslothai/unsloth#6197",
        patch={"rope_frequencies": unstretched},
        needs=_scaled,
    ),
    Fault(
        id="rope-attention-factor-lost",
        seam="rope_frequencies",
        value="no_attention_factor",
        correct="config",
        title="YaRN's attention factor collapsed to 1",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="q and k are too small by one factor, at the first token, too",
        source="turboderp-org/exllamav3#259",
        patch={"rope_frequencies": without_attention_factor},
        needs=_attention_factor,
    ),
    Fault(
        id="rope-restarts",
        seam="rope_positions",
        value="of_the_pass",
        correct="of_the_sequence",
        title="rotary positions ignore the cache",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        step=1,
        symptom="each pass is rotated from position 0; the slots are right",
        source="Blaizzy/mlx-vlm#1983",
        patch={"rope_positions": positions_of_the_pass},
    ),
    Fault(
        id="rope-ahead",
        seam="rope_positions",
        value="ahead_in_decode",
        correct="of_the_sequence",
        title="generated tokens rotated one too far",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        step=1,
        symptom="right among generated tokens, one too far from the prompt; the slots are right",
        patch={"rope_positions": decode_positions_ahead},
    ),
    Fault(
        id="rope-angles-low-precision",
        seam="rope_angles",
        value="bfloat16",
        correct="float32",
        title="rotary angles in bfloat16",
        group="rope",
        level="step",
        first_tap="layers.*.attn.q_rope",
        symptom="a small error that grows with the position; beyond 256 neighbours share their angles",
        source="huggingface/candle#3520",
        patch={"rope_angles": bfloat16_angles},
    ),
)
