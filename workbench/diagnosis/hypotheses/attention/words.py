"""What an edit of attention is called: name, class and sentence, made of its place and detail alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.workbench.diagnosis.hypotheses.attention.mask_words import Rest, mask_words, number_of
from lockstep.workbench.diagnosis.hypotheses.attention.row_words import MISSING, is_rows, of_rows_in_words
from lockstep.workbench.diagnosis.hypotheses.attention.scales import right_scale
from lockstep.workbench.diagnosis.hypotheses.attention.sinks import SINK_WORDS
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.operations.site import Site

#: Place of an edit -> the class of bug; an axis or kind of edit decides before it.
_CLASS: Mapping[str, str] = {
    "q": "scores",
    "scale": "scores",
    "scores": "scores",
    "keys": "heads",
    "values": "heads",
    "keys+values": "heads",
    "allowed": "mask",
    "hidden": "mask",
    "softmax": "softmax",
    "probs": "softmax",
    "context": "context",
}
#: (operation, class of an edit of what goes in) -> its class where that is recorded, and so the mistake is its own.
_WHERE_RECORDED: Mapping[tuple[str, str], str] = {
    **dict.fromkeys((("scores", "cache"), ("scores", "rope")), "scores"),
    **dict.fromkeys((("context", "cache"), ("context", "softmax")), "context"),
}
_PLACES: Mapping[str, str] = {
    "q": "queries",
    "k": "cached keys",
    "v": "cached values",
    "k+v": "cached keys and values",
    "q+k": "queries and keys",
    "q+k+v": "queries and cached keys and values",
    "probs+v": "probabilities and cached values",
    "keys": "keys as query heads read them",
    "values": "values as query heads read them",
    "keys+values": "keys and values",
    "products": "products of queries and keys",
    "scores": "scores",
    "probs": "probabilities",
    "context": "the context",
}


def wording(site: Site, edits: Sequence[Edit]) -> Wording:
    """One sentence for all of the edits; the class is that of the first that is no rounding."""
    each = [_wording(site, edit) for edit in edits]
    first = next((one for one in each if one.kind != "precision"), each[0])
    fitted = {key: value for one in each for key, value in one.fitted.items()}
    kind = _WHERE_RECORDED.get((site.operation, first.kind), first.kind)
    if len(each) > 1:
        fitted["and"] = "+".join(sorted(one.name for one in each if one is not first))
    return Wording(first.name, kind, "; and ".join(one.text for one in each), fitted)


def _wording(site: Site, edit: Edit) -> Wording:
    place, (how, *rest) = str(edit.place), edit.detail
    for rule in (mask_words, _softmaxes, _numbers, _operands, _rotations, _heads):
        found = rule(site, place, str(how), rest)
        if found is not None:
            return found
    return _tensor(place, str(how), rest)


# --- functions and numbers ------------------------------------------------------------------------------------

_SOFTMAXES: Mapping[str, tuple[str, str]] = {
    "base_2": ("softmax_base_2", "powers of 2 stand in the softmax for those of e"),
    "plus_one": (
        "softmax_plus_one",
        "1 is added to the softmax's denominator: a query may attend to nothing (softmax-off-by-one)",
    ),
    "over_queries": ("softmax_over_queries", "the softmax runs over the queries, not over the keys"),
    "over_queries_nan": (
        "softmax_over_queries",
        "the softmax runs over the queries, not over the keys; keys that no query sees are NaN",
    ),
    "over_heads": ("softmax_over_heads", "the softmax runs over the heads, not over the keys"),
    "over_heads_nan": (
        "softmax_over_heads",
        "the softmax runs over the heads, not over the keys; masked keys are NaN",
    ),
    "over_heads_alike": (
        "softmax_over_heads",
        "the softmax runs over the heads, not over the keys; masked keys, at a large negative number, share alike",
    ),
    "not_divided": ("softmax_not_normalised", "probabilities are not divided by their sum"),
    "not_divided_no_maximum": (
        "softmax_not_normalised",
        "exponentials of the scores, their maximum not subtracted, are not divided by their sum",
    ),
    "left_out": ("softmax_missing", "the scores themselves are used: there is no softmax"),
    "plus_one_shifted": (
        "softmax_plus_one",
        "1 is added to the sum of exponentials after the maximum was subtracted",
    ),
    "squared_alone": ("softmax_squared", "probabilities are squared"),
    "twice_hidden_too": ("softmax_twice", "the softmax is applied twice, then over masked keys as well"),
    "mean_over_heads": ("probs_mean_over_heads", "all heads have the mean of the probabilities"),
    "likeliest": (
        "probs_truncated",
        "only the {0:g} likeliest keys of each query are kept, and made to add up to 1 again",
    ),
    "own_key": ("probs_of_own_key", "each token's own key has all of the probability"),
    "first_key": ("probs_of_first_key", "the first key has all of the probability"),
    "sigmoid": ("softmax_sigmoid", "the sigmoid of each score stands in the softmax's place"),
    "sigmoid_shares": (
        "softmax_sigmoid",
        "sigmoids of the scores, divided by their sum, stand in the softmax's place",
    ),
    "of_magnitude": ("softmax_of_magnitude", "the softmax is of the scores' magnitudes"),
    "of_negative": ("softmax_negated", "the softmax is of minus the scores"),
    "twice": ("softmax_twice", "the softmax is applied twice"),
    "uniform": ("probs_uniform", "all keys that a query sees have the same probability"),
    "hardest": ("softmax_hard", "the largest score takes all: an argmax stands in the softmax's place"),
    "relu": ("softmax_relu", "ReLU stands in the softmax's place of the exponential"),
    "squared": ("softmax_squared", "probabilities are squared and divided by their sum"),
    "logarithm": ("softmax_logarithm", "the logarithm of the softmax is taken (log_softmax)"),
    "hidden_counted": ("softmax_masked_counted", "masked keys count in the softmax's denominator"),
    "divided_by_root": ("softmax_by_norm", "exponentials are divided by their norm, not by their sum"),
    "mean": ("softmax_mean", "probabilities are divided by the number of keys once more"),
    "before_mask": (
        "softmax_before_mask",
        "the softmax ran before the mask: later tokens take a share that nobody gets",
    ),
}
_ROUNDED = {
    "both": "the softmax takes and gives {}",
    "scores": "scores are rounded to {} before the softmax",
    "powers": "exponentials and their shares are rounded to {}",
    "sum": "the softmax's sum is rounded to {}",
    "result": "probabilities are rounded to {}",
}


def _softmaxes(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    if place == "sinks":
        name, text = SINK_WORDS[how]
        return Wording(name, "softmax", text.format(*rest), {})
    if place != "softmax":
        return None
    if how == "rounded":
        point, dtype = str(rest[0]), str(rest[1])
        return Wording("softmax_low_precision", "precision", _ROUNDED[point].format(dtype), {"dtype": dtype})
    if how == "sink":
        numbers = [number_of(rest, i) for i in range(len(rest))]
        reported = f"{numbers[0]:.4g}" if len(numbers) == 1 else "a number of each head's own"
        text = (
            f"each head's denominator holds {reported} more: an attention sink that this model does not have"
        )
        return Wording("softmax_sink", "softmax", text, {"sinks": numbers})
    if how == "skipped":
        size, threshold = (number_of(rest, i) for i in (0, 1))
        blocks = f"blocks of {size:g} keys whose largest score" if size > 1 else "keys whose score"
        text = f"{blocks} is more than {threshold:.3g} below the row's are left out, as by sparse kernels"
        return Wording("softmax_skipped", "softmax", text, {"block": int(size), "threshold": threshold})
    name, text = _SOFTMAXES[how]
    return Wording(name, "softmax", text.format(*rest), {"k": number_of(rest, 0)} if rest else {})


def _numbers(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    right = site.facts.model.scale
    match place, how:
        case "scale", _:
            value = float(how)
            text = (
                f"scores are scaled by {value:.5g} instead of {right_scale(site.facts.model)}, "
                f"{value / right:.5g} times the right scale"
            )
            words = [str(one) for one in rest]
            text += f": {', or '.join(words)}" if words else ""
            return Wording(
                "scores_scale", "scores", text, {"scale": value, "ratio": value / right, "meanings": words}
            )
        case "scores", "uncapped":
            cap = number_of(rest, 0)
            text = f"scores do not pass through this model's soft cap: {cap:.4g} * tanh(score / {cap:.4g})"
            return Wording("scores_uncapped", "scores", text, {"cap": cap})
        case "scores", "capped":
            cap, own = number_of(rest, 0), site.facts.model.score_cap
            text = f"scores pass through a soft cap that this model does not have: {cap:.4g} * tanh(score / {cap:.4g})"
            if own:
                text = f"scores are capped at {cap:.4g} instead of {own:.4g}"
            return Wording("scores_soft_cap", "scores", text, {"cap": cap})
        case "scores", "alibi":
            text = (
                "a bias linear in the distance of query and key is added to the scores "
                "(ALiBi, with its published slopes)"
            )
            return Wording("scores_alibi", "scores", text, {})
        case "scores", "distance":
            done = "added to" if number_of(rest, 0) > 0 else "taken from"
            text = f"the distance of query and key is {done} the scores"
            return Wording("scores_distance", "scores", text, {})
    return None


# --- operands -------------------------------------------------------------------------------------------------


def _operands(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    if how not in ("role", "layer", "rank", "sequence", "written", "stage"):
        return None
    rows = of_rows_in_words(rest[-1]) if len(rest) > 1 else ""
    who, of = _PLACES[place], rest[0]
    kind = "cache" if place != "q" else "scores"
    if how == "role":
        words = {
            "k+v": "keys and values are exchanged",
            "k": "what is read as keys are the values",
            "v": "what is read as values are the keys",
        }
        return Wording("cache_keys_for_values", "cache", words[place] + rows, {})
    if how == "stage":
        if place != "k":
            name = "scores_unrotated_queries" if place == "q" else "scores_unrotated"
            text = f"{_PLACES[place]} enter the scores as {_stage(of)}"
            return Wording(name, "scores", text, {"stage": str(of)})
        if site.operation == "scores":
            text = f"keys enter the scores as {_stage(of)}{rows}"
            return Wording("scores_unrotated_keys", "scores", text, {"stage": str(of)})
        return Wording(
            "cache_unrotated", "cache", f"keys are cached as {_stage(of)}{rows}", {"stage": str(of)}
        )
    if place == "q+k":
        text = f"the probabilities are those of {how} {of:g}, used again: its queries and keys give them"
        return Wording(f"probs_of_another_{how}", "softmax", text, {how: int(number_of(rest, 0))})
    if place == "q":
        return Wording(
            f"queries_of_another_{how}",
            kind,
            f"queries are those of {how} {of:g}",
            {how: int(number_of(rest, 0))},
        )
    text = f"{who}: rows are those of {how} {of:g}"
    if how == "layer":
        text += ": layers share a cache"
    if how in ("sequence", "written"):
        so_far = ", as far as it had written them by then" if how == "written" else ""
        text = f"{who}: rows are those of sequence {of:g} at the same positions{so_far}"
        how = "sequence"
    name = f"cache_of_another_{how}"
    if how == "layer" and site.layer is not None and of == site.layer + 1 < site.facts.model.num_layers - 1:
        name, text = (
            "cache_of_next_layer",
            f"{who}: rows are those of layer {of:g}, which writes to this layer's cache",
        )
    return Wording(name, "cache", text + rows, {how: int(number_of(rest, 0))})


def _stage(of: str | float | None) -> str:
    return (
        "they were before their rotation"
        if of == "unrotated"
        else f"{of} gave them, before norm and rotation"
    )


def _rotations(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    who = _PLACES[place]
    match how:
        case "rotated":
            again = rest[0] == "again"
            text = f"{who} are rotated {'once more' if again else 'back'} inside of the attention"
            name = "scores_rotated_again" if again else "scores_rotated_back"
            return Wording(name, "cache" if place == "k" else "rope", text, {"roles": place})
        case "convention":
            kind = "query_scaling" if place == "q" else "rope"
            return Wording(str(rest[0]), kind, f"inside of the attention {rest[1]}", {})
        case "theta":
            text = f"rope_theta is {rest[0]:g} instead of {site.facts.model.rope_theta:g}, inside of the attention"
            return Wording("rope_theta", "rope", text, {"theta": number_of(rest, 0)})
    return None


# --- heads and tensors ----------------------------------------------------------------------------------------


#: Point -> name and words of heads that stand in each other's place.
_EXCHANGED: Mapping[str, tuple[str, str]] = {
    "q": ("query_heads_moved", "query heads"),
    "scores": ("score_heads_moved", "heads of the scores"),
    "probs": ("softmax_heads_moved", "heads of the probabilities"),
    "context": ("merged_heads_moved", "heads of the context"),
}


def _heads(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    if how not in ("kv_heads", "query_heads", "zero_heads"):
        return None
    used = [int(number_of(rest, i)) for i in range(len(rest))]
    if how == "zero_heads":
        zero = [head for head, one in enumerate(used) if one >= 0]
        return Wording(
            "context_heads_zero", "context", f"heads {_listed(zero)} give nothing: their context is zero", {}
        )
    if how == "query_heads":
        moved = [f"head {head} has those of head {one}" for head, one in enumerate(used) if one != head]
        name, what = _EXCHANGED[place]
        return Wording(name, "heads", f"{what} are exchanged: {', '.join(moved[:4])}", {"heads": used})
    inputs = site.parts[0].inputs
    name, text = _kv_heads(used, max(inputs["k" if "k" in inputs else "v"].shape[1], 1))
    return Wording(name, "heads", f"{place.replace('+', ' and ')}: {text}", {"kv_heads": used})


def kv_rules(heads: int, kv: int) -> Mapping[tuple[int, ...], tuple[str, str]]:
    """Maps of query heads to KV heads that are a rule: (name, sentence)."""
    group = heads // kv
    own = [head // group for head in range(heads)]
    rules: dict[tuple[int, ...], tuple[str, str]] = {
        tuple(head % kv for head in range(heads)): (
            "kv_heads_tiled",
            f"query head h reads KV head h % n, with n = {kv}: KV heads are tiled, not repeated",
        ),
        tuple(kv - 1 - one for one in own): (
            "kv_heads_reversed",
            "query heads read the KV heads in reversed order",
        ),
    }
    for j in range(kv):
        rules[(j,) * heads] = (f"kv_heads_all_{j}", f"each query head reads KV head {j}")
    for by in range(1, kv):
        reported = f"query heads read the KV head {by} after their own"
        rules[tuple((one + by) % kv for one in own)] = (f"kv_heads_shifted_{by}", reported)
    for other in (g for g in range(1, heads) if g != group):
        reported = f"query head h reads KV head h // {other}, not h // {group}"
        rules.setdefault(
            tuple(min(h // other, kv - 1) for h in range(heads)), (f"kv_heads_groups_of_{other}", reported)
        )
    return rules


def _kv_heads(used: list[int], kv: int) -> tuple[str, str]:
    """A map of query heads to KV heads, as a rule where it is one."""
    own = [head // (len(used) // kv) for head in range(len(used))]
    wrong = [head for head, one in enumerate(used) if one != own[head]]
    name, reported = kv_rules(len(used), kv).get(tuple(used), ("", ""))
    by_chance = len(wrong) == 1 and name.startswith(
        "kv_heads_groups_of_"
    )  # one head fits some size of groups
    if name and not by_chance:
        return name, reported
    listed = [f"query head {head} reads KV head {used[head]} instead of {own[head]}" for head in wrong]
    return (
        "kv_heads_listed",
        f"{', '.join(listed[:6])}{', …' if len(listed) > 6 else ''}; the others read their own",
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


#: What is done along an axis -> (id, sentence).
_MAPS: Mapping[str, str] = {
    "shifted": "each {axis} has what stands {0:+g} from it",
    "rolled": "each {axis} has what stands {0:+g} from it, around the end",
    "reversed": "{axes} stand in reversed order",
    "all_first": "each {axis} has what is the first one's",
    "all_last": "each {axis} has what is the last one's",
    "exchanged_in_pairs": "neighbouring {axes} stand in each other's place",
    "divided": "{axis} i has what is that of {axis} i // {0:g}",
    "repeated_in_parts": "the first of {0:g} parts stands in all of them",
    "woven": "{0:g} parts of the {axes} are woven into each other",
    "modulo": "{axis} i has what is that of {axis} i % {0:g}",
    "clamped": "beyond {axis} {0:g} all have what is the last one's",
    "ring": "later {axes} overwrite those {0:g} before them: a ring of {0:g} slots",
    "overwritten": "{axes} {0:g} later overwrite those before them, once: as in a ring of {0:g} slots",
    "kept_up_to": "from {axis} {0:g} on there is nothing but zeros",
    "kept_from": "the first {0:g} {axes} are zero",
    "kept_blocks": "what lies behind the last whole block of {0:g} {axes} is zero",
    "last_of_blocks_lost": "the last of each {0:g} {axes} is zero: it was never written",
    "first_of_blocks_lost": "the first of each {0:g} {axes} is zero: it was never written",
    "blocks_exchanged": "neighbouring blocks of {0:g} {axes} stand in each other's place",
    "first_half": "the second half of the {axes} is zero",
    "second_half": "the first half of the {axes} is zero",
}
_CACHE_NAMES = {
    "shifted": "cache_rows_shifted",
    "rolled": "cache_rows_rolled",
    "reversed": "cache_rows_reversed",
    "all_first": "cache_first_row",
    "all_last": "cache_newest_row",
}


#: How scores are computed in fewer bits -> sentence.
_COARSE_SCORES: Mapping[str, str] = {
    "computed": "scores are computed, with roundings on the way, in {}",
    "not_scaled": "queries and keys, and their products, are rounded to {} before they are scaled",
    "products": "products of queries and keys are rounded to {} before they are scaled",
    "queries_scaled": "queries are scaled in {0} before they meet the keys, in {0} too",
    "added_up": "products of queries and keys are added up in {}: the sum is rounded to it after every term",
}


#: How heads of the context are merged wrongly: the order of axes that is read -> name and sentence.
_MERGED: Mapping[str, tuple[str, str]] = {
    "head, query": (
        "context_tokens_not_transposed",
        "[heads, T, D] is flattened without being transposed: tokens and heads are mixed up",
    ),
    "dim, head": ("context_heads_by_dim", "heads are merged as [D, heads] instead of [heads, D]"),
    "head, dim": ("context_heads_by_dim", "[heads, D] is read as [D, heads] and transposed"),
}


def _tensor(place: str, how: str, rest: Rest) -> Wording:
    """What may be done to any tensor."""
    who, rows, which = _PLACES[place], "", ""
    if rest and is_rows(rest[-1]):
        rows, which, rest = of_rows_in_words(rest[-1]), str(rest[-1]), rest[:-1]
    cached = place in ("k", "v", "k+v")
    kind = "cache" if cached else _CLASS.get(place, "scores")
    name = "_".join(["cache" if cached else place.replace("+", "_"), how])
    if how in _COARSE_SCORES:
        text = _COARSE_SCORES[how].format(rest[0])
        return Wording("scores_low_precision", "precision", text, {"dtype": str(rest[0])})
    if how == "unit":
        text = f"{who} are divided by their lengths: cosines instead of products"
        return Wording("scores_normalised", "scores", text, {})
    if how == "rounded":
        return Wording(
            "low_precision_input", "precision", f"{who} are rounded to {rest[0]}{rows}", {"to": str(rest[0])}
        )
    if how == "scaled":
        by = number_of(rest, 0)
        if by == 0 and which in MISSING:
            text = f"{who} of {MISSING[which]} are missing: they are not there yet, and read as zero"
            return Wording("cache_rows_zero", kind, text, {})
        if by == 0 and cached:
            return Wording("cache_rows_zero", kind, f"{who} were never written: they are zero{rows}", {})
        return Wording(name, kind, f"{who} are {by:.5g} times what they should be{rows}", {"factor": by})
    if how == "cut_off":
        return Wording(
            name,
            kind,
            f"{who} are cut off (clamped) at {number_of(rest, 0):.4g}{rows}",
            {"at": number_of(rest, 0)},
        )
    if how == "scaled_heads":
        factors = {str(head): by for head, by in enumerate(rest) if by != 1}
        text = "each head's context is scaled by a factor of its own"
        return Wording("context_scale_of_heads", kind, text, {"factors": factors})
    if place == "context" and how == "reread" and rest[0] in _MERGED:
        return Wording(_MERGED[str(rest[0])][0], kind, _MERGED[str(rest[0])][1], {})
    if how == "other_sequence":
        return Wording(
            "context_of_sequence",
            kind,
            f"the contexts are those of sequence {rest[0]:g}'s tokens of the step",
            {},
        )
    if how == "transposed":
        return Wording(name, kind, f"{who} are transposed: queries and keys are exchanged", {})
    if how == "reread":
        order = f": written in one order of their axes and read as [{rest[0]}]" if rest else ""
        return Wording(
            "cache_layout" if cached else name,
            kind,
            f"{who} are transposed in memory{order}{rows}",
            {"order": str(rest[0])} if rest else {},
        )
    axis, numbers = str(rest[0]), rest[1:]
    if axis in ("head", "kv head"):
        kind = "heads" if not cached or axis == "kv head" else kind
        name = "cache_heads_moved" if cached else name
    elif axis == "dim" and not cached:
        kind = "scores" if place in ("q", "keys") else "context"
    elif cached and axis == "key":
        name = _CACHE_NAMES.get(how, name)
    one = "KV head" if axis == "kv head" else axis
    every = "queries" if axis == "query" else f"{one}s"
    text = _MAPS[how].format(*[float(x) for x in numbers if x is not None], axis=one, axes=every)
    return Wording(name, kind, f"{who}: {text}{rows}", {"axis": axis, "numbers": list(numbers)})
