"""By which frequencies an engine may turn instead: another base, exponent, scaling of the context, length, unit.

A frequency is theta ** -exponent, stretched as the configuration states (`rope_frequencies`): each of these is a node
with its alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.rotary import Lengths, frequencies, magnitude
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.judgements.cause import numbers_in_words

#: Bases that models really have.
KNOWN_BASES = (
    *(1e4, 5e5, 1e6, 1e5, 1e3, 2e4, 4e4, 8e4, 1.5e5, 2e5),
    *(2.5e5, 3e5, 2e6, 5e6, 8e6, 1e7, 5e7, 1e8, 1e9),
)
#: Factors by which contexts are stretched.
KNOWN_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 3.0, 6.0, 10.0, 40.0)
#: Units of angles in each other's place: (factor, in words).
_UNITS = (
    (2 * math.pi, "2 pi: a cycle is taken for a radian"),
    (math.pi / 180, "pi/180: radians are taken for degrees"),
    (180 / math.pi, "180/pi: degrees are taken for radians"),
)


@dataclass(frozen=True, slots=True)
class FrequencyRule:
    """Frequencies [N or 1, 1, P] by a rule, with the attention factor that belongs to them; `name` of the cause,
    `fitted` its numbers, of which `parameters` were solved for."""

    name: str
    text: str
    values: Array
    factor: float
    fitted: Mapping[str, object]
    parameters: int = 0


def frequency_rules(model: ModelConfig, rows: Sequence[Row], lengths: Lengths) -> Iterator[FrequencyRule]:
    """Every one of a fixed list."""
    yield from _other_lengths(model, rows)
    yield from _scalings(model, lengths)
    for base in KNOWN_BASES:
        if not math.isclose(base, model.rope_theta, rel_tol=1e-6):
            yield from with_base(model, lengths, base)
    yield from _exponents(model, lengths)
    own = frequencies(model, lengths)
    text = "the frequencies are applied in reverse order: the first pair turns slowest"
    yield FrequencyRule("rope_frequencies_reversed", text, own[..., ::-1], magnitude(model), {})


def rules_of_other_layers(
    whole: ModelConfig, model: ModelConfig, lengths: Lengths
) -> Iterator[FrequencyRule]:
    """The base and the scaling of layers of another type in the place of the layer's own, both of them or one. `whole`
    is the model, `model` that of the layer, with heads of the channels that rotate."""
    own, others = (model.rope_theta, model.rope_scaling), dict[tuple[float, RopeScaling], list[int]]()
    for layer in range(whole.num_layers):
        other = whole.of_layer(layer)
        if other.rotary_dim and (rope := (other.rope_theta, other.rope_scaling)) != own:
            others.setdefault(rope, []).append(layer)
    for (theta, scaling), layers in others.items():
        whose = f"layer{'s' * (len(layers) > 1)} {numbers_in_words(layers)}"
        ways = {
            (theta, scaling): "the rotation is that of {}: ",
            (theta, own[1]): "theta is that of {}: ",
            (own[0], scaling): "the scaling of the frequencies is that of {}: ",
        }
        for rope, words in ways.items():
            if rope == own or rope == (own[0], RopeScaling()):  # a scaling left out is another rule
                continue
            text = f"{words.format(whose)}{_in_words(*rope)} instead of {_in_words(*own)}"
            values = frequencies(model, lengths, *rope)
            fitted = {"theta": rope[0], "scaling": rope[1].kind, "factor": rope[1].factor, "layers": layers}
            yield FrequencyRule("rope_of_other_layers", text, values, magnitude(model, rope[1]), fitted)


def _in_words(theta: float, scaling: RopeScaling) -> str:
    stretched = "" if scaling.kind == "none" else f" and {scaling.kind} scaling by {scaling.factor:g}"
    return f"theta {theta:g}{stretched}"


def with_base(
    model: ModelConfig, lengths: Lengths, base: float, parameters: int = 0
) -> Iterator[FrequencyRule]:
    """Another theta, with the model's scaling and without."""
    for scaling in dict.fromkeys((model.rope_scaling, RopeScaling())):
        text = f"rope_theta is {base:.6g} instead of {model.rope_theta:g}"
        if scaling != model.rope_scaling:
            text += " and the scaling of the frequencies is not applied"
        values = frequencies(model, lengths, base, scaling)
        fitted = {"theta": base, "expected": model.rope_theta}
        yield FrequencyRule("rope_theta", text, values, magnitude(model), fitted, parameters)


def _exponents(model: ModelConfig, lengths: Lengths) -> Iterator[FrequencyRule]:
    """The right base to other exponents than 2i / head_dim."""
    size, pair = model.head_dim, np.arange(model.head_dim // 2)
    exponents = {
        "2i over half of head_dim": 4 * pair / size,
        "2i over twice head_dim": pair / size,
        "2i over a quarter of head_dim": 8 * pair / size,
        "2i over four times head_dim": pair / (2 * size),
        "2i over hidden_size": 2 * pair / model.hidden_size,
        "2i over hidden_size / heads, not head_dim": 2 * pair * model.num_heads / model.hidden_size,
        "i over the number of pairs less one (linspace with its end)": pair / max(size // 2 - 1, 1),
        "2(i + 1) over head_dim": 2 * (pair + 1) / size,
    }
    right = 2 * pair / size
    for words, exponent in exponents.items():
        if np.allclose(exponent, right):
            continue
        stretched = frequencies(model, lengths) * model.rope_theta ** (right - exponent)
        text = f"the exponents of the frequencies are {words}"
        yield FrequencyRule("rope_dimension", text, stretched, magnitude(model), {"exponent": words})


def _scalings(model: ModelConfig, lengths: Lengths) -> Iterator[FrequencyRule]:
    """The context stretched otherwise than the configuration states: not at all, by another kind, by other numbers."""
    own = model.rope_scaling

    def rule(text: str, values: Array, attention_factor: float, **fitted: object) -> FrequencyRule:
        return FrequencyRule("rope_scaling", text, values, attention_factor, fitted)

    if own.kind != "none":
        text = f"the {own.kind} scaling of the frequencies is not applied"
        plain = frequencies(model, lengths, scaling=RopeScaling())
        yield rule(text, plain, magnitude(model), scaling="none")
        text = f"the {own.kind} scaling is applied to frequencies that are scaled already"
        twice = frequencies(model, lengths) ** 2 / plain
        yield rule(text, twice, magnitude(model), scaling="twice")
    for text, scaling in (*_other_numbers(own, model), *_other_kinds(own, model)):
        values = frequencies(model, lengths, scaling=scaling)
        yield rule(text, values, magnitude(model, scaling), scaling=scaling.kind, factor=scaling.factor)
    if own.kind == "yarn" and model.rope_theta != 1e4:
        ramp = frequencies(model, lengths, 1e4) / frequencies(model, lengths, 1e4, RopeScaling())
        text = "YaRN's ramp between pairs is placed with the default base 10000"
        values = frequencies(model, lengths, scaling=RopeScaling()) * ramp
        yield rule(text, values, magnitude(model), ramp_base=1e4)
    if own.kind in ("yarn", "llama3"):
        text = f"the {own.kind} scaling stretches the pairs that it should leave, and leaves the others"
        plain = frequencies(model, lengths, scaling=RopeScaling())
        values = plain * (1 + 1 / own.factor) - frequencies(model, lengths)
        yield rule(text, values, magnitude(model), scaling="turned round")
    for factor in sorted({own.factor, *KNOWN_FACTORS} - {1.0}):
        base = model.rope_theta * factor ** (model.head_dim / max(model.head_dim - 2, 1))
        text = f"the base is raised for a context {factor:g} times as long (NTK scaling)"
        yield rule(text, frequencies(model, lengths, base, RopeScaling()), 1.0, scaling="ntk", factor=factor)


#: Fields of a scaling that are taken for each other: (kind, one, other, in words).
_EXCHANGED = (
    ("longrope", "factors", "long_factors", "longrope scaling's short_factor and long_factor"),
    (
        "llama3",
        "low_freq_factor",
        "high_freq_factor",
        "llama3 scaling's low_freq_factor and high_freq_factor",
    ),
    ("yarn", "beta_fast", "beta_slow", "YaRN scaling's beta_fast and beta_slow"),
)


def _other_numbers(own: RopeScaling, model: ModelConfig) -> Iterator[tuple[str, RopeScaling]]:
    """The configuration's scaling with another number in one of its fields."""
    if own.kind != "none":
        for factor in KNOWN_FACTORS:
            if factor != own.factor:
                text = f"the {own.kind} scaling has the factor {factor:g} instead of {own.factor:g}"
                yield text, replace(own, factor=factor)
    for kind, one, other, words in _EXCHANGED:
        if own.kind == kind:
            swapped = {one: getattr(own, other), other: getattr(own, one)}
            yield f"the {words} are exchanged", replace(own, **swapped)
    if own.kind == "yarn":
        text = "YaRN's ramp between pairs is not rounded as configured (truncate)"
        yield text, replace(own, truncate=not own.truncate)
    lengths = {2048, 4096, 8192, 32768, model.max_position} - {own.original_max_position}
    for length in sorted(lengths) if own.kind in ("llama3", "yarn") else ():
        text = f"the {own.kind} scaling takes {length} for the original context instead of {own.original_max_position}"
        yield text, replace(own, original_max_position=length)


def _other_kinds(own: RopeScaling, model: ModelConfig) -> Iterator[tuple[str, RopeScaling]]:
    instead = "" if own.kind == "none" else f" instead of {own.kind}"
    for factor in dict.fromkeys((own.factor, *KNOWN_FACTORS)):
        if factor == 1.0:
            continue
        if own.kind != "linear":
            text = f"frequencies are divided by {factor:g} (linear scaling){instead}"
            yield text, RopeScaling("linear", factor)
        text = (
            f"frequencies are multiplied by {factor:g}, not divided, as if linear scaling were turned round"
        )
        yield text, RopeScaling("linear", 1 / factor)
    for times, words in _UNITS:
        yield f"angles are multiplied by {words}", RopeScaling("linear", 1 / times)
    for length in sorted({8192, model.max_position}) if own.kind != "llama3" else ():
        yield "llama3 scaling is applied, which the model has not", RopeScaling("llama3", 8.0, length)
    for length in sorted({32768, model.max_position}) if own.kind != "yarn" else ():
        for factor in KNOWN_FACTORS[:3]:
            text = f"YaRN scaling by {factor:g} is applied, which the model has not"
            yield text, RopeScaling("yarn", factor, length)


def _other_lengths(model: ModelConfig, rows: Sequence[Row]) -> Iterator[FrequencyRule]:
    """Frequencies that depend on a sequence's length, by another than its own so far."""
    if not model.rope_scaling.by_length:
        return
    first: dict[int, int] = {}
    longest: dict[int, int] = {}
    for row in rows:
        first.setdefault(row.seq, row.length)
        longest[row.step] = max(longest.get(row.step, 0), row.length)
    trained = model.rope_scaling.original_max_position or model.max_position
    ways: dict[str, tuple[str, list[int]]] = {
        "trained": (
            "are those of the trained context throughout, also where a sequence outgrows it",
            [0 for _ in rows],
        ),
        "prompt": (
            "stay those of the prompt's length when the sequence outgrows the trained context",
            [first[row.seq] for row in rows],
        ),
        "batch": (
            "are chosen by the longest sequence of the batch, not by each one's own length",
            [longest[row.step] for row in rows],
        ),
        "position": ("are chosen by each token's own position", [row.position + 1 for row in rows]),
    }
    if model.rope_scaling.kind == "longrope":
        words, always = "are those of the long context throughout, also in short sequences", trained + 1
        if all(length > trained for length in ways["batch"][1]):
            words += ", or chosen by the longest sequence of the batch: all steps here have a long one"
            del ways["batch"]
        ways["long"] = (words, [always for _ in rows])
    for name, (words, lengths) in ways.items():
        values = frequencies(model, np.array(lengths, dtype=np.int64))
        text = f"the {model.rope_scaling.kind} frequencies {words}"
        yield FrequencyRule("rope_length", text, values, magnitude(model), {"length": name})


def pairs_in_words(pairs: Sequence[int], of: int) -> str:
    """Which pairs, of how many."""
    chosen = list(pairs)
    if not chosen:
        return "no pair"
    if len(chosen) == of:
        return "all pairs"
    if chosen == list(range(chosen[0], chosen[-1] + 1)):
        return (
            f"pairs {chosen[0]} to {chosen[-1]} of {of}" if len(chosen) > 1 else f"pair {chosen[0]} of {of}"
        )
    if len(chosen) > 2 and set(np.diff(chosen)) == {2} and len(chosen) >= of // 2:
        return f"the {('even', 'odd')[chosen[0] % 2]} pairs of {of}"
    return f"pairs {', '.join(map(str, chosen[:8]))}{', …' if len(chosen) > 8 else ''} of {of}"
