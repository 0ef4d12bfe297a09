"""Embedding and output head, both split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.wiring import Wiring
from engine.parallel import shards
from engine.parallel.comm import Comm


class VocabParallelEmbedding:
    """Each rank looks up the ids that it owns, zero for the others; the sum over ranks is the row."""

    def __init__(
        self, span: shards.Span, hidden: int, comm: Comm, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.span = span
        self.comm = comm
        self.weight = torch.empty((span.size, hidden), dtype=dtype, device=device)

    def bind(self, wiring: Wiring) -> None:
        self.tap, self.place = wiring.tap("embed"), wiring.place("embed")

    def __call__(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> [T, hidden]."""
        self.comm.enter(self.place)
        if self.comm.size == 1:
            out = F.embedding(ids, self.weight)
        else:
            owned = (ids >= self.span.start) & (ids < self.span.stop)
            out = self.weight.new_zeros(ids.shape[0], self.weight.shape[1])
            if self.span.size:  # with a padded vocabulary the last rank may own no row at all
                rows = F.embedding((ids - self.span.start).clamp(0, self.span.size - 1), self.weight)
                out = rows.masked_fill(~owned[:, None], 0)
            out = self.comm.all_reduce(out)
        if self.tap:
            self.tap(out)
        return out


class VocabParallelHead:
    """Rows of the vocabulary that this rank scores. `weight` may be the embedding's own (tied)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def bind(self, wiring: Wiring) -> None:
        self.tap = wiring.tap("logits")

    def __call__(self, last: Tensor) -> Tensor:
        """Last hidden rows [S, hidden] -> this rank's logits [S, V / tp]."""
        logits = F.linear(last, self.weight)
        if self.tap:
            self.tap(logits)
        return logits
