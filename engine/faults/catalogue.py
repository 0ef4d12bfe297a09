"""All known faults, and what their names and values mean. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.config import ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.faults import (
    bias,
    cache,
    clip,
    experts,
    grouped_query,
    indexer,
    latent,
    layer_rope,
    linear_attention,
    llama4,
    lm_head,
    mamba,
    mask,
    mlp,
    multipliers,
    names,
    norm,
    per_layer,
    quantisation,
    rope,
    rope_angles,
    scores,
    sharding,
    short_convolution,
    side_by_side,
    sinks,
    stream,
    xielu,
)
from lockstep.engine.faults.fault import Fault
from lockstep.engine.text import did_you_mean, printable

#: In the order in which toggles are listed.
FAULTS: tuple[Fault, ...] = (
    *mask.FAULTS,
    *bias.FAULTS,
    *rope.FAULTS,
    *rope_angles.FAULTS,
    *layer_rope.FAULTS,
    *cache.FAULTS,
    *grouped_query.FAULTS,
    *scores.FAULTS,
    *latent.FAULTS,
    *indexer.FAULTS,
    *sinks.FAULTS,
    *linear_attention.FAULTS,
    *sharding.FAULTS,
    *norm.FAULTS,
    *mlp.FAULTS,
    *xielu.FAULTS,
    *clip.FAULTS,
    *side_by_side.FAULTS,
    *short_convolution.FAULTS,
    *mamba.FAULTS,
    *experts.FAULTS,
    *lm_head.FAULTS,
    *names.FAULTS,
    *stream.FAULTS,
    *multipliers.FAULTS,
    *per_layer.FAULTS,
    *llama4.FAULTS,
    *quantisation.FAULTS,
)

#: Seam -> its correct value.
DEFAULTS: Mapping[str, str] = {fault.seam: fault.correct for fault in FAULTS}

_BY_SEAM = {(fault.seam, fault.value): fault for fault in FAULTS}


def faults_of(rules: Mapping[str, str]) -> list[Fault]:
    """The faults that `rules` (name -> value) switch on, in the catalogue's order.

    ConfigError for an unknown name, with the nearest that exist, or for an unknown value of one.
    """
    found = []
    for name, value in rules.items():
        if name not in DEFAULTS:
            raise ConfigError(_unknown(name))
        if value == DEFAULTS[name]:
            continue
        if (name, value) not in _BY_SEAM:
            known = [DEFAULTS[name], *(f.value for f in FAULTS if f.seam == name)]
            raise ConfigError(f"fault {name} has no value {value!r}: use one of {', '.join(known)}")
        found.append(_BY_SEAM[name, value])
    return sorted(found, key=FAULTS.index)


def _unknown(name: str) -> str:
    everything = f"`lockstep faults` lists all {len(DEFAULTS)}"
    nearest = did_you_mean(name, DEFAULTS, "")
    advice = f"{nearest} {everything}" if nearest else everything
    return f"there is no fault {printable(name, 60)!r}: {advice}"


def check_faults(rules: Mapping[str, str], model: ModelConfig, tp: int) -> list[Fault]:
    """The faults of `rules`, each of which can act on this model; ConfigError states why one cannot."""
    faults = faults_of(rules)
    for fault in faults:
        reason = fault.needs(model, tp)
        if reason is not None:
            raise ConfigError(f"{fault.seam}={fault.value} cannot act here: {reason}")
    return faults


def parse_fault(text: str) -> tuple[str, str]:
    """ "NAME=VALUE" -> (name, value), checked against the catalogue."""
    name, equals, value = text.partition("=")
    if not equals:
        example = next((f"{name}={fault.value}" for fault in FAULTS if fault.seam == name), "load_bias=false")
        raise ConfigError(f"a fault is NAME=VALUE, not {printable(text, 60)!r}: for example {example}")
    faults_of({name: value})
    return name, value
