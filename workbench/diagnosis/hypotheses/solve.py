"""Numbers that an edit leaves open, solved for: those with which it comes nearest to what was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.engine.graph.formula import Node
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, node_at, together
from lockstep.workbench.diagnosis.hypotheses.fits import simple
from lockstep.workbench.diagnosis.hypotheses.trial import Tried
from lockstep.workbench.diagnosis.recording import Array

#: Steps of a line search, rounds of it over several numbers, and Gauss-Newton steps.
_LINE, _ROUNDS, _NEWTON = 24, 2, 4
_GOLDEN = (math.sqrt(5) - 1) / 2
#: A rounder number stands for a solved one if it leaves no more than so many times as much;
_AS_GOOD = 1.5
#: or no more than this share of the noise.
_OF_NOISE = 0.5
#: Starts of functions whose number is one of its own.
_STARTS: Mapping[str, Sequence[float]] = {
    "scaled": (1.0,),
    "plus": (0.0,),
    "swish": (0.5, 0.8, 1.3, 1.7, 3.0),
    "capped": (0.5, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 300.0, 1000.0),
    "leaky": (0.0, 0.01, 0.1, 0.3),
}
#: Of numbers without a function, as epsilons.
_POWERS = tuple(10.0**power for power in range(-12, 3))
#: No number is looked for more closely that leaves more than this share of the error at all of its starts.
_HOPELESS = 0.95
#: Numbers that need no fitting: everybody writes them.
_PLAIN = (0.0, 1.0, -1.0, 2.0, 0.5)
#: Digits of a number beyond which it counts as two.
_DIGITS = 3
#: Factors of a limit that is solved for again beside another edit.
_AROUND = (0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """Edits with their numbers, and what they leave of the sample (`left`: the share of the error's norm). `fitted`
    counts the numbers that were solved for and are not round. `open` are the edits before, `numbers` what they got."""

    edits: tuple[Edit, ...]
    left: float
    rest: Array
    fitted: int = 0
    open: tuple[Edit, ...] = ()
    numbers: tuple[float, ...] = ()

    @property
    def cost(self) -> int:
        """The length of the hypothesis: edits beyond the first, and fitted numbers."""
        return len(self.edits) - 1 + self.fitted


def solve(
    tried: Tried, edits: Sequence[Edit], near: Sequence[float] = (), enough: float = math.inf
) -> Solved | None:
    """The edits with the numbers that fit best; None where their formula has no such shape. `near`: of each open number
    a value to begin at, where one is known; there they have to leave less than `enough` to be looked for further."""
    edits = tuple(edits)
    names = [f"?{i}" for i in range(sum(one.free for one in edits))]
    tree = together(_numbered(edits, names), tried.formula)
    if not names:
        rest = tried.rest(tree, {})
        return None if rest is None else Solved(edits, _share(tried, rest), rest, open=edits)
    line = _Line(tried, tree, names)
    starts: list[Sequence[float]] = [tuple(one * by for by in _AROUND) for one in near]
    if near and not line.left(line.newton(line.coarse(near, starts))) < enough:
        return None
    starts = starts or [_starts(tried, one) for one in edits for _ in range(one.free)]
    found = line.solved(starts)
    if found is None:
        return None
    numbers = line.rounded(found)
    rest = line.rest(numbers)
    if rest is None:
        return None
    return Solved(
        _numbered(edits, numbers),
        _share(tried, rest),
        rest,
        _fitted(edits, numbers),
        edits,
        tuple(numbers),
    )


def _share(tried: Tried, rest: Array) -> float:
    return float(np.linalg.norm(rest)) / tried.error if tried.error > 0 else math.inf


def _numbered(edits: Sequence[Edit], numbers: Sequence[str | float]) -> tuple[Edit, ...]:
    left = list(numbers)
    return tuple(one.with_numbers([left.pop(0) for _ in range(one.free)]) for one in edits)


def _starts(tried: Tried, edit: Edit) -> Sequence[float]:
    """Where to look for an edit's number: of limits among the sizes of what is cut off."""
    if edit.kind == "number":
        return _POWERS
    name = str(edit.detail[0])
    if name in _STARTS:
        return _STARTS[name]
    path = edit.place
    value = tried.value(Node(path) if isinstance(path, str) else node_at(tried.formula, path))
    if value is None or not value.size:
        return (1.0,)
    sizes = value if name in ("clamped_above", "clamped_below") else np.abs(value)
    return tuple(dict.fromkeys(np.nanquantile(sizes, np.linspace(0.02, 0.999, 12)).tolist()))


@dataclass(slots=True)
class _Line:
    """The search for the numbers of one tree."""

    tried: Tried
    tree: Node
    names: Sequence[str]

    def rest(self, numbers: Sequence[float]) -> Array | None:
        return self.tried.rest(self.tree, dict(zip(self.names, numbers, strict=True)))

    def left(self, numbers: Sequence[float]) -> float:
        rest = self.rest(numbers)
        return math.inf if rest is None else _share(self.tried, rest)

    def coarse(self, numbers: Sequence[float], starts: Sequence[Sequence[float]]) -> list[float]:
        """Each number in turn as the best of its starts."""
        for i, values in enumerate(starts):
            numbers = min(([*numbers[:i], one, *numbers[i + 1 :]] for one in values), key=self.left)
        return list(numbers)

    def solved(self, starts: Sequence[Sequence[float]]) -> list[float] | None:
        numbers = [one[len(one) // 2] for one in starts]
        for _ in range(_ROUNDS if len(starts) > 1 else 1):
            for i, values in enumerate(starts):
                if len(values) > 1:
                    numbers[i] = self._along(numbers, i, values)
        numbers = self.newton(numbers)
        return numbers if math.isfinite(self.left(numbers)) else None

    def _along(self, numbers: Sequence[float], i: int, values: Sequence[float]) -> float:
        """The best of the values of one number, then by the golden section between its neighbours."""

        def left(value: float) -> float:
            return self.left([*numbers[:i], value, *numbers[i + 1 :]])

        tried = [left(one) for one in values]
        at = int(np.argmin(tried))
        if not tried[at] <= _HOPELESS:
            return values[at]
        low, high = values[max(at - 1, 0)], values[min(at + 1, len(values) - 1)]
        geometric = low > 0 and high > 8 * low
        if geometric:
            low, high = math.log(low), math.log(high)

        def real(x: float) -> float:
            return math.exp(x) if geometric else x

        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        of_a, of_b = left(real(a)), left(real(b))
        for _ in range(_LINE):
            if of_a <= of_b:
                high, b, of_b = b, a, of_a
                a = high - _GOLDEN * (high - low)
                of_a = left(real(a))
            else:
                low, a, of_a = a, b, of_b
                b = low + _GOLDEN * (high - low)
                of_b = left(real(b))
        best, least = (a, of_a) if of_a <= of_b else (b, of_b)
        return real(best) if least < tried[at] else values[at]

    def newton(self, numbers: list[float]) -> list[float]:
        """Exact in one step where what comes out is linear in the numbers."""
        rest = self.rest(numbers)
        for _ in range(_NEWTON):
            if rest is None:
                break
            slopes = [self._slope(numbers, i, rest) for i in range(len(numbers))]
            columns = np.stack(slopes, axis=1)
            if not np.isfinite(columns).all() or not columns.any():
                break
            step = np.linalg.lstsq(columns, -rest, rcond=None)[0]
            further = [one + float(by) for one, by in zip(numbers, step, strict=True)]
            after = self.rest(further)
            if after is None or not np.linalg.norm(after) < (1 - 1e-6) * np.linalg.norm(rest):
                break
            numbers, rest = further, after
        return numbers

    def _slope(self, numbers: Sequence[float], i: int, rest: Array) -> Array:
        by = 1e-4 * abs(numbers[i]) or 1e-4
        moved = self.rest([*numbers[:i], numbers[i] + by, *numbers[i + 1 :]])
        return np.zeros_like(rest) if moved is None else (moved - rest) / by

    def rounded(self, numbers: list[float]) -> list[float]:
        """The roundest numbers that fit as well: all at once, else each by itself."""
        enough = max(_AS_GOOD * self.left(numbers), _OF_NOISE * self.tried.noise / self.tried.error)
        for digits in range(_DIGITS + 2):
            together = [_rounder(one, digits) for one in numbers]
            if self.left(together) <= enough:
                return together
        for i, value in enumerate(numbers):
            for digits in range(_DIGITS + 2):
                one = [*numbers[:i], _rounder(value, digits), *numbers[i + 1 :]]
                if self.left(one) <= enough:
                    numbers = one
                    break
        return numbers


def _rounder(number: float, digits: int) -> float:
    """To so many digits; 0: to a number that engines multiply by, if one is near."""
    if digits == 0 and simple(number) != number:
        return simple(number)
    return float(f"{number:.{max(digits, 1)}g}")


def _fitted(edits: Sequence[Edit], numbers: Sequence[float]) -> int:
    """How many fitted figures there are: none in a multiple that needs no fitting, two in a number that is not
    round."""
    multiples = [one.detail[0] in ("scaled", "plus") for one in edits for _ in range(one.free)]
    return sum(
        0 if multiple and number in _PLAIN else _figures(number)
        for multiple, number in zip(multiples, numbers, strict=True)
    )


def _figures(number: float) -> int:
    return 1 if float(f"{number:.{_DIGITS}g}") == number else 2
