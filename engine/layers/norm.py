"""The norms of a model, each with its weight and its tap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.families import NormForm
from lockstep.engine.layers.weight import Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.rules.norm import scaled

#: bias, x, weight, eps, form -> x normed.
LayerNormRule = Callable[[Tensor | None, Tensor, Tensor, float, NormForm], Tensor]


class Norm:
    """Normalises the last axis, whole on every rank: [..., D] -> [..., D]."""

    def __init__(
        self, module: str, size: int, model: ModelConfig, store: Store, eps: float | None = None
    ) -> None:
        self.name, self.weight = f"{module}.weight", store.vector(size)
        self.eps, self.form = model.rms_eps if eps is None else eps, model.norm

    def parameters(self) -> dict[str, Tensor]:
        """Checkpoint name -> the weight."""
        return {self.name: self.weight}

    def bind(self, wiring: Wiring, tap: str) -> None:
        """Take the seam in force, and the tap if it is on."""
        self.rule: Callable[[Tensor, Tensor, float, NormForm], Tensor] = wiring.rules.norm
        self.tap = wiring.tap(tap)

    def normalised(self, x: Tensor) -> Tensor:
        """Without the tap."""
        return self.rule(x, self.weight, self.eps, self.form)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.rule(x, self.weight, self.eps, self.form)
        if self.tap:
            self.tap(out)
        return out


class LayerNorm(Norm):
    """The same with the mean taken off, and a bias."""

    def __init__(self, module: str, size: int, model: ModelConfig, store: Store) -> None:
        super().__init__(module, size, model, store)
        self.bias_name, self.bias = f"{module}.bias", store.bias(size)

    def parameters(self) -> dict[str, Tensor]:
        """Checkpoint name -> weight and bias."""
        return {self.name: self.weight, self.bias_name: self.bias}

    def bind(self, wiring: Wiring, tap: str, rule: LayerNormRule | None = None) -> None:
        """Take the seam in force, `rule` or that of the model's norms, and the tap if it is on."""
        super().bind(wiring, tap)
        self.rule = partial(rule or wiring.rules.layer_norm, self.bias)


class CentredNorm(Norm):
    """LayerNorm without a bias."""

    def bind(self, wiring: Wiring, tap: str) -> None:
        """Take the seam in force, and the tap if it is on."""
        super().bind(wiring, tap)
        self.rule = partial(wiring.rules.layer_norm, None)


class BareNorm(CentredNorm):
    """The same without a weight of the checkpoint's."""

    def __init__(self, module: str, size: int, model: ModelConfig, store: Store) -> None:
        super().__init__(module, size, model, store)
        self.weight.fill_(1.0)

    def parameters(self) -> dict[str, Tensor]:
        """None."""
        return {}


def norm_of(model: ModelConfig) -> type[Norm]:
    """The kind of norms that a model has on its stream."""
    if not model.norm_weight:
        return BareNorm
    if model.norm == "centred":
        return CentredNorm
    return LayerNorm if model.norm_bias else Norm


def unnormed(x: Tensor) -> Tensor:
    """In place of a norm that the model has not."""
    return x


class QKNorm:
    """Normalises each head of q and of k by itself: q [T, heads, D], k [T, kv_heads, D] -> the same."""

    def __init__(self, q: Norm, k: Norm, *, taps: tuple[str, str] = ("attn.q_norm", "attn.k_norm")) -> None:
        self.q, self.k, self.taps = q, k, taps

    def parameters(self) -> dict[str, Tensor]:
        """Checkpoint name -> the weight."""
        return self.q.parameters() | self.k.parameters()

    def bind(self, wiring: Wiring) -> None:
        """Take the seam in force, and the taps that are on."""
        for norm, tap in zip((self.q, self.k), self.taps, strict=True):
            norm.bind(wiring, tap)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q), self.k(k)


class WholeQKNorm(QKNorm):
    """Normalises all heads of q at once, and all of k: the ranks, which split them, sum up their squares."""

    def __init__(self, module: str, model: ModelConfig, comm: Comm, store: Store) -> None:
        spans = [of(model, comm.size, comm.rank) for of in (shards.heads, shards.kv_heads)]
        q, k = (
            Norm(f"{module}.{one}_norm", span.size * model.head_dim, model, store)
            for one, span in zip("qk", spans, strict=True)
        )
        super().__init__(q, k)
        self.comm, replicas = comm, shards.kv_replicas(model, comm.size)
        heads = (model.num_heads, model.num_kv_heads * replicas)  # that are summed up over all ranks
        self.widths = torch.tensor([count * model.head_dim for count in heads], device=store.device)

    def bind(self, wiring: Wiring) -> None:
        """Take the seam in force, and the taps that are on."""
        super().bind(wiring)
        self.sum, self.place = wiring.rules.sum_squares, wiring.place("attn.q_norm")

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = q.float(), k.float()
        squares = torch.stack([x.square().sum((-2, -1)) for x in wide], -1)  # [T, 2]
        self.comm.enter(self.place)
        scales = torch.rsqrt(self.sum(squares, self.comm) / self.widths + self.q.eps)
        q, k = (
            scaled(x * scales[:, i, None, None], norm.weight.view(x.shape[1:]), norm.form, q.dtype)
            for i, (x, norm) in enumerate(zip(wide, (self.q, self.k), strict=True))
        )
        if self.q.tap:
            self.q.tap(q)
        if self.k.tap:
            self.k.tap(k)
        return q, k
