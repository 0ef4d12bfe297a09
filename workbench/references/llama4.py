"""Taps of transformers' Llama 4, whose modules differ from those of other models: one norm of queries and keys, queries
that are scaled in between, a router that gives scores of all experts, and experts that run every token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.config import ModelConfig

#: (tap within the layer, tensor).
See = Callable[[str, Tensor], None]


def tap_attention(attention: Any, model: ModelConfig, see: See, stack: ExitStack) -> None:
    """Of a layer that norms what it has rotated both sides of that norm, which is called for queries and then for keys,
    [1, T, heads, D]; of one that does not rotate queries and keys as they were projected."""
    for one in "qk" * (not model.rotary_dim):

        def projected(_module: nn.Module, _args: Any, output: Tensor, tap: str = f"attn.{one}_rope") -> None:
            see(tap, output[0].unflatten(-1, (-1, model.head_dim)))

        stack.callback(attention.get_submodule(f"{one}_proj").register_forward_hook(projected).remove)
    if not hasattr(attention, "qk_norm"):
        return
    turns: list[str] = []

    def normed(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        turns[:] = turns[1:] or ["q", "k"]
        see(f"attn.{turns[0]}_rope", args[0][0])
        see(f"attn.{turns[0]}_unit_norm", output[0])

    stack.callback(attention.qk_norm.register_forward_hook(normed).remove)


def attended(attention: Any, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Which of its taps queries and keys [T, heads, D] are as attention is given them, beside `tap_attention`'s."""
    if hasattr(attention, "qk_norm"):
        return {}
    if attention.attn_temperature_tuning and not attention.use_rope:
        return {"q_scaled": q}
    return {"q_rope": q, "k_rope": k}


def tap_experts(mixture: Any, see: See, stack: ExitStack) -> None:
    """The router gives sigmoids [T, E], 0 of those that are not chosen, and logits; experts read [E * T, H]."""
    chosen: list[Tensor] = []  # the experts of each token, ascending, [T, S]

    def routed(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor]) -> None:
        scores, logits = output
        ids = logits.topk(mixture.top_k, dim=1).indices.sort(-1).values
        chosen[:] = [ids]
        see("mlp.router", logits)
        see("mlp.topk_ids", ids)
        see("mlp.topk_weights", scores.gather(1, ids))

    experts = mixture.experts

    def forward(hidden: Tensor) -> Tensor:
        """As the module's own, in the same order."""
        ids = chosen[0]
        tokens = torch.arange(len(ids), device=ids.device)[:, None]
        x = hidden.view(experts.num_experts, -1, hidden.shape[-1])
        gate, up = torch.bmm(x, experts.gate_up_proj).chunk(2, dim=-1)
        act = up * experts.act_fn(gate)
        down = torch.bmm(act, experts.down_proj)
        for name, rows in (("input", x), ("gate", gate), ("up", up), ("act", act), ("down", down)):
            see(f"mlp.experts.{name}", rows[ids, tokens])
        return down.view(-1, hidden.shape[-1])

    def summed(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor]) -> None:
        see("mlp.combine", output[0])

    stack.callback(mixture.router.register_forward_hook(routed).remove)
    experts.forward = forward
    stack.callback(delattr, experts, "forward")
    stack.callback(mixture.register_forward_hook(summed).remove)
