"""What layers that keep a state of fixed size in place of keys and values have in common.

A sequence's tokens meet what its earlier passes left. Each sequence is computed by itself, so that it does not depend
on the rest of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.linear import RowParallelLinear
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.layers.wiring import TapCallback, Wiring
from lockstep.engine.rules import Rules


class StatefulLayer(ABC):
    """One layer's mixing of tokens, over this rank's heads or channels."""

    layer: int
    model: ModelConfig
    out_proj: RowParallelLinear
    rules: Rules
    taps: dict[str, TapCallback]
    #: Of the heads' states, where the layer has any.
    tap_state: TapCallback | None

    @abstractmethod
    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""

    @abstractmethod
    def fresh(self) -> LayerState:
        """The state of a sequence that has read nothing."""

    @abstractmethod
    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: Batch, rope: Any, inputs: Any, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same. It rotates nothing and has no mask."""

    def _before(self, seq: int, new: int, pool: KVPool) -> LayerState:
        states = pool.states
        return self.rules.state_before(
            states.of(seq, self.layer), states.last.get(self.layer), states.fresh[self.layer], new
        )

    def _with_rows_before(self, x: Tensor, batch: Batch, pool: KVPool) -> list[Tensor]:
        """Of each sequence what its convolution reads [W - 1 + T, channels]: the rows that it has kept, and those of x
        [T, channels]."""
        return [
            torch.cat((self._before(one.seq, one.stop - one.start, pool).rows, x[one.start : one.stop]))
            for one in batch.spans
        ]

    def _recurred(
        self,
        rule: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
        rows: Sequence[Tensor],
        kept: int,
        batch: Batch,
        pool: KVPool,
    ) -> Tensor:
        """What each token reads from its sequence's state. `rule`: of the heads' states and the tokens of one sequence,
        which gives the states after them as well; these are kept, with so many of the convolution's newest `rows`."""
        parts = []
        for index, span in enumerate(batch.spans):
            met = self._before(span.seq, span.stop - span.start, pool)
            read, heads = rule(met.heads, slice(span.start, span.stop))
            heads = self.rules.state_kept(heads)
            if self.tap_state:
                self.tap_state(heads.unsqueeze(0), index)
            newest = self.rules.conv_kept(rows[index], kept)
            pool.states.write(self.layer, span, LayerState(newest, heads))
            parts.append(read)
        return torch.cat(parts)

    def _seen(self, names: Sequence[str], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, which their taps have seen."""
        for name, tensor in zip(names, tensors, strict=True):
            if tap := self.taps.get(name):
                tap(tensor)
        return tensors
