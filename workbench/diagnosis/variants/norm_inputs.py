"""What a norm read instead of its input: another tap of the residual stream, or of the layer."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.workbench.diagnosis.operations.expected import normalised
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array
from lockstep.workbench.diagnosis.variants.fits import Mask, apart
from lockstep.workbench.diagnosis.variants.variant import Variant


def input_variants(site: Site, weight: Array, eps: float, wrong: Mask) -> Iterator[Variant]:
    """The right norm of another tap."""
    for tap, (name, text) in other_inputs(site).items():
        found = site.rows_of(tap)
        if found is None or found.size != site.expected.size:
            continue
        x = found.reshape(site.expected.shape)
        predicted = normalised(x, eps) * weight
        if apart(site.seen[wrong], predicted[wrong]) < 0.3:
            kind = "residual" if name.startswith(("layer", "residual")) else "norm"
            yield Variant(name, kind, text, {"input": tap}, predicted)


def other_inputs(site: Site) -> dict[str, tuple[str, str]]:
    """What a norm may have read instead of its input: tap -> name of the cause, sentence."""
    layers, layer, near = site.facts.model.num_layers, site.layer, site.near
    if site.kind in ("attn.q_norm", "attn.k_norm"):
        own = site.kind.replace("_norm", "_proj")
        others = [kind for kind in ("attn.q_proj", "attn.k_proj", "attn.v_proj") if kind != own]
        return {near(kind): ("norm_input", f"{kind} is normalised instead of {own}") for kind in others}
    found: dict[str, tuple[str, str]] = {}
    if site.kind == "mlp_norm":
        text = "the residual stream is normalised before the attention's output is added"
        found[near("<")] = "norm_before_residual", text
        text = "the attention's output is normalised without the residual stream"
        found[near("attn.o_proj")] = "residual_missing", text
        found[near("attn_norm")] = "norm_input", "the output of the attention's norm is normalised again"
    else:
        above = layers if layer is None else layer
        if above:
            text = f"the residual stream is normalised before the output of layer {above - 1}'s MLP is added"
            found[f"layers.{above - 1}.attn_residual"] = "norm_before_residual", text
            text = f"the output of layer {above - 1}'s MLP is normalised without the residual stream"
            found[f"layers.{above - 1}.mlp.down"] = "residual_missing", text
        for first in range(above - 1, -1, -1):
            which = f"layer {first} is" if first == above - 1 else f"layers {first} to {above - 1} are"
            text = f"{which} skipped: what enters layer {first} goes on"
            found[f"layers.{first - 1}.mlp_residual" if first else "embed"] = "layer_skipped", text
    for other in range(layers):
        text = f"the output of layer {other} is normalised: not what enters here"
        found.setdefault(f"layers.{other}.mlp_residual", ("layer_input", text))
    return {tap: told for tap, told in found.items() if tap not in _inputs_of(site)}


def _inputs_of(site: Site) -> tuple[str, ...]:
    return (site.near("attn_residual"),) if site.kind == "mlp_norm" else (site.near("<"),)
