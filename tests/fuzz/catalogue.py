"""All kinds of tries of `make fuzz`."""

from __future__ import annotations

from tests.fuzz import tries
from tests.soak.trial import Trial

TRIALS = (
    Trial(
        "check", "`check` of a random model: family, sizes, rotation, windows, biases, dtype, tp, ep, prompts",
        "it matches transformers, with taps and without", tries.check_model, 120, seconds=300,
    ),
    Trial(
        "config", "a random config.json read by the engine and by transformers",
        "the same parameters, shapes, windows and constants", tries.config_parity, 1400, quick=20,
    ),
    Trial(
        "sampling", f"{tries.DRAWS} draws from random logits under random temperature, top-k and top-p",
        "no token that cannot be, and the exact distribution (chi-squared within 5 standard deviations)",
        tries.sampling, 100, quick=3,
    ),
)  # fmt: skip
