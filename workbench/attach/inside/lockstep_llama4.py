"""What Llama 4 in transformers shows beside other models: one norm of rotated queries and keys, called for both in
turn, a router that gives scores and logits of all experts, and a rotation by another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Of that `model_type`, in place of what is taken of other models (`lockstep_modules.Names`).
LLAMA4: dict[str, dict[str, str]] = {
    ".self_attn": {"rotary rows q": ".attn.q_rope", "rotary rows k": ".attn.k_rope"},
    ".self_attn.qk_norm": {"first call": ".attn.q_unit_norm", "second call": ".attn.k_unit_norm"},
    ".mlp.router": {"sum": ".mlp.router", "best": ".mlp.topk_ids", "best scores": ".mlp.topk_weights"},
    ".mlp.experts": {},
}
LLAMA4_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    "rotary rows q": lambda x, owner: x[0],
    "rotary rows k": lambda x, owner: x[1],
    "first call": lambda x, owner: x,
    "second call": lambda x, owner: x,
    "best": lambda x, owner: _best(x[1], owner),
    "best scores": lambda x, owner: x[0].gather(-1, _best(x[1], owner)),
}


def _best(logits: Any, owner: Any) -> Any:
    """The experts of each token, in the order of their numbers: [N, S] of logits [N, E]."""
    return logits.topk(owner.top_k, -1).indices.sort(-1).values


def every_other(see: Callable[[Any], None], take: str) -> Callable[[Any], None]:
    """A hook that lets every other call see, the first of two or the second."""
    calls = [take != "first call"]

    def seeing(value: Any) -> None:
        calls[0] = not calls[0]
        if calls[0]:
            see(value)

    return seeing
