"""Hooks that give every tap of the design its counterpart in a transformers decoder.

| tap | where in transformers |
| --- | --- |
| `embed`, `final_norm`, `logits` | outputs of `embed_tokens`, `norm`, `lm_head` |
| `attn_norm`, `mlp_norm` | outputs of `input_layernorm`, `post_attention_layernorm` |
| `attn_residual` | what goes into `post_attention_layernorm` |
| `q_proj` … `k_norm`, `o_proj`, `gate`, `up`, `down` | outputs of the modules of that name |
| `q_rope` … `context` | the attention interface (`attention.py`) |
| `act` | what goes into `down_proj` |
| `mlp_residual` | the output of the decoder layer |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.engine.graph import (
    LAYER,
    LAYER_OUTPUT,
    MULTIPLIED,
    OUTSIDE,
    STREAM,
    Operation,
    Part,
    layer_operations,
)
from lockstep.engine.taps.names import TapSpec, tap_specs
from lockstep.workbench.references.arrays import Seen
from lockstep.workbench.references.attention import listening

#: Taps with no counterpart, and why.
ABSENT = {
    "attn.o_proj.partial": "one rank has no partial sums: its o_proj is whole",
    "mlp.down.partial": "one rank has no partial sums: its down_proj is whole",
}

#: Operations that no module gives: they are what goes into the next one.
_BEFORE = ("residual", "activation")

See = Callable[[str, Seen], None]


def golden_taps(model: Any) -> tuple[TapSpec, ...]:
    """The taps of DESIGN §2 for this model at tp = 1, in execution order."""
    return tap_specs(model.config.num_hidden_layers, _parts(model))


def _parts(model: Any) -> frozenset[Part]:
    """What the model has of what only some have."""
    names = {name for name, _ in model.model.layers[0].named_modules()}
    return frozenset(one.part for one in LAYER.values() if one.part is not None and one.module in names)


def absent_taps(model: Any) -> dict[str, str]:
    """Tap -> why the reference has no such tensor."""
    layers = range(model.config.num_hidden_layers)
    return {f"layers.{i}.{name}": reason for i in layers for name, reason in ABSENT.items()}


@contextmanager
def tapped(model: Any, see: See) -> Iterator[None]:
    """Within the block every forward pass of `model` (batch of one) calls `see(tap, tensor)`, batch axis dropped.

    The tensor is the model's own: copy it before the pass goes on.
    """
    decoder = model.model
    with ExitStack() as stack:

        def after(module: nn.Module, tap: str) -> None:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                see(tap, output[0])

            stack.callback(module.register_forward_hook(hook).remove)

        def before(module: nn.Module, tap: str) -> None:
            def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
                see(tap, args[0][0])

            stack.callback(module.register_forward_pre_hook(hook).remove)

        for operation in OUTSIDE.values():
            after(model.get_submodule(operation.module), operation.tap)
        for i, layer in enumerate(decoder.layers):
            _tap_layer(layer, f"layers.{i}", _parts(model), after, before)

        def on_attention(layer: int, seen: dict[str, Seen]) -> None:
            for name, tensor in seen.items():
                see(f"layers.{layer}.attn.{name}", tensor)

        stack.enter_context(listening([layer.self_attn for layer in decoder.layers], on_attention))
        yield


def _tap_layer(
    layer: Any,
    name: str,
    parts: Collection[Part],
    after: Callable[[nn.Module, str], None],
    before: Callable[[nn.Module, str], None],
) -> None:
    for operation in layer_operations(parts):
        if operation.part == "partial" or not operation.module:
            continue
        module = layer.get_submodule(operation.module)
        after(module, f"{name}.{operation.tap}")
        for read in _multiplied(operation):
            if read != STREAM and LAYER[read].kind in _BEFORE:
                before(module, f"{name}.{read}")
    after(layer, f"{name}.{LAYER_OUTPUT}")


def _multiplied(operation: Operation) -> Iterable[str]:
    """What the module of an operation reads: of a sum over ranks, what its terms do."""
    return [MULTIPLIED[operation.tap]] if operation.tap in MULTIPLIED else operation.inputs.values()
