"""Hypotheses about norms without weight, of values and of routers, and about inputs of each layer's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lockstep.engine.graph.formula import Node, evaluate, numbers_of, substitute
from lockstep.workbench.diagnosis.hypotheses.operands import formula_at
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.expected import heads_of, normalised
from lockstep.workbench.diagnosis.operations.shares import weight_names
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def value_norms(site: Site) -> Iterator[Variant]:
    """What values may be instead of each head over its root mean square."""
    if site.kind != "attn.v_norm":
        return
    model, layer = site.facts.model, site.layer
    x = heads_of(site.inputs["x"], model.head_dim)
    right = site.expected
    yield _norm("value_norm_missing", "values are not normalised: the norm of v is left out", x)
    if (weight := site.facts.vector(f"model.layers.{layer}.self_attn.k_norm.weight")) is not None:
        text = "values go through the norm of keys: they are multiplied by its weight, theirs has none"
        yield _norm("value_norm_of_keys", text, right * weight)
    text = "values are divided by their length, not by their root mean square"
    yield _norm("value_norm_length", text, right / np.sqrt(model.head_dim))
    whole = normalised(x.reshape(len(x), -1), model.rms_eps).reshape(x.shape)
    yield _norm("value_norm_whole", "values are normalised over all heads at once, not head by head", whole)
    for kind, text in {
        "attn.k_norm": "values are the normalised keys",
        "attn.k_rope": "values are the rotated keys: they are taken after the norm and the rotation",
    }.items():
        keys = site.rows_of(site.near(kind))
        if keys is not None and keys.size == right.size:
            yield _norm("value_norm_input", text, keys.reshape(right.shape))


def router_norms(site: Site) -> Iterator[Variant]:
    """What a router that stands beside an MLP may read instead of the stream over its root mean square."""
    if site.kind != "mlp.router_norm":
        return
    text = "the router reads the stream as it is: its own norm is left out"
    yield _norm("router_norm_missing", text, site.inputs["x"])
    name = weight_names(site.near("mlp_norm"), "norm", site.facts)["weight"]
    if (weight := site.facts.vector(name)) is not None:
        text = "the router reads through the MLP's norm: it is multiplied by its weight, its own has none"
        yield _norm("router_norm_of_mlp", text, site.expected * weight)
    text = "the router's input is divided by its length, not by its root mean square"
    yield _norm("router_norm_length", text, site.expected / np.sqrt(site.expected.shape[-1]))


def router_inputs(site: Site) -> Iterator[Variant]:
    """What may be lacking of the factors of such a router's input."""
    x, factor = site.inputs["x"], site.facts.model.hidden_size**-0.5
    text = "channels of the router's input are not multiplied by its scale"
    yield Variant("router_scale_missing", "channel_scale", text, {}, x * factor)
    text = "the router's input is neither multiplied by its scale nor divided by the root of the width"
    yield Variant("router_input_unscaled", "channel_scale", text, {}, x)
    text = "the router's input is not divided by the root of the width"
    yield Variant("router_factor_missing", "channel_scale", text, {}, site.expected / factor)


def _norm(name: str, text: str, predicted: Array) -> Variant:
    return Variant(name, "norm", text, {}, predicted)


def layer_parts(site: Site) -> Iterator[Variant]:
    """Which part of all layers' inputs a layer may read instead of its own."""
    inputs, whole = site.facts.model.layer_inputs, site.inputs["x"]
    if inputs is None:
        return
    parts = whole.reshape(len(whole), inputs.layers, inputs.width)
    for layer in range(inputs.layers):
        if layer != inputs.layer:
            text = f"the layer reads the per-layer input of layer {layer}"
            yield Variant("layer_input_of_layer", "input", text, {"layer": layer}, parts[:, layer])
    turned = whole.reshape(len(whole), inputs.width, inputs.layers)[:, :, inputs.layer or 0]
    text = "the channels of all layers' inputs are taken in turn, as if they lay [width, layers]"
    yield Variant("layer_input_in_turn", "input", text, {}, turned)
    for name, source in (("embed", "the embedding alone"), ("proj", "the product alone")):
        found = site.rows_of(f"layer_inputs.{name}")
        if found is not None and found.shape == whole.shape:
            own = found.reshape(parts.shape)[:, inputs.layer or 0]
            yield Variant("layer_input_of_part", "input", f"the layer reads {source}", {}, own)


#: What is put in place of a leaf, or of the whole: name, text.
_SUMS: tuple[tuple[str, str, dict[str, float]], ...] = (
    (
        "layer_inputs_unscaled",
        "the sum of embedding and product is not divided by the root of 2",
        {"input_factor": 1.0},
    ),
    (
        "layer_inputs_product_alone",
        "per-layer inputs lack their embedding: the product alone",
        {"embedded": 0.0},
    ),
    ("layer_inputs_embedding_alone", "per-layer inputs lack the product of the embedding", {"weight": 0.0}),
    (
        "layer_inputs_norm_without_weight",
        "the norm of the product is not multiplied by its weight",
        {"weight": 1.0},
    ),
)


def layer_sums(site: Site) -> Iterator[Variant]:
    """What all layers' inputs may be the sum of."""
    weight = site.facts.vector(site.weights["weight"])
    if weight is None:
        return
    given: Mapping[str, Any] = {**numbers_of(site.facts.model), **site.inputs, "weight": weight}
    formula = formula_at(site)
    for name, text, other in _SUMS:
        found = np.broadcast_to(evaluate(formula, {**given, **other}), site.expected.shape)
        yield Variant(name, "input", text, {}, np.asarray(found))
    with_one = evaluate(substitute(formula, {"weight": Node("1 + w")}), {**given, "1 + w": 1 + weight})
    text = "the norm of the product is multiplied by 1 + its weight"
    yield Variant("layer_inputs_norm_plus_one", "norm", text, {}, with_one)
    whole = normalised(site.inputs["x"] * given["projection_scale"], site.facts.model.rms_eps)
    layers = whole.reshape(len(whole), -1, len(weight)) * weight
    found = (layers.reshape(whole.shape) + site.inputs["embedded"]) * given["input_factor"]
    yield Variant(
        "layer_inputs_norm_whole", "norm", "the product is normalised over all layers at once", {}, found
    )
    scaled = site.inputs["x"] * given["projection_scale"]
    text = "the product is not normalised"
    found = (scaled + site.inputs["embedded"]) * given["input_factor"]
    yield Variant("layer_inputs_norm_missing", "norm", text, {}, found)
