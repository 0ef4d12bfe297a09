"""Linear layers split over the ranks, after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

All are built from *global* sizes; `engine.parallel.shards` says what a rank owns. `parameters()` maps
checkpoint names to views of the packed weight, so loading writes straight to where a GEMM reads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.layers.wiring import Wiring
from engine.parallel import shards
from engine.parallel.comm import Comm


def _empty(*shape: int, like: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=like, device=device)


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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.names = names
        self.sizes = tuple(span.size for span in spans)
        self.weight = _empty(sum(self.sizes), in_features, like=dtype, device=device)
        # A bias that is never written must read as "no bias", not as stale memory.
        self.bias = torch.zeros(sum(self.sizes), dtype=dtype, device=device) if bias else None

    def parameters(self) -> dict[str, Tensor]:
        """Checkpoint name -> this rank's rows, as views of the pack."""
        weights = zip(self.names, self.weight.split(self.sizes), strict=True)
        params = {f"{name}.weight": part for name, part in weights}
        if self.bias is not None:
            biases = zip(self.names, self.bias.split(self.sizes), strict=True)
            params |= {f"{name}.bias": part for name, part in biases}
        return params

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = F.linear(x, self.weight, self.bias)
        parts: tuple[Tensor, ...] = torch.split_with_sizes(packed, self.sizes, -1)
        return parts


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v in one GEMM; KV heads are replicated when there are more ranks than heads."""

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        tp: int,
        plan: shards.QKVPlan,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.tp, self.plan = model, tp, plan
        names = [f"{name}.{part}_proj" for part in "qkv"]
        bias = model.qkv_bias and plan.bias
        super().__init__(names, list(plan.rows), plan.columns.size, bias, dtype, device)

    def bind(self, wiring: Wiring) -> None:
        """Take the seam that cuts the pack."""
        self.cut = wiring.rules.qkv_sizes

    def own_heads(self, part: int, x: Tensor) -> Tensor:
        """This rank's heads of q (0), k (1) or v (2), as a view of what it computed of them."""
        own = self.plan.own[part]
        return x[:, own.start : own.stop]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        columns = self.plan.columns
        packed = F.linear(x[:, columns.start : columns.stop], self.weight, self.bias)  # [T, q + k + v]
        return self.cut(packed, self.sizes, self.model, self.tp)


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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.comm = comm
        self.weight = _empty(out_features, span.size, like=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    def parameters(self) -> dict[str, Tensor]:
        params = {f"{self.name}.weight": self.weight}
        if self.bias is not None:
            params[f"{self.name}.bias"] = self.bias
        return params

    def bind(self, wiring: Wiring, tap: str) -> None:
        """Take the seams of reduction and bias, and the taps before and after it."""
        self.reduce, self.add_bias = wiring.rules.reduce, wiring.rules.row_bias
        self.tap_partial, self.tap_out = wiring.tap(f"{tap}.partial"), wiring.tap(tap)
        self.place = wiring.place(tap)

    def __call__(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)  # [T, H], this rank's share of the sum
        if self.tap_partial:
            self.tap_partial(partial)
        self.comm.enter(self.place)
        out = self.reduce(partial, self.comm)  # [T, H]
        if self.bias is not None:
            out = self.add_bias(out, self.bias, self.comm)
        if self.tap_out:
            self.tap_out(out)
        return out
