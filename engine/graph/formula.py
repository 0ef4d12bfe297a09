"""Formulas: what an operation computes, as a small expression tree, and its value in float64 (torch-free).

    evaluate(FORMULAS["norm"], {"x": x, "weight": weight, "eps": 1e-6})
    str(FORMULAS["residual"])                                             # "x + y"

A leaf is an input or a weight by its role, or a number. T tokens of one sequence, K positions attended to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.linear_attention import L2_EPS
from lockstep.engine.graph import index_choice, recurrence, routing
from lockstep.engine.graph.index_choice import as_seen
from lockstep.engine.graph.mamba_formulas import GATE_FIRST_NORM, NORM_FIRST, READ, STATE
from lockstep.engine.graph.multipliers import FACTORS
from lockstep.engine.graph.node import Node as Node
from lockstep.engine.graph.node import of as _of
from lockstep.engine.graph.node import substitute as substitute
from lockstep.engine.graph.operation import Kind, Operation
from lockstep.engine.graph.rotations import (
    rotate,
    rotate_last,
    rotate_last_neighbours,
    rotate_neighbours,
    rotate_part,
)

Array = NDArray[np.float64]
#: Bytes of a weight in float64 that are made at a time: a processor's cache holds them until they are multiplied.
_CHUNK = 4 << 20


def silu(x: Array) -> Array:
    """x · σ(x) (arXiv:1702.03118)."""
    return np.asarray(x / (1 + np.exp(-np.clip(x, -700, 700))))


def rows_at_once(width: int) -> int:
    """Rows of so many columns that are widened at once."""
    return max(1, _CHUNK // (8 * max(1, width)))


def in_chunks(weight: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Rows of a weight [out, in], as many at a time as are widened at once."""
    rows = rows_at_once(weight.shape[1])
    return (weight[i : i + rows] for i in range(0, len(weight), rows))


def product(x: Array, weight: NDArray[Any]) -> Array:
    """x [N, in] times a weight [out, in] of any dtype: [N, out]."""
    parts = [x @ some.astype(np.float64).T for some in in_chunks(weight)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(x), 0))


def gelu(x: Array) -> Array:
    """x · Φ(x) (arXiv:1606.08415)."""
    return np.asarray(x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2)


def gelu_tanh(x: Array) -> Array:
    """The same with Φ by a tanh."""
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


def expand(kv: Array, heads: int) -> Array:
    """Keys or values [K, kv_heads, D] for each of `heads` query heads: head h reads KV head h // group."""
    return kv.repeat(heads // kv.shape[1], axis=1)


def _dot(q: Array, k: Array) -> Array:
    """q [T, heads, D], k [K, kv_heads, D] -> [heads, T, K]."""
    return np.asarray(np.einsum("thd,khd->htk", q, expand(k, q.shape[1]), optimize=True))


def _softmax(scores: Array) -> Array:
    """Over the keys. Of a query that sees none: NaN."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        return np.asarray(weights / weights.sum(-1, keepdims=True))


def softmax_beside(scores: Array, sinks: Array) -> Array:
    """The same of scores [heads, T, K] with one term more in each head's sum, exp of its sink [heads]
    (arXiv:2309.17453)."""
    beside = np.broadcast_to(sinks.reshape(-1, 1, 1), (*scores.shape[:-1], 1))
    return _softmax(np.concatenate([scores, beside], -1))[..., :-1]


def swish(x: Array, slope: float = 1.0) -> Array:
    """x · σ(slope · x)."""
    return np.asarray(x * routing.sigmoid(slope * x))


def curve_below_zero(x: Array, eps: float) -> Array:
    """exp(x) - 1 - x where x is negative, else 0; exp(x) - 1 is at most that of `eps`."""
    return np.asarray(np.where(x > 0, 0.0, np.expm1(np.minimum(x, eps)) - x))


def clamped_within(x: Array, limit: float) -> Array:
    """x within ±limit."""
    return np.clip(x, -abs(limit), abs(limit))


def _weigh(probs: Array, v: Array) -> Array:
    """probs [heads, T, K], v [K, kv_heads, D] -> [T, heads * D]."""
    out = np.einsum("htk,khd->thd", probs, expand(v, len(probs)), optimize=True)
    return np.asarray(out.reshape(len(out), -1))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "square": np.square,
    "root": np.sqrt,
    "mean": lambda x: x.mean(-1, keepdims=True),
    "sum": lambda partial: partial.sum(0),  # over the ranks
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "swish": swish,
    "clamped_above": np.minimum,
    "clamped_within": clamped_within,
    "tanh": np.tanh,
    "product": product,
    "rotate": rotate,
    "rotate_part": rotate_part,
    "rotate_neighbours": rotate_neighbours,
    "rotate_last": rotate_last,
    "rotate_last_neighbours": rotate_last_neighbours,
    "first": lambda x, count: x[..., : int(count)],
    "last": lambda x, count: x[..., x.shape[-1] - int(count) :],
    "columns": lambda x, first, count: x[..., int(first) : int(first + count)],
    "beside": lambda own, shared: np.concatenate(  # each head's own channels, and those that all heads share
        [own, np.broadcast_to(shared, (*own.shape[:-1], shared.shape[-1]))], axis=-1
    ),
    "dot": _dot,
    "where": lambda allowed, scores: np.where(allowed, scores, -np.inf),
    "softmax": _softmax,
    "softmax_beside": softmax_beside,
    "weigh": _weigh,
    "row": lambda weight, token: weight[token].astype(np.float64),
    "sigmoid": routing.sigmoid,
    "chosen": routing.chosen,
    "taken": routing.taken,
    "mixed": routing.mixed,
    "weighed": routing.weighed,
    "plain_sum": routing.plain_sum,
    "summed_heads": index_choice.summed_heads,
    "best_keys": index_choice.best_keys,
    "shares": routing.shares,
    "routed": routing.routed,
    "added_to_rows": routing.added_to_rows,
    "weighed_sum": routing.weighed_sum,
    "total": lambda x: x.sum(-1, keepdims=True),
    "exp": np.exp,
    "log1p": np.log1p,
    "floor": np.floor,
    "above_zero": lambda x: np.maximum(x, 0.0),
    "curve_below_zero": curve_below_zero,
    "negative": np.negative,
    "softplus": recurrence.softplus,
    "convolved": recurrence.convolved,
    "by_heads": recurrence.by_heads,
    "side_by_side": recurrence.side_by_side,
    "paired": recurrence.paired,
    "last_state": recurrence.last_state,
    "read_out": recurrence.read_out,
    "scanned": recurrence.scanned,
    "scan_read": recurrence.scan_read,
    "mean_of_groups": recurrence.mean_of_groups,
    "clamped": np.clip,
    "each_head": lambda x: x[:, None],
    "times_of_experts": lambda weights, scale, ids: weights * scale[ids.astype(np.int64)],
}


_X, _WEIGHT, _BIAS = Node("x"), Node("weight"), Node("bias")
#: x over its root mean square (RMSNorm, arXiv:1910.07467).
NORMALISED = _of("divide", _X, _of("root", _of("add", _of("mean", _of("square", _X)), Node("eps"))))
#: LayerNorm (arXiv:1607.06450): the mean is taken off first.
CENTRED = _of("subtract", _X, _of("mean", _X))
_DEVIATION = _of("root", _of("add", _of("mean", _of("square", CENTRED)), Node("eps")))
CENTRED_NORM = _of("multiply", _of("divide", CENTRED, _DEVIATION), _WEIGHT)
LAYER_NORM = _of("add", CENTRED_NORM, _BIAS)
#: The same by the mean over all ranks' channels.
NORMALISED_WHOLE = _of(
    "divide", _X, _of("root", _of("add", _of("mean", _of("square", Node("whole"))), Node("eps")))
)
#: The clamped SwiGLU of gpt-oss (arXiv:2508.10925).
CLAMPED_SWIGLU = _of(
    "multiply",
    _of("swish", _of("clamped_above", Node("gate"), Node("limit")), Node("slope")),
    _of("add", _of("clamped_within", Node("up"), Node("limit")), Node("1")),
)
#: xIELU (arXiv:2411.13010).
XIELU = _of(
    "add",
    _of("multiply", Node("xielu_beta"), Node("up")),
    _of(
        "add",
        _of("multiply", _of("softplus", Node("alpha_p")), _of("square", _of("above_zero", Node("up")))),
        _of(
            "multiply",
            _of("add", Node("xielu_beta"), _of("softplus", Node("alpha_n"))),
            _of("curve_below_zero", Node("up"), Node("xielu_eps")),
        ),
    ),
)
_LINEAR = _of("add", _of("product", _X, _WEIGHT), _BIAS)
#: Scores before the mask.
SCALED = _of("multiply", _of("dot", Node("q"), Node("k")), Node("scale"))
_HEADS_OF_KEYS, _KEYS = _of("by_heads", _X, Node("key_dim")), _of("by_heads", Node("k"), Node("key_dim"))
_RECURRENT = (
    Node("before"),
    _of("paired", _KEYS, Node("beta")),
    Node("v"),
    Node("beta"),
    _of("exp", Node("decay")),
)
_QUERIES = _of("multiply", _of("by_heads", Node("q"), Node("key_dim")), Node("key_scale"))
_VALUES = _of("by_heads", _X, Node("value_dim"))
_OF_LAYERS = _of("by_heads", _of("multiply", _X, Node("projection_scale")), Node("input_width"))
_VALUES_NORMALISED, _OF_LAYERS_NORMALISED = (
    substitute(NORMALISED, {"x": heads}) for heads in (_VALUES, _OF_LAYERS)
)
#: What a query is multiplied by where it stands: 1 + beta ln(1 + floor((position + offset) / length)).
_STEPS = _of("floor", _of("divide", _of("add", Node("position"), Node("query_offset")), Node("query_length")))
_QUERY_FACTOR = _of("add", Node("1"), _of("multiply", Node("query_beta"), _of("log1p", _STEPS)))
_HEAD_WEIGHTS = _of("multiply", Node("weights"), Node("index_weight"))
#: Kind -> what its operations compute.
FORMULAS: Mapping[Kind, Node] = {
    "embedding": _of("row", _WEIGHT, Node("token")),
    "norm": _of("multiply", NORMALISED, _WEIGHT),
    "linear": _LINEAR,
    "head": _LINEAR,
    "rope": _of("rotate", _X, Node("angles"), Node("factor")),
    "cache": Node("written"),
    "scores": _of("where", Node("allowed"), SCALED),
    "softmax": _of("softmax", Node("scores")),
    "context": _of("weigh", Node("probs"), Node("v")),
    "reduce": _of("add", _of("sum", Node("partial")), _BIAS),
    "residual": _of("add", _X, Node("y")),
    "activation": _of("multiply", _of("silu", Node("gate")), Node("up")),
    "choice": _of(
        "chosen",
        _of("softmax", Node("logits")),
        Node("top_k"),
        Node("groups"),
        Node("top_groups"),
        Node("group_best"),
    ),
    "choice_weights": _of("taken", _of("softmax", Node("logits")), Node("ids")),
    "experts": _of("routed", _X, _WEIGHT, Node("ids")),
    "combine": _of("weighed_sum", _X, Node("weights")),
    "keys": _of("beside", _of("first", Node("expanded"), Node("plain_dim")), Node("rope")),
    "values": _of("last", Node("expanded"), Node("value_dim")),
    "gate": _of("multiply", _X, _of("sigmoid", Node("gate"))),
    "conv": _of("silu", _of("convolved", Node("before"), _X, _WEIGHT)),
    "l2_norm": _of(
        "side_by_side",
        _of(
            "divide",
            _HEADS_OF_KEYS,
            _of("root", _of("add", _of("total", _of("square", _HEADS_OF_KEYS)), Node("l2_eps"))),
        ),
    ),
    "sigmoid": _of("sigmoid", _X),
    "decay": _of(
        "negative",
        _of("multiply", _of("exp", Node("A_log")), _of("softplus", _of("add", _X, Node("dt_bias")))),
    ),
    "state": _of("last_state", *_RECURRENT),
    "delta": _of("read_out", _of("paired", _QUERIES, Node("beta")), *_RECURRENT),
    "gated_norm": _of(
        "multiply",
        _of("side_by_side", _of("multiply", _VALUES_NORMALISED, _WEIGHT)),
        _of("silu", Node("gate")),
    ),
    "unit_norm": NORMALISED,
    "step_size": _of("softplus", _of("add", _X, Node("dt_bias"))),
    "ssm_state": STATE,
    "ssm_read": READ,
    "layer_inputs": _of(
        "multiply",
        _of("add", _of("side_by_side", _of("multiply", _OF_LAYERS_NORMALISED, _WEIGHT)), Node("embedded")),
        Node("input_factor"),
    ),
    "layer_input": _of("columns", _X, Node("input_first"), Node("input_width")),
    "query_scaling": _of("multiply", _X, _QUERY_FACTOR),
    "expert_input": _of("weighed", _X, Node("weights")),
    "times": _of("multiply", _X, Node("gate")),
    "channel_scale": _of("multiply", _of("multiply", _X, _WEIGHT), Node("router_factor")),
    "clip": _of("clamped_within", _X, Node("clip")),
    "multiplier": _X,
    "mixed": _of("add", _X, Node("y")),
    "index_scores": _of(
        "where", Node("allowed"), _of("summed_heads", _of("above_zero", SCALED), _HEAD_WEIGHTS)
    ),
    "key_choice": _of("best_keys", Node("scores"), Node("index_top_k")),
    "shared_choice": Node("ids"),
}


def _times(formula: Node, name: str, factor: float) -> Node:
    return formula if factor == 1 else _of("multiply", formula, Node(name))


def _capped(formula: Node, name: str, cap: float) -> Node:
    return _of("multiply", Node(name), _of("tanh", _of("divide", formula, Node(name)))) if cap else formula


def formula_of(operation: Operation, model: ModelConfig) -> Node:
    """What an operation of this model computes; the leaves that are numbers of the model are in `numbers_of`."""
    usual, model = FORMULAS[operation.kind], as_seen(operation, model)
    match operation.kind:
        case "norm":
            weight = _of("add", Node("1"), _WEIGHT) if model.norms_add_one else _WEIGHT
            if not model.norm_weight:
                return _of("divide", CENTRED, _DEVIATION)
            if model.centring:
                return substitute(LAYER_NORM if model.norm_bias else CENTRED_NORM, {"weight": weight})
            if operation.width in ("latent", "query_latent"):
                return _latent_norm(operation)
            whole = operation.sharded and model.qk_norm_whole
            return _of("multiply", NORMALISED_WHOLE if whole else NORMALISED, weight)
        case "rope":
            rotated = rotation_of(model)
            return (
                substitute(rotated, {"x": _of("last", _X, Node("rope_dim"))})
                if operation.width == "rope_key"
                else rotated
            )
        case "scores":
            return _of("where", Node("allowed"), _capped(SCALED, "score_cap", model.score_cap))
        case "softmax" if model.sinks:
            return _of("softmax_beside", Node("scores"), Node("sinks"))
        case "experts" if model.expert_bias:
            return _of("added_to_rows", usual, _BIAS, Node("ids"))
        case "activation":
            if model.clamp is not None:
                return CLAMPED_SWIGLU
            if model.activation == "xielu":
                return XIELU
            if not model.gated:
                return _of(model.activation, Node("up"))
            return _of("multiply", _of(model.activation, Node("gate")), Node("up"))
        case "embedding":
            if operation.width == "layer_inputs":
                return _of("multiply", usual, Node("input_multiplier"))
            return _times(usual, "embedding_multiplier", model.embedding_multiplier)
        case "residual":
            added = _of("add", _X, _times(Node("y"), "residual_multiplier", model.residual_multiplier))
            return _of("multiply", added, Node("layer_scalar")) if operation.scaled else added
        case "head":
            divided = usual if model.logit_divisor == 1 else _of("divide", usual, Node("logit_divisor"))
            return _capped(divided, "logit_cap", model.logit_cap)
        case "conv" if model.short_conv is not None:
            return _of("convolved", Node("before"), _X, _WEIGHT)
        case "conv" if model.conv_bias:
            return _of("silu", _of("add", _of("convolved", Node("before"), _X, _WEIGHT), _BIAS))
        case "step_size" if model.mamba is not None and model.mamba.limited:
            return _of("clamped", usual, Node("least_step"), Node("largest_step"))
        case "gated_norm" if model.mamba is not None:
            return NORM_FIRST if model.mamba.norm_first else GATE_FIRST_NORM
        case "multiplier" if model.multipliers is not None:
            name = FACTORS[operation.tap]
            return _times(_X, f"{name}_multiplier", getattr(model.multipliers, name))
        case "choice" | "choice_weights":
            return _routing(operation.kind, model.experts) if model.experts is not None else usual
        case "combine":
            summed = usual if "weights" in operation.inputs else _of("plain_sum", _X)
            return _with_shared(summed, operation.inputs)
        case _:
            return usual


def _latent_norm(operation: Operation) -> Node:
    """Of the latent of keys and values: what else its product gives is left out."""
    latent = _of("first", _X, Node("kv_rank")) if operation.width == "latent" else _X
    return substitute(FORMULAS["norm"], {"x": latent})


def _routing(kind: Kind, experts: ExpertsConfig) -> Node:
    scores = Node("logits") if experts.scores == "logits" else _of(experts.scores, Node("logits"))
    if kind == "choice":
        choice = _of("add", scores, Node("correction")) if experts.correction else scores
        return _of("chosen", choice, Node("top_k"), Node("groups"), Node("top_groups"), Node("group_best"))
    if experts.jitter is not None:
        return _of("mixed", scores, Node("ids"), Node("jitter"))
    weights = _of("taken", scores, Node("ids"))
    if experts.renormalised:
        eps = [Node("shares_eps")] if experts.shares_eps else []
        weights = _of("shares", weights, *eps)
    if experts.beside_mlp:
        weights = _of("times_of_experts", weights, Node("expert_scale"), Node("ids"))
    return _times(weights, "routed_factor", experts.factor)


def _with_shared(routed: Node, inputs: Collection[str]) -> Node:
    shared = Node("shared")
    if "gate" in inputs:
        shared = _of("multiply", _of("sigmoid", Node("gate")), shared)
    return _of("add", routed, shared) if "shared" in inputs else routed


def rotation_of(model: ModelConfig) -> Node:
    """How this model's layers rotate heads."""
    name = "rotate" if model.rotary_dim == model.head_dim else "rotate_part"
    name = "rotate_neighbours" if model.neighbours and model.rotary_dim else name
    if model.rotary_last:
        name = "rotate_last_neighbours" if model.neighbours else "rotate_last"
    return _of(name, _X, Node("angles"), Node("factor"))


def eps_of(operation: Operation | None, model: ModelConfig) -> float:
    """What a norm adds to the mean square."""
    model = as_seen(operation, model)
    of_latent = operation is not None and operation.width in ("latent", "query_latent")
    return model.latent.eps if of_latent and model.latent is not None else model.rms_eps


def numbers_of(model: ModelConfig, operation: Operation | None = None) -> dict[str, float]:
    """The numbers of a model, as an operation has them, by the names of leaves."""
    model = as_seen(operation, model)
    names = (
        "score_cap",
        "logit_cap",
        "embedding_multiplier",
        "residual_multiplier",
        "logit_divisor",
        "scale",
    )
    more: dict[str, float] = {}
    if (experts := model.experts) is not None:
        more = {"top_k": experts.top_k, "groups": experts.groups, "top_groups": experts.top_groups}
        more["routed_factor"], more["group_best"] = experts.factor, experts.group_best
        more |= {"shares_eps": experts.shares_eps} if experts.shares_eps else {}
        more |= {} if experts.jitter is None else {"jitter": experts.jitter}
        more |= {"router_factor": model.hidden_size**-0.5} if experts.beside_mlp else {}
    if (latent := model.latent) is not None:
        more |= {name: getattr(latent, name) for name in ("kv_rank", "plain_dim", "rope_dim", "value_dim")}
    if (indexer := model.indexer) is not None:
        more |= {"index_top_k": indexer.top_k, "index_weight": indexer.heads**-0.5}
    if (clamp := model.clamp) is not None:
        more |= {"limit": clamp.limit, "slope": clamp.slope}
    if model.clip_qkv is not None:
        more["clip"] = model.clip_qkv
    if model.multipliers is not None:
        more |= {f"{name}_multiplier": getattr(model.multipliers, name) for name in FACTORS.values()}
    if (linear := model.linear) is not None:
        more |= {"key_dim": linear.key_dim, "value_dim": linear.value_dim, "l2_eps": L2_EPS}
        more["key_scale"] = linear.key_dim**-0.5
    if (mamba := model.mamba) is not None:
        more |= {"ssm_dim": mamba.head_dim, "state_dim": mamba.state, "norm_width": mamba.norm_width}
        more |= dict(zip(("least_step", "largest_step"), mamba.limits, strict=True))
    if (inputs := model.layer_inputs) is not None:
        more |= {"input_width": inputs.width, "input_first": inputs.width * (inputs.layer or 0)}
        more |= {"input_multiplier": inputs.width**0.5, "projection_scale": model.hidden_size**-0.5}
        more["input_factor"] = 2.0**-0.5
    if (scaling := model.query_scaling) is not None:
        more |= {f"query_{name}": getattr(scaling, name) for name in ("beta", "length", "offset")}
    return {
        "1": 1.0,
        "eps": eps_of(operation, model),
        **{name: getattr(model, name) for name in names},
        **more,
    }


def evaluate(formula: Node, given: Mapping[str, Any]) -> Any:
    """The value of a formula; `given` has those of its leaves. KeyError for one that it lacks."""
    if not formula.args:
        return given[formula.name]
    return FUNCTIONS[formula.name](*(evaluate(one, given) for one in formula.args))
