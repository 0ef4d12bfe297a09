"""Attention of a step in which every sequence of a large batch reads one token, on a CPU and in float32: all of them by
one kernel, which reads the pool where it lies.

Sequence by sequence such a step takes a dozen operators of torch for each in every layer. Scores and probabilities are
whole, so that it has the same bits whether they are measured or not; taps that keep, show or change a tensor have it
sequence by sequence. Used of large models and in engines for many sequences, where importing numba is worth it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.engine.batch import SequenceSpan
from lockstep.engine.compiled import kernels, on_threads, runs
from lockstep.engine.layers.plain_attention import attended
from lockstep.engine.taps.measurands import PerSequence, Runs
from lockstep.engine.text import first_line

#: Largest error of the self-test beside float64, on outputs of about 1.
TOLERANCE = 1e-5
_KERNELS = "lockstep.engine.layers.cpu_decode_kernels"
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The slots of the pool that hold the rows of all sequences, one behind the other, and where each sequence ends;
    and their runs of slots that follow one another: sequence, first slot, how many, and the first one's row."""

    slots: Tensor
    ends: NDArray[np.int64]
    runs: NDArray[np.int64]
    #: The runs of elements that layers have in common.
    _in_elements: dict[tuple[str, int], Runs] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[Tensor]) -> CachedRows:
        """From the slots of each."""
        slots, ends = torch.cat(rows), np.cumsum([0, *map(len, rows)])
        apart = np.flatnonzero(np.diff(slots.numpy()) != 1) + 1
        first = np.unique(np.concatenate((ends[:-1], apart)))
        sequences = np.searchsorted(ends, first, "right") - 1
        lens = np.diff(first, append=ends[-1])
        runs = np.stack((sequences, slots.numpy()[first], lens, first - ends[sequences]), 1)
        return cls(slots, ends, runs)

    @property
    def count(self) -> int:
        """Sequences."""
        return len(self.ends) - 1

    def stored(self, x: Tensor) -> PerSequence:
        """What the pool x [slots, kv_heads, D] holds of each sequence."""
        per_row = x.shape[1] * x.shape[2]
        if (runs := self._in_elements.get(("stored", per_row))) is None:
            runs = Runs.of(self.count, self.runs * np.array([1, per_row, per_row, per_row]))
            self._in_elements["stored", per_row] = runs
        return PerSequence(x, runs)

    def cells(self, x: Tensor) -> PerSequence:
        """Each sequence's own of x, [heads, K] one behind the other."""
        per_row = x.numel() // len(self.slots)
        if (runs := self._in_elements.get(("cells", per_row))) is None:
            first, elements = per_row * self.ends[:-1], per_row * np.diff(self.ends)
            table = np.stack((np.arange(self.count), first, elements, np.zeros_like(first)), 1)
            runs = self._in_elements["cells", per_row] = Runs.of(self.count, table)
        return PerSequence(x, runs)


def decodes(spans: list[SequenceSpan]) -> bool:
    """Whether each sequence reads one token, that of its last row."""
    return all(span.stop - span.start == 1 and span.in_order for span in spans)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, rows: CachedRows, *, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, heads, D] over the pool's keys and values [slots, kv_heads, D] -> scores and probabilities, of each
    sequence [heads, K], one behind the other; and the context [S, heads, D]. -inf beyond the window."""
    (count, heads, width), kv_heads = q.shape, keys.shape[1]
    cells = heads * int(rows.ends[-1])
    q = q.contiguous()
    scores, probs, out = torch.empty(cells), torch.empty(cells), torch.empty(q.shape)
    addresses = [x.data_ptr() for x in (q, keys, values, rows.slots, scores, probs, out)]
    shapes = count, heads, kv_heads, width, keys.shape[0]
    some = runs(count * kv_heads, 1)

    def work(number: int) -> None:
        part = some[number]
        kernels(_KERNELS).attend(
            *addresses, *shapes, rows.ends, scale, window or _NO_WINDOW, part.start, part.stop
        )

    on_threads(work, len(some))
    return scores, probs, out


@cache
def refusal(heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why the kernel cannot be used with these shapes; None where it has passed its test: a ragged batch in shuffled
    slots, with and without a window, beside float64."""
    random = torch.Generator().manual_seed(0)
    lens, order = [19, 1, 48], torch.randperm(80, generator=random)
    rows = CachedRows.of(list(order[: sum(lens)].split(lens)))
    keys, values = (torch.randn(80, kv_heads, head_dim, generator=random) for _ in range(2))
    q = torch.randn(3, heads, head_dim, generator=random)
    for window in (None, 17):
        try:
            *_, found = attend(q, keys, values, rows, scale=head_dim**-0.5, window=window)
        except Exception as error:  # whatever importing or compiling throws
            return first_line("no attention of a whole batch on this CPU", error)
        for seq, own in enumerate(rows.slots.split(lens)):
            seen = own[max(0, len(own) - (window or len(own))) :]
            expected = attended(q[seq : seq + 1], keys[seen], values[seen], torch.float64)[0]
            if not (found[seq] - expected).abs().max() <= TOLERANCE:  # NaN as well
                return "no attention of a whole batch on this CPU: the kernel is wrong on it"
    return None
