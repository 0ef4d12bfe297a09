"""llama.cpp's tensors as our taps: which is which, and from its layout to ours. Pure: needs no llama.cpp.

| llama.cpp | ours | from the operations |
| --- | --- | --- |
| `embd` | `embed` | |
| `attn_norm-i`, `ffn_norm-i`, `result_norm` | `attn_norm`, `mlp_norm`, `final_norm` | |
| `Qcur-i`, `Kcur-i`, `Vcur-i` | `q_proj`, `k_proj`, `v_proj` | MUL_MAT, ADD (with the bias: the last counts) |
| `Qcur_normed-i`, `Kcur_normed-i` | `q_norm`, `k_norm` | |
| `Qcur-i`, `Kcur-i` | `q_rope`, `k_rope` | ROPE |
| `cache_k_li (view)`, `cache_v_li (view)` | `k_cache`, `v_cache` | VIEW; V lies transposed, both are padded |
| `kq-i` | `scores` | scaled and masked here: llama.cpp does both inside its softmax |
| `kq_soft_max-i` | `probs` | |
| `kqv_out-i` | `context` | |
| `attn_out-i`, or without a name | `o_proj` | the last MUL_MAT or ADD between `kqv_out-i` and `ffn_inp-i` |
| `ffn_inp-i`, `l_out-i` | `attn_residual`, `mlp_residual` | |
| `ffn_gate-i`, `ffn_up-i` | `gate`, `up` | with a bias: `ffn_gate_b-i`, `ffn_up_b-i` |
| `ffn_swiglu-i`, `ffn_out-i` | `act`, `down` | |
| `result_output` | `logits` | the last token's row |

ggml names dimensions from the inside out; arrays here have four, the outermost first, as in torch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.checkpoint.gguf.names import PairRows
from lockstep.engine.taps.names import local_name

Array = NDArray[np.float32]

_LINEAR = frozenset({"MUL_MAT", "ADD"})
_ROPE = frozenset({"ROPE"})
_VIEW = frozenset({"VIEW"})
#: Operations that give another view of what was computed before, and no numbers of their own.
_VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})

#: llama.cpp's name -> (tap, operations that give it; None: any that computes)
_OUTSIDE: Mapping[str, str] = {"embd": "embed", "result_norm": "final_norm", "result_output": "logits"}
_IN_LAYER: Mapping[str, tuple[tuple[str, frozenset[str] | None], ...]] = {
    "attn_norm": (("attn_norm", None),),
    "Qcur": (("attn.q_proj", _LINEAR), ("attn.q_rope", _ROPE)),
    "Kcur": (("attn.k_proj", _LINEAR), ("attn.k_rope", _ROPE)),
    "Vcur": (("attn.v_proj", _LINEAR),),
    "Qcur_normed": (("attn.q_norm", None),),
    "Kcur_normed": (("attn.k_norm", None),),
    "cache_k": (("attn.k_cache", _VIEW),),
    "cache_v": (("attn.v_cache", _VIEW),),
    "kq": (("attn.scores", None),),
    "kq_soft_max": (("attn.probs", None),),
    "kqv_out": (("attn.context", None),),
    "attn_out": (("attn.o_proj", _LINEAR),),
    "ffn_inp": (("attn_residual", None),),
    "ffn_norm": (("mlp_norm", None),),
    "ffn_gate": (("mlp.gate", None),),
    "ffn_gate_b": (("mlp.gate", None),),
    "ffn_up": (("mlp.up", None),),
    "ffn_up_b": (("mlp.up", None),),
    "ffn_swiglu": (("mlp.act", None),),
    "ffn_out": (("mlp.down", None),),
    "l_out": (("mlp_residual", None),),
}
_NAME = re.compile(r"(?P<name>\w+)-(?P<layer>\d+)|(?P<cache>cache_[kv])_l(?P<of>\d+) \(view\)", re.ASCII)

#: Taps that llama.cpp has no tensor for, and why.
ABSENT = {
    "attn.o_proj.partial": "one process has no partial sums: its attention output is whole",
    "mlp.down.partial": "one process has no partial sums: its ffn_out is whole",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layouts depend on. `interleaved`: rows of q and k lie as in GGUF's llama, RoPE turning (2i, 2i + 1)."""

    heads: int
    kv_heads: int
    head_dim: int
    interleaved: bool

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


@functools.lru_cache(1 << 14)  # every step has the same names again
def _parsed(name: str) -> tuple[int, tuple[tuple[str, frozenset[str] | None], ...]]:
    """The layer of a tensor, and the taps that it may be; none where the name means nothing."""
    found = _NAME.fullmatch(name)
    if found is None:
        return 0, ()
    return int(found["layer"] or found["of"]), _IN_LAYER.get(found["name"] or found["cache"], ())


_local_name = functools.lru_cache(1 << 14)(local_name)


class TapNames:
    """Names each tensor of one forward pass, in the order in which llama.cpp computes them."""

    def __init__(self) -> None:
        self._attention: int | None = None  # the layer between its kqv_out and its ffn_inp

    def tap(self, name: str, operation: str) -> str | None:
        """Our tap of the tensor that comes next; None for one without a counterpart."""
        if name in _OUTSIDE:
            return _OUTSIDE[name]
        layer, known = _parsed(name)
        if not known:
            unnamed = self._attention is not None and operation in _LINEAR
            return f"layers.{self._attention}.attn.o_proj" if unnamed else None
        for tap, operations in known:
            if operation in operations if operations else operation not in _VIEWS:
                if tap == "attn.context":
                    self._attention = layer
                elif tap == "attn_residual":
                    self._attention = None
                return f"layers.{layer}.{tap}"
        return None


def arrange(tap: str, x: Array, shape: Shape, positions: range) -> Array:
    """One tensor in our layout (`engine.taps.names`). `positions` are those of the tokens that this pass reads; all
    positions up to the last are attended to."""
    kind, keys = _local_name(tap), positions.stop
    match kind:
        case "attn.q_proj" | "attn.k_proj":
            heads = x.reshape(len(positions), -1, shape.head_dim)
            return np.reshape(_half_split(heads, shape), (len(positions), -1))
        case "attn.q_norm" | "attn.k_norm" | "attn.q_rope" | "attn.k_rope":
            return _half_split(x[0], shape)
        case "attn.k_cache":  # [1, padded, kv_heads, head_dim]
            return _half_split(x[0, :keys], shape)
        case "attn.v_cache":  # [1, head_dim, kv_heads, padded]
            v: Array = np.transpose(x[0], (2, 1, 0))
            return v[:keys]
        case "attn.scores":  # [1, heads, T, padded]
            scaled = x[0, :, :, :keys] * np.float32(shape.scale)
            future = np.arange(keys) > np.array(positions)[:, None]
            masked: Array = np.where(future, np.float32(-np.inf), scaled)
            return masked
        case "attn.probs":
            return x[0, :, :, :keys]
        case "logits":
            return x[0, 0, -1:]
        case _:
            return x[0, 0, :]


def _half_split(x: Array, shape: Shape) -> Array:
    """[..., head_dim] in Hugging Face's order, where RoPE turns (i, i + head_dim / 2)."""
    if not shape.interleaved:
        return x
    rows: Array = PairRows(shape.head_dim).from_gguf(np.moveaxis(x, -1, 0))
    return np.moveaxis(rows, 0, -1)
