"""The tensors of passes, put together row by row to those of a session's steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import local_name
from lockstep.sessions import slices
from lockstep.sessions.dtypes import STORED_AS, stored
from lockstep.sessions.meta import ROW_HASHES, ModelMeta
from lockstep.sessions.records import STATISTICS, TensorRecord
from lockstep.workbench.foreign.heads import RankPasses, placed_rows, without_array
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.rows import RowPlace, RowPlan
from lockstep.workbench.foreign.shapes import ATTENTION, CACHES, by_rows, is_of_last, shaped
from lockstep.workbench.foreign.survey import any_layer, named_tensors

#: (tap, rank, sequence)
PartKey = tuple[str, int, int]


@dataclass(slots=True)
class _Part:
    """One tensor of one rank for one sequence at one step, as far as its rows have come: `filled`, None for all."""

    array: NDArray[Any]
    dtype: str
    filled: NDArray[np.bool_] | None

    def record(self, key: PartKey) -> TensorRecord:
        """The tensor, or the rows of it that were seen."""
        tap, rank, seq = key
        array, part = self.array, ""
        if self.filled is not None and not self.filled.all():
            rows = np.flatnonzero(self.filled)
            array, part = array[rows], slices.choose(rows.tolist())
        if local_name(tap) in ATTENTION:
            array, part = np.moveaxis(array, 0, 1), f":,{part}" if part else ""
        return TensorRecord(tap, rank, seq, np.ascontiguousarray(array), self.dtype, part)


@dataclass(slots=True)
class PlacedTensors:
    """Collects rows until a step has all of its own. `called` are taps under another name; `lost` names what could not
    be placed, and why."""

    plan: RowPlan
    model: ModelMeta
    called: Mapping[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    _steps: dict[int, dict[PartKey, _Part]] = field(default_factory=dict)

    def add(self, number: int, found: RankPasses) -> None:
        """Take the rows of one pass of all ranks."""
        places = self.plan.places[number]
        if not places:
            return
        names = self.plan.names[number]
        for rank, one in found.items():
            for tap, tensor in named_tensors(one):
                for name, part in _parts(self.called.get(tap, tap), tensor, one):
                    self._place(name, rank, one, part, places, names)

    def take(self, step: int) -> list[TensorRecord]:
        """The tensors of a step, all of whose rows have come."""
        return [part.record(key) for key, part in self._steps.pop(step, {}).items()]

    def _place(
        self, tap: str, rank: int, one: ForeignPass, part: ForeignTensor,
        places: Mapping[int, Sequence[RowPlace]], names: tuple[str, ...],
    ) -> None:  # fmt: skip
        array = part.array
        assert array is not None
        if local_name(tap) in CACHES:
            return self._lose(tap, "a cache is no row of a pass")
        if part.dtype not in STORED_AS:
            return self._lose(tap, f"a session cannot hold {part.dtype[:40]!r}")
        array = by_rows(tap, array, len(part.rows or one.ids))
        count = len(array) if array.ndim and array.size else 0
        rows = (part.rows or placed_rows(one.positions, names, count)) if count else None
        if rows is None or len(rows) != count or not all(0 <= row < len(names) for row in rows):
            return self._lose(tap, f"which rows of a pass its {count} are is not recorded")
        if local_name(tap) in ATTENTION and len({name for name in names if name}) > 1:
            return self._lose(tap, "of a pass of several requests, whose keys are whose is not recorded")
        array = shaped(tap, self._without_padding(tap, array), self.model)
        for (seq, step), (source, target) in self._groups(tap, rows, places).items():
            self._fill((tap, rank, seq), step, array[source], target, part.dtype)
        return None

    def _lose(self, tap: str, why: str) -> None:
        self.lost.setdefault(any_layer(tap), why)

    def _without_padding(self, tap: str, array: NDArray[Any]) -> NDArray[Any]:
        """Logits of a whole vocabulary without the columns that only fill it up."""
        vocab = self.model.vocab_size
        return array[..., :vocab] if tap == "logits" and vocab else array

    def _groups(
        self, tap: str, rows: tuple[int, ...], places: Mapping[int, Sequence[RowPlace]]
    ) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        """By sequence and step: which rows of a tensor go to which of the step's: of logits and states the last."""
        groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for index, place in (
            (index, place) for index, row in enumerate(rows) for place in places.get(row, ())
        ):
            target = place.row
            if is_of_last(tap):
                if target != len(self.plan.sequences[place.seq].span(place.step)) - 1:
                    continue
                target = 0
            source, targets = groups.setdefault((place.seq, place.step), ([], []))
            source.append(index)
            targets.append(target)
        return groups

    def _fill(self, key: PartKey, step: int, rows: NDArray[Any], target: list[int], dtype: str) -> None:
        tap, _, seq = key
        parts = self._steps.setdefault(step, {})
        span = self.plan.sequences[seq].span(step)
        size = 1 if is_of_last(tap) else len(span)
        if local_name(tap) in ATTENTION:
            rows = _keys(rows, span.stop, -np.inf if tap.endswith("scores") else 0)
        if key not in parts:
            if target == list(range(size)):  # all of them at once, as most come
                parts[key] = _Part(stored(rows, dtype), dtype, None)
                return
            array = np.zeros((size, *rows.shape[1:]), STORED_AS[dtype])
            parts[key] = _Part(array, dtype, np.zeros(size, np.bool_))
        part = parts[key]
        if part.dtype != dtype or part.array.shape[1:] != rows.shape[1:]:
            raise ForeignDumpError(
                f"rank {key[1]}: {tap[:120]} has rows of {dtype}{list(rows.shape[1:])}, and of "
                f"{part.dtype}{list(part.array.shape[1:])} in another pass: they make up no tensor"
            )
        part.array[target] = stored(rows, dtype)
        if part.filled is not None:
            part.filled[target] = True


def _keys(rows: NDArray[Any], keys: int, nothing: float) -> NDArray[Any]:
    """Rows [T, heads, K] with as many keys as the step has: a chunk does not see those of later ones."""
    if rows.ndim != 3 or rows.shape[2] >= keys:
        return rows[..., :keys]
    padded = np.full((*rows.shape[:2], keys), nothing, rows.dtype)
    padded[..., : rows.shape[2]] = rows
    return padded


def _parts(tap: str, tensor: ForeignTensor, one: ForeignPass) -> Iterator[tuple[str, ForeignTensor]]:
    """A tensor as it is; of one that left statistics alone, those of its rows, and their hashes."""
    if tensor.array is not None:
        yield tap, tensor
        return
    for ending, array in without_array(tensor, one).items():
        dtype = "uint64" if ending == ROW_HASHES else "float32"
        yield tap + ending, _as_array(tensor, array.astype(dtype), dtype)


def _as_array(tensor: ForeignTensor, array: NDArray[Any], dtype: str) -> ForeignTensor:
    if array.ndim != 2 or array.shape[1] not in (1, len(STATISTICS)):
        raise ForeignDumpError(
            f"{tensor.tap[:120]}: statistics of shape {list(array.shape)}, not [rows, {len(STATISTICS)}]"
        )
    return ForeignTensor(tensor.tap, tensor.layout, dtype, array, tensor.rows)
