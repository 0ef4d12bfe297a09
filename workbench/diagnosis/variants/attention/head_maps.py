"""Which head reads which: every wrong head held against all KV heads (and all other heads), and the map then read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.workbench.diagnosis.hypotheses.blocks import (
    all_wrong_heads,
    by_head,
    cached,
    from_heads,
    in_place,
    places,
    products,
    reproduces,
    scopes,
    usual_noise,
)
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.attention import FUSED, soft_capped
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array

#: What a head (of a part) gives if it reads `source`; None where that cannot be.
Reading = Callable[[int, int, int], Array | None]
#: (id, sentence, the source of each head)
_Rule = tuple[str, str, NDArray[np.int64]]
#: Rules that hold for a single wrong head by chance: so many ways are there to cut heads into groups.
_BY_CHANCE = "groups_of_"


def score_heads(site: Site) -> Iterator[Variant]:
    """KV heads that queries meet, and query heads in each other's place."""
    scale, cap = site.facts.model.scale, site.facts.model.score_cap
    inputs = [part.inputs for part in site.parts]

    def masked(i: int, head: int, x: Array) -> Array:
        return np.where(np.isfinite(site.parts[i].expected[head]), soft_capped(x * scale, cap), -np.inf)

    def reading(keys: Sequence[Array | None]) -> Reading:
        def of(i: int, head: int, source: int) -> Array | None:
            k = keys[i]
            fits = k is not None and k.shape == inputs[i]["k"].shape
            return (
                masked(i, head, inputs[i]["q"][:, head] @ k[:, source].T) if fits and k is not None else None
            )

        return of

    right = [products(each["q"], each["k"]) for each in inputs]
    own = reading([each["k"] for each in inputs])
    yield from kv_head_maps(
        site, inputs[0]["k"].shape[1], own, lambda rank: reading(cached(site, "k", rank=rank))
    )
    yield from exchanged(site, "query", lambda i, head, source: masked(i, head, right[i][source]))


def softmax_heads(site: Site) -> Iterator[Variant]:
    """Heads of the probabilities in each other's place."""
    yield from exchanged(site, "softmax", lambda i, head, source: site.parts[i].expected[source])


def value_heads(site: Site) -> Iterator[Variant]:
    """KV heads whose values are read, probabilities of other heads, and the order in which heads are merged."""
    inputs = [part.inputs for part in site.parts]

    def reading(values: Sequence[Array | None]) -> Reading:
        def of(i: int, head: int, source: int) -> Array | None:
            v = values[i]
            fits = v is not None and v.shape == inputs[i]["v"].shape
            return inputs[i]["probs"][head] @ v[:, source] if fits and v is not None else None

        return of

    own = reading([each["v"] for each in inputs])
    yield from kv_head_maps(
        site, inputs[0]["v"].shape[1], own, lambda rank: reading(cached(site, "v", rank=rank))
    )
    yield from exchanged(
        site, "merged", lambda i, head, source: by_head(site, site.parts[i].expected)[source]
    )
    kv_heads, heads = inputs[0]["v"].shape[1], inputs[0]["probs"].shape[0]
    yield from exchanged(
        site,
        "probability",
        lambda i, head, source: inputs[i]["probs"][source] @ inputs[i]["v"][:, head * kv_heads // heads],
    )


def kv_head_maps(
    site: Site, kv_heads: int, own: Reading, of_rank: Callable[[int], Reading]
) -> Iterator[Variant]:
    """`own`: what a head gives that reads another KV head of its rank; `of_rank`: of another one."""
    heads = len(by_head(site, site.parts[0].expected))
    right = np.arange(heads) * kv_heads // heads
    words = "query head {} reads KV head {} instead of {}"
    yield from _variants(site, "kv_heads", own, kv_heads, list(kv_maps(heads, kv_heads)), right, words)
    for rank in site.taps.ranks:
        if rank not in site.ranks:
            rule = (f"of_rank_{rank}", f"query heads read the KV heads of rank {rank}", right)
            yield from _variants(site, "kv_heads", of_rank(rank), kv_heads, [rule], None, "")


#: What stands in another head's place: (name of several, words for one).
_EXCHANGED = {
    "query": ("query heads", "head {}'s scores are those of head {}"),
    "softmax": ("heads of the probabilities", "the probabilities of head {} are those of head {}"),
    "merged": ("merged heads", "the context of head {} is that of head {}"),
    "probability": ("heads of the probabilities", "head {} uses the probabilities of head {}"),
}


def exchanged(site: Site, what: str, of: Reading) -> Iterator[Variant]:
    heads = len(by_head(site, site.parts[0].expected))
    reported, words = _EXCHANGED[what]
    rules = list(_orders(heads, reported))
    yield from _variants(site, f"{what}_heads", of, heads, rules, np.arange(heads), words)


def _variants(
    site: Site,
    name: str,
    of: Reading,
    sources: int,
    rules: Sequence[_Rule],
    right: NDArray[np.int64] | None,
    words: str,
) -> Iterator[Variant]:
    """Every rule under which all wrong heads read a source that reproduces them, and the others what they should
    (`right`). A list of sources where there is no rule, but a source for each."""
    if not all(part.fits for part in site.parts):
        return
    found = _sources(site, of, sources)
    noise = usual_noise(site) if site.operation in FUSED else None
    if not found or not all(found.values()):
        return
    fitting: list[_Rule] = []
    for one in rules:
        read_by = one[2].tolist()
        fits = all(
            s in found[h] if h in found else right is None or s == right[h] for h, s in enumerate(read_by)
        )
        if fits and len(found) == 1 and one[0].startswith(_BY_CHANCE):
            continue
        if fits and all(
            read_by != other[2].tolist() for other in fitting
        ):  # one map under two names is told once
            fitting.append(one)
    for rule, text, reads in fitting[:2]:  # two that cannot be told apart are both told
        chosen = {head: int(reads[head]) for head in found}
        yield Variant(
            f"{name}_{rule}",
            "heads",
            text,
            {"map": _written(chosen)},
            _predicted(site, of, chosen),
            noise=noise,
        )
    if not fitting and right is not None:
        chosen = {head: min(fits) for head, fits in found.items()}
        text = ", ".join(words.format(head, source, right[head]) for head, source in list(chosen.items())[:4])
        text += f" and {len(chosen) - 4} more" if len(chosen) > 4 else ""
        text += ", counted within the rank" if len(site.taps.ranks) > 1 else ""
        predicted = _predicted(site, of, chosen)
        yield Variant(f"{name}_listed", "heads", text, {"map": _written(chosen)}, predicted, len(chosen),
                      noise=noise)  # fmt: skip


def _sources(site: Site, of: Reading, sources: int) -> dict[int, set[int]]:
    """For each wrong head the sources that reproduce it wherever it is wrong."""
    scope, at = scopes(site), list(places(site))
    seen = [by_head(site, part.seen) for part in site.parts]
    noise = [by_head(site, part.noise) for part in site.parts]
    found: dict[int, set[int]] = {}
    for head in all_wrong_heads(site):
        mine = [i for i, wrong in at if wrong == head]
        found[head] = set()
        for source in range(sources):
            guesses = [of(i, head, source) for i in mine]
            if all(guess is not None and reproduces(seen[i][head], guess, noise[i][head], scope[i][head])
                   for i, guess in zip(mine, guesses, strict=True)):  # fmt: skip
                found[head].add(source)
    return found


def _predicted(site: Site, of: Reading, chosen: Mapping[int, int]) -> list[Array]:
    guesses: list[Array | None] = []
    for i, part in enumerate(site.parts):
        made = by_head(site, part.expected).copy()
        for head, source in chosen.items():
            guess = of(i, head, source)
            if guess is not None:
                made[head] = guess
        guesses.append(from_heads(site, made))
    return in_place(site, guesses)


def _written(chosen: Mapping[int, int]) -> dict[str, int]:
    return {str(head): source for head, source in chosen.items()}


def kv_maps(heads: int, kv_heads: int) -> Iterator[_Rule]:
    """Rules by which query heads may find their KV heads; the right one is h // group."""
    h, n, group = np.arange(heads), kv_heads, max(heads // kv_heads, 1)
    yield "tiled", "query head h reads KV head h % n instead of h // group", h % n
    order = "shifted_1" if n == 2 else "reversed"  # of two heads the reverse is the next
    yield order, "query heads read the KV heads in reversed order", n - 1 - h // group
    for kv in range(n):
        yield f"all_{kv}", f"every query head reads KV head {kv}", np.full(heads, kv)
    for shift in range(1, n):
        text = f"query heads read the KV head {shift} after their own"
        yield f"shifted_{shift}", text, (h // group + shift) % n
    for size in range(1, heads + 1):
        if size != group:
            text = f"query head h reads KV head h // {size} instead of h // {group}: groups of another size"
            yield f"groups_of_{size}", text, np.minimum(h // size, n - 1)
            yield f"groups_of_{size}", f"{text}, beyond the last from the first again", h // size % n
    yield "tiled_reversed", "query head h reads KV head n - 1 - h % n", n - 1 - h % n


def _orders(heads: int, told: str) -> Iterator[_Rule]:
    """Rules by which heads may stand in each other's place."""
    h = np.arange(heads)
    yield "reversed", f"{told} stand in reversed order", heads - 1 - h
    for source in range(heads):
        yield f"all_{source}", f"all {told} are head {source}", np.full(heads, source)
    for shift in range(1, heads):
        text = f"{told} are rolled by {shift}: head h stands where h + {shift} should"
        yield f"rolled_{shift}", text, (h - shift) % heads
    for parts in range(2, heads):
        if heads % parts == 0:
            text = (
                f"{told} are interleaved: [{heads // parts}, {parts}] is read as [{parts}, {heads // parts}]"
            )
            yield f"interleaved_{parts}", text, (h % parts) * (heads // parts) + h // parts
