"""An MLP without a gate whose activation has numbers of its own: xIELU (arXiv:2411.13010), as Apertus has it."""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.mlp import UngatedMLP
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards


class XIELUMLP(UngatedMLP):
    """down(xielu(up(x))). `layer` is the checkpoint's name of the layer."""

    def __init__(
        self, up: MergedColumnParallelLinear, down: RowParallelLinear, layer: str, store: Store
    ) -> None:
        super().__init__(up, down, "xielu")
        self.numbers = {
            f"{layer}.{name}": store.number() if role.startswith("xielu_") else store.vector(1)
            for role, name in shards.XIELU.items()
        }

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share, and the activation's numbers."""
        return super().parameters() | self.numbers

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        super().bind(wiring)
        self.act_alone = lambda x, activation: wiring.rules.xielu(x, *self.numbers.values())
