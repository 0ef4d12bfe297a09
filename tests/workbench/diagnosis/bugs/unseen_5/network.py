"""Layers and the MLP: what is skipped, what is read, how it is activated."""

from __future__ import annotations

import torch

from tests.workbench.diagnosis.bugs.bug import bug
from tests.workbench.diagnosis.bugs.patched import Patched


def _act(p, change, which=None):
    """`change(act, gate, up)` in place of the activation."""
    for _, layer in p.layers(which):

        def forward(x, mlp=layer.mlp):
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
            return mlp.down_proj(change(mlp.act_fn(gate) * up, gate, up))

        layer.mlp.forward = forward


@bug(
    "residual",
    accepted=("residual", "layer", "layers", "skipped"),
    words="skip|layer|residual|not added|missing",
    taps=("mlp_residual",),
    layers=(3,),
    step=1,
    model="qwen2-deep",
    dtype="bfloat16",
)
def layer_skipped_for_a_draft_is_skipped_in_decode(p: Patched) -> None:
    """It runs, and fills its cache, but what it adds is dropped."""

    def around(forward, x, **kwargs):
        out = forward(x, **kwargs)
        return x.clone() if p.decode else out

    p.wrap(p.decoder.layers[3], around)


@bug(
    "mlp",
    accepted=("activation",),
    words="activat|zero|threshold|small|act",
    taps=("mlp.act",),
    step=1,
    model="qwen2-untied",
    tp=2,
)
def small_activations_dropped_by_a_threshold_in_decode(p: Patched) -> None:
    """A sparse kernel that was tuned for another model."""
    _act(p, lambda act, gate, up: act.where(gate.abs() > 0.4, 0) if p.decode else act)


@bug(
    "mlp",
    accepted=("activation",),
    words="activat|unit|channel|column|repeat|act",
    taps=("mlp.act",),
    model="qwen3",
)
def units_behind_the_64th_take_those_of_the_first(p: Patched) -> None:
    """The kernel's index is taken modulo its block of 64."""
    _act(p, lambda act, gate, up: torch.cat([act[..., :64], act[..., :32]], -1))


@bug(
    "linear",
    accepted=("input",),
    words="input|context|layer|stale|reads",
    taps=("attn.o_proj",),
    layers=(1,),
    step=1,
    model="llama",
)
def o_reads_the_context_of_the_layer_below_in_decode(p: Patched) -> None:
    """One buffer for the contexts of all layers, and in one layer nobody waits for the kernel that fills it."""
    held = {}
    p.input(p.attn(0).o_proj, lambda x: held.update(x=x) or x)
    p.input(p.attn(1).o_proj, lambda x: held["x"] if p.decode else x)


@bug(
    "mlp",
    accepted=("activation", "input", "overflow"),
    words="activat|token|row|wrap|index|act|offset",
    taps=("mlp.act",),
    model="llama-long",
)
def index_of_the_fused_activation_wraps_at_32768(p: Patched) -> None:
    """Gate and up lie side by side in rows of 192: from token 171 on others are read."""

    def change(act, gate, up):
        tokens, width = gate.shape[1:]
        flat = torch.cat([gate, up], -1).flatten()
        at = torch.arange(tokens)[:, None] * 2 * width + torch.arange(width)
        first, second = flat[at % 32768], flat[(at + width) % 32768]
        return (torch.nn.functional.silu(first) * second)[None]

    _act(p, change)
