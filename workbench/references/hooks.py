"""Hooks that give every tap of the design its counterpart in a transformers decoder.

| tap | where in transformers |
| --- | --- |
| `embed`, `logits` | what goes into the first layer, what the model gives |
| `attn_norm` … `k_norm`, `o_proj`, `gate`, `up`, `down`, `final_norm` | outputs of the modules of that name |
| `attn_residual` | what goes into the module that reads it |
| `q_rope` … `context` | the attention interface (`attention.py`) |
| `act` | what goes into `down_proj` |
| `mlp_residual` | the output of the decoder layer |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import (
    LAYER,
    LAYER_OUTPUT,
    MULTIPLIED,
    OUTSIDE,
    Operation,
    operations_of,
)
from lockstep.engine.taps.names import TapSpec, model_taps
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
    layers = range(model.config.num_hidden_layers)
    return {f"layers.{i}.{name}": reason for i in layers for name, reason in ABSENT.items()}


@contextmanager
def tapped(model: Any, see: See) -> Iterator[None]:
    """Within the block every forward pass of `model` (batch of one) calls `see(tap, tensor)`, batch axis dropped.

    The tensor is the model's own: copy it before the pass goes on.
    """
    decoder = model.model
    with ExitStack() as stack:

        def after(module: nn.Module, tap: str, shaped: Shaped = _same) -> None:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                see(tap, shaped(output[0]))

            stack.callback(module.register_forward_hook(hook).remove)

        def before(module: nn.Module, tap: str) -> None:
            def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
                see(tap, args[0][0])

            stack.callback(module.register_forward_pre_hook(hook).remove)

        before(decoder.layers[0], "embed")
        after(model.get_submodule(OUTSIDE["final_norm"].module), "final_norm")
        for i, layer in enumerate(decoder.layers):
            _tap_layer(layer, f"layers.{i}", model_config(model), after, before)

        def on_attention(layer: int, seen: dict[str, Seen]) -> None:
            for name, tensor in seen.items():
                see(f"layers.{layer}.attn.{name}", tensor)

        def on_logits(_module: nn.Module, _args: Any, output: Any) -> None:
            see("logits", output.logits[0])

        stack.callback(model.register_forward_hook(on_logits).remove)
        stack.enter_context(listening([layer.self_attn for layer in decoder.layers], on_attention))
        yield


def _tap_layer(
    layer: Any,
    name: str,
    model: ModelConfig,
    after: Callable[[nn.Module, str, Shaped], None],
    before: Callable[[nn.Module, str], None],
) -> None:
    seen: set[str] = set()
    for operation in operations_of(model):
        if operation.part == "partial" or not operation.module:
            continue
        module = layer.get_submodule(operation.module)
        after(module, f"{name}.{operation.tap}", _shaped(operation, model))
        for read in _multiplied(operation):
            if read in LAYER and LAYER[read].kind in _BEFORE and read not in seen:
                before(module, f"{name}.{read}")
                seen.add(read)
    after(layer, f"{name}.{LAYER_OUTPUT}", _same)


def _shaped(operation: Operation, model: ModelConfig) -> Shaped:
    """From what the module of an operation gives to the tap's tensor."""
    if operation.form == "heads":
        return lambda x: x.reshape(len(x), -1, model.head_dim)
    return _same


def _multiplied(operation: Operation) -> Iterable[str]:
    """What the module of an operation reads: of a sum over ranks, what its terms do."""
    return [MULTIPLIED[operation.tap]] if operation.tap in MULTIPLIED else operation.inputs.values()
