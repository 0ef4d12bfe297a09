"""Embedding and output head, both split over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.weight import DenseMatrix, KeptMatrix, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm


class VocabParallelEmbedding:
    """Each rank looks up the ids that it owns, zero for the others; the sum over ranks is the row."""

    def __init__(
        self,
        model: ModelConfig,
        comm: Comm,
        store: Store,
        module: str = "model.embed_tokens",
        tap: str = "embed",
    ) -> None:
        self.name = tap
        self.model, self.hidden = model, model.hidden_size
        self.span = span = shards.vocab(model.vocab_size, comm.size, comm.rank)
        self.comm = comm
        self.weight = store.unpacked.matrix([f"{module}.weight"], [span.size], self.hidden)

    def bind(self, wiring: Wiring) -> None:
        self.tap, self.place = wiring.tap(self.name), wiring.place(self.name)
        self.rules = wiring.rules

    def __call__(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> [T, hidden]."""
        self.comm.enter(self.place)
        if self.comm.size == 1:
            out = self.weight.look_up(ids)
        else:
            owned = (ids >= self.span.start) & (ids < self.span.stop)
            if self.span.size:
                rows = self.weight.look_up((ids - self.span.start).clamp(0, self.span.size - 1))
                out = rows.masked_fill(~owned[:, None], 0)
            else:  # with a padded vocabulary the last rank may own no row at all
                out = torch.zeros(len(ids), self.hidden, dtype=self.weight.dtype, device=self.weight.device)
            out = self.comm.all_reduce(out)
        out = self.rules.embedding(out, self.model)
        if self.tap:
            self.tap(out)
        return out


class VocabParallelHead:
    """Rows of the vocabulary that this rank scores. `weight` may be the embedding's own (tied); `bias` [V / tp]."""

    def __init__(
        self, weight: DenseMatrix | KeptMatrix, model: ModelConfig, bias: Tensor | None = None
    ) -> None:
        self.weight, self.model, self.bias = weight, model, bias

    def biases(self) -> dict[str, Tensor]:
        """Checkpoint name -> the bias, of models that have one."""
        return {} if self.bias is None else {shards.HEAD_BIAS: self.bias}

    def bind(self, wiring: Wiring) -> None:
        self.tap, self.finish = wiring.tap("logits"), wiring.rules.logits

    def logits(self, last: Tensor) -> Tensor:
        """Last hidden rows [S, hidden] -> this rank's logits [S, V / tp]. Calls no tap."""
        return self.finish(self.weight.product(last, self.bias), self.model)

    def __call__(self, last: Tensor) -> Tensor:
        logits = self.logits(last)
        if self.tap:
            self.tap(logits)
        return logits
