"""What a tiny transformers model computes, request by request: the truth behind the dumps that the tests write.

runs = computed(model, [[3, 1, 4], [1, 5]], steps=2)
runs[0].passes[1]["layers.0.attn.q_proj"]      # the second pass of the first request, [rows, features]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from lockstep.workbench.references.loading import CACHE

#: One pass of one request: its ids, its positions, and its taps by name.
Taps = dict[str, Tensor]


@dataclass(frozen=True)
class Computed:
    """A request that was read greedily: `ids[k]` went into pass k, which gave `passes[k]`."""

    ids: tuple[tuple[int, ...], ...]
    passes: tuple[Taps, ...]

    def positions(self, index: int) -> tuple[int, ...]:
        start = sum(len(ids) for ids in self.ids[:index])
        return tuple(range(start, start + len(self.ids[index])))


def computed(model: Any, prompts: Sequence[Sequence[int]], steps: int) -> list[Computed]:
    """Each prompt read on its own, and `steps` greedy tokens after it."""
    return [_computed(model, prompt, steps) for prompt in prompts]


def _computed(model: Any, prompt: Sequence[int], steps: int) -> Computed:
    cache, ids, fed, passes = None, list(prompt), [], []
    for _ in range(steps + 1):
        taps: Taps = {}
        hooks = _hooked(model, taps)
        with torch.inference_mode():
            out = model(torch.tensor([ids]), use_cache=True, **{CACHE: cache})
        for hook in hooks:
            hook.remove()
        cache = out[CACHE]
        fed.append(tuple(ids))
        passes.append({name: tap.clone() for name, tap in taps.items()})
        ids = [int(out.logits[0, -1].argmax())]
    return Computed(tuple(fed), tuple(passes))


def _hooked(model: Any, taps: Taps) -> list[Any]:
    hooks = []
    last = len(model.model.layers) - 1

    def out(module: Any, tap: str) -> None:
        hooks.append(module.register_forward_hook(lambda _m, _i, x: taps.__setitem__(tap, x[0].flatten(1))))

    def inp(module: Any, tap: str) -> None:
        hooks.append(
            module.register_forward_pre_hook(lambda _m, x: taps.__setitem__(tap, x[0][0].flatten(1)))
        )

    out(model.model.embed_tokens, "embed")
    hooks.append(
        model.model.rotary_emb.register_forward_hook(lambda _m, _i, x: taps.update(cos=x[0], sin=x[1]))
    )
    for i, layer in enumerate(model.model.layers):
        at = f"layers.{i}."
        attn, mlp = layer.self_attn, layer.mlp
        if i:
            inp(layer.input_layernorm, f"layers.{i - 1}.mlp_residual")
        out(layer.input_layernorm, at + "attn_norm")
        for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"):
            if hasattr(attn, name):
                out(getattr(attn, name), f"{at}attn.{name}")
        inp(attn.o_proj, at + "attn.context")
        out(attn.o_proj, at + "attn.o_proj")
        inp(layer.post_attention_layernorm, at + "attn_residual")
        out(layer.post_attention_layernorm, at + "mlp_norm")
        out(mlp.gate_proj, at + "mlp.gate")
        out(mlp.up_proj, at + "mlp.up")
        inp(mlp.down_proj, at + "mlp.act")
        out(mlp.down_proj, at + "mlp.down")
        hooks.append(
            attn.o_proj.register_forward_pre_hook(lambda _m, _x, at=at, attn=attn: _rope(taps, at, attn))
        )
    inp(model.model.norm, f"layers.{last}.mlp_residual")
    out(model.model.norm, "final_norm")
    out(model.lm_head, "logits")
    return hooks


def _rope(taps: Taps, at: str, attn: Any) -> None:
    """q_rope and k_rope, which are no module's in transformers: by its own function."""
    head = attn.head_dim
    q, k = (taps.get(f"{at}attn.{n}_norm", taps[f"{at}attn.{n}_proj"]) for n in "qk")
    q, k = (x.reshape(1, len(x), -1, head).transpose(1, 2) for x in (q, k))
    q, k = apply_rotary_pos_emb(q, k, taps["cos"], taps["sin"])
    for name, x in (("q_rope", q), ("k_rope", k)):
        taps[f"{at}attn.{name}"] = x.transpose(1, 2)[0].flatten(1)
