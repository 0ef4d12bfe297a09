"""By which frequencies q and k were rotated: the base, the stretching of the context, or each pair's own.

All fits take x and `seen` [N, heads, D] and the right positions [N]: an angle is proportional to the position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_scaling import RopeScaling
from lockstep.workbench.diagnosis.operations.recorded import Row
from lockstep.workbench.diagnosis.operations.rotary import Lengths, frequencies, magnitude
from lockstep.workbench.diagnosis.operations.rotary_forms import Complex, complex_pairs
from lockstep.workbench.diagnosis.recording import Array

#: Bases that models really have.
KNOWN_BASES = (
    1e4,
    5e5,
    1e6,
    1e5,
    1e3,
    2e4,
    4e4,
    8e4,
    1.5e5,
    2e5,
    2.5e5,
    3e5,
    2e6,
    5e6,
    8e6,
    1e7,
    5e7,
    1e8,
    1e9,
)
#: Factors by which contexts are stretched.
KNOWN_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 3.0, 6.0, 10.0, 40.0)
#: Units of angles in each other's place: (factor, in words).
_UNITS = (
    (2 * math.pi, "2 pi: a cycle is taken for a radian"),
    (math.pi / 180, "pi/180: radians are taken for degrees"),
    (180 / math.pi, "180/pi: degrees are taken for radians"),
)
#: Tokens that a fit looks at, and those that it begins with.
_TOKENS, _FEW = 64, 8


@dataclass(frozen=True, slots=True)
class Turns:
    """How far each pair of each token turned, summed over the heads: `both` [N, P], at positions [N], in sequences of
    lengths [N]."""

    both: Complex
    positions: Array
    lengths: Lengths

    @classmethod
    def of(cls, x: Array, seen: Array, positions: Array, lengths: Lengths) -> Turns:
        """Of the tokens beyond position 0, those at small positions first."""
        there = np.flatnonzero(positions != 0)
        there = there[np.argsort(np.abs(positions[there]), kind="stable")][:_TOKENS]
        both = (complex_pairs(seen[there]) * complex_pairs(x[there]).conj()).sum(1)
        return cls(np.asarray(both), positions[there].astype(np.float64), lengths[there])

    def match(self, frequencies: Array) -> float:
        """How well these frequencies [N or 1, 1, P] explain the turns, 1 at best."""
        turned = np.exp(-1j * self.positions[:, None] * frequencies[:, 0])
        return float((self.both * turned).real.sum() / max(np.abs(self.both).sum(), np.finfo(float).tiny))


def fit_base(turns: Turns, of: Callable[[float, Lengths], Array]) -> float | None:
    """The base whose frequencies `of(base, lengths)` explain the turns best; a known one where it does so as well."""
    if not len(turns.positions):
        return None
    low, high = math.log(10.0), math.log(1e9)
    coarse = Turns(turns.both[:_FEW], turns.positions[:_FEW], turns.lengths[:_FEW])
    points = int(np.clip(4 * np.abs(coarse.positions).max() * (high - low), 400, 8000))
    grid = np.linspace(low, high, points)
    best = float(grid[np.argmax([coarse.match(of(math.exp(value), coarse.lengths)) for value in grid])])
    width = float(grid[1] - grid[0])
    for _ in range(16):
        around = best + width * np.linspace(-1, 1, 9)
        best = float(around[np.argmax([turns.match(of(math.exp(value), turns.lengths)) for value in around])])
        width /= 3
    left = _left(turns.match(of(math.exp(best), turns.lengths)))
    near = [base for base in KNOWN_BASES if abs(math.log(base) - best) < 0.05]
    for base in near:
        if _left(turns.match(of(base, turns.lengths))) <= 1.5 * left + 1e-7:
            return base
    return math.exp(best)


def _left(match: float) -> float:
    return math.sqrt(max(2 * (1 - match), 0.0))


def fit_pairs(turns: Turns, fastest: float) -> Array:
    """Each pair's own frequency [P], up to 1.5 times the `fastest` of the right ones or half a turn a position: beyond
    that, whole positions do not tell one from another."""
    reach, top = float(np.abs(turns.positions).max()), max(1.5 * fastest, math.pi)
    grid = np.linspace(0, top, int(np.clip(4 * reach * top, 64, 20_000)))
    waves = np.exp(-1j * grid[:, None] * turns.positions)  # [G, N]
    found = grid[np.argmax((waves @ turns.both).real, axis=0)]  # [P]
    width = float(grid[1] - grid[0])
    for _ in range(14):
        around = found[None, :] + width * np.linspace(-1, 1, 9)[:, None]  # [9, P]
        turned = np.exp(-1j * around[:, None, :] * turns.positions[None, :, None])
        scores = (turns.both[None] * turned).real.sum(1)
        found = np.take_along_axis(around, scores.argmax(0)[None], 0)[0]
        width /= 3
    return np.asarray(found)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Other frequencies [N or 1, 1, P] than the model's, with the attention factor that belongs to them."""

    text: str
    frequencies: Array
    factor: float
    fitted: dict[str, object]


def stretches(model: ModelConfig, lengths: Lengths) -> Iterator[Stretch]:
    """The context of sequences of `lengths` [N] stretched otherwise than the configuration says: not at all, by another
    kind, with other numbers."""
    own, plain = model.rope_scaling, RopeScaling()
    if own.kind != "none":
        text = f"the {own.kind} scaling of the frequencies is not applied"
        yield Stretch(text, frequencies(model, lengths, scaling=plain), magnitude(model), {"scaling": "none"})
    for text, scaling in _scalings(own, model):
        fitted: dict[str, object] = {"scaling": scaling.kind, "factor": scaling.factor}
        yield Stretch(text, frequencies(model, lengths, scaling=scaling), magnitude(model, scaling), fitted)
    if own.kind == "yarn" and model.rope_theta != 1e4:
        ramp = frequencies(model, lengths, 1e4) / frequencies(model, lengths, 1e4, plain)
        text = "YaRN's ramp between pairs is placed with the default base 10000"
        yield Stretch(
            text, frequencies(model, lengths, scaling=plain) * ramp, magnitude(model), {"ramp_base": 1e4}
        )
    for factor in {own.factor, *KNOWN_FACTORS} - {1.0}:
        base = model.rope_theta * factor ** (model.head_dim / max(model.head_dim - 2, 1))
        text = f"the base is raised for a context {factor:g} times as long (NTK scaling)"
        yield Stretch(
            text, frequencies(model, lengths, base, plain), 1.0, {"scaling": "ntk", "factor": factor}
        )


def other_lengths(model: ModelConfig, rows: Sequence[Row]) -> Iterator[tuple[str, str, Lengths]]:
    """Lengths [N] by which an engine may choose the frequencies that change with a sequence's length, instead of
    its own so far: (name, words, lengths)."""
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
        ways["long"] = (
            "are those of the long context throughout, also in short sequences",
            [trained + 1 for _ in rows],
        )
    for name, (words, lengths) in ways.items():
        yield name, f"the {model.rope_scaling.kind} frequencies {words}", np.array(lengths, dtype=np.int64)


def _scalings(own: RopeScaling, model: ModelConfig) -> Iterator[tuple[str, RopeScaling]]:
    for factor in dict.fromkeys((own.factor, *KNOWN_FACTORS)):
        if own.kind != "none" and factor not in (own.factor, 1.0):
            yield (
                f"the {own.kind} scaling has the factor {factor:g} instead of {own.factor:g}",
                replace(own, factor=factor),
            )
        if own.kind != "linear" and factor != 1.0:
            instead = "" if own.kind == "none" else f" instead of {own.kind}"
            yield (
                f"frequencies are divided by {factor:g} (linear scaling){instead}",
                RopeScaling("linear", factor),
            )
        if factor != 1.0:
            text = f"frequencies are multiplied by {factor:g}, not divided, as if linear scaling were turned round"
            yield text, RopeScaling("linear", 1 / factor)
    for times, words in _UNITS:
        yield f"angles are multiplied by {words}", RopeScaling("linear", 1 / times)
    if own.kind == "longrope":
        exchanged = replace(own, factors=own.long_factors, long_factors=own.factors)
        yield "the longrope scaling's short_factor and long_factor are exchanged", exchanged
    if own.kind == "llama3":
        exchanged = replace(own, low_freq_factor=own.high_freq_factor, high_freq_factor=own.low_freq_factor)
        yield "the llama3 scaling's low_freq_factor and high_freq_factor are exchanged", exchanged
    if own.kind == "yarn":
        yield (
            "the YaRN scaling's beta_fast and beta_slow are exchanged",
            replace(own, beta_fast=own.beta_slow, beta_slow=own.beta_fast),
        )
        yield (
            "YaRN's ramp between pairs is not rounded as configured (truncate)",
            replace(own, truncate=not own.truncate),
        )
    lengths = {2048, 4096, 8192, 32768, model.max_position} - {own.original_max_position}
    for length in sorted(lengths) if own.kind in ("llama3", "yarn") else ():
        text = f"the {own.kind} scaling takes {length} for the original context instead of {own.original_max_position}"
        yield text, replace(own, original_max_position=length)
    if own.kind != "llama3":
        for length in (8192, model.max_position):
            yield "llama3 scaling is applied, which the model has not", RopeScaling("llama3", 8.0, length)
    if own.kind != "yarn":
        for factor in KNOWN_FACTORS[:3]:
            for length in (32768, model.max_position):
                yield (
                    f"YaRN scaling by {factor:g} is applied, which the model has not",
                    RopeScaling("yarn", factor, length),
                )


def in_words(pairs: Sequence[int], of: int) -> str:
    """Which pairs, of how many."""
    chosen = list(pairs)
    if not chosen:
        return "no pair"
    if chosen == list(range(chosen[0], chosen[-1] + 1)):
        if len(chosen) == of:
            return "all pairs"
        return (
            f"pairs {chosen[0]} to {chosen[-1]} of {of}" if len(chosen) > 1 else f"pair {chosen[0]} of {of}"
        )
    if len(set(np.diff(chosen))) == 1 and len(chosen) > 2:
        kind = (
            ("even", "odd")[chosen[0] % 2]
            if chosen[1] - chosen[0] == 2
            else f"every {chosen[1] - chosen[0]}th"
        )
        return f"the {kind} pairs" if len(chosen) >= of // 2 else f"{kind} pairs {chosen[0]} to {chosen[-1]}"
    return f"{len(chosen)} of {of} pairs"
