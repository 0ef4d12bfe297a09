"""Handles on a loaded transformers model, by which a bug is put into it.

Everything acts on one model's own modules, so that models of several ranks can run side by side. What transformers
calls by a module's global name (`apply_rotary_pos_emb`, the attention interface) is replaced once by a dispatcher that
asks the module, or the tensor, at hand: `dispatching`.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.workbench.references import attention as recorder
from lockstep.workbench.references.loading import CACHE

Layers = Iterable[int] | None


@dataclass(slots=True)
class Patched:
    """One rank's model while it is being spoilt, and what it is doing while it runs.

    `full` is the unsharded model, `ring` joins the ranks. During a pass `past` is the number of cached positions, `new`
    that of the tokens read, `seq` the sequence.
    """

    model: Any
    rank: int = 0
    tp: int = 1
    full: Any = None
    ring: Any = None
    past: int = 0
    new: int = 0
    seq: int = 0
    caches: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.full = self.full or copy.deepcopy(self.model)
        self.decoder.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs[CACHE]
        if not any(cache is known for known in self.caches):
            self.caches.append(cache)
        self.seq = next(i for i, known in enumerate(self.caches) if known is cache)
        self.past, self.new = cache.get_seq_length(), kwargs["input_ids"].shape[1]

    @property
    def decoder(self) -> Any:
        return self.model.model

    @property
    def decode(self) -> bool:
        return self.past > 0

    @property
    def step(self) -> int:
        """Of the sequence: 0 is the prefill."""
        return 0 if not self.past else self.past - self._prompts[self.seq] + 1

    @property
    def _prompts(self) -> list[int]:
        return self.model.prompt_lengths

    def layers(self, which: Layers = None) -> list[tuple[int, Any]]:
        chosen = range(len(self.decoder.layers)) if which is None else which
        return [(i, self.decoder.layers[i]) for i in chosen]

    def attn(self, i: int) -> Any:
        return self.decoder.layers[i].self_attn

    def mlp(self, i: int) -> Any:
        return self.decoder.layers[i].mlp

    # -- modules ------------------------------------------------------------------------------------------------

    def wrap(self, module: Any, around: Callable[..., Any]) -> None:
        """`around(forward, *args)` in place of the module's forward."""
        module.forward = partial(around, module.forward)

    def output(self, module: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.wrap(module, lambda forward, x: change(forward(x)))

    def input(self, module: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.wrap(module, lambda forward, x: forward(change(x)))

    def weight(self, module: Any, change: Callable[[Tensor], Tensor]) -> None:
        """Other numbers in memory; a head tied to the embedding leaves that as it was."""
        module.weight = nn.Parameter(change(module.weight.detach().clone()), requires_grad=False)

    def bias(self, module: Any, change: Callable[[Tensor], Tensor]) -> None:
        module.bias = nn.Parameter(change(module.bias.detach().clone()), requires_grad=False)

    def residuals(
        self,
        i: int,
        attn: Callable[[Tensor, Tensor], Tensor] = torch.add,
        mlp: Callable[[Tensor, Tensor], Tensor] = torch.add,
    ) -> None:
        """A decoder layer whose sums are `attn(residual, o)` and `mlp(residual, down)`."""
        layer = self.decoder.layers[i]

        def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
            middle = attn(hidden_states, out)
            return mlp(middle, layer.mlp(layer.post_attention_layernorm(middle)))

        layer.forward = forward

    # -- rotation -----------------------------------------------------------------------------------------------

    def angles(
        self, change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]], which: Layers = None
    ) -> None:
        """`change(rotary, x, position_ids)` -> cos, sin [1, T, head_dim] for the layers."""
        rotary = copy.deepcopy(self.decoder.rotary_emb)
        for _, layer in self.layers(which):

            def around(forward: Any, **kwargs: Any) -> Any:
                table = change(rotary, kwargs["hidden_states"], kwargs["position_ids"])
                return forward(**(kwargs | {"position_embeddings": table}))

            self.wrap(layer.self_attn, around)

    def positions(self, change: Callable[[Tensor], Tensor], which: Layers = None) -> None:
        """Rotated as if at `change(position_ids)`, [1, T]."""
        self.angles(lambda rotary, x, positions: rotary(x, change(positions)), which)

    def frequencies(
        self, change: Callable[[Tensor], Tensor], which: Layers = None, factor: float | None = None
    ) -> None:
        """Other inverse frequencies [head_dim / 2], and another attention factor."""

        def table(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            wrong = copy.deepcopy(rotary)
            wrong.inv_freq = change(rotary.inv_freq)
            wrong.attention_scaling = rotary.attention_scaling if factor is None else factor
            return wrong(x, positions)

        self.angles(table, which)

    def rotate(self, change: Callable[..., tuple[Tensor, Tensor]], which: Layers = None) -> None:
        """`change(apply, q, k, cos, sin)` -> q, k [1, heads, T, head_dim], cos and sin [1, T, head_dim]."""
        for _, layer in self.layers(which):

            def around(forward: Any, **kwargs: Any) -> Any:
                cos, sin = kwargs["position_embeddings"]
                cos = cos.clone()
                cos.rotate = change
                return forward(**(kwargs | {"position_embeddings": (cos, sin)}))

            self.wrap(layer.self_attn, around)

    # -- attention and cache ------------------------------------------------------------------------------------

    def attention(self, which: Layers = None, **stages: Callable[..., Any]) -> None:
        """Other `Stages` in the layers."""
        for _, layer in self.layers(which):
            known = getattr(layer.self_attn, "stages", None) or Stages()
            for name, stage in stages.items():
                assert hasattr(known, name), name
                setattr(known, name, stage)
            layer.self_attn.stages = known

    def cache(
        self,
        which: Layers = None,
        *,
        written: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`written(k, v)`: what goes into the cache in place of the new rows [1, kv_heads, T, D]; `read(k, v)`: what is
        attended to in place of all rows."""
        for _, layer in self.layers(which):
            self.attention([layer.self_attn.layer_idx])

            def around(forward: Any, attn: Any = layer.self_attn, **kwargs: Any) -> Any:
                view = _CacheView(kwargs[CACHE], attn, written, read)
                return forward(**(kwargs | {CACHE: view}))

            self.wrap(layer.self_attn, around)


class _CacheView:
    """A cache that writes or reads something else."""

    def __init__(self, real: Any, attn: Any, written: Any, read: Any) -> None:
        self.real, self.attn, self.written, self.read = real, attn, written, read

    def update(self, k: Tensor, v: Tensor, layer: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.attn.fresh = k
        if self.written:
            k, v = self.written(k, v)
        k, v = self.real.update(k, v, layer, *rest, **more)
        return self.read(k, v) if self.read else (k, v)


def repeat(kv: Tensor, groups: int) -> Tensor:
    """Query head h reads KV head h // groups."""
    return kv.repeat_interleave(groups, dim=1)


def masked(scores: Tensor, allowed: Tensor) -> Tensor:
    """As transformers does: the dtype's most negative number is added."""
    return scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


@dataclass(slots=True)
class Stages:
    """Attention in steps, each of which a bug may replace. Shapes: q [1, heads, T, D], k and v [1, kv_heads, K, D],
    scores and probs [1, heads, T, K], allowed [1, 1, T, K], context [1, heads, T, D]."""

    keys: Callable[[Tensor, int], Tensor] = repeat
    values: Callable[[Tensor, int], Tensor] = repeat
    product: Callable[[Tensor, Tensor], Tensor] = lambda q, k: q @ k.transpose(2, 3)
    scale: Callable[[Tensor, float], Tensor] = lambda scores, scaling: scores * scaling
    allow: Callable[[Tensor], Tensor] = lambda allowed: allowed
    mask: Callable[[Tensor, Tensor], Tensor] = masked
    softmax: Callable[[Tensor], Tensor] = softmax
    context: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    merge: Callable[[Tensor], Tensor] = lambda context: context.transpose(1, 2).contiguous()

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """What `recorder._eager_with_taps` computes where no stage was replaced, with the same taps."""
        groups, new = module.num_key_value_groups, q.shape[2]
        allowed = (mask == 0).expand(1, 1, new, mask.shape[-1])[..., -k.shape[2] :]
        if (more := k.shape[2] - allowed.shape[-1]) > 0:
            allowed = nn.functional.pad(allowed, (more, 0), value=True)
        scores = self.scale(self.product(q, self.keys(k, groups)), scaling)
        scores = self.mask(scores, self.allow(allowed))
        probs = self.softmax(scores)
        context = self.merge(self.context(probs, self.values(v, groups)))
        listener = recorder._listeners.get(id(module))
        if listener is not None:
            fresh = getattr(module, "fresh", None)
            fresh = k[:, :, -new:] if fresh is None else fresh
            listener(
                module.layer_idx,
                {
                    "q_rope": q[0].transpose(0, 1),
                    "k_rope": fresh[0].transpose(0, 1),
                    "k_cache": k[0].transpose(0, 1),
                    "v_cache": v[0].transpose(0, 1),
                    "scores": scores[0].masked_fill(
                        scores[0] <= torch.finfo(scores.dtype).min / 2, -math.inf
                    ),
                    "probs": probs[0],
                    "context": context[0].flatten(1),
                },
            )
        return context, probs


@contextmanager
def dispatching(model: Any) -> Iterator[None]:
    """Within the block attention modules with `stages` use them, and tables with `rotate` are applied by it."""

    def attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stages = getattr(module, "stages", None)
        return (stages or recorder._eager_with_taps)(module, *args, **kwargs)

    modelling = sys.modules[type(model).__module__]
    apply = modelling.apply_rotary_pos_emb

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        change = getattr(cos, "rotate", None)
        return change(apply, q, k, cos, sin) if change else apply(q, k, cos, sin)

    with mock.patch.object(modelling, "apply_rotary_pos_emb", rotate):
        AttentionInterface.register(recorder.NAME, attend)
        try:
            yield
        finally:
            recorder.register()
