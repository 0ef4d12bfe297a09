"""What a layer is bound to: the rules in force and the taps that are on.

Binding is separate from construction: a toggle or a new capture policy rebinds the layers, which is cheap, and
leaves the weights in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lockstep.engine.rules import Rules
from lockstep.engine.taps.measurands import Growing, PerSequence


class TileSink(Protocol):
    """Takes a tensor [heads, T, K] in tiles."""

    def add(self, x: Tensor, head: int, row: int, key: int) -> None:
        """A tile [h, t, k], whose first element stands at those indices."""


class TapCallback(Protocol):
    """Called with the tensor at a tap; may pause the rank or overwrite the tensor in place."""

    def __call__(self, x: Tensor, sequence: int | None = None) -> None:
        """`sequence` is the index in the batch when the tensor is one sequence's alone."""

    @property
    def changes(self) -> bool:
        """Whether a patch overwrites the tensor."""

    def tiles(
        self, sequence: int, shape: tuple[int, int, int], outside: float, like: Tensor
    ) -> TileSink | None:
        """What takes the sequence's tensor [heads, T, K], of the dtype of `like`, in tiles; cells in none of them hold
        `outside`. None where the tap needs the whole."""


@runtime_checkable
class MeasuringTap(Protocol):
    """A tap that only measures."""

    def growing(self, pieces: Sequence[Growing]) -> None:
        """What each sequence of the batch has, as long as it is when the step runs."""

    def each(self, found: PerSequence) -> None:
        """What each sequence of the batch has, which only faults overwrite."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """One layer's view of rules and taps: `tap("attn.q_proj")` is None when that tap is off."""

    rules: Rules
    taps: Callable[[str], TapCallback | None]
    places: Mapping[str, int]  # tap name -> index in execution order
    prefix: str = ""

    def tap(self, name: str) -> TapCallback | None:
        """The tap of that name in this layer, None when it is off."""
        return self.taps(self.prefix + name)

    def place(self, name: str) -> int:
        """The index for `Comm.enter` when the operation of that tap begins."""
        return self.places[self.prefix + name]

    def layer(self, index: int) -> Wiring:
        """The view of one decoder layer."""
        return Wiring(self.rules, self.taps, self.places, f"layers.{index}.")
