"""Two variants of one run held against each other: what is rounding, and what is a bug.

Bits first: the operations that give other bits on equal ones depend on the axis, and by how much shows that they round.
Then each operation of either run is judged on its own inputs, as diagnosis does: rounding that has gathered over the
layers, or an expert that flipped by it, accuses nobody, and a bug is found behind rounding that came before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from lockstep.engine.taps.flow import remembers
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions.metrics import coarser
from lockstep.sessions.text import clean
from lockstep.workbench.checking.axes.axis import (
    AxisBug,
    AxisName,
    AxisResult,
    AxisRounding,
    AxisToken,
    AxisVerdict,
)
from lockstep.workbench.checking.axes.cache_evidence import CacheEvidence, blocks_of, chosen, is_greedy
from lockstep.workbench.checking.axes.row_judge import RowJudge, is_cache
from lockstep.workbench.diagnosis.operations.facts import UNIT
from lockstep.workbench.diagnosis.row_comparison import Place, RowComparison, TapRows, compare_rows
from lockstep.workbench.diagnosis.row_sides import RowSide, paired
from lockstep.workbench.views.moved import ROUNDING
from lockstep.workbench.views.provenance.findings import CacheFinding
from lockstep.workbench.views.verdicts import WRONG_ABOVE

_Side = Literal["base", "variant"]
_BOTH: tuple[_Side, _Side] = ("base", "variant")
#: The judges of the two runs, where there is a checkpoint.
Judges = tuple[RowJudge, RowJudge]


@dataclass(frozen=True)
class Variants:
    """The run that a variant is held against (`base`) and the variant, with what judges them. Places are the base's."""

    base: RowSide
    variant: RowSide
    judges: Judges | None = None

    @cached_property
    def caches(self) -> tuple[CacheEvidence, CacheEvidence]:
        """Whose rows the requests of each read of a paged cache."""
        return CacheEvidence.of(self.base), CacheEvidence.of(self.variant)

    @cached_property
    def others(self) -> dict[int, int]:
        """By request of the base that of the variant."""
        return {seq: other for seq, other, _ in self.pairs}

    @cached_property
    def pairs(self) -> list[tuple[int, int, list[int]]]:
        """(sequence of the base, of the variant, the positions that both computed)."""
        return list(paired(self.base, self.variant))

    @property
    def dtype(self) -> str:
        return coarser(*(side.session.meta.config.dtype or "float32" for side in (self.base, self.variant)))

    def compare(self, axis: AxisName, summary: str) -> AxisResult:
        """Hold the two against each other; `summary` names them."""
        bits = compare_rows(self.base, self.variant)
        if not bits.rows or not bits.taps:
            why = "the two read no tokens in common" if not bits.rows else "no tap was recorded in both"
            return AxisResult(axis, summary, "inconclusive", why=why)
        far = compare_rows(
            self.base, self.variant, WRONG_ABOVE * ROUNDING.get(self.dtype, ROUNDING["float32"])
        )
        bugs = tuple(self._bugs(far)) if bits.differing or self.judges else ()
        tokens = tuple(self._tokens(bits))
        if not bugs:
            bugs = tuple(self._unseen(bits, tokens))
        rounding = tuple(self._rounding(bits, {one.tap for one in bugs}))
        why = _doubt(bits) or _unexplained(bits, far)
        wrong = bool(bugs or tokens)
        verdict: AxisVerdict = "bug" if wrong else "rounding" if bits.differing else "equal"
        if verdict != "bug" and why:
            verdict = "inconclusive"
        elif verdict == "rounding" and not rounding:
            why = "other bits, each of which came in with an operation's inputs"
        notes = () if wrong else (*self._notes(), *self._alike())
        return AxisResult(
            axis, summary, verdict, bits.rows, len(bits.taps), bugs, rounding, why, tokens, notes
        )

    def _bugs(self, far: RowComparison) -> Iterator[AxisBug]:
        """Operations that are wrong in one run and not in the other, or differently in each."""
        beyond = {one.tap: one.own_rows for one in far.taps}
        there = set(self.variant.session.captured_taps(self.variant.branch))
        for tap in (one.name for one in self.base.session.taps if one.name in there):
            places, side = self._wrong(tap, beyond.get(tap, ()))
            if places:
                yield self._bug(tap, sorted(places, key=lambda p: (p[1], p[0])), side)

    def _wrong(
        self, tap: str, beyond: Sequence[Place]
    ) -> tuple[set[Place], Literal["variant", "base", "both", "unknown"]]:
        """Where one of the runs is wrong and the other is not; of rows `beyond` rounding where either is, or, where
        that cannot be judged, all."""
        judged = self._judged(tap)
        if judged is None:
            return set(beyond), "unknown"
        base, variant, known = judged
        unknown = {place for place in beyond if place not in known}
        found = {place for place in base ^ variant if not self._may_round(tap, place)}
        found |= {place for place in beyond if place in base | variant}
        if not found:
            return unknown, "unknown"
        if found & base and found & variant:
            return found, "both"
        return found, "base" if found & base else "variant"

    def _may_round(self, tap: str, place: Place) -> bool:
        """Whether the row rests on rows of the prefix cache, of which the engine may have other roundings than were
        recorded last, and is no farther off than rounding may bring it."""
        if not remembers(tap):
            return False
        taken = self.caches[0].taken.get(place[0]), self.caches[1].taken.get(self.others[place[0]])
        error = self._error(tap, [place]) if any(taken) else None
        return error is not None and error <= WRONG_ABOVE * ROUNDING.get(self.dtype, ROUNDING["float32"])

    def _judged(self, tap: str) -> tuple[set[Place], set[Place], set[Place]] | None:
        """The wrong rows of each, of those that both computed and that could be judged in both, which come last."""
        if self.judges is None:
            return None
        base, variant = (judge.rows(tap) for judge in self.judges)
        if base is None or variant is None:
            return None
        matched = {(seq, at): (other, at) for seq, other, positions in self.pairs for at in positions}
        known = {
            place for place, other in matched.items() if place in base.judged and other in variant.judged
        }
        return (
            {place for place in known if place in base.wrong},
            {place for place in known if matched[place] in variant.wrong},
            known,
        )

    def _bug(
        self, tap: str, places: list[Place], side: Literal["variant", "base", "both", "unknown"]
    ) -> AxisBug:
        positions = tuple(sorted({at for _, at in places}))
        requests = tuple(sorted({seq for seq, _ in places}))
        error, cache = self._error(tap, places[:1]), self._explained(tap, places, side)
        if side == "unknown" and cache and len({where for where, _ in cache}) == 1:
            side = cache[0][0]
        findings = tuple(finding for _, finding in cache)
        return AxisBug(
            tap, places[0], requests, positions, error, side, blocks_of(findings) or self._blocks(tap, places),
            tuple(dict.fromkeys(finding.in_words() for finding in findings)),
        )  # fmt: skip

    def _explained(
        self, tap: str, places: Sequence[Place], side: Literal["variant", "base", "both", "unknown"]
    ) -> list[tuple[_Side, CacheFinding]]:
        """The wrong accesses to the cache that these rows make, those of the first first."""
        found: list[tuple[_Side, CacheFinding]] = []
        for chosen_places in (set(places[:1]), set(places)):
            if side != "variant":
                found += [("base", one) for one in self.caches[0].at(tap, chosen_places)]
            if side != "base":
                theirs = {(self.others[seq], at) for seq, at in chosen_places}
                found += [("variant", one) for one in self.caches[1].at(tap, theirs)]
        return found

    def _tokens(self, bits: RowComparison) -> Iterator[AxisToken]:
        """Where requests part: tokens that the logits before them did not choose, in one run that is greedy until
        then, where they did in the other."""
        for seq, at in bits.parted:
            sides = ((self.base, seq), (self.variant, self.others[seq]))
            if not all(is_greedy(one, mine, at) for one, mine in sides):
                continue
            reported = [one.sequences[mine][at].token for one, mine in sides]
            before = [one.sequences[mine][at - 1].token for one, mine in sides]
            picked = [chosen(one, mine, at) for one, mine in sides]
            for mine in (0, 1):
                cached = self.caches[mine].taken.get(sides[mine][1]) == at
                again = picked[mine] is None and cached and reported[mine] == before[mine]
                if picked[1 - mine] == reported[1 - mine] and (
                    again or picked[mine] not in (None, reported[mine])
                ):
                    yield AxisToken((seq, at), reported[mine], picked[mine], again, _BOTH[mine])

    def _unseen(self, bits: RowComparison, tokens: Sequence[AxisToken]) -> Iterator[AxisBug]:
        """Where requests part, or one breaks off, behind rows of a cache that are not theirs, in operations of which
        nothing was recorded that could be judged: those rows are proof enough."""
        reported = {one.first for one in tokens}
        for seq, at, sides in [
            (*place, (0, 1)) for place in bits.parted if place not in reported
        ] + self._cut():
            for number in sides:
                mine = (seq, self.others[seq])[number]
                for finding in self.caches[number].behind((mine, at), cut=len(sides) == 1):
                    last = finding.first.places[0] if len(sides) == 1 else finding.first.stop - 1
                    tap = f"layers.{finding.layers[0] if finding.layers else 0}.attn.context"
                    yield AxisBug(
                        tap, (seq, last), (seq,), (last,), None, _BOTH[number], blocks_of((finding,)),
                        (finding.in_words(),),
                    )  # fmt: skip

    def _cut(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Requests of which one run has no rows from a position on, and which run that is."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for seq, other, positions in self.pairs:
            after = positions[-1] + 1
            held = after in self.base.sequences[seq], after in self.variant.sequences[other]
            if any(held) and not all(held):
                found.append((seq, after, (held.index(False),)))
        return found

    def _alike(self) -> Iterator[str]:
        """The first operation that is wrong in both runs alike, which is no matter of the axis."""
        there = set(self.variant.session.captured_taps(self.variant.branch))
        for tap in (one.name for one in self.base.session.taps if one.name in there):
            judged = self._judged(tap)
            if judged is not None and (both := judged[0] & judged[1]):
                seq, at = min(both, key=lambda place: (place[1], place[0]))
                yield (
                    f"{clean(tap, limit=80)} does not give what its inputs give, in both runs alike, first at request "
                    f"{seq}, position {at}: it is no matter of this axis, and check or diagnose names it"
                )
                return

    def _notes(self) -> Iterator[str]:
        """Wrong accesses to a cache that changed nothing of what was compared."""
        found = {
            side: [one.in_words() for one in held.findings]
            for side, held in zip(_BOTH, self.caches, strict=True)
        }
        yield from dict.fromkeys(
            f"without an effect on what was compared: {words}"
            for reported in found.values()
            for words in reported
        )

    def _error(self, tap: str, places: Sequence[Place]) -> float | None:
        """The largest difference of these rows, relative to the larger of the row's norm and the usual one."""
        rows = list(self._rows(tap, places))
        norms = [float(np.linalg.norm(x)) for x, _ in rows]
        usual = float(np.sqrt(np.mean(np.square(norms)))) if norms else 0.0
        scale = [max(norm, usual) or 1.0 for norm in norms]
        apart = [float(np.linalg.norm(x - y)) / by for (x, y), by in zip(rows, scale, strict=True)]
        return max(apart, default=None)

    def _rows(self, tap: str, places: Sequence[Place]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Both tensors' rows at these places, in float64; what is not finite in either is left out."""
        if "tensor" not in self.base.kinds(tap) & self.variant.kinds(tap):
            return
        wanted = set(places)
        for seq, other, positions in self.pairs:
            chosen = [at for at in positions if (seq, at) in wanted]
            mine = self.base.rows(tap, "tensor", seq, chosen) if chosen else {}
            theirs = self.variant.rows(tap, "tensor", other, chosen) if chosen else {}
            for at in chosen:
                if at in mine and at in theirs and mine[at].size == theirs[at].size:
                    x, y = (side[at].astype(np.float64).ravel() for side in (mine, theirs))
                    finite = np.isfinite(x) & np.isfinite(y)
                    yield x[finite], y[finite]

    def _blocks(self, tap: str, places: Sequence[Place]) -> tuple[int, ...]:
        """Of a cache: the variant's blocks that these rows read."""
        size = (self.variant.session.meta.config.block_size or 0) if is_cache(tap) else 0
        found: dict[int, None] = {}
        for seq, at in places if size else ():
            row = self.variant.sequences[self.others[seq]][at]
            reported = self.variant.session.step(row.step, self.variant.branch).sequences
            table = next(one.block_table for one in reported if one.seq == self.others[seq])
            found.update(dict.fromkeys(map(int, table[: at // size + 1])))
        return tuple(found)

    def _rounding(self, bits: RowComparison, bugs: set[str]) -> Iterator[AxisRounding]:
        """Operations that give other bits on equal ones, those of one kind in all layers together."""
        kinds: dict[str, list[TapRows]] = {}
        for one in bits.taps:
            if one.own and one.tap not in bugs:
                kinds.setdefault(local_name(one.tap), []).append(one)
        unit = UNIT.get(self.dtype, UNIT["float32"])
        for operation, found in kinds.items():
            sizes = [size for one in found if (size := self._error(one.tap, one.own_rows)) is not None]
            layers = tuple(layer for one in found if (layer := layer_of(one.tap)) is not None)
            first = found[0].first_own
            assert first is not None, "an operation that differs by itself does so somewhere"
            yield AxisRounding(
                operation,
                layers,
                sum(one.own for one in found),
                sum(one.rows for one in found),
                first,
                max(sizes) / unit if sizes else None,
            )


def _unexplained(bits: RowComparison, far: RowComparison) -> str:
    """What differs by more than rounding on equal bits, where no operation is wrong; "" where nothing does."""
    equal_inputs = {one.tap: set(one.own_rows) for one in bits.taps}
    for one in far.taps:
        if places := sorted(equal_inputs[one.tap] & {*one.own_rows}):
            seq, at = places[0]
            return (
                f"{clean(one.tap, limit=80)} differs by more than rounding at request {seq}, position {at}, though its "
                "inputs have equal bits and it gives what they give: what it reads beside them was not compared"
            )
    return ""


def _doubt(bits: RowComparison) -> str:
    """Why nothing can be stated of two runs in which no bug was found; "" where it can."""
    if bits.parted:
        seq, at = bits.parted[0]
        return f"request {seq} goes on with another token at position {at}: what follows is not compared"
    return (
        "statistics alone were recorded: that they are equal proves nothing"
        if bits.by_statistics_alone
        else ""
    )
