"""How far the pairs of each token may have turned: the error of any phase at once, without rotating anything.

What comes out is a cos φ + b sin φ (`Convention.terms`), so that the squared error of a pair is a quadratic form of
cosine and sine, whose five coefficients are summed once. Positions, frequencies and bases are all searched in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.rotation.conventions import Convention
from lockstep.workbench.diagnosis.recording import Array

#: Points a unit of the fastest pair's angle, at which a position is looked for, and the most of them.
_DENSITY, _MOST = 4, 1 << 17
#: Minima that are refined, how often, and by how much each time.
_MINIMA, _ROUNDS = 4, 14
#: Phases of a turn at which a free phase is tried.
_TURN = 48


@dataclass(frozen=True, slots=True)
class Phases:
    """Squared errors [N, P] of a phase φ: constant + cos φ * c + sin φ * s + cos 2φ * c2 + sin 2φ * s2. Of N tokens and
    P pairs; by head, [N, H, P]. `size` is the squared norm of what was seen."""

    constant: Array
    c: Array
    s: Array
    c2: Array
    s2: Array
    size: float

    @classmethod
    def of(
        cls, convention: Convention, x: Array, seen: Array, factor: float, *, by_head: bool = False
    ) -> Phases:
        """Of x and `seen` [N, H, D], with a factor on what comes out."""
        a, b, table = convention.terms(x)
        a, b = factor * a, factor * b
        into = np.eye(x.shape[-1] // 2)[table]

        def summed(values: Array) -> Array:
            each = values @ into
            return each if by_head else np.asarray(each.sum(1))

        aa, bb, ab = summed(a * a), summed(b * b), summed(a * b)
        own = summed(seen * seen)
        return cls(
            own + (aa + bb) / 2, -2 * summed(seen * a), -2 * summed(seen * b), (aa - bb) / 2, ab, float(own.sum())
        )  # fmt: skip

    def error(self, phase: Array) -> Array:
        """Of phases that broadcast to the pairs."""
        cos, sin = np.cos(phase), np.sin(phase)
        second = 0.0
        if self.bent:
            second = (cos * cos - sin * sin) * self.c2 + 2 * cos * sin * self.s2
        return np.maximum(self.constant + cos * self.c + sin * self.s + second, 0.0)

    @property
    def bent(self) -> bool:
        """Whether the norm of a pair depends on its phase: that of a proper rotation does not."""
        return bool(np.abs(self.c2).max(initial=0.0) + np.abs(self.s2).max(initial=0.0) > 1e-9 * self.size)

    def free(self) -> float:
        """The squared error that is left if each pair of each token may turn as far as it likes."""
        phase = np.linspace(0, 2 * np.pi, _TURN, endpoint=False)
        values = np.stack([self.error(np.full(self.c.shape, each)) for each in phase])
        best, width = phase[values.argmin(0)], np.pi / _TURN
        for _ in range(6):
            tries = best + width * np.array([-1.0, 0.0, 1.0]).reshape(-1, *[1] * best.ndim)
            left = np.stack([self.error(each) for each in tries])
            best, width = np.take_along_axis(tries, left.argmin(0)[None], 0)[0], width / 2
        return float(self.error(best).sum())

    def some(self, rows: NDArray[np.intp]) -> Phases:
        """Of those tokens alone."""
        return self._of(lambda x: x[rows])

    def pairs(self, chosen: NDArray[np.intp]) -> Phases:
        """Of those pairs alone."""
        return self._of(lambda x: x[..., chosen])

    def _of(self, part: Callable[[Array], Array]) -> Phases:
        constant, c, s = part(self.constant), part(self.c), part(self.s)
        return Phases(constant, c, s, part(self.c2), part(self.s2), self.size)

    # --- what is solved for ----------------------------------------------------------------------------

    def positions(self, frequencies: Array, right: Array, reach: float, noise: float) -> tuple[Array, Array]:
        """The position [N] of each token within ±`reach` whose phases leave least, and what they leave, relative to
        what was seen [N], at frequencies [N or 1, P]. The right one [N] is taken where it fits within `noise`, then
        a whole one."""
        sizes = np.maximum(self.constant.sum(-1) / 2, 1e-300)  # of what was seen, about

        def left(at: Array) -> Array:
            """Relative errors of positions [N, K]."""
            parts = [self._error_of(at[:, k], frequencies) for k in range(at.shape[1])]
            return np.asarray(np.sqrt(np.stack(parts, axis=1) / sizes[:, None]))

        minima = self._minima(frequencies, reach)
        offsets, width = np.linspace(-1, 1, 9), 1 / (_DENSITY * float(frequencies.max(initial=1e-3)))
        for _ in range(_ROUNDS):
            around = (minima[..., None] + width * offsets).reshape(len(minima), -1)
            errors = left(around).reshape(*minima.shape, -1)
            best = errors.argmin(-1)[..., None]
            minima = np.take_along_axis(around.reshape(*minima.shape, -1), best, -1)[..., 0]
            width /= 3
        found = np.take_along_axis(minima, left(minima).argmin(-1)[:, None], 1)[:, 0]
        options = np.stack([right, np.round(found), found], axis=1)
        errors = left(options)
        choice = np.argmax(errors <= np.maximum(3 * errors[:, 2:], noise), axis=1)[:, None]
        at, rest = (np.take_along_axis(each, choice, 1)[:, 0] for each in (options, errors))
        return at, rest

    def _error_of(self, at: Array, frequencies: Array) -> Array:
        return np.asarray(self.error(at[:, None] * frequencies).sum(-1))

    def _minima(self, frequencies: Array, reach: float) -> Array:
        """The best few positions [N, K] of a grid, none beside another."""
        points = int(min(2 * reach * _DENSITY * float(frequencies.max(initial=1e-3)) + 3, _MOST))
        grid = np.linspace(-reach, reach, points)
        own, which = np.unique(frequencies, axis=0, return_inverse=True)
        which = np.broadcast_to(which.reshape(-1), len(self.c))
        found = np.empty((len(self.c), _MINIMA))
        for number, each in enumerate(own):
            rows = np.flatnonzero(which == number)
            angles = grid[:, None] * each
            cos, sin = np.cos(angles), np.sin(angles)
            values = self.c[rows] @ cos.T + self.s[rows] @ sin.T
            if self.bent:
                values += self.c2[rows] @ (cos**2 - sin**2).T + self.s2[rows] @ (2 * cos * sin).T
            for row, line in zip(rows, values, strict=True):
                inner = np.flatnonzero((line[1:-1] <= line[:-2]) & (line[1:-1] <= line[2:])) + 1
                inner = inner if len(inner) else np.array([int(line.argmin())])
                found[row] = grid[np.resize(inner[np.argsort(line[inner])[:_MINIMA]], _MINIMA)]
        return found

    def frequencies(self, positions: Array, fastest: float) -> Array:
        """Each pair's own frequency [P], up to 1.5 times the `fastest` of the right ones or half a turn a position:
        beyond that, whole positions do not distinguish them."""
        reach, top = float(np.abs(positions).max()), max(1.5 * fastest, np.pi)
        grid = np.linspace(0, top, int(np.clip(4 * reach * top, 64, 20_000)))
        found = grid[np.argmin(self._by_frequency(grid[:, None], positions), axis=0)]
        width = float(grid[1] - grid[0])
        for _ in range(14):
            around = found + width * np.linspace(-1, 1, 9)[:, None]
            best = self._by_frequency(around, positions).argmin(0)[None]
            found = np.take_along_axis(around, best, 0)[0]
            width /= 3
        return np.asarray(found)

    def _by_frequency(self, tries: Array, positions: Array) -> Array:
        """Errors [G, P] of frequencies [G, 1 or P], summed over the tokens."""
        out = np.empty((len(tries), self.c.shape[-1]))
        for start in range(0, len(tries), 256):
            some = slice(start, start + 256)
            out[some] = self.error(tries[some, None] * positions[:, None]).sum(1)
        return out
