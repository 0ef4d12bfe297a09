"""Blocks with multipliers: attention and a state side by side, of whose results the sum goes on, and the MLP."""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import Activation
from lockstep.engine.config.multipliers import Multipliers
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers.attention import Attention
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.mlp import MLP
from lockstep.engine.layers.multiplier import Multiplier
from lockstep.engine.layers.stateful import StatefulLayer
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.layers.wiring import Wiring


class SideBySide:
    """Attention and a layer with a state, of the same input: the sum of what they give."""

    def __init__(self, attention: Attention, state: StatefulLayer, model: ModelConfig) -> None:
        self.attention, self.state = attention, state
        of_attention, of_state = (
            ("attn.in_scaled", "attn.o_scaled"),
            ("attn.ssm_in_scaled", "attn.out_scaled"),
        )
        self.of_attention, self.of_state = (
            [Multiplier(tap, model.multipliers) for tap in taps] for taps in (of_attention, of_state)
        )

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return self.attention.parameters() | self.state.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.attention.bind(wiring)
        self.state.bind(wiring)
        for factor in (*self.of_attention, *self.of_state):
            factor.bind(wiring)
        self.mix, self.tap = wiring.rules.mixed, wiring.tap("attn.mixed")

    def __call__(
        self, x: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        into, out = self.of_attention
        attended = out(self.attention(into(x), batch, rope, inputs, pool))
        into, out = self.of_state
        y = self.mix(out(self.state(into(x), batch, rope, inputs, pool)), attended)
        if self.tap:
            self.tap(y)
        return y


class MultipliedMLP(MLP):
    """The MLP with multipliers of its gate and of what it gives."""

    def __init__(
        self,
        gate_up: MergedColumnParallelLinear,
        down: RowParallelLinear,
        activation: Activation,
        multipliers: Multipliers,
    ) -> None:
        super().__init__(gate_up, down, activation)
        self.of_gate, self.of_down = (
            Multiplier(tap, multipliers) for tap in ("mlp.gate_scaled", "mlp.down_scaled")
        )

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        super().bind(wiring)
        self.of_gate.bind(wiring)
        self.of_down.bind(wiring)

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What goes into the second product."""
        return super().activated(self.of_gate(gate), up)

    def __call__(self, x: Tensor) -> Tensor:
        return self.of_down(super().__call__(x))
