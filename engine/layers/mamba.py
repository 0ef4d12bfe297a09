"""Mamba-2 with a recurrent state in place of attention (arXiv:2405.21060).

What a sequence's earlier passes left is the newest rows of the convolution and each head's state [head_dim, state].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.batch import Batch
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.mamba import MambaConfig
from lockstep.engine.graph.mamba import CONVOLVED, PROJECTED
from lockstep.engine.graph.mamba_vectors import ssm_vectors
from lockstep.engine.kv.pool import KVPool
from lockstep.engine.kv.states import LayerState
from lockstep.engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from lockstep.engine.layers.multiplier import Multiplier
from lockstep.engine.layers.stateful import StatefulLayer
from lockstep.engine.layers.weight import KeptTensor, Store
from lockstep.engine.layers.wiring import Wiring
from lockstep.engine.parallel import shards
from lockstep.engine.parallel.comm import Comm


class Mamba2(StatefulLayer):
    """One layer's Mamba-2 over this rank's heads. `modules`: the checkpoint's, by tap."""

    def __init__(
        self,
        layer: int,
        model: ModelConfig,
        config: MambaConfig,
        modules: Mapping[str, str],
        out_proj: RowParallelLinear,
        store: Store,
    ) -> None:
        self.layer, self.model, self.config, self.out_proj = layer, model, config, out_proj
        tp, rank = out_proj.comm.size, out_proj.comm.rank
        channels, groups, heads = (
            shards.span_of(width, model, tp, rank) for width in ("ssm_channels", "ssm_groups", "ssm_heads")
        )
        spans = [channels, channels, groups, groups, heads]
        self.in_proj = MergedColumnParallelLinear(
            [modules[tap] for tap in PROJECTED], spans, model.hidden_size, config.proj_bias, store
        )
        self.heads, self.sizes = heads.size, [channels.size, groups.size, groups.size]
        self.conv = store.vector(sum(self.sizes) * config.conv).view(-1, config.conv)
        self.conv_bias = store.bias(sum(self.sizes)) if config.conv_bias else None
        self.conv_names = [modules[tap] for tap in CONVOLVED]
        kinds = ("step_size", "ssm_state", "ssm_read")
        names = {role: name for kind in kinds for role, name in ssm_vectors(model, kind).items()}
        self.of_heads = {role: store.vector(heads.size) for role in names}
        self.head_names = {role: f"model.layers.{layer}.{name}" for role, name in names.items()}
        self.norm = None
        if config.normed:
            self.norm = GroupNorm(f"{modules['attn.ssm_norm']}.weight", model, config, out_proj.comm, store)
        scaled = PROJECTED if model.multipliers is not None else ()
        self.factors = [Multiplier(f"{tap}_scaled", model.multipliers) for tap in scaled]

    def parameters(self) -> dict[str, Tensor | KeptTensor]:
        """Checkpoint name -> this rank's share."""
        found: dict[str, Tensor | KeptTensor] = {**self.in_proj.parameters(), **self.out_proj.parameters()}
        for kind, whole in (("weight", self.conv), ("bias", self.conv_bias)):
            if whole is not None:
                parts = zip(self.conv_names, whole.split(self.sizes), strict=True)
                found |= {f"{name}.{kind}": part for name, part in parts}
        found |= {self.head_names[role]: vector for role, vector in self.of_heads.items()}
        return found if self.norm is None else found | {self.norm.name: self.norm.weight}

    def fresh(self) -> LayerState:
        """The state of a sequence that has read nothing."""
        config = self.config
        heads = self.conv.new_zeros(self.heads, config.head_dim, config.state, dtype=torch.float32)
        return LayerState(self.conv.new_zeros(config.conv - 1, len(self.conv)), heads)

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force and the taps that are on."""
        self.rules = wiring.rules
        names = (*PROJECTED, *CONVOLVED, *(f"attn.ssm_{one}" for one in ("step", "read", "norm", "gated")))
        self.taps = {name: tap for name in names if (tap := wiring.tap(name))}
        self.tap_state = wiring.tap("attn.ssm_state")
        self.rate = self.rules.ssm_rate(self.of_heads["A_log"])
        for part in (self.norm, *self.factors):
            if part is not None:
                part.bind(wiring)
        self.out_proj.bind(wiring, "attn.out_proj")

    def __call__(self, x: Tensor, batch: Batch, rope: Any, inputs: Any, pool: KVPool) -> Tensor:
        """[T, hidden] -> the same. It rotates nothing and has no mask."""
        z, *mixed, dt = self._projected(x)
        rows = self._with_rows_before(torch.cat(mixed, -1), batch, pool)
        convolved = torch.cat([self._convolved(one) for one in rows])
        into, b, c = self._seen(CONVOLVED, convolved.split(self.sizes, -1))
        (step,) = self._seen(
            ("attn.ssm_step",), (self.rules.ssm_step(dt, self.of_heads["dt_bias"], self.config.limits),)
        )
        b, c = (
            self.rules.key_heads(one.unflatten(-1, (-1, self.config.state)), self.heads) for one in (b, c)
        )
        into = into.unflatten(-1, (self.heads, -1))

        def scan(heads: Tensor, own: slice) -> tuple[Tensor, Tensor]:
            return self.rules.ssm_scan(heads, into[own], b[own], c[own], step[own], self.rate)

        read = self._recurred(scan, rows, self.config.conv - 1, batch, pool)
        out = self.rules.ssm_skip(read, into, self.of_heads["D"])
        (out,) = self._seen(("attn.ssm_read",), (out.flatten(1).to(x.dtype),))
        return self.out_proj(self._gated(out, z))

    def _projected(self, x: Tensor) -> Sequence[Tensor]:
        parts = self._seen(PROJECTED, self.in_proj(x))
        if not self.factors:
            return parts
        return [factor(part) for factor, part in zip(self.factors, parts, strict=True)]

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """What is read from the states, through its gate and, where there is one, the norm."""
        if self.norm is None:
            (out,) = self._seen(("attn.ssm_gated",), (self.rules.ssm_gate(read, z),))
        else:
            (out,) = self._seen(("attn.ssm_norm",), (self.norm(read, z),))
        return out

    def _convolved(self, rows: Tensor) -> Tensor:
        if self.conv_bias is None:
            return self.rules.short_conv(rows, self.conv)
        return self.rules.ssm_conv(rows, self.conv, self.conv_bias)


class GroupNorm:
    """RMSNorm of groups of channels, and a gate before or behind it. Ranks that share a group sum up its squares."""

    def __init__(self, name: str, model: ModelConfig, config: MambaConfig, comm: Comm, store: Store) -> None:
        span = shards.span_of("ssm_channels", model, comm.size, comm.rank)
        self.name, self.weight = name, store.vector(span.size)
        self.comm, self.config, self.eps = comm, config, model.rms_eps
        self.width = min(config.norm_width, span.size)
        self.shared = config.norm_sharers(comm.size) > 1
        self.group = span.start // config.norm_width  # the first of those that the rank has

    def bind(self, wiring: Wiring) -> None:
        """Take the seams in force."""
        first = self.config.norm_first
        self.rule = wiring.rules.ssm_norm_first if first else wiring.rules.ssm_norm
        self.sum = wiring.rules.sum_squares
        self.place = wiring.place("attn.ssm_norm")

    def normalised(self, x: Tensor) -> Tensor:
        """x [T, C] float32, each group over its root mean square."""
        groups: Tensor = x.unflatten(-1, (-1, self.width))
        squares = groups.square().sum(-1)  # [T, groups]
        if self.shared:  # of all groups of the model, whose others are zero here
            squares_of_all = squares.new_zeros(len(x), self.config.norm_groups)
            squares_of_all[:, self.group] = squares[:, 0]
            self.comm.enter(self.place)
            squares = self.sum(squares_of_all, self.comm)[:, self.group : self.group + 1]
        scale: Tensor = torch.rsqrt(squares / self.config.norm_width + self.eps)
        return (groups * scale.unsqueeze(-1)).flatten(1)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """[T, C] twice -> the same."""
        out: Tensor = self.rule(x, gate, self.weight, self.normalised)
        return out
