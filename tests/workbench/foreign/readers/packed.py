"""A packed run of several requests as an engine with fused modules has it on each rank: modules in execution order.

Names and what each module gives are those of sglang/srt/models/qwen2.py and qwen3.py (vLLM's are the same): `qkv_proj`
and `gate_up_proj` are one product, norms give the sum as well, q_norm sees [tokens * heads, head_dim], KV heads are
repeated where there are more ranks than heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.workbench.foreign.readers.activations import Computed, Taps

Outputs = Tensor | list[Tensor]


@dataclass(frozen=True)
class PackedPass:
    """One pass over all requests: what went in, the length of each request after it, and its taps, row after row."""

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    taps: Taps

    @property
    def last(self) -> Tensor:
        """The last row of each request."""
        starts = torch.cat(
            [torch.tensor([0]), (self.positions[1:] != self.positions[:-1] + 1).nonzero()[:, 0] + 1]
        )
        return torch.cat([starts[1:] - 1, torch.tensor([len(self.ids) - 1])])


def packed(runs: Sequence[Computed]) -> Iterator[PackedPass]:
    """The n-th passes of all requests as one."""
    for k in range(len(runs[0].ids)):
        positions = [one.positions(k) for one in runs]
        yield PackedPass(
            torch.tensor([token for one in runs for token in one.ids[k]]),
            torch.tensor([p for one in positions for p in one]),
            torch.tensor([one[-1] + 1 for one in positions]),
            {
                tap: torch.cat([one.passes[k][tap] for one in runs])
                for tap in runs[0].passes[k]
                if tap not in ("cos", "sin")
            },
        )


@dataclass(frozen=True)
class Rank:
    """One of `size` ranks of `model`."""

    model: Any
    rank: int
    size: int

    def columns(self, x: Tensor, replicas: int = 1) -> Tensor:
        return x.chunk(max(1, self.size // replicas), -1)[self.rank // replicas]

    def kv(self, x: Tensor) -> Tensor:
        return self.columns(x, max(1, self.size // self.model.config.num_key_value_heads))

    def modules(self, taps: Taps) -> Iterator[tuple[str, Outputs]]:
        """Every leaf module of the decoder, and what it gives on this rank."""
        head = self.model.model.layers[0].self_attn.head_dim
        yield "model.embed_tokens", taps["embed"]
        for i in range(len(self.model.model.layers)):
            at, name = f"layers.{i}.", f"model.layers.{i}."
            q, k, v, q_rope, k_rope = (
                split(taps[f"{at}attn.{tap}"])
                for tap, split in (
                    ("q_proj", self.columns), ("k_proj", self.kv), ("v_proj", self.kv),
                    ("q_rope", self.columns), ("k_rope", self.kv),
                )
            )  # fmt: skip
            normed = taps[at + "attn_norm"]
            yield name + "input_layernorm", [normed, taps[f"layers.{i - 1}.mlp_residual"]] if i else normed
            yield name + "self_attn.qkv_proj", torch.cat([q, k, v], -1)
            if at + "attn.q_norm" in taps:
                yield name + "self_attn.q_norm", self.columns(taps[at + "attn.q_norm"]).reshape(-1, head)
                yield name + "self_attn.k_norm", self.kv(taps[at + "attn.k_norm"]).reshape(-1, head)
            yield name + "self_attn.rotary_emb", [q_rope, k_rope]
            yield name + "self_attn.attn", self.columns(taps[at + "attn.context"])
            yield name + "self_attn.o_proj", taps[at + "attn.o_proj"]
            yield name + "post_attention_layernorm", [taps[at + "mlp_norm"], taps[at + "attn_residual"]]
            gate, up = self.columns(taps[at + "mlp.gate"]), self.columns(taps[at + "mlp.up"])
            yield name + "mlp.gate_up_proj", torch.cat([gate, up], -1)
            yield name + "mlp.act_fn", self.columns(taps[at + "mlp.act"])
            yield name + "mlp.down_proj", taps[at + "mlp.down"]
        last = len(self.model.model.layers) - 1
        yield "model.norm", [taps["final_norm"], taps[f"layers.{last}.mlp_residual"]]
