"""The taps of one rank: which are on, and what happens when a tensor passes one.

In this order: progress is reported, a patch may overwrite the tensor, the rank may pause (and receive another
patch meanwhile), statistics are measured, the tensor is captured if the policy asks for it, and patches marked
`after` overwrite it, so that only later operations see their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.taps import cpu_pass
from lockstep.engine.taps.flow import remembers
from lockstep.engine.taps.ledger import Recorded, StatisticsLedger
from lockstep.engine.taps.measurands import Growing, PerSequence
from lockstep.engine.taps.measure import TiledStatistics
from lockstep.engine.taps.names import TapSpec, newest_rows
from lockstep.engine.taps.pausing import Pauser

Cut = Literal["full", "newest", "last"]
Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """What is recorded of a step: statistics of every tap or none, and tensors of some taps.

    `tensors[tap index]`: "full"; "newest" for attention of which a long prompt has only its `newest_rows`; or "last"
    for the row of the last token only; of attention as many of the newest rows as all ranks together can hand over in
    `rows_bytes` as float16, that row at least.
    """

    statistics: bool = False
    tensors: Mapping[int, Cut] = field(default_factory=dict)
    rows_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TapPatch:
    """Overwrite `index` of the tensor at a tap with `value`, in the step `step` of sequence `seq` only.

    `after`: applied after statistics and capture, which see the operation's own output; later operations see
    `value`.
    """

    tap: int
    seq: int
    step: int
    index: tuple[slice, ...]
    value: Tensor
    after: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """One tensor captured in a step."""

    tap: int
    seq: int
    tensor: Tensor
    cut: Cut


class StatisticsTap:
    """A tap that only measures statistics, bound into a layer: the fast path of a recorded run."""

    __slots__ = ("add", "enter", "hub", "index", "masked")
    changes = False

    def __init__(self, hub: TapHub, index: int) -> None:
        self.hub, self.index = hub, index
        self.enter, self.add, self.masked = hub.comm.enter, hub.ledger.add, hub.masked

    def __call__(self, x: Tensor, sequence: int | None = None) -> None:
        """Note the statistics of x."""
        self.enter(self.index)
        masked = 0 if sequence is None else self.masked(self.index, x.shape)
        self.add(self.index, x, masked)

    def tiles(self, sequence: int, shape: Shape, outside: float, like: Tensor) -> TapTiles:
        """What measures a tensor [heads, T, K] in tiles."""
        return self.hub.tiles(self.index, sequence, shape, outside, like)

    def growing(self, pieces: Sequence[Growing]) -> None:
        """Note the statistics of what each sequence of the batch has, as long as it is by then."""
        self.enter(self.index)
        self.hub.add_growing(self.index, pieces)

    def each(self, found: PerSequence) -> None:
        """Note the statistics of what each sequence of the batch has, which only faults overwrite within the step."""
        self.enter(self.index)
        self.hub.add_each(self.index, found)


class TapTiles:
    """A tensor [heads, T, K] of one sequence that passes a tap in tiles: what is measured of it, and what is kept."""

    __slots__ = ("first", "measured", "tail")

    def __init__(self, measured: TiledStatistics | None, tail: Tensor | None, first: int) -> None:
        self.measured = measured
        self.tail, self.first = tail, first  # the newest rows [heads, n, K], and the number of the first

    def add(self, x: Tensor, head: int, row: int, key: int) -> None:
        """A tile [h, t, k], whose first element stands at those indices of the whole."""
        if self.measured is not None:
            self.measured.add(x, head, row, key)
        heads, rows, keys = x.shape
        skipped = max(0, self.first - row)
        if self.tail is not None and skipped < rows:
            kept = slice(row + skipped - self.first, row + rows - self.first)
            self.tail[head : head + heads, kept, key : key + keys] = x[:, skipped:]


class RankTap:
    """A tap that may also patch, pause or capture, bound into a layer."""

    __slots__ = ("hub", "index")

    def __init__(self, hub: TapHub, index: int) -> None:
        self.hub, self.index = hub, index

    def __call__(self, x: Tensor, sequence: int | None = None) -> None:
        """Let x pass: the whole packed batch's tensor, or that of the batch's sequence `sequence`."""
        self.hub.see(self.index, x, sequence)

    @property
    def changes(self) -> bool:
        """Whether a patch overwrites the tensor."""
        return any(patch.tap == self.index for patch in self.hub.patches)

    def tiles(self, sequence: int, shape: Shape, outside: float, like: Tensor) -> TapTiles | None:
        """What measures and keeps a tensor [heads, T, K] in tiles; None where it is patched, shown or kept whole."""
        hub = self.hub
        shown = hub.pauser is not None and hub.pauser.needs(self.index)
        if self.changes or shown or hub.policy.tensors.get(self.index) == "full":
            return None
        return hub.tiles(self.index, sequence, shape, outside, like)


class TapHub:
    """All taps of one rank."""

    batch: Batch

    def __init__(self, model: ModelConfig, specs: Sequence[TapSpec], comm: Comm) -> None:
        self.specs, self.heads, self.model = specs, model.num_heads, model
        self.comm = comm
        self.places = {spec.name: i for i, spec in enumerate(specs)}
        self.policy = CapturePolicy()
        self.patches: list[TapPatch] = []
        self.pauser: Pauser | None = None
        # Sums are made in place of partials, and the cache's rows of all layers share one buffer.
        self.ledger = StatisticsLedger(
            len(specs),
            [i for i, one in enumerate(specs) if one.layout.kind == "partial" or remembers(one.name)],
        )
        self._captured: list[Captured] = []
        #: Of this pass, by window and cells: what a correct mask hides of each sequence, in layers that are alike.
        self._masked: dict[tuple[int | None, int], list[int]] = {}
        self._handed_out = 0  # how many of those were handed out at pauses of this pass
        most = None if model.indexer is None else model.indexer.top_k
        #: Of scores how many keys a query sees at most. An indexer chooses as many as a window has.
        self._windows = {
            place: (model.windows[i] if model.windows else None) or most
            for i in range(model.num_layers)
            if (place := self.places.get(f"layers.{i}.attn.scores")) is not None
        }
        self._attention = {place + after for place in self._windows for after in (0, 1)}
        self._windows |= {
            place: None
            for i in range(model.num_layers)
            if (place := self.places.get(f"layers.{i}.attn.index_scores")) is not None
        }

    def tap(self, name: str) -> RankTap | StatisticsTap | None:
        """The tap of that name, or None while nothing needs it."""
        index = self.places.get(name)
        if index is None:
            return None
        patched = any(patch.tap == index for patch in self.patches)
        paused = self.pauser is not None and self.pauser.needs(index)
        if patched or paused or index in self.policy.tensors:
            return RankTap(self, index)
        if self.policy.statistics:
            return StatisticsTap(self, index)
        return None

    def begin(self, batch: Batch) -> None:
        """A forward pass starts."""
        self.batch = batch
        self._captured, self._handed_out = [], 0
        self._masked.clear()
        if self.policy.statistics:
            cpu_pass.use(len(batch.ids) * len(self.specs) * self.model.hidden_size)
        if self.pauser:
            self.pauser.begin(batch)

    def see(self, index: int, x: Tensor, sequence: int | None) -> None:
        """Handle tensor x at tap `index`."""
        self.comm.enter(index)
        self._apply_patches(index, x, sequence, after=False)
        masked = 0 if sequence is None else self.masked(index, x.shape)
        if self.pauser is not None:
            before, self._standing = self.patches, (index, x, sequence, masked)
            self.pauser.at(index, x, sequence, masked)
            if self.patches is not before:  # given while paused here
                self._apply_patches(index, x, sequence, after=False)
        if self.policy.statistics:  # of what the patches below are to overwrite, a copy
            self.ledger.add(index, x.clone() if self._patched_after(index) else x, masked)
        if index in self.policy.tensors:
            self._captured += self._cut(index, x, sequence)
        self._apply_patches(index, x, sequence, after=True)

    def tiles(self, index: int, sequence: int, shape: Shape, outside: float, like: Tensor) -> TapTiles:
        """A tensor [heads, T, K] of the batch's sequence `sequence`, of the dtype of `like`, will pass tap `index` in
        tiles."""
        self.comm.enter(index)
        measured = tail = None
        if self.policy.statistics:
            measured = self.ledger.tiled(index, shape, outside, like, self.masked(index, shape))
        rows = 0
        if index in self.policy.tensors:
            heads, _, keys = shape
            rows = self._rows(index, shape)
            tail = like.new_full((heads, rows, keys), outside)
            seq = self.batch.spans[sequence].seq
            self._captured.append(Captured(index, seq, tail, self.policy.tensors[index]))
        return TapTiles(measured, tail, shape[1] - rows)

    def end(self) -> tuple[NDArray[np.float32] | None, NDArray[np.uint64] | None, list[Captured]]:
        """The pass is over: statistics [taps, 8], checksums [taps], the captured tensors that no pause has reported."""
        captured, self._captured = self._captured[self._handed_out :], []
        if not self.policy.statistics:
            return None, None, captured
        stats, checksums = self.ledger.close()
        return stats, checksums, captured

    def replayed(
        self, batch: Batch, recorded: Recorded | None, measured: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.uint64] | None, list[Captured]]:
        """A captured pass has been replayed, `measured` is what it recorded, on the host: as `end`."""
        self.batch = batch
        if recorded is None or measured is None:
            return None, None, []
        cells: dict[int | None, list[int]] = {}  # by window: most layers have the same

        def masked(tap: int) -> list[int]:
            window = self._windows[tap]
            if window not in cells:
                cells[window] = self._masked_of_each(tap, self.heads)
            return cells[window]

        stats, checksums = self.ledger.replayed(recorded, measured, masked)
        return stats, checksums, []

    @property
    def measures_alone(self) -> bool:
        """Whether no tap needs the tensor itself: to stop at, to keep or to overwrite it."""
        return self.pauser is None and not self.patches and not self.policy.tensors

    def abandon(self) -> None:
        """The pass was aborted: drop its statistics and captures."""
        self.ledger.clear()
        self._captured = []

    def so_far(self) -> tuple[NDArray[np.float32] | None, NDArray[np.uint64] | None, list[Captured]]:
        """While paused: statistics and checksums of what has passed, the tap paused at included, and the tensors
        captured since the last pause. A patch may still overwrite the tensor paused at, so it is reported again."""
        index, x, sequence, masked = self._standing
        new = self._captured[self._handed_out :]
        self._handed_out += sum(one.tap != index for one in new)
        if index in self.policy.tensors:
            new += self._cut(index, x, sequence)
        if not self.policy.statistics:
            return None, None, new
        return *self.ledger.table_with(index, x, masked), new

    def parts(self, index: int, x: Tensor, sequence: int | None) -> list[tuple[int, Tensor]]:
        """x cut into the batch's sequences, as (sequence id, tensor) pairs."""
        spans = self.batch.spans
        if sequence is not None:
            return [(spans[sequence].seq, x)]
        if self.specs[index].name == "logits":  # one row a sequence
            return [(span.seq, x[i : i + 1]) for i, span in enumerate(spans)]
        return [(span.seq, x[span.start : span.stop]) for span in spans]

    def _cut(self, index: int, x: Tensor, sequence: int | None) -> list[Captured]:
        """What the policy keeps of a tensor."""
        cut = self.policy.tensors[index]
        found = []
        for seq, part in self.parts(index, x, sequence):
            if cut == "full":
                kept = part
            elif self._is_attention(index):  # [heads, T, K]
                kept = part[:, -self._rows(index, part.shape) :]
            else:
                kept = part[-1:]
            found.append(Captured(index, seq, kept.clone(), cut))
        return found

    def _is_attention(self, index: int) -> bool:
        """Whether the tap is scores or probs."""
        return index in self._attention

    def _rows(self, index: int, attention: Sequence[int]) -> int:
        """How many of the newest rows of [heads, T, K] at a tap are handed over."""
        heads, new, keys = attention
        if self.policy.tensors[index] == "newest":
            return newest_rows(self.heads, new, keys)
        rows = [cut for index, cut in self.policy.tensors.items() if self._is_attention(index)].count("last")
        share = (self.policy.rows_bytes or 0) // (self.comm.size * rows * len(self.batch.spans))
        return max(1, min(new, share // (2 * heads * keys)))

    def _apply_patches(self, index: int, x: Tensor, sequence: int | None, *, after: bool) -> None:
        for patch in self.patches:
            if patch.tap == index and patch.after == after and patch.step == self.comm.step:
                for seq, part in self.parts(index, x, sequence):
                    if seq == patch.seq:
                        part[patch.index] = patch.value.to(x.device, x.dtype)

    def add_growing(self, index: int, pieces: Sequence[Growing]) -> None:
        """What each sequence of the batch has at tap `index`."""
        seen = index in self._windows
        self.ledger.add_growing(index, pieces, self._masked_of_each(index, pieces[0].width) if seen else None)

    def add_each(self, index: int, found: PerSequence) -> None:
        """What each sequence of the batch has at tap `index`, of attention the cells of one query."""
        masked = None
        if index in self._windows:
            like = self._windows[index], found.runs.elements
            if (masked := self._masked.get(like)) is None:
                heads = found.runs.elements // sum(span.kv_len for span in self.batch.spans)
                masked = self._masked[like] = self._masked_of_each(index, heads)
        self.ledger.add_each(index, found, masked)

    def _masked_of_each(self, index: int, heads: int) -> list[int]:
        """`masked` of each sequence in a step in which it reads one token."""
        return [self.masked(index, (heads, 1, span.kv_len)) for span in self.batch.spans]

    def _patched_after(self, index: int) -> bool:
        return any(patch.tap == index and patch.after for patch in self.patches)

    def masked(self, index: int, shape: Sequence[int]) -> int:
        """Number of cells that a correct causal or windowed mask sets to -inf in one sequence's tensor: 0 except
        in scores [heads, T, K]."""
        if index not in self._windows:
            return 0
        heads, new, keys = shape
        window = self._windows[index]
        if self.model.chunked:
            seen = sum(self.model.keys_seen(position, window) for position in range(keys - new, keys))
            return heads * (new * keys - seen)
        window = window or keys
        alone = max(
            0, min(window, keys) - (keys - new)
        )  # of the queries those that the window takes no key from
        seen = alone * (keys - new) + alone * (alone + 1) // 2 + (new - alone) * window
        return heads * (new * keys - seen)
