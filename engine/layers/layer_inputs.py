"""Per-layer inputs (Gemma-3n, Gemma-4): a second embedding with a vector for each token and layer, and what a layer
makes of its own.

All of it is whole on every rank, but for the embedding's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.layer_shapes import LayerInputs
from lockstep.engine.graph import outside_of, parts_of
from lockstep.engine.graph.layer_inputs import NORM
from lockstep.engine.layers.embedding import VocabParallelEmbedding
from lockstep.engine.layers.linear import MergedColumnParallelLinear
from lockstep.engine.layers.norm import Norm
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import TapCallback, Wiring
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.parallel.shards import Span


class AllLayerInputs:
    """What all layers read beside the stream, made once a pass."""

    def __init__(self, model: ModelConfig, own: LayerInputs, comm: Comm, store: Store) -> None:
        self.model = model
        modules = {one.tap: one.module for one in outside_of(parts_of(model))}
        as_embedding = replace(model, hidden_size=own.total, embedding_multiplier=own.width**0.5)
        tap = "layer_inputs.embed"
        self.embed = VocabParallelEmbedding(as_embedding, comm, store, modules[tap], tap)
        self.proj = _whole(modules["layer_inputs.proj"], own.total, model.hidden_size, store)
        self.norm = Norm(NORM, own.width, model, store)

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return {**self.embed.weight.parts(), **self.proj.parameters(), **self.norm.parameters()}

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.embed.bind(wiring)
        self.norm.bind(wiring, "layer_inputs")
        self.sum, self.tap_proj = wiring.rules.layer_inputs, wiring.tap("layer_inputs.proj")

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """Token ids [T] and their embedding [T, hidden] -> [T, layers * width]."""
        rows = self.embed(ids)
        (projected,) = self.proj(x)
        _seen(self.tap_proj, projected)
        out = self.sum(rows, projected, self.norm.normalised, self.model)
        _seen(self.norm.tap, out)
        return out


class LayerInputGate:
    """What a layer adds to the stream: its own input through a gate, and a product of that."""

    def __init__(
        self, model: ModelConfig, own: LayerInputs, modules: Mapping[str, str], store: Store
    ) -> None:
        self.activation, self.own = model.activation, own
        self.gate = _whole(modules["layer_input.gate"], own.width, model.hidden_size, store)
        self.proj = _whole(modules["layer_input.proj"], model.hidden_size, own.width, store)

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> the weight."""
        return self.gate.parameters() | self.proj.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.part, self.act = wiring.rules.layer_input, wiring.rules.act
        self.tap_stream, self.tap_own = wiring.tap("mlp_stream"), wiring.tap("layer_input")
        self.tap_gate, self.tap_act, self.tap_proj = (
            wiring.tap(f"layer_input.{one}") for one in ("gate", "act", "proj")
        )

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The stream [T, hidden] and all layers' inputs -> [T, hidden]."""
        _seen(self.tap_stream, x)
        own = self.part(inputs, self.own)
        _seen(self.tap_own, own)
        (gate,) = self.gate(x)
        _seen(self.tap_gate, gate)
        hidden = self.act(gate, own, self.activation)
        _seen(self.tap_act, hidden)
        (out,) = self.proj(hidden)
        _seen(self.tap_proj, out)
        return out


def _whole(module: str, out_features: int, in_features: int, store: Store) -> MergedColumnParallelLinear:
    """A product that every rank has whole."""
    return MergedColumnParallelLinear([module], [Span(0, out_features)], in_features, False, store)


def _seen(tap: TapCallback | None, x: Tensor) -> None:
    if tap:
        tap(x)
