"""Hooks that give every tap of the design its counterpart in a transformers decoder.

| tap | where in transformers |
| --- | --- |
| `embed`, `logits` | what goes into the first layer, what the model gives |
| `attn_norm` … `k_norm`, `o_proj`, `gate`, `up`, `down`, `final_norm` | outputs of the modules of that name |
| `attn_residual` | what goes into the module that reads it, else the sum made again |
| `q_rope` … `context` | the attention interface (`attention.py`) |
| `gate`, `in_proj_*` | the columns of theirs in what a stacked module gives |
| `gated`, `act` | what goes into `o_proj`, `down_proj` |
| `conv_*` … `delta` | the functions of linear attention (`recurrence.py`) |
| `ssm_conv_*` … `ssm_read` | the functions of Mamba-2 (`mamba.py`) |
| `*_scaled`, `mixed` | Falcon-H1's multipliers (`multipliers.py`) |
| `conv_in`, `conv` | the functions of short convolutions (`short_convolution.py`) |
| `index_q_rope` … `index_scores` | the indexer (`indexer.py`) |
| `index_chosen`, `shared_chosen` | the attention interface |
| `router`, `topk_ids`, `topk_weights` | what the router gives |
| `experts.*` | the experts interface (`experts.py`) |
| `combine` | the output of the module in place of the MLP |
| `mlp_residual` | the output of the decoder layer |
| `layer_inputs`, `layer_input` | what the method that makes them returns, what each decoder layer is given |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.checkpoint.stacks import Place, stored_in
from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.graph import (
    LAYER,
    LAYER_OUTPUT,
    Operation,
    final_norm_of,
    operation_of,
    operations_of,
)
from lockstep.engine.parallel.sizes import size_of
from lockstep.engine.taps.names import TapSpec, local_name, model_taps
from lockstep.workbench.references import llama4
from lockstep.workbench.references.arrays import Seen
from lockstep.workbench.references.attention import listening
from lockstep.workbench.references.experts import hearing, in_order
from lockstep.workbench.references.indexer import indexing
from lockstep.workbench.references.mamba import scanning
from lockstep.workbench.references.multipliers import tap_multiplied
from lockstep.workbench.references.recurrence import following
from lockstep.workbench.references.scaled_queries import rotating
from lockstep.workbench.references.short_convolution import convolving

#: Taps with no counterpart, and why.
ABSENT = {
    "attn.o_proj.partial": "one rank has no partial sums: its o_proj is whole",
    "attn.out_proj.partial": "one rank has no partial sums: its out_proj is whole",
    "mlp.down.partial": "one rank has no partial sums: its down_proj is whole",
    "mlp.combine.partial": "one rank has no partial sums: its experts are whole",
}

#: Operations that no module gives: they are what goes into the next one.
_BEFORE = ("residual", "activation", "cache", "gate", "rope", "times")

#: Families whose norms of heads are given [heads, T, D] by transformers, not [T, heads, D].
_HEADS_FIRST: Collection[Family] = (
    "gemma3_text",
    "exaone4",
    "exaone_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "apertus",
    "phi",
)

See = Callable[[str, Seen], None]
Shaped = Callable[[Tensor], Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def golden_taps(model: Any) -> tuple[TapSpec, ...]:
    """The taps of DESIGN §2 for this model at tp = 1, in execution order."""
    return model_taps(model_config(model), 1)


def model_config(model: Any) -> ModelConfig:
    """What the transformers model is. ConfigError for what the engine would compute differently."""
    return ModelConfig.from_hf(model.config.to_dict() | {"dtype": "float32"})  # its own may be float64


def absent_taps(model: Any) -> dict[str, str]:
    """Tap -> why the reference has no such tensor."""
    return {
        spec.name: ABSENT[name] for spec in golden_taps(model) if (name := local_name(spec.name)) in ABSENT
    }


@contextmanager
def tapped(model: Any, see: See) -> Iterator[None]:
    """Within the block every forward pass of `model` (batch of one) calls `see(tap, tensor)`, batch axis dropped.

    The tensor is the model's own: copy it before the pass goes on.
    """
    decoder = model.model
    with ExitStack() as stack:

        def after(module: nn.Module, tap: str, shaped: Shaped = _same) -> None:
            def hook(_module: nn.Module, _args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
                see(tap, shaped(_unbatched(output if isinstance(output, Tensor) else output[0])))

            stack.callback(module.register_forward_hook(hook).remove)

        def before(module: nn.Module, tap: str, shaped: Shaped = _same) -> None:
            def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
                see(tap, shaped(_unbatched(args[0])))

            stack.callback(module.register_forward_pre_hook(hook).remove)

        before(decoder.layers[0], "embed")
        after(model.get_submodule(final_norm_of(model_config(model))), "final_norm")
        if hasattr(
            decoder, "_maybe_slice_kv_shared_inputs"
        ):  # layers that share keys and values run all tokens
            decoder._maybe_slice_kv_shared_inputs = lambda *inputs, **_: inputs[:4]
            stack.callback(delattr, decoder, "_maybe_slice_kv_shared_inputs")
        if model_config(model).layer_inputs is not None:
            _tap_layer_inputs(decoder, see, after, stack)
        for i, layer in enumerate(decoder.layers):
            own = model_config(model).of_layer(i)
            _tap_layer(layer, f"layers.{i}", own, after, before)
            if own.clip_qkv is not None:
                clamped = partial(torch.clamp, min=-own.clip_qkv, max=own.clip_qkv)
                for one in "qkv":  # what the products give is clamped in place
                    after(
                        layer.get_submodule(f"self_attn.{one}_proj"), f"layers.{i}.attn.{one}_clip", clamped
                    )
            if own.multipliers is not None:
                tap_multiplied(layer, partial(_see_within, see, i), stack)
            if own.parallel:
                _tap_sum(layer, f"layers.{i}.attn_residual", own, see, stack)
            if own.experts is not None:
                names = ("mlp", "block_sparse_moe", "feed_forward", "mixer")
                mixture = next(getattr(layer, name) for name in names if hasattr(layer, name))
                if not own.pre_norms and not own.experts.beside_mlp:
                    before(mixture, f"layers.{i}.attn_residual")
                if own.experts.beside_mlp:
                    _tap_experts_beside(layer, f"layers.{i}.mlp", see, stack)
                elif own.experts.weighed_inputs:
                    llama4.tap_experts(mixture, partial(_see_within, see, i), stack)
                else:
                    _tap_experts(mixture, getattr(layer, "shared_mlp", None), f"layers.{i}.mlp", see, stack)
            if own.indexer is not None and own.indexer.source is None:
                see_own = partial(_see_within, see, i)
                stack.enter_context(indexing(layer.self_attn.indexer, own.indexer, see_own))
            if own.family == "llama4_text":
                llama4.tap_attention(layer.self_attn, own, partial(_see_within, see, i), stack)

        def on_attention(layer: int, seen: Mapping[str, Seen]) -> None:
            for name, tensor in seen.items():
                see(f"layers.{layer}.attn.{name}", tensor)

        def on_logits(_module: nn.Module, _args: Any, output: Any) -> None:
            see("logits", output.logits[0])

        stack.callback(model.register_forward_hook(on_logits).remove)
        attention = _blocks(decoder, "self_attn", "full_attention")
        stack.enter_context(listening(attention, on_attention))
        stack.enter_context(rotating(attention, lambda i, x: see(f"layers.{i}.attn.q_rope", x)))
        linear = [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]
        stack.enter_context(following(linear, on_attention))
        convolutions = [layer.conv for layer in decoder.layers if hasattr(layer, "conv")]
        stack.enter_context(convolving(convolutions, on_attention))
        stack.enter_context(scanning(_blocks(decoder, "mamba", "linear_attention"), on_attention))
        yield


def _blocks(decoder: Any, name: str, kind: str) -> list[Any]:
    """The layers' modules of that name; of layers that have one block alone those of that kind."""
    found = [getattr(layer, name, None) for layer in decoder.layers]
    found += [layer.mixer for layer in decoder.layers if hasattr(layer, "mixer") and layer.block_type == kind]
    return [one for one in found if one is not None]


def _see_within(see: See, layer: int, tap: str, x: Tensor) -> None:
    see(f"layers.{layer}.{tap}", x)


def _tap_layer(
    layer: Any,
    name: str,
    model: ModelConfig,
    after: Callable[[nn.Module, str, Shaped], None],
    before: Callable[[nn.Module, str, Shaped], None],
) -> None:
    seen, stacked = set[str](), stored_in(model)
    for operation in operations_of(model):
        if operation.part == "experts" or operation.tap.endswith(".partial") or not operation.module:
            continue
        if operation.kind == "conv":
            continue
        place = stacked.get(f"model.layers.0.{operation.module}.weight")
        module = layer.get_submodule(operation.module if place is None else _within_layer(place.tensor))
        after(
            module,
            f"{name}.{operation.tap}",
            _shaped(operation, model, place),
        )
        for read in _multiplied(operation, model):
            if read in LAYER and LAYER[read].kind in _BEFORE and read not in seen:
                by_heads = LAYER[read].form in ("cache", "heads")
                before(module, f"{name}.{read}", _by_position if by_heads else _same)
                seen.add(read)
    after(layer, f"{name}.{LAYER_OUTPUT}", _same)


def _tap_layer_inputs(
    decoder: Any, see: See, after: Callable[[nn.Module, str, Shaped], None], stack: ExitStack
) -> None:
    """Per-layer inputs: the modules that make them, their sum, and what each layer is given of it."""
    after(decoder.embed_tokens_per_layer, "layer_inputs.embed", _same)
    after(decoder.per_layer_model_projection, "layer_inputs.proj", _same)
    summed = decoder.project_per_layer_inputs

    def project(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = summed(*args, **kwargs)
        see("layer_inputs", out[0].flatten(1))  # [T, layers, width]
        return out

    decoder.project_per_layer_inputs = project
    stack.callback(delattr, decoder, "project_per_layer_inputs")
    for i, layer in enumerate(decoder.layers):

        def given(_module: nn.Module, args: tuple[Tensor, ...], i: int = i) -> None:
            see(f"layers.{i}.layer_input", args[1][0])

        stack.callback(layer.register_forward_pre_hook(given).remove)


def _tap_sum(layer: Any, tap: str, model: ModelConfig, see: See, stack: ExitStack) -> None:
    """The stream with attention's term, where the MLP's is added in the same line of the layer."""
    stream: list[Tensor] = []

    def on_stream(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        stream[:] = args[:1]

    def on_attention(_module: nn.Module, _args: Any, output: Tensor) -> None:
        see(tap, _unbatched(stream.pop() + output))

    stack.callback(layer.register_forward_pre_hook(on_stream).remove)
    product = operation_of(model, "attn.o_proj")
    assert product is not None
    stack.callback(layer.get_submodule(product.module).register_forward_hook(on_attention).remove)


def _tap_experts(mlp: Any, beside: Any, name: str, see: See, stack: ExitStack) -> None:
    """The module that has experts in place of an MLP, and that of a shared one, which runs after it, where the layer
    adds both."""
    sums: list[Tensor] = []

    def on_router(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, weights, ids = output
        see(f"{name}.router", logits)
        _see_choice(see, name, ids, weights)

    def on_sum(_module: nn.Module, _args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        summed = output if isinstance(output, Tensor) else output[0]
        if beside is None:
            see(f"{name}.combine", _unbatched(summed))
        else:
            sums[:] = [summed]

    def on_shared(_module: nn.Module, _args: Any, output: Tensor) -> None:
        see(f"{name}.combine", _unbatched(sums.pop() + output))

    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    stack.callback(router.register_forward_hook(on_router).remove)
    stack.enter_context(hearing(mlp.experts, partial(_see_experts, see, name)))
    stack.callback(mlp.register_forward_hook(on_sum).remove)
    if beside is not None:
        stack.callback(beside.register_forward_hook(on_shared).remove)


def _tap_experts_beside(layer: Any, name: str, see: See, stack: ExitStack) -> None:
    """Experts that stand beside the MLP, whose router gives probabilities, and norms what it reads itself."""

    def on_logits(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        see(f"{name}.router_input", args[0])
        see(f"{name}.router", output)

    def on_router(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, weights, ids = output
        _see_choice(see, name, ids, weights)

    def on_sum(_module: nn.Module, _args: Any, output: Tensor) -> None:
        see(f"{name}.combine", output)

    stack.callback(layer.router.proj.register_forward_hook(on_logits).remove)
    stack.callback(layer.router.register_forward_hook(on_router).remove)
    stack.enter_context(hearing(layer.experts, partial(_see_experts, see, name)))
    stack.callback(layer.experts.register_forward_hook(on_sum).remove)


def _see_choice(see: See, name: str, ids: Tensor, weights: Tensor) -> None:
    for tap, tensor in zip(("topk_ids", "topk_weights"), in_order(ids, weights), strict=True):
        see(f"{name}.{tap}", tensor)


def _see_experts(see: See, name: str, seen: Mapping[str, Tensor]) -> None:
    for tap, tensor in seen.items():
        see(f"{name}.experts.{tap}", tensor)


def _unbatched(x: Tensor) -> Tensor:
    """Without the batch axis: of rows that have been flattened, [T, …], as they are."""
    return x if x.ndim == 2 else x[0]


def _by_position(x: Tensor) -> Tensor:
    """What is cached or rotated, [heads, K, D], as [K, heads, D]."""
    return x.transpose(0, 1)


def _within_layer(parameter: str) -> str:
    """The module of a parameter of layer 0, by its name within the layer."""
    return parameter.removeprefix("model.layers.0.").removesuffix(".weight")


def _shaped(operation: Operation, model: ModelConfig, place: Place | None) -> Shaped:
    """From what the module of an operation gives to the tap's tensor; `place`: its part of a stack."""
    if place is not None:
        return lambda x: place.of(x.mT).mT
    if operation.form == "cached_rows":
        return lambda x: x[0]  # it makes keys and values of one head, [1, K, …]
    if operation.kind == "gated_norm":
        return lambda x: x.reshape(-1, size_of(operation.width, model))  # it norms [T * heads, D]
    if operation.form == "heads" and model.family in _HEADS_FIRST:
        return lambda x: x.transpose(0, 1)
    if operation.form == "heads":
        return lambda x: x.reshape(len(x), -1, model.head_dim)
    return _same


def _multiplied(operation: Operation, model: ModelConfig) -> Collection[str]:
    """What the module of an operation reads: of a sum over ranks, what its terms do."""
    term = operation_of(model, operation.inputs.get("partial", ""))
    return (operation if term is None else term).inputs.values()
