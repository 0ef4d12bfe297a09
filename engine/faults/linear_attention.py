"""Linear attention and gated attention: what becomes of states between passes and requests, what is made of the decay,
the rate, queries and keys, and gates that are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Fault, Level, Needs, one_seam

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.engine.kv.states import LayerState


def left_behind(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
    """A sequence begins with the state that another one has left in the layer: nobody has reset it."""
    from lockstep.engine.kv.states import LayerState

    if held is not None:
        return held
    return fresh if left is None else LayerState(fresh.rows, left.heads)


def restarted(held: LayerState | None, left: LayerState | None, fresh: LayerState, new: int) -> LayerState:
    """Every pass begins with a fresh state, whatever was read before."""
    from lockstep.engine.kv.states import LayerState

    return fresh if held is None else LayerState(held.rows, fresh.heads)


def one_short(rows: Tensor, count: int) -> Tensor:
    """The convolution keeps one row less."""
    kept = rows[len(rows) - count :].clone()
    kept[0] = 0
    return kept


def frozen(rows: Tensor, count: int) -> Tensor:
    """A pass over a single token leaves what the convolution has kept as it was."""
    start = 0 if len(rows) == count + 1 else len(rows) - count
    return rows[start : start + count].clone()


def without_silu(rows: Tensor, weight: Tensor) -> Tensor:
    """The convolution alone."""
    from lockstep.engine.rules.recurrence import convolution

    return convolution(rows, weight)


def not_normalised(x: Tensor) -> Tensor:
    """Queries and keys as the convolution gives them."""
    return x.float()


def not_squashed(b: Tensor) -> Tensor:
    """The rate without its sigmoid."""
    return b


def without_softplus(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The decay without its softplus."""
    return -a_log.float().exp() * (a.float() + dt_bias)


def without_dt_bias(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The decay without its bias."""
    import torch.nn.functional as F

    return -a_log.float().exp() * F.softplus(a.float())


def tiled(keys: Tensor, heads: int) -> Tensor:
    """Value head h reads key head h modulo their number."""
    return keys.repeat(1, heads // keys.shape[1], 1)


def in_bfloat16(state: Tensor) -> Tensor:
    """The state is kept in bfloat16."""
    import torch

    return state.to(torch.bfloat16).float()


def ungated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The norm without its gate."""
    import torch.nn.functional as F

    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def ungated(context: Tensor, gate: Tensor) -> Tensor:
    """What attention gives, as it is."""
    return context


def has_states(model: ModelConfig, tp: int) -> str | None:
    """Some layers have linear attention."""
    return None if model.linear is not None else "the model has no linear attention"


def has_convolutions(model: ModelConfig, tp: int) -> str | None:
    """Some layers have a short convolution, alone or before linear attention."""
    return None if model.stateful else "no layer has a short convolution"


def has_recurrence(model: ModelConfig, tp: int) -> str | None:
    """Some layers have heads with a state."""
    there = model.linear is not None or model.mamba is not None
    return None if there else "no layer has a recurrent state"


def shared_keys(model: ModelConfig, tp: int) -> str | None:
    """A rank has several key heads, of which each is read by several value heads."""
    if (linear := model.linear) is None:
        return "the model has no linear attention"
    several = linear.group > 1 and linear.key_heads > tp
    return None if several else "no rank has several key heads with several value heads each"


def has_output_gate(model: ModelConfig, tp: int) -> str | None:
    """Attention has an output gate."""
    return None if model.output_gate else "the model's attention has no output gate"


def _fault(
    seam: str, value: str, correct: str, patch: Callable[..., object], tap: str, title: str, symptom: str,
    source: str = "", needs: Needs = has_states, step: int = 0, level: Level = "step",
) -> Fault:  # fmt: skip
    return one_seam(
        seam, value, correct, patch, f"layers.*.attn.{tap}", title, symptom, needs,
        group="attention", level=level, step=step, source=source,
    )  # fmt: skip


FAULTS = (
    _fault(
        "state_before", "left", "carried", left_behind, "*state", "state not reset between requests",
        "the second request is another than the first one with the same tokens", "modular/modular#6681",
        has_recurrence, level="build",
    ),
    _fault(
        "state_before", "restarted", "carried", restarted, "*state", "state restarts at each pass",
        "of a prompt read in chunks the last one alone counts, and a decode step knows nothing before its token",
        "gittensor-ai-lab/sparkinfer#1071", has_recurrence, step=1,
    ),
    _fault(
        "conv_kept", "one_short", "newest", one_short, "*conv*", "convolution state one token short",
        "the first tokens of each later pass lack the oldest one of their window", step=1, level="build",
        needs=has_convolutions,
    ),
    _fault(
        "conv_kept", "frozen", "newest", frozen, "*conv*", "convolution state not updated by decode steps",
        "each later token sees those at the end of the prompt before it", step=2, level="build", needs=has_convolutions,
    ),
    _fault(
        "short_conv", "linear", "silu", without_silu, "conv_q", "SiLU of the convolution left out",
        "queries, keys and values may be negative without bound",
    ),
    _fault(
        "l2_norm", "missing", "each_head", not_normalised, "q_l2", "queries and keys not normalised",
        "states grow with the length of the keys",
    ),
    _fault(
        "beta", "linear", "sigmoid", not_squashed, "beta", "rate without its sigmoid",
        "states are corrected by more than all, or the wrong way",
    ),
    _fault(
        "decay", "linear", "softplus", without_softplus, "decay", "decay without softplus",
        "some states grow instead of being forgotten",
    ),
    _fault(
        "decay", "unbiased", "softplus", without_dt_bias, "decay", "decay without dt_bias",
        "states are forgotten too fast or too slowly",
    ),
    _fault(
        "key_heads", "tiled", "neighbours", tiled, "state", "key heads tiled instead of repeated",
        "value heads read other key heads than their own", "sgl-project/sglang#38363", shared_keys,
    ),
    _fault(
        "state_kept", "bfloat16", "float32", in_bfloat16, "*state", "state stored in bfloat16",
        "errors add up with every token", "huggingface/transformers#46190", has_recurrence,
    ),
    _fault(
        "gated_norm", "ungated", "silu", ungated_norm, "gated_norm", "gate of the gated norm left out",
        "all heads pass in full",
    ),
    _fault(
        "output_gate", "missing", "sigmoid", ungated, "gated", "output gate of attention left out",
        "attention is too large, for each channel by another factor", needs=has_output_gate,
    ),
)  # fmt: skip
