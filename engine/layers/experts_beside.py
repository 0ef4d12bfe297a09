"""Experts beside a layer's MLP (Gemma-4): both read the same stream under norms of their own, and each one's output has
another before they are added. The router reads the stream without the MLP's norm, divided by its root mean square and
multiplied channel by channel.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.experts import MixtureOfExperts
from lockstep.engine.layers.norm import Norm
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring


class ExpertsBeside:
    """norm(mlp) + norm(experts(norm(x), routed by x)). `scale`: the checkpoint's name of the router's numbers; `norms`
    by tap, which the layer binds."""

    def __init__(
        self,
        mixture: MixtureOfExperts,
        norms: Mapping[str, Norm],
        scale: str,
        model: ModelConfig,
        store: Store,
    ) -> None:
        self.mixture, self.scale_name, self.scale = mixture, scale, store.vector(model.hidden_size)
        self.eps, self.factor = model.rms_eps, model.hidden_size**-0.5
        self.dense_norm, self.experts_norm, self.combine_norm = (
            norms[f"mlp.{one}_norm"] for one in ("dense", "experts", "combine")
        )

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share, without the norms'."""
        return {self.scale_name: self.scale} | self.mixture.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.mixture.bind(wiring)
        self.unit_norm = wiring.rules.router_norm
        self.tap_norm, self.tap_input, self.tap_sum = (
            wiring.tap(f"mlp.{one}") for one in ("router_norm", "router_input", "sum")
        )

    def __call__(self, dense: Tensor, stream: Tensor) -> Tensor:
        """What the MLP gives and the stream that it has read, [T, H] both -> [T, H]."""
        own = self.dense_norm(dense)
        unit = self.unit_norm(stream, self.eps)
        if self.tap_norm:
            self.tap_norm(unit)
        routed = unit * self.scale * self.factor
        if self.tap_input:
            self.tap_input(routed)
        out = own + self.combine_norm(self.mixture(self.experts_norm(stream), routed))
        if self.tap_sum:
            self.tap_sum(out)
        return out
