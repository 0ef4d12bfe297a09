"""Whole layers that engines skip, repeat or run out of order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.fits import apart, wrong_rows
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.layers import layer_noise, layer_output, normalise
from lockstep.workbench.diagnosis.operations.site import Site

#: Layers that are tried in place of others.
_MOST = 8


def skipped(site: Site) -> Iterator[Variant]:
    """Layers that left nothing in the recording never ran: what entered them goes on. `span` are the layers."""
    assert site.span is not None, "a site of layers names them"
    first, last, x = site.span.start, site.span.stop - 1, site.inputs["x"]
    predicted = normalise(site.facts, site.weights["weight"], x) if site.weights else x
    if predicted is not None:
        which = f"layer {first} is" if first == last else f"layers {first} to {last} are"
        text = f"{which} skipped: what enters layer {first} goes on unchanged"
        yield Variant("layer_skipped", "residual", text, {"layers": [first, last]}, predicted)


def repeated(site: Site) -> Iterator[Variant]:
    """A layer that is run between the input of a layer's first norm and that norm: once more, or out of order."""
    if site.kind not in ("attn_norm", "final_norm"):
        return
    wrong, layers = wrong_rows(site), site.facts.model.num_layers
    at = layers if site.layer is None else site.layer
    for layer in sorted(range(layers), key=lambda i: abs(i - at + 0.5))[:_MOST]:
        with np.errstate(all="ignore"):
            after = layer_output(site.facts, layer, site.inputs["x"], site.rows)
            predicted = (
                None if after is None else normalise(site.facts, site.weights.get("weight", ""), after)
            )
        if predicted is None:
            return
        if apart(site.seen[wrong], predicted[wrong]) < 0.1:
            again = layer in (at, at - 1)
            text = (
                f"layer {layer} is run twice"
                if again
                else f"layer {layer} is run once more before layer {at}"
            )
            noise = layer_noise(site.facts, predicted)
            yield Variant("layer_repeated", "residual", text, {"layer": layer}, predicted, noise=noise)
