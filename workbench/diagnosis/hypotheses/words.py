"""What an edit is called: its sentence, its class and its figures, made here and nowhere else, and made last.

A sentence states what ran and what should have: in words where there are plain ones, else by the formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.engine.graph import LAYER_OUTPUT, STREAM
from lockstep.engine.graph.formula import Node, numbers_of
from lockstep.engine.graph.operation import STATES
from lockstep.engine.taps.flow import near
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.hypotheses.edits import Detail, Edit, Place, nodes, together
from lockstep.workbench.diagnosis.hypotheses.fits import named
from lockstep.workbench.diagnosis.hypotheses.formula_text import formula_text
from lockstep.workbench.diagnosis.hypotheses.maps import NOT_WRITTEN
from lockstep.workbench.diagnosis.hypotheses.norm_words import (
    NORM_LEAVES,
    NORM_SENTENCES,
    norm_place,
    norm_sentence,
)
from lockstep.workbench.diagnosis.hypotheses.operands import FIRST_PART, READER, STEP_BEFORE, place_of
from lockstep.workbench.diagnosis.hypotheses.products.words import PRODUCTS
from lockstep.workbench.diagnosis.hypotheses.products.words import sentence_of as of_products
from lockstep.workbench.diagnosis.hypotheses.recurrent_words import (
    RECURRENT_WORDS,
    coarse_words,
    pairing_words,
    shared_slot_words,
    width_words,
)
from lockstep.workbench.diagnosis.hypotheses.routing_words import ROUTING_WORDS
from lockstep.workbench.diagnosis.hypotheses.setting import Setting, Wording
from lockstep.workbench.diagnosis.operations.shares import whose
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.judgements.cause import numbers_in_words

#: Functions that round, and how that is reported.
PRECISIONS = ("bfloat16", "float16", "float32")
#: Operation -> what its leaves are called in formulas, and what they are in a sentence.
_LEAVES: Mapping[str, Mapping[str, str]] = {
    "norm": NORM_LEAVES,
    "residual": {"x": "stream", "y": "branch"},
}
_SENTENCES: Mapping[str, Mapping[str, str]] = {
    "norm": NORM_SENTENCES,
    "residual": {
        "x": "the residual stream",
        "y": "the {branch}'s output",
        "layer_scalar": "the layer's scalar",
    },
    "combine": {
        "x": "what the layer's own experts give",
        "weights": "the layer's own weights",
        "shared": "what the layer's own shared expert gives",
        "gate": "that of the layer's own gate",
    },
    **{
        kind: {
            "before": "the sequence's own state",
            "x": "the convolved x",
            "b": "the convolved B",
            "c": "the convolved C",
            "k": "the normalised keys",
            "q": "the normalised queries",
            "v": "the convolved values",
        }
        for kind in STATES
    },
    "conv": {"before": "the sequence's own last rows"},
}
_RESULTS = {"residual": "the sum", "activation": "the product"}
#: Operation -> plain words for a change at a place, by the kind of the edit and the first of its detail.
_PLAIN: Mapping[str, Mapping[tuple[object, str, object], str]] = {
    "residual": {
        ((), "left_out", 0.0): "the {branch}'s output is not added to the residual stream",
        ((), "repeated", "y"): "the residual stream is added 2 times",
        ((), "repeated", "x"): "the {branch}'s output is added 2 times",
        ((), "left_out", 1.0): "the residual stream is not added to the {branch}'s output",
        ((), "function", "subtract"): "the {branch}'s output is subtracted from the residual stream",
        ((0,), "applied", "negative"): "the residual stream is subtracted from the {branch}'s output",
        ((1,), "left_out", 0.0): "the {branch}'s output is not multiplied by {residual_multiplier:g}",
        ((1, 1), "number", 1.0): "the {branch}'s output is not multiplied by {residual_multiplier:g}",
        ("scaled", "left_out", 0.0): "the layer's output is not multiplied by its scalar",
        ("scaled", "before", "x"): "the layer's scalar multiplies the residual stream, not the sum",
        ("scaled", "before", "y"): "the layer's scalar multiplies the {branch}'s output, not the sum",
        ("scalar", "applied", "squared"): "the layer's output is multiplied by its scalar twice",
    },
    "activation": {
        ("limit", "number", math.inf): "gate and up are not clamped (the limit is {limit:g})",
        ((0, 0), "left_out", 0.0): "gate is not clamped (the limit is {limit:g})",
        ((1, 0), "left_out", 0.0): "up is not clamped (the limit is {limit:g})",
        ((0, 1), "number", 1.0): "the sigmoid is of gate itself: alpha is 1 instead of {slope:g}",
        ((1,), "left_out", 0.0): "1 is not added to up",
    },
}  # fmt: skip
#: Further words of what is done to a value, for any operation.
_DONE: Mapping[str, str] = {
    "centred": "the mean of the row is subtracted from {at}",
    "scaled": "{at} is multiplied by {by}{then}",
    "clamped_above": "{at} is clamped at {a:g} from above",
    "clamped_below": "{at} is clamped at {a:g} from below",
    "clamped_within": "{at} is clamped to ±{a:g}",
    "dropped_below": "{at} is zero where it is below some {a:.2g} in size: small numbers are dropped",
    "rows_before": "{at} is that of another token, the one before",
    "rows_before_of_sequence": "{at} is that of the sequence's token before, of the step before in decode",
    "rows_before_in_turn": "{at} is that of another token, the one before in the pass, of the first the last",
    "rows_after": "{at} is that of another token, the one after",
    "columns_moved": "the columns of {at} are out of order: moved by {a:g}",
    "backwards": "{at} is read backwards",
    "pairs_as_halves": "neighbouring columns of {at} are read as halves",
    "halves_as_pairs": "halves of {at} are read as neighbouring columns",
    "halves_exchanged": "the halves of {at} are exchanged",
    "pairs_exchanged": "neighbouring columns of {at} are exchanged",
    "first_half_twice": "the first half of {at} is read twice",
    "second_half_twice": "the second half of {at} is read twice",
    "overflowing": "{at} overflows in float16",
}
#: Maps of the result, or of a leaf.
_MAPS: Mapping[str, str] = {
    "rows_moved": "each of the wrong rows is that of another token",
    "rows_added": "the row of {at} is added to each of the wrong rows, times {0:g}",
    "clamped": "the result is clamped to [{0:.5g}, {1:.5g}]",
    "largest_kept": "of each token only the {0:g} largest numbers of the result are kept",
    "columns_scaled":
        "each channel is off by a factor of its own, {0:.4g} to {1:.4g}, as by another weight",
    "heads_exchanged": "{0:g} heads have what others should have: head {1:g} that of head {2:g}",
    "heads_scaled": "{0:g} heads are off by a factor: head {1:g} is {2:.5g} times what it should be",
    "channels_ordered":
        "{0:g} channels of each head are in another order: channel {1:g} has what channel {2:g} should have",
    "channels_by_hadamard":
        "each head goes through a Hadamard transform of its channels, which nothing undoes",
    "channels_turned": "the channels of each head go through one orthogonal matrix, a turn of all of them",
    "channels_mixed": "the channels of each head go through one matrix",
    "row_added": "the same vector is added to every row, as by a bias",
    "rows_scaled":
        "each row is off by a factor of its own, {0:.4g} to {1:.4g}, as by another number to divide by",
    "rows_not_kept":
        "the rows of {0:g} tokens are not kept for the convolution: from the wrong tokens on older rows stay in "
        "their place",
    "kept_whole_chunks":
        "the state that is kept is that behind the last whole chunk of {0:g} tokens: those after it are forgotten",
    "kept_through_chunks":
        "what each chunk of {0:g} tokens began with is handed on as it was: it has not decayed by the chunk's tokens",
    "undecayed_chunk":
        "the state behind a chunk of {0:g} tokens that is not whole has not decayed by the tokens of that chunk",
    "decayed_by_padding":
        "the state decays once more for each token by which a sequence is shorter than the longest of its pass: "
        "padding changes it",
    "restarted":
        "what the sequence has is lost within its prompt: tokens go on as if nothing had come before them, as where a "
        "chunk is read without what the one before it has left",
    "leaf_rows_moved": "{at} of another token is added",
    "leaf_rows_scaled": "{at} of each token is multiplied by a number of its own, {0:.4g} to {1:.4g}",
}  # fmt: skip
#: What recorded tensors are called, seen from the layer of an operation; {0} is "" in the same layer.
_TENSORS: Mapping[str, str] = {
    "attn_norm": "the output of the attention's norm{0}",
    "attn.o_proj": "the attention's output{0}",
    "attn_residual": "the stream after the attention{0}",
    "mlp_norm": "the output of the MLP's norm{0}",
    "mlp.gate": "gate{0}",
    "mlp.up": "up{0}",
    "mlp.down": "the MLP's output{0}",
    "mlp.router": "the router's logits{0}",
    "mlp.topk_ids": "the chosen experts{0}",
    "mlp.topk_weights": "the experts' weights{0}",
    "mlp.experts.down": "what the experts give{0}",
    "mlp.shared.down": "what the shared expert gives{0}",
    "mlp.shared_gate": "the logit of the shared expert's gate{0}",
}


def wording(site: Site, edits: Sequence[Edit]) -> Wording:
    """What edits of the operation of a site are called."""
    at = Setting.of(site)
    kinds = [class_of(at, one) for one in edits]
    kind = next((one for one in kinds if one != "precision"), kinds[0])
    if at.replica and edits[0].place == () and edits[0].detail[:1] == ("scaled",):
        kind = "sharding"
    name = f"{site.operation}_{'_and_'.join(dict.fromkeys(map(_id, edits)))}"
    if len(edits) == 1 and (routing := _routing_words(at, edits[0])) is not None:
        name = routing[0]
    return Wording(name, kind, sentence(at, edits), _figures(at, edits))


def sentence(at: Setting, edits: Sequence[Edit]) -> str:
    """All edits of one operation in words."""
    texts = list(dict.fromkeys(_sentence(at, one) for one in edits))
    text = "; ".join(one for one in texts if one)
    if not all(texts):
        right, ran = formula_text(at.formula, _LEAVES.get(at.operation, {})), _formula(at, edits)
        text = f"{text}{': ' * bool(text)}{ran} is computed instead of {right}"
    named = edits[0].detail[:1] in (("single_columns_scaled",), ("columns_of_another",))
    # What is rounded shows where it happens to cross a step.
    rounded = all(class_of(at, one) == "precision" for one in edits)
    if at.channels and not named and not rounded:
        text = f"{text}, at channel{'s' * (len(at.channels) > 1)} {numbers_in_words(at.channels)} alone"
    if at.replica and edits[0].place == () and edits[0].detail[:1] == ("scaled",):
        text = f"{text}{at.replica}"
    return text


def sentence_of(places: Sequence[tuple[Setting, Sequence[Edit]]]) -> str:
    """The same edits at several places: what is another at each is reported as seen from each."""
    (first, edits), *rest = places
    if first.operation in PRODUCTS:
        return of_products(places)
    same = all([one.detail for one in edits] == [one.detail for one in others] for _, others in rest)
    general = replace(
        first,
        kind=first.kind if len({at.kind for at, _ in places}) == 1 else "",
        weight=_of_all([at.weight for at, _ in places]),
        bias=_of_all([at.bias for at, _ in places]),
        channels=first.channels if len({at.channels for at, _ in places}) == 1 else (),
        seen="" if len({at.layer for at, _ in places}) == 1 else "by itself" if same else "from each",
    )
    return sentence(general, edits)


def _of_all(names: Sequence[str]) -> str:
    """What the weights or biases of several norms are called together."""
    different = list(dict.fromkeys(names))
    if len(different) == 1:
        return different[0]
    modules = {local_name(name.removeprefix("model.")) for name in different}
    kind = different[0].rpartition(".")[2]
    return f"model.layers.*.{modules.pop()}" if len(modules) == 1 else f"each norm's {kind}"


def _id(edit: Edit) -> str:
    if edit.kind == "map":
        return str(edit.detail[0])
    return "precision" if _rounds(edit) else edit.kind


def _figures(at: Setting, edits: Sequence[Edit]) -> dict[str, object]:
    """What was fitted, with the formula; of a weight whose it is instead."""
    numbers = [one for edit in edits for one in edit.detail if isinstance(one, float)]
    found: dict[str, object] = {"formula": _formula(at, edits), **({"numbers": numbers} if numbers else {})}
    for edit in edits:
        other = str(edit.detail[0]) if edit.kind == "operand" else ""
        own = {"weight": at.weight, "bias": at.bias}.get(other.rpartition(".")[2])
        if own:
            found |= {"weight": own, "is": other, "of": whose(other, at.layer)[0]}
    return found


def _formula(at: Setting, edits: Sequence[Edit]) -> str:
    """What ran: the right formula where no edit gives it."""
    names = {**_LEAVES.get(at.operation, {}), **_named_leaves(at, edits)}
    maps = any(one.kind == "map" for one in edits)
    return formula_text(at.formula if maps else together(edits, at.formula), names)


def _named_leaves(at: Setting, edits: Sequence[Edit]) -> dict[str, str]:
    """Operands by what they are."""
    read = [one.detail[0] for one in edits if one.kind == "operand"]
    read += [one.detail[1] for one in edits if one.kind == "applied" and one.detail[0] == "plus"]
    return {name: tensor_in_words(at, name) for name in read if isinstance(name, str)}


def _sentence(at: Setting, edit: Edit) -> str:
    """One edit in plain words; "" where the formula shows it best."""
    numbers = [one for one in edit.detail if isinstance(one, float)]
    fields = {
        "weight": at.weight,
        "bias": at.bias,
        **numbers_of(at.model),
        "by": named(numbers[0]) if numbers else "",
        "then": " before it is added to the sum" if at.operation == "residual" and edit.place else "",
        "branch": at.branch,
        "own": at.row[0],
        "row": at.row[1],
        "part": at.row[1] / numbers[0] if edit.detail[:1] == ("mean_of_each_part",) else 0,
        "ranks": at.ranks,
        **dict(zip("abc", numbers, strict=False)),
    }
    first = edit.detail[0] if edit.detail else None
    if edit.kind == "map":
        return _map_in_words(at, str(first), edit.detail[1:], fields)
    trained = (
        at.operation == "activation" and at.model.activation == "xielu"
    )  # whose formula has other places
    if at.operation == "norm":
        plain = norm_sentence(at.formula, edit)
    else:
        plain = None if trained else _PLAIN.get(at.operation, {}).get((_place(at, edit), edit.kind, first))
    if plain is not None:
        return plain.format(**fields)
    if (routing := _routing_words(at, edit)) is not None:
        return routing[1].format(**fields)
    if edit.kind == "operand" and at.operation in STATES and (reported := coarse_words(str(first))):
        return reported
    if edit.kind == "operand" and (shared := shared_slot_words(at.operation, str(first))):
        return shared
    if edit.kind == "operand" and edit.place == "norm_width" and (width := width_words(str(first))):
        return width
    if first == "paired_as":
        return pairing_words(at.model, numbers)
    node = _node_at(at, edit)
    inside = f"{node.name} A_log" if node.args == (Node("A_log"),) else node.name
    recurrent = RECURRENT_WORDS.get((at.operation, inside, edit.kind, first))
    if recurrent is not None:
        return recurrent.format(**fields)
    what = _at(at, edit).format(**fields)
    if edit.kind == "number":
        right = numbers_of(at.model)[_node_at(at, edit).name]
        return f"{what} is {numbers[0]:g} instead of {right:g}"
    if edit.kind == "operand" and edit.place == ():
        return f"{tensor_in_words(at, str(first))} goes on in place of {_RESULTS.get(at.operation, 'the result')}"
    if edit.kind == "operand":
        return f"{tensor_in_words(at, str(first))} is read instead of {what}"
    if _rounds(edit):
        return f"{what} is rounded to {first}" if edit.kind == "applied" else f"{what} is computed in {first}"
    if edit.kind == "inserted" and first == "rope":
        return "the norm is taken of rotated heads: the rotation runs before the norm, not after it"
    if edit.kind == "inserted":
        weight = f" and multiplied by {tensor_in_words(at, str(edit.detail[1]))}" if edit.detail[1] else ""
        return f"{what} is normalised before it is used: divided by its root mean square{weight}"
    if edit.kind == "applied" and first == "plus":
        by = "" if numbers[-1] == 1 else f"{numbers[-1]:g} times "
        return f"{by}{tensor_in_words(at, str(edit.detail[1]))} is added as well"
    if edit.kind == "applied" and first in _DONE:
        return _DONE[str(first)].format(at=what, **fields)
    return ""


def _place(at: Setting, edit: Edit) -> Place:
    """The place in the usual formula: a residual sum may be multiplied as a whole."""
    if at.operation != "residual" or at.formula.name != "multiply" or isinstance(edit.place, str):
        return edit.place
    return edit.place[1:] if edit.place[:1] == (0,) else "scalar" if edit.place else "scaled"


def _routing_words(at: Setting, edit: Edit) -> tuple[str, str] | None:
    """The name of an edit of routing, and its sentence."""
    if edit.kind == "map":
        return None
    first, node = edit.detail[0] if edit.detail else None, _node_at(at, edit)
    places = (node.name, formula_text(node))
    found = (ROUTING_WORDS.get((at.operation, place, edit.kind, first)) for place in places)
    return next((one for one in found if one is not None), None)


def _map_in_words(at: Setting, name: str, detail: Detail, fields: Mapping[str, object]) -> str:
    what = ""
    if detail and isinstance(detail[0], str):
        what = _SENTENCES.get(at.operation, {}).get(detail[0], detail[0]).format(**fields)
    numbers = [one for one in detail if isinstance(one, float)]
    if name == "rows_moved" and numbers:
        by = f"{abs(numbers[0]):g} {'before' if numbers[0] < 0 else 'after'} it"
        return f"each of the wrong rows is that of another token, the token {by}"
    if name == "single_columns_scaled":
        reported = [f"{column:g} is {by:.5g} times what it should be" for column, by in _pairs(numbers)[:4]]
        more = f", {len(numbers) // 2 - 4} more" if len(numbers) > 8 else ""
        of = f", as with another {fields['weight']}" if fields["weight"] else ""
        return f"single channels differ: {', '.join(reported)}{more}{of}"
    if name == "columns_of_another":
        return NOT_WRITTEN.format(tensor_in_words(at, str(detail[0])), *numbers)
    if name == "columns_paired":
        column, other, many, *moved = numbers
        how = f", {moved[0]:g} after it" if moved else ""
        return f"the columns of {what} are out of order{how}: column {column:g} gets column {other:g}, {many:g} differ"
    return _MAPS[name].format(*numbers, at=what)


def _pairs(numbers: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _at(at: Setting, edit: Edit) -> str:
    """The place of an edit: a leaf by what it is, else its formula."""
    place = edit.place
    if at.operation == "norm" and (found := norm_place(at.formula, edit)) is not None:
        return found
    node = _node_at(at, edit)
    if not node.args:
        return _SENTENCES.get(at.operation, {}).get(node.name, node.name)
    return "the result" if place == () else formula_text(node, _LEAVES.get(at.operation, {}))


def _node_at(at: Setting, edit: Edit) -> Node:
    if isinstance(edit.place, str):
        return next((node for _, node in nodes(at.formula) if node.name == edit.place), Node(edit.place))
    return dict(nodes(at.formula))[edit.place]


def tensor_in_words(place: Setting, name: str) -> str:
    """An operand: a tap, perhaps of another rank, or a weight of the checkpoint."""
    if name.endswith((".weight", ".bias", ".layer_scalar")):
        of, tensor = whose(name, None if place.seen == "by itself" else place.layer)
        return f"{tensor} of {of}"
    if name.endswith(STEP_BEFORE):
        return f"{tensor_in_words(place, name.removesuffix(STEP_BEFORE))}{STEP_BEFORE}"
    if name == FIRST_PART:
        return FIRST_PART
    if name == READER:
        return "the output of the norm that reads the sum"
    tap, rank = place_of(name)
    layer, at = layer_of(tap), f" of rank {rank}" if rank is not None else ""
    own = place.layers if place.layer is None else place.layer
    if (
        place.seen == "from each"
        and (-1 if layer is None else layer) == own - 1
        and (tap == "embed" or local_name(tap) == LAYER_OUTPUT)
    ):
        return "the stream that enters the layer"
    if tap == "embed":
        return "the embedding"
    if local_name(tap) == LAYER_OUTPUT:
        entering = layer == own - 1 and not place.seen
        return f"the stream that enters layer {own}" if entering else f"the output of layer {layer}"
    return _TENSORS.get(local_name(tap), f"{local_name(tap)}{{0}}").format(_of_layer(place, layer)) + at


def _of_layer(place: Setting, layer: int | None) -> str:
    """Whose a tensor is; "" of the operation's own layer."""
    if layer is None or (layer == place.layer and place.seen != "by itself"):
        return ""
    if place.seen == "from each" and place.layer is not None:
        by = layer - place.layer
        return {-1: " of the layer before", 1: " of the next layer"}.get(
            by, f" of {abs(by)} layers {'before' if by < 0 else 'on'}"
        )
    return f" of layer {layer}"


def _rounds(edit: Edit) -> bool:
    return edit.kind in ("applied", "throughout") and edit.detail[0] in PRECISIONS


def class_of(at: Setting, edit: Edit) -> str:
    """The class of bug: the operation's own, but for precision, loading and the stream."""
    first = str(edit.detail[0]) if edit.detail else ""
    if _rounds(edit) or (at.operation in STATES and coarse_words(first)):
        return "precision"
    if first == "overflowing":
        return "overflow"
    if edit.detail[:1] == ("rope",):
        return "rope"
    if at.formula.name == "where" and _node_at(at, edit).name in ("where", "allowed"):
        return "mask"
    own = {"weight": at.weight, "bias": at.bias}.get(first.rpartition(".")[2])
    if edit.kind == "operand" and own:
        return "weight" if whose(first, at.layer)[1] == whose(own, at.layer)[1] else at.operation
    if (
        edit.kind == "operand"
        and at.operation == "norm"
        and place_of(first)[0] != near(STREAM, at.layer, at.layers)
    ):
        return (
            "residual"
            if local_name(first) in ("mlp_residual", "attn.o_proj", "mlp.down", "embed")
            else "norm"
        )
    return at.operation
