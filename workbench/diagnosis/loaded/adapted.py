"""Weights for which there is an adapter: it is merged into them, or held beside them, once and by its own scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel.shards import Span
from lockstep.engine.text import printable
from lockstep.workbench.diagnosis.loaded.adapter import Adapter, Addition, factor_of
from lockstep.workbench.diagnosis.loaded.explain import Mistake, explain_numbers
from lockstep.workbench.diagnosis.loaded.places import HeldPart, Shape, key_of
from lockstep.workbench.diagnosis.loaded.rank_weights import HeldAdapter, RankWeights

#: How far a merged weight may be from the one expected, as a share of what the adapter changes: the order of sums.
_NEAR = 0.25
#: Roundings of its dtype by which a weight may be off a multiple of the addition, which is fitted.
_ROUNDINGS = 0.75
#: How near to a whole number of times a multiple has to be, and how near to the same scale.
_WHOLE, _SAME = 0.02, 1e-5
#: By how much a fitted scale may be off.
_FITTED = 0.03


@dataclass(slots=True)
class AdaptedWeights:
    """What ranks hold of an adapter so far. `how`: "merged into" or "beside", with how many weights of ranks."""

    adapter: Adapter
    how: Counter[str] = field(default_factory=Counter)
    _held: dict[int, Mapping[str, HeldAdapter]] = field(default_factory=dict)

    @classmethod
    def of_model(cls, adapter: Adapter, shapes: Mapping[str, Shape]) -> Self:
        """For a model whose parameters have these shapes. CheckpointError where it is not made for that."""
        there = {key_of(name): shape for name, shape in shapes.items()}
        for key, one in adapter.additions.items():
            if there.get(key) != one.shape:
                of = f"is {list(there[key])}" if key in there else "is no parameter of its own"
                raise CheckpointError(
                    f"{adapter.path}: an adapter of another model: it adds {list(one.shape)} to {printable(key)}, "
                    f"which {of} here"
                )
        return cls(adapter)

    def of(self, parameter: str) -> Addition | None:
        """What has to be added to a parameter of the checkpoint."""
        return self.adapter.additions.get(key_of(parameter))

    def has(self, name: str) -> bool:
        """Whether a tensor in memory is one of the adapter's."""
        found = factor_of(name)
        return found is not None and found[0] in self.adapter.additions

    def merged(
        self, place: HeldPart, x: Tensor, stored: Tensor, rank: RankWeights, module: str
    ) -> Mistake | None:
        """What is wrong with the part `x` of a weight in a rank's memory, [rows, columns], that is `module`'s, where
        the checkpoint has `stored`."""
        addition, held = self.of(place.parameter), self._held_by(rank).get(key_of(place.parameter))
        assert addition is not None
        due = addition.part(place.taken, place.columns)
        base, applied = stored.to(x.dtype), held is not None and held.active and not held.merged
        if module in rank.beside.modules:
            return self._apart(place, x, base, due, rank, module)
        # A weight is rounded before or after it is merged.
        right = [(one.double() + due).to(x.dtype) for one in (stored, base)]
        if torch.equal(x, base) and (applied or any(torch.equal(x, one) for one in right)):
            self.how["beside" if applied else "merged into"] += 1
            return None
        if torch.equal(x, base):
            return Mistake("no adapter", _alone(held))
        whole = any(_size(x.double() - one) <= _NEAR * _size(one.double() - base) for one in right)
        if whole and not applied:
            self.how["merged into"] += 1
            return None
        d = x.double() - base
        floor = _ROUNDINGS * torch.finfo(x.dtype).eps * (_size(base) + _size(due))
        if (times := 1.0 if whole else _times(d, due, floor)) is not None:
            return _by_scale(times + applied, addition.scale, applied=applied)
        if (other := self._other(addition, place, d, floor)) is not None:
            return Mistake.in_words("another adapter", f"what is added is the adapter's for {other}")
        explained = explain_numbers(x, right[1])
        return Mistake(
            explained.kind, f"beside the checkpoint's with the adapter: {explained.text}", explained.key
        )

    def _apart(
        self, place: HeldPart, x: Tensor, base: Tensor, due: Tensor, rank: RankWeights, module: str
    ) -> Mistake | None:
        """The same where the engine holds the adapter beside its weights in tensors of its own. Its factors are rounded
        to their dtype, and the scale is in one of them."""
        addition = self.of(place.parameter)
        assert addition is not None
        if not torch.equal(x, base):
            return explain_numbers(x, base)
        d = rank.beside.part(module, place.rows, x.shape[1])
        floor = _ROUNDINGS * rank.beside.rounding * _size(due)
        if _size(d - due) <= floor:
            self.how["beside"] += 1
            return None
        if not bool(d.any()):
            return Mistake(
                "no adapter", "the checkpoint's alone: the adapter beside it has nothing for this weight"
            )
        if (times := _times(d, due, floor)) is not None:
            return _by_scale(times, addition.scale, applied=False)
        if (other := self._other(addition, place, d, floor)) is not None:
            return Mistake.in_words("another adapter", f"what is added is the adapter's for {other}")
        if (owner := _owner(addition, place, d, floor)) is not None:
            return Mistake.in_words("elsewhere", f"what is added is rank {owner}'s part of the adapter")
        explained = explain_numbers(d, due)
        return Mistake(explained.kind, f"the adapter beside it: {explained.text}", explained.key)

    def _held_by(self, rank: RankWeights) -> Mapping[str, HeldAdapter]:
        """What a rank holds beside its weights, by what the names of these have in common with others."""
        if rank.rank not in self._held:
            self._held[rank.rank] = {key_of(f"{module}.weight"): one for module, one in rank.adapters.items()}
        return self._held[rank.rank]

    def _other(self, own: Addition, place: HeldPart, d: Tensor, floor: float) -> str | None:
        """Whose addition it is instead."""
        for key, one in self.adapter.additions.items():
            alike = one is not own and one.shape == own.shape
            if alike and _size(d - one.part(place.taken, place.columns)) <= floor:
                return key
        return None

    def beside(self, rank: RankWeights) -> Iterator[tuple[str, Mistake]]:
        """By name what is wrong with the factors that a rank holds whole, and with their scale."""
        for name, stored in rank.names():
            if (found := factor_of(name)) is None or (
                addition := self.adapter.additions.get(found[0])
            ) is None:
                continue
            right = addition.a if found[1] == "A" else addition.b
            x = rank.source.read(stored)
            if x.shape != right.shape:
                yield (
                    name,
                    Mistake("shape", f"has the shape {list(x.shape)}, the adapter's is {list(right.shape)}"),
                )
            elif not torch.equal(x, right.to(x.dtype)):
                yield name, explain_numbers(x, right.to(x.dtype))
        for module, held in rank.adapters.items():
            one = self.adapter.additions.get(key_of(f"{module}.weight"))
            if one is not None and held.active and not _alike(held.scale, one.scale):
                yield f"{module}.weight", _scaled(_figure(held.scale), one.scale)


def _owner(addition: Addition, place: HeldPart, d: Tensor, floor: float) -> int | None:
    """Which rank's part of an addition `d` is."""
    rows, width = addition.shape
    by_columns = place.columns is not None and place.columns.size < width
    size, whole = (d.shape[1], width) if by_columns else (d.shape[0], rows)
    for owner in range(whole // size):
        span = Span(owner * size, (owner + 1) * size)
        part = addition.part(place.taken, span) if by_columns else addition.part(span, place.columns)
        if part.shape == d.shape and _size(d - part) <= floor:
            return owner
    return None


def _alone(held: HeldAdapter | None) -> str:
    if held is None:
        return "the checkpoint's alone: the adapter is neither merged nor held beside it"
    return "the checkpoint's alone: the adapter is held beside it, and " + (
        "was merged by the engine's account" if held.merged else "switched off"
    )


def _by_scale(times: float, scale: float, *, applied: bool) -> Mistake:
    """How often the adapter counts, where that is not once."""
    whole = round(times)
    if abs(times - whole) > _WHOLE or whole < 2:
        return _scaled(_figure(times * scale), scale)
    text = f"the adapter is merged {whole} times"
    if applied:
        text = f"the adapter counts {whole} times: it is merged, and applied beside the weight as well"
    return Mistake("adapter twice", text, str(whole))


def _scaled(found: str, scale: float) -> Mistake:
    text = f"the adapter counts by {found} instead of {scale:.4g}, which its alpha and rank make"
    return Mistake("adapter scale", text, found)


def _figure(fitted: float) -> str:
    """As many digits as a fit to numbers of a narrow dtype has: the same for all weights."""
    short = f"{fitted:.1g}"
    return f"{float(short):g}" if abs(float(short) - fitted) <= _FITTED * abs(fitted) else f"{fitted:.2g}"


def _times(d: Tensor, due: Tensor, floor: float) -> float | None:
    """By how much `due` is in `d`; None where there is anything else."""
    square = float((due * due).sum())
    times = float((d * due).sum()) / square if square else 0.0
    return times if square and _size(d - times * due) <= floor * max(1.0, abs(times)) else None


def _size(x: Tensor) -> float:
    return float(x.double().norm())


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * abs(b)
