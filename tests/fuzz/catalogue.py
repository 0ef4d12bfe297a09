"""All kinds of tries of `make fuzz`."""

from __future__ import annotations

from functools import partial

from tests.fuzz import tries
from tests.soak.trial import Trial

_RIGHT = "it matches transformers, with taps and without"


def _check(kind: str, drawn: str) -> Trial:
    return Trial(kind, f"`check` of {drawn}", _RIGHT, partial(tries.check_model, kind), 60, seconds=1200)


TRIALS = (
    _check("dense", "a random model: family, sizes, rotation, windows, biases, norms, dtype, tp, prompts"),
    _check("experts", "one with experts: routing, groups, shared and first dense layers, ep as well"),
    _check("latents", "one with latent attention: ranks, rotated parts, indexers, experts"),
    _check("states", "one whose layers keep a state: convolutions, Mamba-2, delta rule, attention between"),
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
