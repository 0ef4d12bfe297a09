"""Every weight that ranks hold against the checkpoint, bit by bit; and what is not in memory at all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.engine.checkpoint.source import Source
from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.engine.parallel.shards import Span
from lockstep.workbench.diagnosis.loaded.adapted import AdaptedWeights
from lockstep.workbench.diagnosis.loaded.adapter import Adapter
from lockstep.workbench.diagnosis.loaded.checkpoint import LoadedFrom, OddStack
from lockstep.workbench.diagnosis.loaded.explain import (
    Mistake,
    are_altered,
    explain_numbers,
    explain_rows,
    in_another_order,
    in_rows,
    rounded,
)
from lockstep.workbench.diagnosis.loaded.places import HeldPart, Parameters, Shape, key_of, part_of, unheld
from lockstep.workbench.diagnosis.loaded.rank_weights import RankWeights
from lockstep.workbench.diagnosis.loaded.rows import BLOCK, RowRun, RowTable
from lockstep.workbench.diagnosis.loaded.stack_parts import StackPart

_LAYER = re.compile(r"(?<=layers\.)\d+", re.ASCII)
_EXPERT = re.compile(r"(?<=experts\.)\d+", re.ASCII)
#: Of rows that are wrong, as many are looked at.
_LOOKED_AT = 4096
_SCALE = re.compile(r".*(?:weight|input|k|v|q|prob)_scale(?:_inv)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class WrongWeight:
    """`parameter` of the checkpoint is not in memory as it should be: on `ranks`, in `layers` (none: it is of none).
    `parameter` has a * in place of the layer's number where several have the same mistake."""

    parameter: str
    mistake: Mistake
    ranks: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """`compared`: parameters of the checkpoint of which all that ranks hold was compared; `numbers` in memory.
    `dtypes`: of the checkpoint and in memory, with how many tensors. `unknown`: what ranks hold and the checkpoint has
    nothing for; `left_out`: what could not be compared, with why; `other_parts`: what reads images, which is not."""

    engine: str
    ranks: int
    compared: int
    numbers: int
    wrong: tuple[WrongWeight, ...]
    dtypes: dict[tuple[str, str], int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    other_parts: tuple[str, ...] = ()
    adapted: dict[str, int] = field(default_factory=dict)


def compare_weights(
    ranks: Sequence[RankWeights],
    checkpoint: LoadedFrom,
    see: Callable[[str], None] = lambda _: None,
    adapter: Adapter | None = None,
) -> LoadedWeights:
    """Hold what each rank has against the checkpoint, with an adapter where one is to be in force. CheckpointError
    where either cannot be read, or the adapter is another model's."""
    comparison = _Comparison(checkpoint, len(ranks) and ranks[0].size, adapter)
    for rank in ranks:
        see(f"weights of rank {rank.rank}")
        comparison.add(rank)
    return comparison.result(ranks)


class _Comparison:
    """What was found so far."""

    def __init__(self, checkpoint: LoadedFrom, size: int, adapter: Adapter | None) -> None:
        self.checkpoint, self.source, self.size = checkpoint, checkpoint.source, size
        self.parameters = Parameters(checkpoint.source, checkpoint.tied, checkpoint.model)
        self.found: dict[tuple[str, Mistake], set[tuple[int, int | None, str]]] = defaultdict(set)
        self.held: dict[str, list[Span]] = defaultdict(list)
        self.dtypes: dict[tuple[str, str], int] = defaultdict(int)
        self.unknown: set[str] = set()
        self.left_out: set[str] = set()
        self.other_parts: set[str] = set()
        self.numbers = 0
        self.adapted = None if adapter is None else AdaptedWeights.of_model(adapter, self.parameters.shapes)
        self._tables: dict[tuple[int, torch.dtype], RowTable] = {}

    def add(self, rank: RankWeights) -> None:
        done: set[tuple[str, str]] = set()
        if self.adapted is not None:
            for name, mistake in self.adapted.beside(rank):
                self._note(rank, name, mistake)
        for name, stored in rank.names():
            info = rank.source.info(stored)
            if part := other_part(name):
                self.other_parts.add(part)
                continue
            if (stack := self.checkpoint.stacks.get(key_of(name))) is not None:
                self._compare_stack(rank, stored, stack)
                continue
            places = self.parameters.places(name, info.shape, rank.rank, rank.size)
            if places is None:
                self._of_none(rank, name, stored)
                continue
            if not places:
                self._misshapen(rank, name, info.shape)
            for place in places:
                self.held[place.parameter].append(place.taken)
                if (place.parameter, stored) not in done:
                    self._compare(rank, stored, place)
                done.add((place.parameter, stored))
        self.left_out |= {f"{name} ({why})" for name, why in rank.skipped.items() if name not in rank.buffers}

    def _compare_stack(self, rank: RankWeights, stored: str, stack: OddStack) -> None:
        """A stack in an order of its own: all of it, some of its matrices, or a part of each."""
        tensor, parameters = stack
        source, shape = self.checkpoint.stored, rank.source.info(stored).shape
        part = (
            None if source is None else StackPart.of(source.info(tensor).shape, shape, rank.rank, rank.size)
        )
        for parameter, matrix in parameters.items():
            if part is None or matrix is None or part.has_matrix(matrix):
                self.held[parameter].append(Span(0, self.parameters.shapes[parameter][0]))
        if source is None or part is None:
            self._leave_out(tensor)
            return
        x = rank.source.read(stored)
        whole = _as_held(source.read(tensor), rank.dtype(stored), x.dtype)
        self.numbers += x.numel()
        self.dtypes[source.info(tensor).dtype, rank.dtype(stored)] += 1
        if any(torch.equal(x, y) for y in part.ways(whole)):
            return
        if part.cuts_matrices:  # in another way, perhaps
            self._leave_out(tensor)
            return
        y = next(part.ways(whole))
        owner = next((one for one in range(rank.size) if torch.equal(x, part.of_rank(whole, one))), None)
        rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])
        other = None if owner is None else Mistake.in_words("elsewhere", f"rank {owner}'s part instead")
        self._note(rank, tensor, other or rounded(x, y) or explain_numbers(*rows))

    def _leave_out(self, tensor: str) -> None:
        self.left_out.add(f"{_LAYER.sub('*', tensor)} (a part of a stack in an order of its own)")

    def _of_none(self, rank: RankWeights, name: str, stored: str) -> None:
        """What the checkpoint has nothing for: scales of quantised weights must not be zero."""
        if name in rank.buffers or name != stored:
            return
        if self.adapted is not None and self.adapted.has(name):
            return
        if _SCALE.fullmatch(name) and not bool(rank.source.read(stored).any()):
            self._note(rank, name, Mistake("zeros", "all zeros: never loaded, or overwritten"))
        self.unknown.add(_LAYER.sub("*", name))

    def _misshapen(self, rank: RankWeights, name: str, shape: tuple[int, ...]) -> None:
        text = f"has the shape {list(shape)} in memory, which is no part of the checkpoint's over {rank.size} ranks"
        self._note(rank, name, Mistake("shape", text))

    def _note(self, rank: RankWeights, name: str, mistake: Mistake) -> None:
        layer = _LAYER.search(name)
        starred = _EXPERT.sub("*", _LAYER.sub("*", name))
        self.found[starred, mistake].add((rank.rank, int(layer[0]) if layer else None, name))

    def _compare(self, rank: RankWeights, stored: str, place: HeldPart) -> None:
        """Block by block; where one is wrong, all that is wrong is looked at. What an adapter changes is looked at as a
        whole."""
        wrong: list[int] = []
        self.dtypes[self.source.info(place.parameter).dtype, rank.dtype(stored)] += 1
        if self.adapted is not None and self.adapted.of(place.parameter) is not None:
            module = stored.rpartition(".")[0]
            if (why := rank.unread.get(module)) is not None:
                self.left_out.add(f"{place.parameter} with its adapter ({why})")
                return
            x, y = self._blocks(rank, stored, place, Span(0, place.taken.size), as_held=False)
            self.numbers += x.numel()
            if (mistake := self.adapted.merged(place, x, y, rank, module)) is not None:
                self._note(rank, place.parameter, mistake)
            return
        for start in range(0, place.taken.size, BLOCK):
            rows = Span(start, min(start + BLOCK, place.taken.size))
            x, y = self._blocks(rank, stored, place, rows)
            self.numbers += x.numel()
            if not torch.equal(x, y):
                bad = (x != y).reshape(len(x), -1).any(1) if x.ndim > 1 else (x != y)
                wrong += (bad.nonzero().flatten() + start).tolist()
        if wrong:
            self._note(rank, place.parameter, self._explained(rank, stored, place, wrong))

    def _blocks(
        self, rank: RankWeights, stored: str, place: HeldPart, rows: Span, *, as_held: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Rows of a place as they are in memory and in the checkpoint, in the dtype in which they were written."""
        here = Span(place.rows.start + rows.start, place.rows.start + rows.stop)
        there = Span(place.taken.start + rows.start, place.taken.start + rows.stop)
        x = (
            _rows_of(rank.source, stored, here)
            if place.matrix is None
            else rank.source.read_matrix(stored, here, None, place.matrix)
        )
        y = _rows_of(self.source, place.parameter, there)
        if place.columns is not None:
            y = y[:, place.columns.start : place.columns.stop]
        return x, _as_held(y, rank.dtype(stored), x.dtype) if as_held else y

    def _explained(self, rank: RankWeights, stored: str, place: HeldPart, wrong: list[int]) -> Mistake:
        """What the wrong rows are: somewhere else in the checkpoint, or other numbers."""
        x, y = self._blocks(rank, stored, place, Span(0, place.taken.size))
        if x.ndim == 1:
            return self._vector(rank, x, y, place) or explain_numbers(x[None], y[None])
        if (through := rounded(x, y)) is not None:
            return through
        rows, scope = wrong[:_LOOKED_AT], in_rows(wrong, len(x))
        if place.among:
            scope = in_rows(
                [place.taken.start + row for row in wrong], self.parameters.shapes[place.parameter][0]
            )
        a, b = (x, y) if not scope else (x[rows], y[rows])
        if are_altered(a, b):
            return explain_numbers(a, b).of_rows(scope)
        table, columns = self._table(x.shape[1], x.dtype), place.columns or Span(0, x.shape[1])
        wanted = RowRun(Span(0, len(x)), place.parameter, place.taken.start, columns)
        runs = table.find(x, place.parameter)
        if (order := in_another_order(runs, wanted)) is not None:
            return order
        found = None
        if bool(a.any()):
            runs = table.find(a, place.parameter) if scope else runs
            found = explain_rows(runs, len(a), lambda run: self._named(run, place, rank))
        return (found or explain_numbers(a, b)).of_rows(scope)

    def _table(self, width: int, dtype: torch.dtype) -> RowTable:
        if (width, dtype) not in self._tables:
            self._tables[width, dtype] = RowTable(
                self.source, self.parameters.shapes, width, dtype, self.size
            )
        return self._tables[width, dtype]

    def _vector(self, rank: RankWeights, x: Tensor, y: Tensor, place: HeldPart) -> Mistake | None:
        """A bias or a norm's weight that is another one's, another rank's, or in another order."""
        if not bool((x != x[0]).any()):
            return None
        for name in sorted(self.parameters.shapes, key=lambda one: one != place.parameter):  # its own first
            shape = self.parameters.shapes[name]
            if len(shape) != 1 or shape[0] % len(x) or shape[0] // len(x) > self.size:
                continue
            whole = self.source.read(name).to(x.dtype)
            for start in range(0, shape[0], len(x)):
                if torch.equal(whole[start : start + len(x)], x):
                    run = RowRun(Span(0, len(x)), name, start, Span(0, 1))
                    text = f"{self._named(run, place, rank)} instead"
                    return Mistake.in_words("elsewhere", text)
        if torch.equal(x.sort().values, y.sort().values):
            return Mistake("order", "its numbers in another order")
        return None

    def _named(self, run: RowRun, place: HeldPart, rank: RankWeights) -> str:
        """A place in the checkpoint: whose part it is, or which rows of what."""
        whole = self.parameters.shapes[run.parameter]
        cut = len(whole) > 1 and run.columns != place.columns
        rows, columns = Span(run.first, run.first + run.rows.size), f", columns {run.columns}" if cut else ""
        if run.parameter != place.parameter:
            other = _relative(run.parameter, place.parameter)
            return (f"rows {rows} of {other}" if rows.size < whole[0] else other) + columns
        owner = _owner(run, place, whole, rank.size, by_columns=cut)
        return f"rows {rows} of it{columns}" if owner is None else f"rank {owner}'s part"

    def result(self, ranks: Sequence[RankWeights]) -> LoadedWeights:
        if len(ranks) == self.size:
            self._note_missing(ranks)
        merged = [self._merged(name, mistake, places) for (name, mistake), places in self.found.items()]
        return LoadedWeights(
            ranks[0].engine, len(ranks), len(self.held), self.numbers,
            tuple(sorted(merged, key=lambda one: (one.layers[:1] or (-1,), one.parameter))),
            dict(self.dtypes), tuple(sorted(self.unknown)), tuple(sorted(self.left_out)),
            tuple(sorted(self.other_parts)), {} if self.adapted is None else dict(self.adapted.how),
        )  # fmt: skip

    def _merged(self, name: str, mistake: Mistake, places: set[tuple[int, int | None, str]]) -> WrongWeight:
        layers = tuple(sorted({layer for _, layer, _ in places if layer is not None}))
        own = {one for _, _, one in places}
        return WrongWeight(
            own.pop() if len(own) == 1 else name,
            mistake,
            tuple(sorted({rank for rank, _, _ in places})),
            layers,
        )

    def _note_missing(self, ranks: Sequence[RankWeights]) -> None:
        """What no rank holds, or not all of it."""
        shapes = {
            name: shape
            for name, shape in self.parameters.shapes.items()
            if not self.checkpoint.is_unread(name)
        }
        skipped = any(rank.skipped for rank in ranks)
        for name, gaps in unheld(shapes, self.held):
            if skipped and name not in self.held:
                self.left_out.add(f"{_LAYER.sub('*', name)} (no rank has written it)")
                continue
            where = "" if gaps == [Span(0, shapes[name][0])] else f"rows {', '.join(map(str, gaps[:3]))}: "
            for rank in ranks:
                self._note(rank, name, Mistake("missing", f"{where}not in memory: no rank holds it"))


def _owner(run: RowRun, place: HeldPart, whole: Shape, size: int, *, by_columns: bool) -> int | None:
    """Which other rank's part of the parameter that is."""
    for rank in range(size):
        if by_columns:
            mine = part_of(whole[1], run.columns.size, rank, size) == run.columns
        else:
            rows = part_of(whole[0], place.taken.size, rank, size, padded=True)
            mine = rows is not None and rows.start == run.first and rows != place.taken
        if mine:
            return rank
    return None


def _rows_of(source: Source, name: str, rows: Span) -> Tensor:
    """Rows of a tensor; a single number is one."""
    return source.read(name, 0, rows) if source.info(name).shape else source.read(name).reshape(1)


def _as_held(checkpoint: Tensor, held: str, written: torch.dtype) -> Tensor:
    """The checkpoint's numbers in the dtype in which the engine holds them, as they were written."""
    return checkpoint.to(_dtype(held)).to(written)


def _relative(other: str, own: str) -> str:
    """Another parameter in the eyes of one: of the same layer, of one before or behind it."""
    mine, theirs = _LAYER.search(own), _LAYER.search(other)
    if mine is None or theirs is None:
        return other
    local = other[theirs.end() + 1 :]
    distance = int(theirs[0]) - int(mine[0])
    if distance == 0:
        return f"the layer's {local}"
    name = "its own" if local == own[mine.end() + 1 :] else local
    where = {1: "the next layer", -1: "the layer before"}.get(
        distance, f"the layer {abs(distance)} {'behind' if distance > 0 else 'before'}"
    )
    return f"{where}'s" if name == "its own" else f"{where}'s {name}"


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
