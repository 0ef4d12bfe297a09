"""Linear layers split over the ranks, after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

All are built from *global* sizes; `engine.parallel.shards` defines what a rank owns. `parameters()` maps
checkpoint names to views of the packed weight, so loading writes straight to where a GEMM reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm


class MergedColumnParallelLinear:
    """Several matrices that read the same input as one GEMM; each split over its own out_features.

    Each part keeps its own span (never a contiguous cut through the pack): rank r holds rows r of the
    first, then rows r of the second, and so on.
    """

    def __init__(
        self,
        names: list[str],
        spans: list[shards.Span],
        in_features: int,
        bias: bool,
        store: Store,
    ) -> None:
        self.names = names
        self.sizes = tuple(span.size for span in spans)
        self.weight = store.matrix([f"{name}.weight" for name in names], self.sizes, in_features)
        self.bias = store.bias(sum(self.sizes)) if bias else None

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's rows."""
        params: dict[str, Tensor | KeptTensor] = {**self.weight.parts()}
        if self.bias is not None:
            biases = zip(self.names, self.bias.split(self.sizes), strict=True)
            params |= {f"{name}.bias": part for name, part in biases}
        return params

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = self.weight.product(x, self.bias)
        parts: tuple[Tensor, ...] = torch.split_with_sizes(packed, self.sizes, -1)
        return parts


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v in one GEMM, or q and k, which is v as well, or q alone; KV heads are replicated when there are more
    ranks than heads."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        tp: int,
        plan: shards.QKVPlan,
        store: Store,
    ) -> None:
        self.model, self.tp, self.plan = model, tp, plan
        made = "q" if model.kv_from is not None else "qk" if model.keys_as_values else "qkv"
        names = [f"{name}.{part}_proj" for part in made]
        bias = model.qkv_bias and plan.bias
        super().__init__(names, list(plan.rows)[: len(made)], plan.columns.size, bias, store)

    def bind(self, wiring: Wiring) -> None:
        """Take the seam that cuts the pack."""
        self.cut = wiring.rules.qkv_sizes

    def own_heads(self, part: int, x: Tensor) -> Tensor:
        """This rank's heads of q (0), k (1) or v (2), as a view of what it computed of them."""
        own = self.plan.own[part]
        return x[:, own.start : own.stop]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        columns = self.plan.columns
        packed = self.weight.product(x[:, columns.start : columns.stop], self.bias)  # [T, q + k + v]
        parts = self.cut(packed, self.sizes, self.model, self.tp)
        return (*parts, parts[1]) if self.model.keys_as_values else parts


class RowParallelLinear:
    """One matrix split over in_features: each rank has a partial product, the sum is the result.

    The bias is whole on every rank and added once, after the sum.
    """

    def __init__(
        self,
        name: str,
        span: shards.Span,
        out_features: int,
        bias: bool,
        comm: Comm,
        store: Store,
    ) -> None:
        self.name = name
        self.comm = comm
        self.weight = store.matrix([f"{name}.weight"], [out_features], span.size)
        self.bias = store.bias(out_features) if bias else None

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        params: dict[str, Tensor | KeptTensor] = {**self.weight.parts()}
        if self.bias is not None:
            params[f"{self.name}.bias"] = self.bias
        return params

    def bind(self, wiring: Wiring, tap: str) -> None:
        """Take the seams of reduction and bias, and the taps before and after it."""
        self.reduce, self.add_bias = wiring.rules.reduce, wiring.rules.row_bias
        self.tap_partial, self.tap_out = wiring.tap(f"{tap}.partial"), wiring.tap(tap)
        self.place = wiring.place(tap)

    def __call__(self, x: Tensor) -> Tensor:
        partial = self.weight.product(x)  # [T, H], this rank's share of the sum
        if self.tap_partial:
            self.tap_partial(partial)
        self.comm.enter(self.place)
        out = self.reduce(partial, self.comm)  # [T, H]
        if self.bias is not None:
            out = self.add_bias(out, self.bias, self.comm)
        if self.tap_out:
            self.tap_out(out)
        return out
