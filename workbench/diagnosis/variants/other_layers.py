"""Results that are another layer's: computed once and used again, or read from a buffer that several layers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.blocks import in_place, others
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site

#: Operation -> what it gives in words, and the class of what is wrong with it.
_GIVES: Mapping[str, tuple[str, str]] = {
    "rope": ("rotated heads", "rope"),
    "scores": ("scores", "scores"),
    "softmax": ("probabilities", "softmax"),
    "weights": ("probabilities", "softmax"),
    "context": ("contexts", "context"),
    "attention": ("contexts", "context"),
}


def results_of_other_layers(site: Site) -> Iterator[Variant]:
    """What the same operation gave in another layer, the nearest before this one first."""
    layers, own = site.facts.model.num_layers, site.layer
    if own is None or not all(part.fits for part in site.parts):
        return
    what, kind = _GIVES[site.operation]
    for layer in sorted((i for i in range(layers) if i != own), key=lambda i: (i > own, abs(i - own))):
        found = (
            [site.rows_of(f"layers.{layer}.{site.kind}")]
            if site.operation == "rope"
            else others(site, site.kind, layer)
        )
        if any(
            x is not None and x.shape == part.seen.shape for x, part in zip(found, site.parts, strict=True)
        ):
            text = f"the {what} are those of layer {layer}{', used again' if layer < own else ''}"
            guesses = [None if x is None else np.asarray(x, np.float64) for x in found]
            yield Variant("result_of_layer", kind, text, {"layer": layer}, in_place(site, guesses))
