"""What an edit of a mask is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.workbench.diagnosis.hypotheses.setting import Wording
from lockstep.workbench.diagnosis.operations.site import Site

#: The detail of an edit behind its first word.
Rest = Sequence[str | float | None]


def number_of(rest: Rest, at: int) -> float:
    """A number of a detail; 0 where it is none."""
    value = rest[at]
    return float(value) if isinstance(value, float | int) else 0.0


#: Form of a mask -> (name of the cause, sentence with its numbers).
_MASKS: Mapping[str, tuple[str, str]] = {
    "all": ("mask_missing", "tokens see later ones: there is no causal mask"),
    "inverted": ("mask_inverted", "the mask is inverted: hidden keys are seen, and the others hidden"),
    "causal": ("window_missing", "the window of {window} is not applied: all earlier tokens are seen"),
    "anticausal": (
        "mask_transposed",
        "the mask is transposed: each query sees itself and the tokens after it",
    ),
    "top_left": (
        "mask_top_left",
        "the causal mask is aligned to the top left: what is cached before a pass is not counted",
    ),
    "not_itself": ("mask_strict", "a token does not see itself: the causal mask is off by one"),
    "itself_alone": ("mask_diagonal", "each query sees its own key alone"),
    "not_cached": ("cache_not_used", "attention reads only this step's keys and values, not the cache"),
    "cached_alone": (
        "cache_newest_missing",
        "this step's rows are not in the cache yet: it is read before it is written",
    ),
    "whole_pass": ("mask_within_pass", "the tokens of a pass see each other, later ones too"),
    "further": ("mask_ahead", "each query sees {0:g} later token{0s}: the causal mask is off by {0:g}"),
    "less": ("mask_behind", "each query does not see the last {0:g} token{0s}, itself among them"),
    "window": (
        "window_width",
        "a sliding window of {0:g} is applied, which this model does not have",
    ),
    "without_first": ("mask_prefix_hidden", "the first {0:g} key{0s} are masked"),
    "first_alone": ("mask_first_keys", "the first {0:g} key{0s} alone are seen"),
    "without_prompt": ("mask_prompt_hidden", "the prompt is masked: tokens decoded since are seen alone"),
    "without_prompt_and": (
        "mask_prompt_hidden",
        "the prompt and {0:g} token{0s} after it are masked, as where the length of the cache begins anew",
    ),
    "without_key": (
        "mask_keys_hidden",
        "the key at {0:g} is masked: a mask of padding, or of another sequence",
    ),
    "prefix_seen": (
        "mask_prefix_seen",
        "the first {0:g} key{0s} are seen from everywhere, as a prefix without a mask",
    ),
    "prefix_kept": (
        "mask_prefix_seen",
        "the first {0:g} key{0s} are seen by every later token, whatever the window",
    ),
    "chunk_without": ("mask_chunk_begins", "queries from position {0:g} on do not see the keys before it"),
    "ring": (
        "cache_overwritten",
        "keys are gone before they are read: a chunk of {0:g} tokens of the prompt is written over a ring of {1:g} "
        "slots, and its first tokens lose what they should see of the keys before it",
    ),
    "coarse": ("mask_coarse", "the mask compares positions in {0}"),
    "later_too": ("mask_not_causal", "nothing hides later tokens, though the window hides what is too old"),
    "without_newest": ("mask_suffix_hidden", "the newest {0:g} key{0s} are masked"),
    "window_ahead": (
        "mask_ahead",
        "each query has the mask of the token after it: it sees one later token, and one too few of its window of "
        "{0:g}",
    ),
    "both_ways": ("window_symmetric", "a window of {0:g} reaches as far ahead as back"),
    "own_block": (
        "mask_own_block",
        "tokens of the same block of {0:g} see each other, later ones too, and no others",
    ),
    "every_other_block": (
        "mask_every_other_block",
        "of the blocks of {0:g} key{0s} every second is left out",
    ),
    "window_of_blocks": (
        "mask_window_of_blocks",
        "the window is counted in blocks of {0:g}: each token sees {1:g} of them, its own among them",
    ),
    "window_and_first": (
        "mask_first_and_newest",
        "only the first {1:g} key{1s} and the newest {0:g} are seen, nothing between them",
    ),
    "chunks": ("mask_chunks", "tokens see their own chunk alone, in chunks of {0:g}"),
    "whole_blocks": ("mask_whole_blocks", "keys of blocks of {0:g} that are not full are masked"),
    "block_end": (
        "mask_blocks",
        "each query sees its block of {0:g} tokens to the end: the mask is causal by blocks",
    ),
    "other_sequences": (
        "mask_across_sequences",
        "tokens see those of the sequences before their own: sequences that are packed into one row are not masked "
        "from each other",
    ),
    "every_nth": (
        "mask_strided",
        "each query sees only keys at distances that are multiples of {0:g}: dilated attention",
    ),
}


#: The same of layers whose attention is in chunks, by the name of the cause.
_OF_CHUNKS: Mapping[str, tuple[str, str]] = {
    "window_missing": (
        "chunks_missing",
        "attention is not cut into chunks of {window}: a token sees what lies before its own",
    ),
    "window_width": ("chunks_sliding", "a sliding window of {0:g} takes the place of chunks of {window}"),
    "mask_own_block": (
        "chunks_not_causal",
        "tokens of the same chunk of {0:g} see each other, later ones too",
    ),
}
#: The same of scores, in which a mask shows by itself what attention reads of a cache.
_OF_SCORES: Mapping[str, tuple[str, str]] = {
    "cache_not_used": ("mask_of_the_step", "only tokens of the same step are seen: what is cached is masked"),
    "cache_newest_missing": (
        "mask_of_the_cache",
        "tokens of the same step are masked: what is cached is seen alone",
    ),
}
_PRODUCT = "the mask is multiplied by -inf: 0 * -inf is NaN, at each key"
#: Masks that are numbers: (name, class, sentence).
_NUMBERS: Mapping[str, tuple[str, str, str]] = {
    "zero_times_inf": ("mask_zero_times_inf", "mask", f"{_PRODUCT} that it allows"),
    "inf_times_zero": ("mask_zero_times_inf", "mask", f"{_PRODUCT} that it should hide"),
    "one_added": (
        "mask_bool_added",
        "mask",
        "a mask of True and False is added to the scores as 1 and 0: nothing is hidden",
    ),
    "hidden_one_added": (
        "mask_bool_added",
        "mask",
        "a mask of True and False is added to the scores as 0 and 1: nothing is hidden",
    ),
    "multiplied": (
        "mask_multiplied",
        "mask",
        "scores are multiplied by a mask of 1 and 0: what should be hidden scores 0",
    ),
}


def mask_words(site: Site, place: str, how: str, rest: Rest) -> Wording | None:
    if place == "hidden":
        if how in _NUMBERS:
            return Wording(*_NUMBERS[how], {})
        number = number_of(rest, 0)
        words = {"added": "get the mask's {:.4g}", "filled": "are set to {:.4g}"}[how].format(number)
        text = f"masked scores {words}, which does not hide them: they keep a share"
        return Wording("mask_finite", "mask", text, {"value": number})
    if place != "allowed":
        return None
    if how == "by_query":
        return _by_query(site, rest)
    name, text = _MASKS[how]
    if site.operation == "scores":
        name, text = _OF_SCORES.get(name, (name, text))
    if name.startswith("cache"):
        ring = {"chunk": number_of(rest, 0), "slots": number_of(rest, 1)} if how == "ring" else {}
        return Wording(name, "cache", text.format(*rest), ring)
    window = _window(site)
    if site.facts.model.chunked and window is not None:
        name, text = _OF_CHUNKS.get(name, (name, text))
    numbers = [int(x) for x in rest if isinstance(x, float | int)]
    fitted = {"width" if name == "window_width" else "size": numbers[0]} if numbers else {}
    if name == "window_width" and window is not None:
        by = fitted["width"] - window
        text = f"the window is {fitted['width']} wide instead of {window}"
        if abs(by) == 1:
            text = f"the window of {window} is one token too {'wide' if by > 0 else 'narrow'}"
        fitted["window"] = window
    if name == "window_width" and window is None:
        others = [n for n, own in enumerate(site.facts.model.windows or ()) if own == fitted["width"]]
        if others:  # as in scores that were recorded
            layers = f"layer{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
            text = (
                f"a sliding window of {{0:g}} is applied, which this layer does not have (that of {layers})"
            )
    if name == "window_missing" and window is not None and _right_in_prefill(site, window):
        name, text = "window_prefill_only", "the sliding window of {window} is applied in the prefill alone"
    if name == "window_missing" and window is None:
        name, text = "mask_causal", "the mask is causal alone"
    return Wording(name, "mask", _filled(text, rest, window), fitted)


def _window(site: Site) -> int | None:
    windows, layer = site.facts.model.windows, site.layer
    return windows[layer] if windows and layer is not None else None


def _right_in_prefill(site: Site, window: int) -> bool:
    """Whether a window hides something in the first step, and is right there."""
    steps = [site.taps.passes[i].step for i in site.passes]
    first = [(part, scope) for part, scope, step in zip(site.parts, site.deviation.scopes, steps, strict=True)
             if step == min(steps)] if site.deviation else []  # fmt: skip
    return not any(scope.any() for _, scope in first) and any(
        row.position >= window for part, _ in first for row in part.rows
    )


def _filled(text: str, rest: Rest, window: int | None) -> str:
    for i, number in enumerate(rest):
        text = text.replace(f"{{{i}s}}", "" if number == 1 else "s")
    return text.format(*rest, window=window)


def _by_query(site: Site, rest: Rest) -> Wording:
    """Masks for ranges of queries: "; "-separated (form, its numbers, first and last position)."""
    texts, one = [], list[str | float | None]()
    names = []
    for item in rest:
        if item != ";":
            one.append(item)
            continue
        name, *numbers, first, last = one
        names.append(_MASKS[str(name)][0])
        queries = f"position {first:g}" if first == last else f"positions {first:g} to {last:g}"
        texts.append(f"for queries at {queries} {_filled(_MASKS[str(name)][1], numbers, _window(site))}")
        one = []
    name = names[0] if len(set(names)) == 1 and names[0].startswith(("mask", "window")) else "mask_by_query"
    return Wording(name, "mask", "; ".join(texts), {"masks": names})
