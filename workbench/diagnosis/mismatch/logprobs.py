"""Level 3: what the log-probabilities are of. Those that each side reported, held against its own recorded logits.

A framework may report log p of the raw logits, of logits that a temperature has divided, of the support that top-k or
top-p has left (renormalised), of the token beside, or no logarithm at all. Two of these are two quantities, however
well the models agree (TRL#7269, TRL#4772).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sessions.meta import SamplingMeta
from lockstep.workbench.diagnosis.mismatch.level import Level
from lockstep.workbench.diagnosis.mismatch.side import Side, Values
from lockstep.workbench.diagnosis.mismatch.tokens import Line
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.row_sides import RowSide
from lockstep.workbench.words.plain_text import plural

#: The log-probabilities that a side reported, by sequence.
Reported = Mapping[int, Sequence[float]]
#: Temperatures that are looked for where none is known, and how exactly.
_TEMPERATURES = (0.05, 20.0)
#: Roundings of the largest logit by which a reported figure may differ from the recorded logits', and digits that a
#: framework may leave out when it writes a figure.
_ROUNDINGS, _DIGITS = 8.0, 1e-4
#: Share of the tokens that a definition has to give.
_SHARE = 0.95
#: The plainest definition.
RAW = "log-softmax of the raw logits"


@dataclass(frozen=True, slots=True)
class Definition:
    """What a reported figure is. `number` is the temperature where it has one."""

    name: str
    number: float | None = None

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name} {self.number:.3g}"


def raw_logprobs(side: Side, line: Line) -> dict[int, float]:
    """log p of each token after the first, by the position of the row before it; those that can be known."""
    targets = side.targets(line)
    found = {
        position: float(row[targets[position]] - _logsumexp(row))
        for position, row in side.logits(line)
        if 0 <= targets[position] < len(row)
    }
    for position, token in targets.items():
        if (
            position not in found
            and (recorded := _of_candidates(side.rows, line.seq, position, token)) is not None
        ):
            found[position] = recorded
    return dict(sorted(found.items()))


def _of_candidates(side: RowSide, seq: int, position: int, token: int) -> float | None:
    """From the candidates of a pass, for its last row; None where the token is not among them."""
    recorded = side.ended_by(seq, position)
    if recorded is None or recorded.logsumexp is None or token not in recorded.topk_ids:
        return None
    return float(recorded.topk_logits[list(recorded.topk_ids).index(token)]) - recorded.logsumexp


def _logsumexp(row: Values) -> float:
    return float(np.logaddexp.reduce(row))


def reported_by_position(line: Line, figures: Sequence[float]) -> dict[int, float] | None:
    """Figures of a side by position: of the response, of every token but the first, or of every token (the first has
    none). None where their number is none of these."""
    ids = len(line.ids)
    for count, first in ((ids - line.prompt, line.prompt), (ids - 1, 1), (ids, 0)):
        if len(figures) == count:
            places = range(line.start + first - 1, line.start + ids - 1)
            return {p: float(x) for p, x in zip(places, figures, strict=True) if p >= line.start and x == x}
    return None


def definition_of(side: Side, line: Line, reported: Mapping[int, float]) -> tuple[Definition | None, str]:
    """What a side's figures are of, and how that is known; None where no definition gives them."""
    rows = {position: row for position, row in side.logits(line) if position in reported}
    if not rows:
        return None, "the logits of these rows are not known: --model CHECKPOINT computes them of final_norm"
    after = side.targets(line)
    targets = np.array([after[position] for position in rows], dtype=np.int64)
    wanted = np.array([reported[position] for position in rows])
    matrix = [rows[position] for position in rows]
    limit = _limit(side.rows, matrix)
    tried: list[tuple[float, Definition]] = []
    for definition, values in _candidates(side.rows, line, matrix, targets, wanted):
        error = np.abs(values - wanted)[~np.isnan(values)]  # a token beside is not there at the end
        if not error.size:
            continue
        if np.mean(error <= limit) >= _SHARE:
            return (
                definition,
                f"{plural(len(wanted), 'figure')}, off by {float(np.median(error)):.1e} at most half the time",
            )
        tried.append((float(np.median(error)), definition))
    nearest = min(tried, key=lambda one: one[0])
    return None, f"nearest is {nearest[1]}, off by {nearest[0]:.2g} in the median"


def _limit(side: RowSide, rows: Sequence[Values]) -> float:
    unit = UNIT.get(side.session.meta.config.dtype or "float32", UNIT["float32"])
    largest = max(float(np.abs(row[np.isfinite(row)]).max(initial=0.0)) for row in rows)
    return _ROUNDINGS * unit * largest + _DIGITS


def _candidates(
    side: RowSide, line: Line, rows: list[Values], targets: NDArray[np.int64], wanted: Values
) -> Iterator[tuple[Definition, Values]]:
    """Definitions with what they give, the plainest first."""
    raw = _chosen(rows, targets)
    yield Definition(RAW), raw
    known = side.session.meta.sequences.get(line.seq)
    sampling = known.sampling if known is not None else None
    if sampling is not None and sampling.temperature not in (0.0, 1.0):
        yield from _processed(rows, targets, sampling)
    fitted = _temperature(rows, targets, wanted)
    yield (
        Definition("log-softmax of logits divided by a temperature of", fitted),
        _chosen(rows, targets, fitted),
    )
    for name, by in (("token before", -1), ("token after", 1)):
        yield Definition(f"that of the {name}"), _beside(raw, by)
    yield Definition("the probability, not its logarithm"), np.exp(raw)
    yield Definition("the logarithm with the other sign"), -raw
    yield Definition("the raw logit, not normalised"), _chosen(rows, targets, normalised=False)
    yield Definition("the logarithm to base 2"), raw / math.log(2)
    yield Definition("the logarithm to base 10"), raw / math.log(10)


def _processed(
    rows: list[Values], targets: NDArray[np.int64], sampling: SamplingMeta
) -> Iterator[tuple[Definition, Values]]:
    """After the steps of sampling that the session states."""
    by = sampling.temperature
    yield Definition("log-softmax of logits divided by a temperature of", by), _chosen(rows, targets, by)
    if sampling.top_k or sampling.top_p < 1:
        kept = [support(row / by, sampling.top_k, sampling.top_p) for row in rows]
        name = "log-softmax over what top-k and top-p leave, at a temperature of"
        yield Definition(name, by), _chosen(kept, targets)
        kept = [np.where(np.isfinite(after), row, -np.inf) for row, after in zip(rows, kept, strict=True)]
        yield Definition("log-softmax of the raw logits that top-k and top-p leave"), _chosen(kept, targets)


def support(row: Values, top_k: int, top_p: float) -> Values:
    """The logits that top-k, then top-p leave; the others are -inf (Holtzman et al. 2020, arXiv:1904.09751)."""
    row = row.copy()
    if 0 < top_k < len(row):
        row[row < np.partition(row, -top_k)[-top_k]] = -np.inf
    if top_p < 1:
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(np.exp(row[order] - _logsumexp(row)))
        row[order[1:][mass[:-1] >= top_p]] = -np.inf
    return row


def _chosen(
    rows: Sequence[Values], targets: NDArray[np.int64], temperature: float = 1.0, *, normalised: bool = True
) -> Values:
    """The logarithm of each target's probability."""
    with np.errstate(invalid="ignore"):
        return np.array(
            [
                row[t] / temperature - (_logsumexp(row / temperature) if normalised else 0.0)
                for row, t in zip(rows, targets, strict=True)
            ]
        )


def _beside(values: Values, by: int) -> Values:
    """Each row has what another row should have; none at the end."""
    moved = np.roll(values, -by)
    moved[-1 if by > 0 else 0] = math.nan
    return moved


def _temperature(rows: Sequence[Values], targets: NDArray[np.int64], wanted: Values) -> float:
    """The one with the least median error, by thirds of the logarithm (a grid first: there may be several valleys)."""

    def error(logarithm: float) -> float:
        off = np.abs(_chosen(rows, targets, math.exp(logarithm)) - wanted)
        return float(np.nanmedian(off)) if np.isfinite(off).any() else math.inf

    low, high = (math.log(one) for one in _TEMPERATURES)
    grid = np.linspace(low, high, 41)
    best = min(range(len(grid)), key=lambda i: error(float(grid[i])))
    low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 40)])
    for _ in range(48):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if error(left) <= error(right) else (left, high)
    return math.exp((low + high) / 2)


def compare_definitions(
    sides: Sequence[tuple[Side, Reported]],
) -> tuple[Level, dict[str, dict[int, dict[int, float]]]]:
    """The level; and each side's reported figures by its name, sequence and position."""
    found: dict[str, Definition | None] = {}
    details, figures = [], dict[str, dict[int, dict[int, float]]]()
    for side, reported in sides:
        name, by_sequence = side.name, figures.setdefault(side.name, {})
        for line in side.lines:
            if line.seq not in reported:
                continue
            by_position = reported_by_position(line, reported[line.seq])
            if by_position is None:
                details.append(f"{name}, sequence {line.seq}: {_misfit(line, len(reported[line.seq]))}")
                continue
            by_sequence[line.seq] = by_position
            definition, how = definition_of(side, line, by_position)
            found.setdefault(name, definition)
            word = "of no definition that is known here" if definition is None else str(definition)
            details.append(f"{name}, sequence {line.seq}: {word} ({how})")
    return _judged(found, details), figures


def _misfit(line: Line, count: int) -> str:
    expected = sorted({len(line.ids) - line.prompt, len(line.ids) - 1, len(line.ids)})
    return f"{plural(count, 'figure')} for {plural(len(line.ids), 'token')}: expected {' or '.join(map(str, expected))}"


def _judged(found: Mapping[str, Definition | None], details: Sequence[str]) -> Level:
    if not found:
        text = f"no figures were reported: both sides' are the {RAW}, as recorded"
        return Level("logprob", "unknown", text, tuple(details))
    names = ", ".join(f"the {name}'s {one or 'of no known definition'}" for name, one in found.items())
    plain = [one for one in found.values() if one is not None and one.name == RAW]
    kinds = {None if one is None else str(one) for one in found.values()}
    if None in kinds:
        return Level("logprob", "unknown", f"it is not known what they are of: {names}", tuple(details))
    if len(kinds) > 1 or (len(found) == 1 and not plain):
        return Level("logprob", "differs", f"they are not of the same thing: {names}", tuple(details))
    return Level("logprob", "equal", f"both are {next(iter(kinds))}", tuple(details))
