"""What to take of layers with linear attention (Gated DeltaNet) and of attention with an output gate, as transformers
has them: products that stack several, head by head or one below the other, and what goes in and out of the delta rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .lockstep_tap import Tape

#: Module -> what to take of it -> tap. "stack q", a part of a product; "rule q", what the rule of a layer meets or
#: gives; "attended", what attention gives.
LINEAR: dict[str, dict[str, str]] = {
    ".linear_attn.in_proj_qkvz": {f"stack {one}": f".attn.in_proj_{one}" for one in "qkvz"},
    ".linear_attn.in_proj_ba": {f"stack {one}": f".attn.in_proj_{one}" for one in "ba"},
    ".linear_attn.in_proj_qkv": {f"rows {one}": f".attn.in_proj_{one}" for one in "qkv"},
    **{f".linear_attn.in_proj_{one}": {"out": f".attn.in_proj_{one}"} for one in "zba"},
    ".linear_attn": {
        **{f"rule {one}": f".attn.conv_{one}" for one in "qkv"},
        **{f"rule {one}": f".attn.{one}" for one in ("beta", "decay", "state", "delta")},
    },
    ".linear_attn.conv1d": {},
    ".linear_attn.norm": {},
    ".linear_attn.out_proj": {"in": ".attn.gated_norm", "out": ".attn.out_proj"},
}
#: Of attention whose output goes through a gate, which lies beside each head's query.
GATED: dict[str, dict[str, str]] = {
    ".self_attn": {"rotary q": ".attn.q_rope", "rotary k": ".attn.k_rope", "attended": ".attn.context"},
    ".self_attn.q_proj": {"head left": ".attn.q_proj", "head right": ".attn.gate"},
    ".self_attn.o_proj": {"in": ".attn.gated", "out": ".attn.o_proj"},
}
#: Of layers with short convolutions (LFM2). "conv in", "conv out": what the function that convolves meets and gives.
CONVOLUTIONS: dict[str, dict[str, str]] = {
    ".conv.in_proj": {
        "third 0": ".attn.conv_in_gate", "third 1": ".attn.conv_out_gate", "third 2": ".attn.conv_x",
    },
    ".conv": {"conv in": ".attn.conv_in", "conv out": ".attn.conv"},
    ".conv.conv": {},
    ".conv.out_proj": {"in": ".attn.conv_gated", "out": ".attn.out_proj"},
}  # fmt: skip
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
#: Of attention that clamps q, k and v (OLMo): what it has rotated, and what it attends to, new tokens alone.
CLIPPED: dict[str, dict[str, str]] = {
    ".self_attn": {
        "rotary q": ".attn.q_rope",
        "rotary k": ".attn.k_rope",
        "turned q": ".attn.q_clip",
        "turned k": ".attn.k_clip",
        "attended v": ".attn.v_clip",
    }
}
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def _stacked(name: str, x: Tensor, owner: Any) -> Tensor:
    """Of a product [B, T, …] that has q, k, v, z, or b, a, of each key head: one of them, heads side by side."""
    group = owner.num_v_heads // owner.num_k_heads
    keys, values = owner.head_k_dim, group * owner.head_v_dim
    names, sizes = ("qkvz", [keys, keys, values, values]) if name in "qkvz" else ("ba", [group, group])
    parts = x.reshape(*x.shape[:-1], owner.num_k_heads, -1).split(sizes, -1)
    chosen: Tensor = parts[names.index(name)].flatten(-2)
    return chosen


def _rows_of(name: str, x: Tensor, owner: Any) -> Tensor:
    """Of a product that has q, k and v one behind the other."""
    parts: tuple[Tensor, ...] = x.split([owner.key_dim, owner.key_dim, owner.value_dim], -1)
    return parts["qkv".index(name)]


def _third(index: int, x: Tensor, owner: Any) -> Tensor:
    """Of a product that has three vectors one behind the other."""
    return x.chunk(3, -1)[index]


def _half_of_heads(half: int, x: Tensor, owner: Any) -> Tensor:
    """Of a product that has two vectors for each head: one, heads side by side."""
    return x.reshape(*x.shape[:-1], -1, 2, owner.head_dim)[..., half, :].flatten(-2)


#: To take, of what a module gives; and of a call of a function, with its positional and named arguments and its result.
TAKE: dict[str, Callable[[Any, Any], Any]] = {
    **{f"stack {one}": partial(_stacked, one) for one in "qkvzba"},
    **{f"rows {one}": partial(_rows_of, one) for one in "qkv"},
    **{f"head {one}": partial(_half_of_heads, half) for half, one in enumerate(("left", "right"))},
    "rule q": lambda call, owner: call[0][0].flatten(2),
    "rule k": lambda call, owner: call[0][1].flatten(2),
    "rule v": lambda call, owner: call[0][2].flatten(2),
    "rule beta": lambda call, owner: call[1]["beta"],
    "rule decay": lambda call, owner: call[1]["g"],
    "rule delta": lambda call, owner: call[2][0].flatten(2),
    "rule state": lambda call, owner: call[2][1],
    **{f"third {index}": partial(_third, index) for index in range(3)},
    "conv in": lambda call, owner: call[0][0].transpose(1, 2),
    "conv out": lambda call, owner: call[2].transpose(1, 2),
    "turned q": lambda call, owner: call[0][0].transpose(1, 2).flatten(2),
    "turned k": lambda call, owner: call[0][1].transpose(1, 2).flatten(2),
    "attended v": lambda call, owner: call[0][3][:, :, -call[0][1].shape[2] :].transpose(1, 2).flatten(2),
    "attended": lambda call, owner: call[2][0].flatten(2),
}


def functions_of(take: str, part: Any) -> Iterator[tuple[Any, str]]:
    """The functions that a module's code calls by their names: the mapping in which they stand, and the name."""
    home = sys.modules[type(part).__module__]
    if take.startswith("attended"):
        name = part.config._attn_implementation
        known = getattr(home, "ALL_ATTENTION_FUNCTIONS", {})
        if name in known:
            yield known, name
        elif hasattr(home, "eager_attention_forward"):
            yield vars(home), "eager_attention_forward"
    elif take.startswith("conv "):
        yield from ((vars(home), name) for name in _CONVOLUTIONS)
    elif take.startswith("turned "):
        yield vars(home), "apply_rotary_pos_emb"
    elif take.startswith("rule"):
        yield from ((vars(home), name) for name in _RULES if hasattr(home, name))


def shown_call(
    tape: Tape, functions: Any, name: str, see: Callable[[Any], None], ours: Callable[[Any], bool]
) -> None:
    """Have a function show its arguments and its result in the calls that are `ours`."""
    real = functions[name]

    def shown(*args: Any, **named: Any) -> Any:
        out = real(*args, **named)
        if tape.line is not None and ours(args):
            see((args, named, out))
        return out

    # Of transformers' registry an own entry hides what is registered for all: it does not stay where there was none.
    own = name in getattr(functions, "_local_mapping", functions)
    functions[name] = shown
    tape.undo.append(lambda: functions.update({name: real}) if own else functions.pop(name))
