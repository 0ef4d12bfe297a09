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

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep.engine.graph import Part
from lockstep.engine.taps.names import TapSpec, tap_specs
from lockstep.workbench.references.attention import listening

#: Taps with no counterpart, and why.
ABSENT = {
    "attn.o_proj.partial": "one rank has no partial sums: its o_proj is whole",
    "mlp.down.partial": "one rank has no partial sums: its down_proj is whole",
}

See = Callable[[str, Tensor], None]


def golden_taps(model: Any) -> tuple[TapSpec, ...]:
    """The taps of DESIGN §2 for this model at tp = 1, in execution order."""
    config = model.config
    parts: tuple[Part, ...] = ("qk_norm",) if hasattr(model.model.layers[0].self_attn, "q_norm") else ()
    return tap_specs(config.num_hidden_layers, parts)


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

        after(decoder.embed_tokens, "embed")
        after(decoder.norm, "final_norm")
        after(model.lm_head, "logits")
        for i, layer in enumerate(decoder.layers):
            _tap_layer(layer, f"layers.{i}", after, before)

        def on_attention(layer: int, seen: dict[str, Tensor]) -> None:
            for name, tensor in seen.items():
                see(f"layers.{layer}.attn.{name}", tensor)

        stack.enter_context(listening([layer.self_attn for layer in decoder.layers], on_attention))
        yield


def _tap_layer(
    layer: Any,
    name: str,
    after: Callable[[nn.Module, str], None],
    before: Callable[[nn.Module, str], None],
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    after(layer.input_layernorm, f"{name}.attn_norm")
    for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"):
        if hasattr(attention, part):
            after(getattr(attention, part), f"{name}.attn.{part}")
    before(layer.post_attention_layernorm, f"{name}.attn_residual")
    after(layer.post_attention_layernorm, f"{name}.mlp_norm")
    after(mlp.gate_proj, f"{name}.mlp.gate")
    after(mlp.up_proj, f"{name}.mlp.up")
    before(mlp.down_proj, f"{name}.mlp.act")
    after(mlp.down_proj, f"{name}.mlp.down")
    after(layer, f"{name}.mlp_residual")
