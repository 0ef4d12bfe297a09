"""What edits of products are called: a phrase with fields for each, and the same phrase for several places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.engine.graph import LAYER, MULTIPLIED
from lockstep.engine.graph.formula import Node
from lockstep.engine.parallel import shards
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.workbench.diagnosis.hypotheses.edits import Edit, nodes
from lockstep.workbench.diagnosis.hypotheses.edits import together as edited
from lockstep.workbench.diagnosis.hypotheses.fits import named
from lockstep.workbench.diagnosis.hypotheses.formula_text import formula_text
from lockstep.workbench.diagnosis.hypotheses.functions import MISREAD
from lockstep.workbench.diagnosis.hypotheses.operands import place_of
from lockstep.workbench.diagnosis.hypotheses.products.caps import CAP, DIVISOR, undivided, without_cap
from lockstep.workbench.diagnosis.hypotheses.products.phrases import Phrase, phrase
from lockstep.workbench.diagnosis.hypotheses.setting import Setting, Wording
from lockstep.workbench.diagnosis.operations.shares import EMBEDDING, HEAD, whose
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.judgements.cause import numbers_in_words

#: Relative error up to which a fitted number is taken for a well-known one.
_NEARLY = 1e-3
#: Operations that are reported here.
PRODUCTS = ("linear", "reduce", "head", "embedding")


def wording(site: Site, edits: Sequence[Edit]) -> Wording | None:
    """What edits of the operation of a site are called; None of what is reported elsewhere."""
    found = phrase_of(Setting.of(site), edits)
    return None if found is None else Wording(found.name, found.kind, _in_words([found]), found.fitted)


def sentence_of(places: Sequence[tuple[Setting, Sequence[Edit]]]) -> str:
    """The same edits at several places; what is another at each of them is reported of each, and so are figures of a
    rank's own."""
    parts: dict[object, list[Phrase]] = {}
    for at, edits in places:
        found = phrase_of(at, edits)
        if found is not None:
            own = _figures_of_rank(found)
            parts.setdefault((found.apart, own), []).append(found)
    return "; ".join(_in_words(phrases) for phrases in parts.values())


def _in_words(phrases: Sequence[Phrase]) -> str:
    fields = {key: together([one.fields.get(key, "") for one in phrases]) for key in phrases[0].fields}
    return phrases[0].text.format(*phrases[0].figures, **fields)


def _figures_of_rank(one: Phrase) -> str:
    """What is stated of a rank, names of tensors and the rank's left out; "" of what is stated of no rank."""
    if "{rank}" not in one.text:
        return ""
    return one.text.format(*one.figures, **dict.fromkeys(one.fields, ""))


def together(names: Sequence[str]) -> str:
    """Names of tensors as one: "model.layers.*.self_attn.{q,k}_proj.bias"; of ranks "each of these ranks"; of anything
    else the first."""
    kinds = list(dict.fromkeys(names))
    if len(kinds) == 1 or not all("." in one or one.startswith("rank ") for one in kinds):
        return kinds[0]
    if kinds[0].startswith("rank "):
        return "each of these ranks"
    parts = [one.split(".") for one in kinds]
    if len({len(one) for one in parts}) > 1:
        return " or ".join(kinds)
    return ".".join(_joined(list(dict.fromkeys(some))) for some in zip(*parts, strict=True))


def _joined(parts: Sequence[str]) -> str:
    """One part of names: "*" for numbers, "{q,k}_proj" for modules."""
    if len(parts) == 1 or all(one.isdigit() for one in parts):
        return parts[0] if len(parts) == 1 else "*"
    tail = parts[0][parts[0].rfind("_") :] if "_" in parts[0] else ""
    tail = tail if all(one.endswith(tail) for one in parts) else ""
    return f"{{{','.join(one.removesuffix(tail) for one in parts)}}}{tail}"


def phrase_of(at: Setting, edits: Sequence[Edit]) -> Phrase | None:
    """The phrase of one edit, or of two; None of a product that comes to nothing, which is reported elsewhere."""
    first, *others = edits
    name = str(first.detail[0]) if first.detail else ""
    leaf = _leaf(at.formula, first)
    match first.kind:
        case "map":
            return _map(at, first)
        case "applied" | "throughout" if others:
            return phrase(at, "weight_and_input_rounded", name)
        case "applied" | "throughout" if leaf not in ("", CAP, DIVISOR):
            return _applied(at, "product" if first.kind == "throughout" else leaf, first)
        case "operand" if leaf == "x":
            return _input(at, name)
        case "operand":
            return _bias(at, name) if leaf == "bias" else _weight(at, name)
        case "operands":
            return _weight(at, str(first.detail[3]), " and its bias")
        case "inserted":
            return _normed(at, str(first.detail[1]), float(first.detail[2] or 0))
        case "left_out" if at.formula.args[1:] == (Node("bias"),) and first.detail == (0.0,):
            return _bias_times(at, 0.0)
        case "function" if name == "subtract":
            return _bias_times(at, -1.0)
        case "number" if leaf == CAP:
            cap, own = float(first.detail[0] or 0), at.model.logit_cap
            return phrase(at, "other_cap", cap, own, fitted={"cap": cap, "should_be": own})
        case "number" if leaf == DIVISOR:
            by, own = float(first.detail[0] or 0), at.model.logit_divisor
            return phrase(at, "other_divisor", by, own, fitted={"divisor": by, "should_be": own})
        case "left_out" if undivided(at.formula, first):
            return phrase(at, "undivided", at.model.logit_divisor)
        case "left_out" if at.operation == "embedding":
            return phrase(at, "unmultiplied", at.model.embedding_multiplier)
        case "left_out" if without_cap(at.formula, first):
            return phrase(at, "uncapped", at.model.logit_cap)
    ran, right = formula_text(edited(edits, at.formula)), formula_text(at.formula)
    return phrase(at, f"formula_of_{leaf}" if leaf in ("x", "weight", "bias") else "formula", ran, right)


def _leaf(formula: Node, edit: Edit) -> str:
    """What an edit is made at: a leaf, "result", or "" of what is in between."""
    if isinstance(edit.place, str):
        return edit.place
    node = dict(nodes(formula)).get(edit.place, Node(""))
    return "result" if edit.place == () else "" if node.args else node.name


def _map(at: Setting, edit: Edit) -> Phrase:
    name, *detail = edit.detail
    if name == "bias_times":
        return _bias_times(at, float(detail[0] or 0))
    if name in ("shard", "shard_shifted"):
        return phrase(
            at,
            str(name),
            *edit.at,
            apart=edit.at[0] if name == "shard" else None,
            fitted={"shard_of": edit.at[0]} if name == "shard" else {},
        )
    return phrase(at, str(name), *detail, *edit.at)


def _bias_times(at: Setting, by: float) -> Phrase:
    """The bias is added so many times."""
    key = "bias_dropped" if by == 0 else "bias_subtracted" if by == -1 else "bias_repeated"
    if at.kind in MULTIPLIED and by == at.ranks > 1:  # of products that are summed over the ranks
        key = "bias_on_every_rank"
    fitted = {"bias": at.bias, "times": by}
    return (
        phrase(at, key, by, fitted=fitted)
        if by == round(by)
        else phrase(at, "bias_scaled", named(by), fitted=fitted)
    )


# --- other operands ------------------------------------------------------------------------------------------------


def _input(at: Setting, name: str) -> Phrase:
    """Another recorded tensor."""
    tap, rank = place_of(name)
    if at.operation == "head":
        skipped = tap == f"layers.{at.layers - 1}.mlp_residual"
        return phrase(at, "head_pooled" if " " in tap else "head_unnormed" if skipped else "head_input", tap)
    of, fitted = (
        "" if rank is None else f" of rank {rank}",
        {"input": tap, "rank": at.rank if rank is None else rank},
    )
    return phrase(at, "wrong_input", of, other=tap, fitted=fitted)


def _bias(at: Setting, name: str) -> Phrase:
    tensor, rank = place_of(name)
    if " misread: " in name:
        return _misread(at, name)
    if rank is not None:
        return phrase(at, "bias_of_other_rank", rank, apart=rank, fitted={"bias": at.bias, "rank": rank})
    return phrase(at, "bias_of_another", other=tensor, apart=_apart(at.bias, tensor, at.layer))


def _misread(at: Setting, name: str) -> Phrase:
    tensor, _, how = name.partition(" misread: ")
    key, _, words = how.partition(": ")
    return phrase(at, "misread", words, other=tensor, fitted={"tensor": tensor, "how": key})


def _apart(own: str, other: str, layer: int | None) -> object:
    """Places distinguished where another module's tensor is there: by which it is, and how far off its layer is."""
    (of, module), mine = whose(other, layer), whose(own, layer)[1] if own else ""
    return of if module == mine else (of, module, mine)


def _weight(at: Setting, name: str, words: str = "") -> Phrase:
    """Another weight of the checkpoint, or another reading or part of the own."""
    tensor, _, how = name.partition(" ")
    rank = place_of(name)[1]
    if how.startswith("misread: "):
        return _misread(at, name)
    if rank is not None:
        return phrase(at, "columns_of_rank", rank, apart=rank, fitted={"shard_of": rank})
    if how.startswith("transposed"):
        return phrase(at, "transposed")
    if how == "strided":
        return phrase(at, "sharded_strided", at.ranks)
    if how.startswith("from "):
        return _started(at, int(how.removeprefix("from ")))
    if tensor in (EMBEDDING, HEAD):
        return phrase(at, "other_table" if at.operation == "embedding" else "head_from_embedding")
    of, module = whose(tensor, at.layer)
    sibling = of == "the same layer" and _input_of(module) == _input_of(whose(at.weight, at.layer)[1])
    return phrase(
        at, "weight_of_sibling" if sibling else "weight_of_another", words, of, "are" if words else "is",
        other=module.removesuffix(".weight") if sibling else module, apart=_apart(at.weight, tensor, at.layer),
        fitted={"weight": at.weight, "is": tensor, "of": of},
    )  # fmt: skip


def _input_of(module: str) -> str:
    """What the product of a module reads."""
    return next((one.inputs.get("x", "") for one in LAYER.values() if f"{one.module}.weight" == module), "")


def _started(at: Setting, start: int) -> Phrase:
    axis = int(not at.split_rows)
    split, size = at.first[axis], at.size[axis]
    of, words = shards.parameters(at.model)[at.weight][axis], ""
    if start + size > of:
        words = f", and runs past the end of {of} into zeros"
    if start < 0:
        words = ", and begins with zeros"
    elif at.rank and start % at.rank == 0 and start // at.rank != size:
        words += f"; {start} is {at.rank} × {start // at.rank}, as if each rank held {start // at.rank}"
    fitted = {"start": start, "should_be": split, "axis": axis}
    return phrase(
        at, "shard_start", ("rows", "columns")[axis], start, split, words, apart=start, fitted=fitted
    )


# --- what is done to a value ---------------------------------------------------------------------------------------


def _applied(at: Setting, leaf: str, edit: Edit) -> Phrase | None:
    name, numbers = str(edit.detail[0]), [one for one in edit.detail if isinstance(one, float)]
    if name == "scaled":
        return _bias_times(at, numbers[0]) if leaf == "bias" else _scaled(at, leaf, numbers[0])
    if name == "plus":
        return _plus(at, str(edit.detail[1]), numbers[0])
    if name in ("saturated", "saturated_float8") and not numbers:
        return phrase(
            at, "scaled_late", "float8 (e4m3)" if name != "saturated" else "int8", str(edit.detail[1])
        )
    if name in ("reshaped", "groups_backwards", "groups_reversed", "columns_moved"):
        return _order(at, name, numbers)
    if name in ("clamped_within", "saturated", "capped", "log_softmax", "probabilities", "centred", "unit_length",
                "layer_normed"):  # fmt: skip
        return phrase(at, name, *map(abs, numbers))
    if leaf == "weight":
        fitted = {"tensor" if name in MISREAD else "weight": at.weight, "to": name}
        return phrase(at, "weight_misread" if name in MISREAD else "weight_rounded", name, fitted=fitted)
    return phrase(at, f"{leaf}_rounded", name)


def _normed(at: Setting, weight: str, eps: float) -> Phrase:
    how = "" if eps == at.model.rms_eps else f" (epsilon {eps:g})" if eps else ", without an epsilon"
    return phrase(at, "normed", how, f" and multiplied by {weight}" if weight else "")


def _scaled(at: Setting, leaf: str, by: float) -> Phrase | None:
    if by == 0:
        if at.operation != "head":
            return None
        if not at.channels:
            return phrase(at, "head_zero")
        ids = f"id{'s' * (len(at.channels) > 1)} {numbers_in_words(at.channels)}"
        return phrase(at, "head_rows_zero", ids)
    words = meaning(at, by)
    if at.operation == "reduce" and at.ranks > 1:
        if by in (2, at.ranks):
            return phrase(at, "summed_twice", 1.0, by)
        if math.isclose(by, 1 / at.ranks):
            return phrase(at, "averaged", 1.0, by, at.ranks)
    if at.operation == "head" and not words and 0.05 <= by <= 20:
        words = f", as by a scale or a temperature of {1 / by:.4g}"
    if at.operation == "embedding" and "sqrt(hidden_size)" in words and by > 1:
        return phrase(at, "embedding_scaled", by, words)
    return phrase(
        at,
        "factor_of_ranks" if at.operation == "linear" and _of_ranks(at, by) else "factor",
        by,
        words + "; the bias is right" * bool(at.bias and leaf != "result"),
        fitted={"factor": by},
    )


def _of_ranks(at: Setting, by: float) -> str:
    """What a sum over the ranks does where a factor is their number, or one over it; "" where it is neither."""
    ways = {float(at.ranks): ": summed too often", 1 / at.ranks: ": averaged"} if at.ranks > 1 else {}
    return next((words for value, words in ways.items() if math.isclose(by, value, rel_tol=_NEARLY)), "")


def meaning(at: Setting, by: float) -> str:
    """The well-known number that a factor is near, and what it stands for, as a clause; "" where it is near none."""
    head, hidden = math.sqrt(at.model.head_dim), math.sqrt(at.model.hidden_size)
    known: Mapping[float, str] = {
        -1.0: ": the sign is wrong",
        head: ", sqrt(head_dim)",
        1 / head: ", 1 / sqrt(head_dim): scaled as the scores are",
        hidden: ", sqrt(hidden_size)",
        1 / hidden: ", 1 / sqrt(hidden_size)",
        2.0: ", doubled",
        0.5: ", halved",
    }
    if words := _of_ranks(at, by):
        return f", that of the number of ranks{words}"
    return next((text for value, text in known.items() if math.isclose(by, value, rel_tol=_NEARLY)), "")


def _plus(at: Setting, name: str, by: float) -> Phrase:
    """What is in the result as well."""
    if name.startswith("positions: "):
        what = name.removeprefix("positions: ")
        times = "" if by == 1 else f", times {named(by)}"
        return phrase(at, "table_added" if "table" in what else "waves_added", what, times)
    if ".bias" in name:
        return _bias(at, name)
    if at.kind in MULTIPLIED and layer_of(name) is not None and local_name(name) != at.kind:
        return phrase(at, "residual_in_sum", by, fitted={"times": by})
    layer = layer_of(name)
    return phrase(at, "added_to_former", name if layer is None else f"layer {layer}")


def _order(at: Setting, name: str, numbers: Sequence[float]) -> Phrase:
    """Of the columns of the weight, or the in features; of the heads that o_proj multiplies."""
    group, dim = int(numbers[0]), at.model.head_dim
    if name == "groups_reversed":
        return phrase(at, "heads_reversed")
    if name == "columns_moved":
        return phrase(at, "columns_ordered", f"shifted by {group}")
    where = "" if group == at.size[1] else f"of each {'head' if group == dim else f'group of {group}'} "
    if name == "groups_backwards":
        return phrase(at, "columns_ordered", f"{where}reversed")
    if len(numbers) > 2:
        return phrase(at, "heads_dealt", int(numbers[1]))
    rows, columns = int(numbers[1]), group // int(numbers[1])
    if at.kind.startswith("attn.o_proj") and columns == dim < group:
        return phrase(at, "heads_transposed")
    how = ": halves interleaved" if rows == 2 else ": pairs taken apart" if columns == 2 else ""
    return phrase(at, "columns_ordered", f"{where}as {rows} × {columns}, transposed{how}")
