"""The gated feed-forward block: one GEMM for gate and up, one for down."""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.config.families import Activation
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.layers.wiring import Wiring


class MLP:
    """down(activation(gate(x)) * up(x)) over this rank's share of the intermediate features."""

    def __init__(
        self, gate_up: MergedColumnParallelLinear, down: RowParallelLinear, activation: Activation
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return self.gate_up.parameters() | self.down.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.act = wiring.rules.act
        self.tap_gate, self.tap_up = wiring.tap("mlp.gate"), wiring.tap("mlp.up")
        self.tap_act = wiring.tap("mlp.act")
        self.down.bind(wiring, "mlp.down")

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)  # [T, I / tp] each
        if self.tap_gate:
            self.tap_gate(gate)
        if self.tap_up:
            self.tap_up(up)
        return self.down(self.activated(gate, up))  # [T, H]

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What goes into the second product."""
        hidden = self.act(gate, up, self.activation)  # [T, I / tp]
        if self.tap_act:
            self.tap_act(hidden)
        return hidden


class UngatedMLP(MLP):
    """down(activation(up(x)))."""

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        super().bind(wiring)
        self.act_alone = wiring.rules.act_alone

    def __call__(self, x: Tensor) -> Tensor:
        (up,) = self.gate_up(x)  # [T, I / tp]
        if self.tap_up:
            self.tap_up(up)
        hidden = self.act_alone(up, self.activation)
        if self.tap_act:
            self.tap_act(hidden)
        return self.down(hidden)
