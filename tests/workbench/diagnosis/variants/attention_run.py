"""A recording of attention made of numbers: torch computes every tap, a test spoils what it likes.

run = Run(model(), spoil={"scores": lambda x, p: x * 8})
causes(run, "attn.scores")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.sessions.layouts import Layout
from lockstep.workbench.diagnosis.hypotheses.variant import Fit
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps, Row, SequencePass
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites_of
from tests.workbench.diagnosis.variants.made import accepted

#: Tokens of each pass of the two sequences: two prefills, then decode steps.
PASSES = ((0, 0, 9), (0, 1, 6), (1, 0, 1), (1, 1, 1), (2, 0, 1), (2, 1, 1), (3, 0, 1), (3, 1, 1))


def model(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "family": "qwen2", "hidden_size": 96, "intermediate_size": 64, "num_layers": 3, "num_heads": 8,
        "num_kv_heads": 4, "head_dim": 16, "vocab_size": 50, "max_position": 128, "rms_eps": 1e-6, "rope_theta": 1e4,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


@dataclass(frozen=True)
class At:
    """Where a tensor is spoilt: everything that was computed so far is in `taps`, by short name."""

    step: int
    seq: int
    start: int  # tokens before this pass
    layer: int
    rank: int
    taps: dict[str, Tensor]
    run: Run


#: Changes one tensor, before what follows is computed from it.
Spoil = Callable[[Tensor, At], Tensor]


@dataclass
class Run:
    """Attention of three layers over two sequences. `spoil` is applied in `layers` (all) on `rank`s (all)."""

    model: ModelConfig
    spoil: Mapping[str, Spoil] = field(default_factory=dict)
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    fused: bool = False  # nothing inside of the attention is recorded
    hidden: Set[str] = frozenset()  # what is not
    weights: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint, by name
    held: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        cached: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        starts = dict.fromkeys((0, 1), 0)
        self.passes = []
        for step, seq, count in PASSES:
            start = starts[seq]
            starts[seq] += count
            rows = tuple(Row(step, seq, start + i, 7, start + i) for i in range(count))
            self.passes.append(SequencePass(step, seq, rows))
            for layer in range(self.model.num_layers):
                for rank in range(self.ranks):
                    self._layer(random, cached, At(step, seq, start, layer, rank, {}, self), count)

    def _put(self, name: str, x: Tensor, at: At) -> Tensor:
        x = x.to(self.dtype)
        if name in self.spoil:
            x = self.spoil[name](x, at).to(self.dtype)
        at.taps[name] = x
        self.held.setdefault((f"layers.{at.layer}.attn.{name}", at.rank), []).append(x.clone())
        return x

    def _layer(self, random: torch.Generator, cached: dict[Any, Any], at: At, count: int) -> None:
        m, dim = self.model, self.model.head_dim
        heads, kv = m.num_heads // self.ranks, max(m.num_kv_heads // self.ranks, 1)
        q, k, v = (
            self._put(name, self.size * torch.randn(count, n * dim, generator=random), at)
            for name, n in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv))
        )
        positions = torch.arange(at.start, at.start + count)
        q = self._put("q_rope", rotate(q.view(count, -1, dim), positions, m.rope_theta), at)
        k = self._put("k_rope", rotate(k.view(count, -1, dim), positions, m.rope_theta), at)
        key = (at.layer, at.rank, at.seq)
        old = cached.get(key)
        keys, values = (k, v.view(count, -1, dim)) if old is None else (
            torch.cat([old[0], k]), torch.cat([old[1], v.view(count, -1, dim)])
        )  # fmt: skip
        cached[key] = (keys, values)  # as written: what is spoilt is what was read
        keys, values = self._put("k_cache", keys, at), self._put("v_cache", values, at)
        if keys.shape != values.shape:
            return  # a test of the cache alone
        window = m.windows[at.layer] if m.windows else None
        hidden = masked(positions, torch.arange(len(keys)), window)
        group = heads // keys.shape[1]
        scores = torch.einsum("thd,khd->htk", q, keys.repeat_interleave(group, 1)) * dim**-0.5
        scores = self._put("scores", scores.masked_fill(hidden, -torch.inf), at)
        probs = self._put("probs", scores.float().softmax(-1), at)
        context = torch.einsum("htk,khd->thd", probs, values.repeat_interleave(group, 1))
        self._put("context", context.reshape(count, -1), at)

    def site(self, kind: str, layer: int = 1, rank: int = 0) -> Site:
        """The site of one tap."""
        facts = Facts(self.model, str(self.dtype).removeprefix("torch."), self.weights.get)
        found = [
            site
            for site in sites_of(f"layers.{layer}.attn.{kind}", ArrayTaps(self), facts)
            if rank in site_ranks(site)
        ]
        assert isinstance(found[0], Site), found
        return found[0]


def site_ranks(site: Any) -> tuple[int, ...]:
    return site.ranks if isinstance(site, Site) else (site.rank,)


def masked(q_positions: Tensor, k_positions: Tensor, window: int | None) -> Tensor:
    """[T, K]: what a query does not see."""
    distance = q_positions[:, None] - k_positions[None, :]
    return (distance < 0) | (distance >= (window or 1 << 30))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """[T, heads, D]: transformers' rotate_half."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** -(torch.arange(half) / half)
    angle = torch.cat([angle, angle], -1)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angle.cos() + turned * angle.sin()


class ArrayTaps(RecordedTaps):
    """The run's tensors where a session's are read."""

    def __init__(self, run: Run) -> None:
        hidden = {"k_cache", "v_cache", "scores", "probs"} if run.fused else run.hidden
        self._arrays = {
            key: tuple(x.double().numpy() for x in tensors)
            for key, tensors in run.held.items()
            if key[0].rsplit(".", 1)[1] not in hidden
        }
        self.recording: Any = SimpleNamespace(ranks=run.ranks, layout=lambda tap: Layout("shard", 1))
        self.passes = tuple(run.passes)

    def has(self, tap: str) -> bool:
        return (tap, 0) in self._arrays

    def captured(self, tap: str) -> bool:
        return self.has(tap)

    def tensors(self, tap: str, rank: int) -> tuple[np.ndarray | None, ...]:
        return self._arrays.get((tap, rank), (None,) * len(self.passes))

    def lead(self, tap: str, rank: int) -> int:
        return rank


def causes(run: Run, kind: str, layer: int = 1, rank: int = 0) -> list[Fit]:
    """The accepted variants of one site."""
    site = run.site(kind, layer, rank)
    return accepted(site)


def names(run: Run, kind: str, layer: int = 1, rank: int = 0) -> list[str]:
    return [fit.variant.name for fit in causes(run, kind, layer, rank)]
