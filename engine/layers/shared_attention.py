"""Attention of Gemma-4: values are normalised, may be what the product of keys gives, and the last layers read the keys
and values that an earlier one has cached.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.layers.attention import Attention
from lockstep.engine.layers.linear import QKVParallelLinear, RowParallelLinear
from lockstep.engine.layers.norm import Norm, QKNorm
from lockstep.engine.layers.step_inputs import StepInputs
from lockstep.engine.layers.weight import KeptTensor
from lockstep.engine.layers.wiring import Wiring


class ValueNormAttention(Attention):
    """One layer's attention over this rank's heads, which makes its own keys and values."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        qkv: QKVParallelLinear,
        o_proj: RowParallelLinear,
        qk_norm: QKNorm,
        page_size: int,
    ) -> None:
        super().__init__(layer, model, qkv, o_proj, qk_norm, None, page_size)
        self.k_norm, self.eps = qk_norm.k, model.rms_eps

    def _bind_projections(self, wiring: Wiring) -> None:
        super()._bind_projections(wiring)
        self.value_norm, self.tap_v_norm = wiring.rules.value_norm, wiring.tap("attn.v_norm")

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(x)
        v = self.value_norm(v, self.k_norm.normalised, self.eps)
        if self.tap_v_norm:
            self.tap_v_norm(v)
        return q, k, v


class BorrowingAttention(Attention):
    """One layer's attention over this rank's heads, to the keys and values of another layer."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        q_proj: QKVParallelLinear,
        o_proj: RowParallelLinear,
        q_norm: Norm,
        page_size: int,
    ) -> None:
        super().__init__(layer, model, q_proj, o_proj, None, None, page_size)
        self.q_norm = q_norm

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        return super().parameters() | self.q_norm.parameters()

    def _bind_projections(self, wiring: Wiring) -> None:
        super()._bind_projections(wiring)
        self.q_norm.bind(wiring, "attn.q_norm")

    def __call__(
        self, x: Tensor, batch: Batch, rope: tuple[Tensor, Tensor], inputs: StepInputs, pool: KVPool
    ) -> Tensor:
        (q,) = self.qkv(x)
        if self.tap_q:
            self.tap_q(q)
        q = self.rotate(self.q_norm(self.qkv.own_heads(0, q).unflatten(-1, (-1, self.head_dim))), *rope)
        if self.tap_q_rope:
            self.tap_q_rope(q)
        pool.lend(self.layer, batch)
        return self._attended(x, q, batch, inputs, pool)
