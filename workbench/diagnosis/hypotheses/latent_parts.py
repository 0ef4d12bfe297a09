"""Keys and values of latent attention: which part of what a latent gives each head is its key, which its value, and
where the part of keys stands that all heads share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.workbench.diagnosis.hypotheses.head_orders import orders
from lockstep.workbench.diagnosis.hypotheses.variant import Variant
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.recording import Array


def shared_parts(site: Site) -> Iterator[Variant]:
    """Keys of latent attention whose shared part was put elsewhere, or given to some heads alone."""
    shared, own = site.inputs["rope"], site.expected[..., : -site.inputs["rope"].shape[-1]]
    none, every = np.zeros_like(shared), np.broadcast_to(shared, (*own.shape[:-1], shared.shape[-1]))
    text = "the rotated part of keys stands before the part of each head"
    yield Variant("key_parts_exchanged", "heads", text, {}, np.concatenate([every, own], -1))
    for head in range(own.shape[1]):
        only = np.where(np.arange(own.shape[1])[:, None] == head, shared, none)
        text = f"the rotated part of keys, which all heads share, is given to head {head} of each rank alone"
        yield Variant("key_part_of_one_head", "heads", text, {"head": head}, np.concatenate([own, only], -1))
    empty = np.broadcast_to(none, every.shape)
    yield Variant(
        "key_part_missing", "heads", "keys have zeros in place of their rotated part", {},
        np.concatenate([own, empty], -1),
    )  # fmt: skip


def other_parts(site: Site) -> Iterator[Variant]:
    """Each head's own part taken from elsewhere in what the latent gives: other elements of it, another head's, or cut
    as if all heads' keys came before all heads' values."""
    expanded, rope = site.inputs["expanded"], site.inputs.get("rope")
    tokens, heads, every = expanded.shape
    width = site.expected.shape[-1] - (0 if rope is None else rope.shape[-1])
    if rope is None:
        what, other, own, order_of = "values", "keys", every - width, "values are those {}"
    else:
        what, other, own = "the keys' own parts", "values", 0
        order_of = "the part of keys that is each head's own is that {}; the part that all share is right"
    flat = expanded.reshape(tokens, heads * every)
    cut = flat[:, heads * own :][:, : heads * width].reshape(tokens, heads, width)
    text = (
        f"{what} are cut from what the latent gives as if all heads' keys came first, then all heads' values"
    )
    yield _taken(site, "latent_split_of_all_heads", text, {}, cut)
    for start in range(every - width + 1) if width else ():
        if start == own:
            continue
        whose = f", the {other}'" if start == every - width - own else ""
        text = (
            f"{what} are elements {start} to {start + width - 1} of the {every} that a head has of the latent"
            f"{whose}, not {own} to {own + width - 1}"
        )
        part = expanded[..., start : start + width]
        yield _taken(site, "latent_part_of_another", text, {"first": start}, part)
    for words, order in orders(heads):
        part = expanded[:, order, own : own + width]
        name = f"{'values' if rope is None else 'keys'}_of_other_heads"
        yield _taken(site, name, order_of.format(words), {"heads": order.tolist()}, part)


def _taken(site: Site, name: str, text: str, fitted: dict[str, object], part: Array) -> Variant:
    """With that in place of each head's own part."""
    rope = site.inputs.get("rope")
    if rope is not None:
        part = np.concatenate([part, np.broadcast_to(rope, (*part.shape[:-1], rope.shape[-1]))], -1)
    return Variant(name, "heads", text, fitted, part)
