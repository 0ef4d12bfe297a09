"""What taps a dump has: their order, and how each is spread over the ranks, stated or found out.

A layout that nobody gives follows from the names that all engines share and from the model's shapes; of an engine's own
taps, from their numbers: bit-equal on all ranks is a replica, ranks that add up to a replica are partial sums. It is
marked as inferred.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.taps.names import layer_of, layout_of, local_name, operation_at
from lockstep.sessions import Tap, layouts
from lockstep.sessions.dtypes import widen
from lockstep.sessions.errors import LayoutError
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.heads import RankPasses, without_array
from lockstep.workbench.foreign.passes import ForeignDumpError, ForeignPass, ForeignTensor
from lockstep.workbench.foreign.shapes import ATTENTION, HEADS, by_rows, is_canonical, shaped, width

#: Taps that a session may have.
MOST_TAPS = 100_000
#: How far the sum over ranks may be from the tap that it becomes, relative to its largest element.
_SUM = 1e-2
#: Passes in which such sums are looked for.
_TRIED = 2


def _usual(tap: str) -> str:
    """The layout of a tap where each KV head is on one rank; of a name that is none of ours: whole."""
    operation = operation_at(tap)
    return "replicate" if operation is None else str(layout_of(operation))


@dataclass(slots=True)
class SeenTap:
    """A tap of the dump. `stated` is its layout there; `shape` a row's on the ranks that have it; `equal`: bit-equal on
    all of them throughout; `summed`: they add up to another tap; `array`: it has tensors; `endings` are those of the
    taps that hold what it has instead."""

    name: str
    stated: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    ranks: set[int] = field(default_factory=set)
    equal: bool = True
    summed: bool = False
    array: bool = False
    endings: set[str] = field(default_factory=set)


@dataclass(slots=True)
class TapSurvey:
    """Looks at every pass of a dump once."""

    model: ModelMeta
    taps: dict[str, SeenTap] = field(default_factory=dict)
    passes: int = 0

    @property
    def statistics_only(self) -> bool:
        """Whether no operation left its numbers. The embedding may have: it shows which rows are whose."""
        taps = self.taps.values()
        whole = any(tap.array and is_canonical(tap.name) and tap.name != "embed" for tap in taps)
        return not whole and (any(tap.endings for tap in taps) or not any(tap.array for tap in taps))

    @property
    def called(self) -> dict[str, str]:
        """Taps that are another of the design's: the output of a block that is one rank's part."""
        return {
            name: f"{name}.partial" for name, tap in self.taps.items() if tap.summed and is_canonical(name)
        }

    def look(self, found: RankPasses) -> None:
        """Note the taps of one pass of all ranks."""
        seen: dict[str, dict[int, ForeignTensor]] = {}
        before, after = "", dict[str, list[str]]()
        for rank, one in found.items():
            for name, tensor in named_tensors(one):
                if name not in self.taps and name not in seen:
                    after.setdefault(before, []).append(name)
                before = name
                seen.setdefault(name, {})[rank] = tensor
        if after:
            self._insert(after)
        for name, by_rank in seen.items():
            self._note(self.taps[name], by_rank, found)
        self.passes += 1
        if self.passes <= _TRIED:
            self._find_sums(seen)

    def _insert(self, after: Mapping[str, Sequence[str]]) -> None:
        """New taps by the one that each was seen after, the newest next to it; "" is before all."""
        order: list[str] = []
        stack = [*reversed(self.taps), *after.get("", ())]
        while stack:
            order.append(name := stack.pop())
            stack += after.get(name, ())
        if len(order) > MOST_TAPS:
            raise ForeignDumpError(f"the dump has more than {MOST_TAPS} taps; record fewer (`only`)")
        self.taps = {one: self.taps.get(one) or SeenTap(one) for one in order}

    def _note(self, tap: SeenTap, by_rank: Mapping[int, ForeignTensor], found: RankPasses) -> None:
        first = by_rank[min(by_rank)]
        tap.stated = tap.stated or first.layout
        tap.dtype = tap.dtype or first.dtype
        tap.ranks |= set(by_rank)
        if first.array is not None:
            tap.array = True
            count = len(first.rows or found[min(by_rank)].ids)
            tap.shape = (
                tap.shape or shaped(tap.name, by_rows(tap.name, first.array, count), self.model).shape[1:]
            )
        tap.endings |= without_array(first, found[min(by_rank)]).keys()
        if tap.equal and len(by_rank) > 1:
            tap.equal = all(_same(first, other) for other in by_rank.values())

    def _find_sums(self, seen: Mapping[str, Mapping[int, ForeignTensor]]) -> None:
        """Taps whose ranks add up: the engine's own to one of those that follow, the outputs of a block to what the
        residual stream gains there (the engine reduces them later, with the norm)."""
        order = list(seen)
        for place, name in enumerate(order):
            tap = self.taps[name]
            if tap.equal or tap.stated or tap.summed or len(seen[name]) < 2:
                continue
            parts = [_numbers(one) for one in seen[name].values()]
            if any(part is None or part.shape != _shape(parts) for part in parts):
                continue
            total = np.sum([part for part in parts if part is not None], axis=0)
            if is_canonical(name):
                gained = self._gained(name, seen)
                tap.summed = gained is not None and _nearer(gained, total, parts[0])
            else:
                tap.summed = any(
                    self.taps[other].equal and _close(total, _numbers(next(iter(seen[other].values()))))
                    for other in order[place + 1 : place + 9]
                )

    def _gained(
        self, name: str, seen: Mapping[str, Mapping[int, ForeignTensor]]
    ) -> NDArray[np.float64] | None:
        """What the residual stream gains by the output of a block; None where it was not recorded, or differs."""
        layer, local = layer_of(name), local_name(name)
        if layer is None or local not in ("attn.o_proj", "mlp.down"):
            return None
        earlier = f"layers.{layer - 1}.mlp_residual" if layer else "embed"
        attention, mlp = f"layers.{layer}.attn_residual", f"layers.{layer}.mlp_residual"
        before, after = (earlier, attention) if local == "attn.o_proj" else (attention, mlp)
        if any(tap not in seen or not self.taps[tap].equal for tap in (before, after)):
            return None
        left, right = (_numbers(next(iter(seen[tap].values()))) for tap in (before, after))
        return None if left is None or right is None or left.shape != right.shape else right - left

    def layout(self, tap: SeenTap, ranks: int) -> tuple[str, bool]:
        """The tap's layout in the session, and whether it is inferred. ForeignDumpError for one that is none."""
        if tap.stated:
            try:
                reported = layouts.parse(tap.stated)
            except LayoutError as error:
                raise ForeignDumpError(f"tap {tap.name[:120]!r}: {error}") from error
            return self._in_session(tap, reported, ranks)
        if ranks == 1:
            return _usual(tap.name), False
        if not is_canonical(tap.name):
            if tap.equal or not tap.shape or tap.ranks != set(range(ranks)):
                return "replicate", True
            return ("partial" if tap.summed else f"shard({len(tap.shape)})"), True
        if tap.summed:
            return "partial", True
        usual = layouts.parse(_usual(tap.name))
        whole, mine = width(tap.name, self.model), prod(tap.shape)
        all_of_it = mine == whole or (whole is None and tap.equal)
        if tap.name == "logits":  # gathered, on one rank or all, perhaps with the padding of the vocabulary
            all_of_it = all_of_it or len(tap.ranks) < ranks or mine > (whole or mine)
        if usual.kind == "shard" and all_of_it:
            return "replicate", True
        return self._in_session(tap, usual, ranks)[0], True

    def _in_session(self, tap: SeenTap, layout: layouts.Layout, ranks: int) -> tuple[str, bool]:
        """Over the dimension that is split in a session, and with the replicas that the model's heads need."""
        local = local_name(tap.name)
        if layout.kind != "shard" or not is_canonical(tap.name):
            return str(layout), False
        dim = 0 if local in ATTENTION else 1
        whole, mine = width(tap.name, self.model), prod(tap.shape)
        same = local in ("attn.q_proj", "attn.context") and tap.equal  # every rank has the attention whole
        if local == "attn.context" and tap.equal:  # as wide as the queries, where values are
            whole = width("layers.0.attn.q_proj", self.model)
        replicas, found = layout.replicas, False
        if whole and mine and replicas == 1 and mine * ranks > whole and mine * ranks % whole == 0:
            copies = mine * ranks // whole
            alike = same or local in HEADS | {"attn.k_proj", "attn.v_proj"}
            if alike and ranks % copies == 0:
                replicas, found = copies, True
        return str(layouts.Layout("shard", dim, replicas)), found

    def session_taps(self, ranks: int) -> tuple[list[Tap], dict[str, str]]:
        """The taps of the session in the order seen, each followed by those that hold its rows' statistics; and the
        layouts that are inferred."""
        taps: list[Tap] = []
        inferred: dict[str, str] = {}
        called = self.called
        for tap in self.taps.values():
            layout, guessed = self.layout(tap, ranks)
            name = called.get(tap.name, tap.name)
            taps.append(Tap(len(taps), name, layout))
            if guessed:
                inferred.setdefault(any_layer(name), layout)
            spread = layout if layout == "replicate" else "shard(1)"
            for ending in sorted(tap.endings):
                taps.append(Tap(len(taps), name + ending, spread))
        return taps, inferred


def named_tensors(one: ForeignPass) -> Iterator[tuple[str, ForeignTensor]]:
    """The tensors of a pass by the tap that each is: of one of the design's seen twice the last counts, an engine's own
    is numbered."""
    times: dict[str, int] = {}
    for tensor in one.tensors:
        times[tensor.tap] = count = times.get(tensor.tap, 0) + 1
        yield tensor.tap if count == 1 or is_canonical(tensor.tap) else f"{tensor.tap}#{count}", tensor


def any_layer(tap: str) -> str:
    """The tap in any layer: "layers.3.attn.q_proj" -> "layers.*.attn.q_proj"."""
    return tap if layer_of(tap) is None else re.sub(r"^layers\.\d+", "layers.*", tap)


def _same(a: ForeignTensor, b: ForeignTensor) -> bool:
    for left, right in ((a.array, b.array), (a.hashes, b.hashes), (a.statistics, b.statistics)):
        if left is not None or right is not None:
            return left is not None and right is not None and _bits(left) == _bits(right)
    return True


def _bits(array: NDArray[Any]) -> tuple[tuple[int, ...], bytes]:
    return array.shape, np.ascontiguousarray(array).tobytes()


def _numbers(tensor: ForeignTensor) -> NDArray[np.float64] | None:
    if tensor.array is None or tensor.array.dtype.kind not in "fu":
        return None
    return widen(tensor.array, tensor.dtype).astype(np.float64)


def _shape(parts: Sequence[NDArray[Any] | None]) -> tuple[int, ...]:
    return next((part.shape for part in parts if part is not None), ())


def _close(total: NDArray[np.float64], other: NDArray[np.float64] | None) -> bool:
    if other is None or other.shape != total.shape or not np.isfinite(total).all():
        return False
    largest = float(np.abs(other).max(initial=0.0))
    return largest > 0 and float(np.abs(total - other).max(initial=0.0)) <= _SUM * largest


def _nearer(
    gained: NDArray[np.float64], total: NDArray[np.float64], part: NDArray[np.float64] | None
) -> bool:
    """Whether a sum over ranks is what the stream gains, and one rank's part is not: by most elements, as rounding is
    that of the largest."""
    if part is None or gained.shape != total.shape or not gained.size:
        return False
    return bool(np.median(np.abs(gained - total)) < np.median(np.abs(gained - part)) / 4)
