"""Pausing: all ranks stop at the same tap, and only there.

Whether to stop is decided from what every rank knows (the next operation, the next layer, a place) or,
where a rank may know something of its own (a condition on its numbers, an interrupt that it saw first), by a
collective at that tap, so that no rank goes on alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.engine.batch import Batch, SequenceSpan
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.taps.breaks import Break, Pause, PauseSpec
from lockstep.engine.taps.measure import measure
from lockstep.engine.taps.names import STATISTICS, TapSpec, layer_of, layer_path, operation_at
from lockstep.engine.taps.parts import merge, statistics, unmask
from lockstep.engine.taps.predicate import evaluate


class Abandon(Exception):
    """Raised at a tap to abort the paused pass."""


class Pauser:
    """Watches the taps of one rank. `wait` blocks while paused and returns what to stop at next (or
    raises Abandon)."""

    def __init__(
        self, specs: Sequence[TapSpec], comm: Comm, wait: Callable[[Pause], PauseSpec], spec: PauseSpec
    ) -> None:
        self._specs, self._comm, self._wait = specs, comm, wait
        self.live: dict[tuple[int, int | None], Tensor] = {}
        self._masked: dict[tuple[int, int | None], int] = {}
        self._held: set[tuple[int, int]] = set()  # (break, place) of this pass, of breaks that name inputs
        self._caches = _written_at(specs)
        self.arm(spec)

    def arm(self, spec: PauseSpec) -> None:
        """Set what to stop at next."""
        self.spec = spec
        self._layer = ""  # where the last stop was; a pass begins outside every layer
        self._agreed = ""  # the layer in which the ranks have last agreed on whether to be interrupted
        self._breaks: dict[int, list[Break]] = {}
        for one in spec.breaks:
            for place in one.places:
                self._breaks.setdefault(place, []).append(one)

    def needs(self, place: int) -> bool:
        """While a pause is possible every tap is on: what passed must be readable at the stop."""
        return True

    def begin(self, batch: Batch) -> None:
        """A forward pass starts."""
        self.live.clear()
        self._masked.clear()
        self._held.clear()
        self._batch = batch
        self._layer = self._agreed = ""

    def at(self, place: int, x: Tensor, sequence: int | None, masked: int = 0) -> None:
        """Tensor x, of which a correct mask has put `masked` cells to -inf, passes tap `place`: pause here if
        it is time to."""
        if not self.spec.keep and all(at != place for at, _ in self.live):
            self.live.clear()
        # A copy: reductions overwrite partial sums in place, and the cache's rows share one buffer.
        self.live[(place, sequence)] = x.detach().clone()
        self._masked[(place, sequence)] = masked
        if sequence is not None and sequence < len(self._batch.spans) - 1:
            return  # the tap is complete with the batch's last sequence
        pause = self._reason(place)
        if pause is not None:
            kv_lens = {span.seq: self._cached(place, span) for span in self._batch.spans}
            self.arm(self._wait(replace(pause, names=self._names(place, None), kv_lens=kv_lens)))
            self._layer = layer_path(self._specs[place].name)

    def _reason(self, place: int) -> Pause | None:
        if self._interrupted(place):
            return Pause(place, "interrupt", (), ())
        all_hits, own_hits = self._hits(place)
        if all_hits:
            return Pause(place, "breakpoint", all_hits, own_hits)
        layer = layer_path(self._specs[place].name)
        stepped = (
            self.spec.stop == "operation"
            or (self.spec.stop == "place" and place == self.spec.place)
            or (self.spec.stop == "layer" and layer != self._layer)
        )
        return Pause(place, "step", (), ()) if stepped else None

    def _interrupted(self, place: int) -> bool:
        """Whether the host has asked any rank to pause. Checked once per layer, because it takes a collective."""
        if self._comm.size == 1:
            return self._comm.interrupted
        layer = layer_path(self._specs[place].name)
        if layer == self._agreed:
            return False
        self._agreed = layer
        return bool(self._comm.union(int(self._comm.interrupted)))

    def _hits(self, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Breaks that hit here on any rank, and on this one."""
        candidates = self._breaks.get(place, [])
        if not candidates:
            return (), ()
        own = [one.rank in (None, self._comm.rank) and self._holds(one, place) for one in candidates]
        everywhere = own
        if any(one.when is not None or one.rank is not None for one in candidates):
            # More than 62 conditional breaks at one tap share the last bit: all of those are reported.
            bits = sum(1 << i for i, hit in enumerate(own[:62]) if hit) | (any(own[62:]) << 61)
            union = self._comm.union(bits)
            everywhere = [bool(union >> min(i, 61) & 1) for i in range(len(own))]
        hits = [one for one, hit in zip(candidates, everywhere, strict=True) if hit]
        self._held.update((one.id, place) for one in hits if one.inputs)
        begun = {one.id for one in hits if not self._inherited(one, place)}
        return tuple(one.id for one in hits if one.id in begun), tuple(
            one.id for one, hit in zip(candidates, own, strict=True) if hit and one.id in begun
        )

    def _inherited(self, one: Break, place: int) -> bool:
        """Whether it held at an input of the place already: every rank knows that of every rank."""
        return any((one.id, source) in self._held for source in one.inputs.get(place, ()))

    def _holds(self, one: Break, place: int) -> bool:
        return one.when is None or bool(evaluate(one.when, self._names(place, one.seq)))

    def _names(self, place: int, seq: int | None) -> dict[str, float]:
        """The names that a condition may use at this tap: its statistics on this rank, and the rank's position in a
        sequence (None: the first)."""
        seen = {key: x for key, x in self.live.items() if key[0] == place}
        parts = torch.cat([measure(x.reshape(1, -1)) for x in seen.values()]).cpu().numpy()
        table = statistics(merge(unmask(parts, [self._masked[key] for key in seen]))[None])[0]
        names = dict(zip(STATISTICS, table.tolist(), strict=True))
        span = next((one for one in self._batch.spans if seq in (None, one.seq)), None)
        return names | {
            "step": self._comm.step,
            "rank": self._comm.rank,
            "position": math.nan if span is None else float(self._batch.positions[span.stop - 1]),
            "token": math.nan if span is None else float(self._batch.ids[span.stop - 1]),
            "kv_len": math.nan if span is None else self._cached(place, span),
        }

    def _cached(self, place: int, span: SequenceSpan) -> int:
        """Rows of a sequence that the tap's layer has cached when the pass is over (outside the layers: the
        layer with the fewest): what it holds by now, and before it has written what it is to hold."""
        layer = layer_of(self._specs[place].name)
        written = place >= self._caches.get(layer or 0, 0)
        rows = [
            held if written or cache not in self._batch.caches else max(held, span.end)
            for cache, held in enumerate(span.held)
        ]
        return min(rows) if layer is None else rows[layer]


def _written_at(specs: Sequence[TapSpec]) -> dict[int | None, int]:
    """By layer the first tap at which its cache holds what the pass writes: keys, latents, or a recurrent state."""
    found: dict[int | None, int] = {}
    for place, one in enumerate(specs):
        operation = operation_at(one.name)
        if operation is not None and (operation.kind == "cache" or operation.form == "state"):
            found.setdefault(layer_of(one.name), place)
    return found
