"""Falcon-H1's multipliers in transformers: what goes into its blocks, and what their modules give, times its numbers.

What is multiplied within a line of the modelling code is made again here, by the numbers that the model's modules hold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lockstep.engine.graph.mamba import PROJECTED

See = Callable[[str, Tensor], None]


def tap_multiplied(layer: Any, see: See, stack: ExitStack) -> None:
    """Every multiplier of a decoder layer; `see` is given the name within the layer and the tensor."""
    mixer, attention, mlp = layer.mamba, layer.self_attn, layer.feed_forward

    def into(module: nn.Module, tap: str) -> None:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            see(tap, args[0][0])

        stack.callback(module.register_forward_pre_hook(hook).remove)

    def behind(module: nn.Module, see_output: Callable[[Tensor], None]) -> None:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            see_output(output[0])

        stack.callback(module.register_forward_hook(hook).remove)

    def parts(projected: Tensor) -> None:
        groups = mixer.n_groups * mixer.ssm_state_size
        sizes = [mixer.intermediate_size] * 2 + [groups] * 2 + [mixer.num_heads]
        for tap, part in zip(PROJECTED, (projected * mixer.mup_vector[0]).split(sizes, -1), strict=True):
            see(f"{tap}_scaled", part)

    states: list[Tensor] = []

    def of_states(output: Tensor) -> None:
        states[:] = [output * layer.ssm_out_multiplier]
        see("attn.out_scaled", states[0])

    def of_attention(output: Tensor) -> None:
        attended = output * layer.attn_out_multiplier
        see("attn.o_scaled", attended)
        see("attn.mixed", states.pop() + attended)

    into(attention.q_proj, "attn.in_scaled")
    into(mixer.in_proj, "attn.ssm_in_scaled")
    behind(mixer.in_proj, parts)
    behind(mixer.out_proj, of_states)
    behind(attention.k_proj, lambda x: see("attn.k_scaled", x * attention.key_multiplier))
    behind(attention.o_proj, of_attention)
    behind(mlp.gate_proj, lambda x: see("mlp.gate_scaled", x * mlp.gate_multiplier))
    behind(mlp, lambda x: see("mlp.down_scaled", x))
