"""Which rows, columns, heads and vocabulary each rank owns. Pure arithmetic on *global* sizes, torch-free.

Every parameter of the model is split along at most one dimension (Megatron's scheme, arXiv:1909.08053):

    column   q/k/v, gate, up       rows of the weight (out features) and their bias are split
    row      o, down               columns of the weight (in features) are split; the bias is replicated
    vocab    embedding, lm_head    rows are split, after padding the vocabulary to a multiple of tp
    whole    norms, router         replicated, but for norms of all heads of q or k at once
    heads    conv1d, A_log, dt     rows are split as those of the products of the same heads
    experts  gate, up, down        `ep` groups of ranks have the experts, equally many each in their order; within a
                                   group each is split as gate, up and down of an MLP are

Which is which follows from what an operation reads and gives (`engine.graph`).

`Span`s are half-open and in global indices: a rank's slice of the checkpoint is `[span.start:span.stop]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from lockstep.engine.config import DType, Family, ModelConfig
from lockstep.engine.errors import ConfigError
from lockstep.engine.graph import STREAM, Operation, Width, final_norm_of, operation_of, operations_of
from lockstep.engine.graph.layer_inputs import NORM, OF_ALL_LAYERS
from lockstep.engine.graph.mamba_vectors import ssm_vectors
from lockstep.engine.graph.operation import WHOLE
from lockstep.engine.parallel.sizes import size_of


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Global indices `start <= i < stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> Span:
        """The same span in units `factor` times smaller: heads to features."""
        return Span(self.start * factor, self.stop * factor)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one parameter.

    `shape` is the global shape, `dim` the dimension that is split (None: replicated whole, the span covers
    dimension 0), `span` this rank's part of it, `replicas` the number of ranks that hold the same part.
    """

    shape: tuple[int, ...]
    dim: int | None
    span: Span
    replicas: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's tensor."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.span.size, *self.shape[self.dim + 1 :])


def even(size: int, tp: int, rank: int, what: str = "size") -> Span:
    """Rank's equal part of `size`, which must divide."""
    if size % tp:
        raise ConfigError(f"tp={tp} does not divide {what} {size}")
    part = size // tp
    return Span(rank * part, (rank + 1) * part)


def heads(model: ModelConfig, tp: int, rank: int) -> Span:
    """The query heads of a rank."""
    return even(model.num_heads, tp, rank, "the number of attention heads")


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """How many (neighbouring) ranks hold each KV head: 1 unless tp exceeds the number of KV heads."""
    return max(1, tp // model.num_kv_heads)


def kv_heads(model: ModelConfig, tp: int, rank: int) -> Span:
    """The KV heads of a rank: its equal part, or the one head it shares with its neighbours."""
    count, replicas = model.num_kv_heads, kv_replicas(model, tp)
    if tp <= count:
        return even(count, tp, rank, "the number of key/value heads")
    if tp % count:
        raise ConfigError(f"tp={tp} is not a multiple of {count} key/value heads")
    return Span(rank // replicas, rank // replicas + 1)


def cached(model: ModelConfig, tp: int, rank: int) -> tuple[int, tuple[int, int]]:
    """What a rank's cache holds of a token in a layer: so many rows of these two widths, of keys and of values; of
    latents one of each, the same on every rank."""
    if (latent := model.latent) is not None:
        return 1, (latent.kv_rank, latent.rope_dim + index_dim(model))
    return kv_heads(model, tp, rank).size, (model.head_dim, model.head_dim)


def index_dim(model: ModelConfig) -> int:
    """Channels of an index key, which lies behind the rotated part of a key in the cache; 0 where a layer has none."""
    there = model.indexer is not None and model.indexer.source is None
    return model.indexer.dim if model.indexer is not None and there else 0


def cached_layers(model: ModelConfig) -> list[int]:
    """The layers that have keys and values, or latents, of their own in the cache."""
    stateful = model.stateful
    return [
        layer
        for layer in range(model.num_layers)
        if (model.beside or not any(stateful[layer : layer + 1]))
        and model.of_layer(layer).kv_from is None
        and "mlp" not in model.blocks[layer : layer + 1]
    ]


def key_heads(model: ModelConfig, tp: int, rank: int) -> Span:
    """The key heads of a rank in a layer with linear attention: those that its heads of values read."""
    if model.linear is None:
        return Span(0, 0)
    values = even(model.linear.value_heads, tp, rank, "the number of linear value heads")
    group = model.linear.group
    return Span(values.start // group, -(-values.stop // group))


def key_replicas(model: ModelConfig, tp: int) -> int:
    """How many (neighbouring) ranks hold each of those key heads, or, of Mamba-2, each group of B and C."""
    if model.mamba is not None:
        return max(1, tp // model.mamba.groups)
    return 1 if model.linear is None else max(1, tp // model.linear.key_heads)


def ssm_groups(model: ModelConfig, tp: int, rank: int) -> Span:
    """The groups of B and C of a rank in a Mamba-2 layer: those that its heads read."""
    if (mamba := model.mamba) is None:
        return Span(0, 0)
    own, group = even(mamba.heads, tp, rank, "the number of Mamba-2 heads"), mamba.heads // mamba.groups
    return Span(own.start // group, -(-own.stop // group))


def replicas(width: Width, model: ModelConfig, tp: int) -> int:
    """How many (neighbouring) ranks hold the same part of what has that width."""
    of = {"kv_heads": kv_replicas, "linear_keys": key_replicas, "ssm_groups": key_replicas}
    return of.get(width, _once)(model, tp)


def _once(model: ModelConfig, tp: int) -> int:
    return 1


def intermediate(model: ModelConfig, tp: int, rank: int) -> Span:
    """The part of the MLP's width that a rank computes."""
    return cropped(model.intermediate_size, tp, rank)


def cropped(size: int, tp: int, rank: int) -> Span:
    """Rank's equal part of `size` padded to a multiple of tp, without the padding: the last ranks may own less, or
    nothing."""
    part = -(-size // tp)
    return Span(min(rank * part, size), min((rank + 1) * part, size))


def vocab(vocab_size: int, tp: int, rank: int) -> Span:
    """The vocabulary of a rank."""
    return cropped(vocab_size, tp, rank)


def held_experts(model: ModelConfig, tp: int, rank: int, ep: int) -> Span:
    """The experts that a rank has, whole or in part."""
    return Span(0, 0) if model.experts is None else placed_experts(model.experts.count, tp, rank, ep)


def placed_experts(count: int, tp: int, rank: int, ep: int) -> Span:
    """Of `count` experts those that a rank has, whole or in part, where `ep` groups of ranks divide them."""
    if tp % ep:
        raise ConfigError(f"ep={ep} does not divide tp={tp}")
    return even(count, ep, rank // (tp // ep), "the number of experts")


def is_first_of_group(tp: int, rank: int, ep: int) -> bool:
    """Whether the rank is the first of those that share each of their experts."""
    return rank % (tp // ep) == 0


def expert_features(model: ModelConfig, tp: int, rank: int, ep: int, expert: int) -> Span:
    """The part of that expert's width that a rank computes: none where another group has it."""
    held = held_experts(model, tp, rank, ep)
    size = size_of("expert", model) if held.start <= expert < held.stop else 0
    return cropped(size, tp // ep, rank % (tp // ep))


#: What the decay of a recurrent state is made from, by role.
DECAY = {"A_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias"}
#: The bias of a router by which experts are chosen, and no more.
CORRECTION = "e_score_correction_bias"
#: The same where it has another name.
CORRECTIONS: Mapping[Family, str] = {"lfm2_moe": "expert_bias"}
#: Where experts stand beside an MLP: the factors of the channels of the router's input, and of each expert's weight.
ROUTER_SCALE, EXPERT_SCALE = "router.scale", "router.per_expert_scale"
#: What each head's softmax has in its sum beside the keys.
SINKS = "self_attn.sinks"
#: The numbers of xIELU, by role: [1] both alphas, the others without an axis.
XIELU = {
    "alpha_p": "mlp.act_fn.alpha_p", "alpha_n": "mlp.act_fn.alpha_n", "xielu_beta": "mlp.act_fn.beta",
    "xielu_eps": "mlp.act_fn.eps",
}  # fmt: skip
#: What a layer's output is multiplied by.
LAYER_SCALAR = "layer_scalar"
HEAD_BIAS = "lm_head.bias"
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)", re.ASCII)


def correction_name(model: ModelConfig) -> str:
    """The correction's name within the layer."""
    found = (operation_of(model, tap) for tap in ("mlp.topk_ids", "mlp.router"))
    module = next(one.module for one in found if one is not None and one.module)
    return f"{module}.{CORRECTIONS.get(model.family, CORRECTION)}"


def layer_of_parameter(name: str) -> int | None:
    """ "model.layers.3.mlp.up_proj.weight" -> 3; None of a tensor outside the layers."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match[1])


def span_of(width: Width, model: ModelConfig, tp: int, rank: int) -> Span:
    """The channels that a rank has."""
    match width:
        case "heads" | "value_heads" | "expanded_heads":
            return heads(model, tp, rank).scaled(size_of(width, model) // model.num_heads)
        case "head":
            return heads(model, tp, rank)
        case "kv_heads":
            return kv_heads(model, tp, rank).scaled(model.head_dim)
        case "intermediate" | "expert" | "shared_expert":
            return cropped(size_of(width, model), tp, rank)
        case "linear_keys":
            return key_heads(model, tp, rank).scaled(0 if model.linear is None else model.linear.key_dim)
        case "linear_values" | "linear_heads":
            return even(size_of(width, model), tp, rank, "the number of linear value heads")
        case "ssm_groups":
            return ssm_groups(model, tp, rank).scaled(0 if model.mamba is None else model.mamba.state)
        case "ssm_channels" | "ssm_heads":
            return even(size_of(width, model), tp, rank, "the number of Mamba-2 heads")
        case "conv_channels":
            return even(model.hidden_size, tp, rank, "the number of channels")
        case "vocab":
            return vocab(model.vocab_size, tp, rank)
        case _:  # WHOLE
            return Span(0, size_of(width, model))


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A layer's parameter: its global shape, the dimension whose channels the ranks split, and the expert whose it
    is."""

    shape: tuple[int, ...]
    dim: int | None = None
    width: Width = "hidden"
    expert: int | None = None


@lru_cache(256)
def _layer_parameters(model: ModelConfig) -> dict[str, _Parameter]:
    """Those of a layer that has all there is."""
    found: dict[str, _Parameter] = {}
    widths: dict[str, Width] = {STREAM: "hidden"}
    for one in operations_of(model):
        widths[one.tap], rows = one.width, size_of(one.width, model)
        if one.kind == "norm":
            if not model.norm_weight:
                continue
            split = 0 if one.sharded and model.qk_norm_whole else None
            size = model.head_dim if one.sharded and split is None else rows
            found[f"{one.module}.weight"] = _Parameter((size,), split, one.width)
            if one.bias and getattr(model, one.bias):
                found[f"{one.module}.bias"] = _Parameter((size,))
            continue
        split = 0 if one.sharded else None
        found |= _of_heads(one, model)
        if one.kind == "choice" and model.experts is not None and model.experts.correction:
            found[correction_name(model)] = _Parameter((model.experts.count,))
        if one.kind == "channel_scale":
            found[ROUTER_SCALE] = _Parameter((model.hidden_size,))
        if one.kind == "choice_weights" and model.experts is not None and model.experts.beside_mlp:
            found[EXPERT_SCALE] = _Parameter((model.experts.count,))
        if one.scaled:
            found[LAYER_SCALAR] = _Parameter((1,))
        if one.kind == "activation" and model.activation == "xielu":
            found |= {
                name: _Parameter(() if role.startswith("xielu_") else (1,)) for role, name in XIELU.items()
            }
        if one.kind == "softmax" and model.sinks:
            found[SINKS] = _Parameter((model.num_heads,), 0, "head")
        if one.kind in ("linear", "experts"):
            read = widths[one.inputs["x"]]
            whole = read in WHOLE
            shape = rows, size_of(read, model)
            matrix = _Parameter(shape, split if whole else 1, one.width if whole else read)
            found |= dict(_of_each(one, "weight", matrix, model))
        if one.bias and getattr(model, one.bias):
            found |= dict(_of_each(one, "bias", _Parameter((rows,), split, one.width), model))
    # Expert by expert: of some checkpoints gate and up are read together.
    of_experts = [(one.expert, name) for name, one in found.items() if one.expert is not None]
    in_turn = iter(name for _, name in sorted(of_experts, key=lambda pair: pair[0]))
    names = [name if one.expert is None else next(in_turn) for name, one in found.items()]
    return {name: found[name] for name in names}


def _of_heads(operation: Operation, model: ModelConfig) -> dict[str, _Parameter]:
    """What linear attention and short convolutions have beside their products."""
    if operation.kind == "conv":
        shape = size_of(operation.width, model), model.conv
        return {f"{operation.module}.weight": _Parameter(shape, 0, operation.width)}
    if (mamba := model.mamba) is not None:
        if operation.kind == "gated_norm":
            return {f"{operation.module}.weight": _Parameter((mamba.channels,), 0, operation.width)}
        one = _Parameter((mamba.heads,), 0, "ssm_heads")
        return dict.fromkeys(ssm_vectors(model, operation.kind).values(), one)
    if (linear := model.linear) is None:
        return {}
    match operation.kind:
        case "decay":
            heads = _Parameter((linear.value_heads,), 0, operation.width)
            return dict.fromkeys(DECAY.values(), heads)
        case "gated_norm":
            return {f"{operation.module}.weight": _Parameter((linear.value_dim,))}
        case _:
            return {}


def _of_each(
    operation: Operation, kind: str, whole: _Parameter, model: ModelConfig
) -> Iterator[tuple[str, _Parameter]]:
    """The weight or bias of a product, or those of all experts, by their names."""
    if operation.kind != "experts" or model.experts is None:
        yield f"{operation.module}.{kind}", whole
        return
    for expert in range(model.experts.count):
        yield f"{operation.module.format(expert)}.{kind}", replace(whole, expert=expert)


def layer_parameters(model: ModelConfig, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Parameters of a decoder layer (names after `model.layers.{i}.`) and their global shapes."""
    return {name: one.shape for name, one in _layer_parameters(model.of_layer(layer)).items()}


def parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter the checkpoint must hold: Hugging Face name to global shape, in the forward's order."""
    vocabulary = (model.vocab_size, model.hidden_size)
    shapes = {"model.embed_tokens.weight": vocabulary, **_of_layer_inputs(model)}
    for i in range(model.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_parameters(model, i).items()}
    for kind in [*(["weight"] if model.norm_weight else []), *(["bias"] if model.norm_bias else [])]:
        shapes[f"{final_norm_of(model)}.{kind}"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    return shapes | ({HEAD_BIAS: (model.vocab_size,)} if model.head_bias else {})


def _of_layer_inputs(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """What per-layer inputs have outside of the layers."""
    if (inputs := model.layer_inputs) is None:
        return {}
    modules = {one.kind: one.module for one in OF_ALL_LAYERS}
    return {
        f"{modules['embedding']}.weight": (model.vocab_size, inputs.total),
        f"{modules['linear']}.weight": (inputs.total, model.hidden_size),
        f"{NORM}.weight": (inputs.width,),
    }


def held_in(name: str, model: ModelConfig, dtype: DType) -> DType:
    """The dtype that a parameter is held in by an engine of `dtype`."""
    wide = model.experts is not None and model.experts.wide
    return (
        "float32"
        if wide
        and name.endswith((f".{CORRECTION}", ".mlp.gate.weight", ".gate.wg.weight", ".mixer.gate.weight"))
        else dtype
    )


class ShardPlan(Protocol):
    """What a rank holds of a parameter."""

    def __call__(self, name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> Shard: ...


def plan(name: str, model: ModelConfig, tp: int, rank: int, ep: int = 1) -> Shard:
    """What `rank` of `tp` holds of the parameter `name`, the experts being divided among `ep` groups of ranks. KeyError
    for a name that the model does not have."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return Shard((model.vocab_size, model.hidden_size), 0, vocab(model.vocab_size, tp, rank))
    if name == HEAD_BIAS and model.head_bias:
        return Shard((model.vocab_size,), 0, vocab(model.vocab_size, tp, rank))
    if (shape := _of_layer_inputs(model).get(name)) is not None:
        split = name == f"{OF_ALL_LAYERS[0].module}.weight"
        return Shard(shape, 0, vocab(model.vocab_size, tp, rank)) if split else _whole(shape, tp)
    if name.rpartition(".")[0] == final_norm_of(model):
        return _whole((model.hidden_size,), tp)
    match = _LAYER.fullmatch(name)
    if match is None or int(match.group(1)) >= model.num_layers:
        raise KeyError(name)
    model = model.of_layer(int(match.group(1)))
    one = _layer_parameters(model)[match.group(2)]
    if one.expert is not None and one.dim is not None:
        return Shard(one.shape, one.dim, expert_features(model, tp, rank, ep, one.expert))
    if one.expert is not None:
        held = held_experts(model, tp, rank, ep)
        there = held.start <= one.expert < held.stop
        return Shard(one.shape, 0, Span(0, one.shape[0] if there else 0))
    if one.dim is None:
        return _whole(one.shape, tp)
    return Shard(one.shape, one.dim, span_of(one.width, model, tp, rank), replicas(one.width, model, tp))


def _whole(shape: tuple[int, ...], tp: int) -> Shard:
    return Shard(shape, None, Span(0, shape[0] if shape else 1), tp)


@dataclass(frozen=True, slots=True)
class QKVPlan:
    """What one rank computes of q, k and v in its fused product.

    `rows`: out features of q, k and v, global; `columns`: the in features it reads; `own`: which of the
    rows it computed (counted from its first) its heads go on with; `bias`: whether it adds the bias.
    """

    rows: tuple[Span, Span, Span]
    columns: Span
    own: tuple[Span, Span, Span]
    bias: bool = True


def qkv_by_heads(model: ModelConfig, tp: int, rank: int) -> QKVPlan:
    """A rank computes its own heads from all in features, and goes on with all that it computed."""
    q = heads(model, tp, rank).scaled(model.head_dim)
    kv = kv_heads(model, tp, rank).scaled(model.head_dim)
    return QKVPlan(
        (q, kv, kv), Span(0, model.hidden_size), (Span(0, q.size), Span(0, kv.size), Span(0, kv.size))
    )
