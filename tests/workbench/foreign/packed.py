"""Foreign runs made of a reference: the same rows, packed into passes as an engine may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.engine.taps.names import local_name, tap_specs
from lockstep.sessions import Session
from lockstep.sessions.layouts import cut
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.passes import ForeignFacts, ForeignPass, ForeignTensor

#: Taps that an engine with a fused attention has not.
FUSED = ("attn.scores", "attn.probs", "attn.k_cache", "attn.v_cache")

#: A row of a pass: sequence and position; None is padding.
PackedRow = tuple[int, int] | None


@dataclass
class PackedRun:
    """A dump in memory. `by_rank` may be changed before it is read."""

    folder: Path
    facts: ForeignFacts
    by_rank: dict[int, list[ForeignPass]] = field(default_factory=dict)

    def passes(self, rank: int) -> Iterator[ForeignPass]:
        return iter(self.by_rank.get(rank, ()))


@dataclass(repr=False)
class Rows:
    """All rows of a reference's session: `ids[seq]`, and `taps[name][seq][position]`."""

    model: ModelMeta
    prompts: list[int]
    ids: list[list[int]]
    taps: dict[str, list[dict[int, Any]]]

    @classmethod
    def of(cls, source: Session) -> Rows:
        first = source.step(0).sequences
        ids: list[list[int]] = [[] for _ in first]
        names = [
            tap.name
            for tap in source.taps
            if local_name(tap.name) not in FUSED and tap.name not in source.meta.absent
        ]
        taps: dict[str, list[dict[int, Any]]] = {name: [{} for _ in first] for name in names}
        for step in source.steps():
            for one in source.step(step).sequences:
                ids[one.seq] += one.ids
                for name in names:
                    array = source.rebuilt(name, step=step, seq=one.seq).array
                    if array is not None:
                        at = list(one.positions)[-len(array) :]
                        taps[name][one.seq] |= dict(zip(at, array, strict=True))
        return cls(source.meta.model, [len(one.ids) for one in first], ids, taps)

    def decoding(self) -> list[list[PackedRow]]:
        """The plainest packing: all prompts in one pass, then a row a sequence."""
        prefill: list[PackedRow] = [(seq, p) for seq, size in enumerate(self.prompts) for p in range(size)]
        most = max(len(one) - size for one, size in zip(self.ids, self.prompts, strict=True))
        return [
            prefill,
            *(
                [(seq, size + k) for seq, size in enumerate(self.prompts) if size + k < len(self.ids[seq])]
                for k in range(most)
            ),
        ]


def packed(
    rows: Rows,
    packing: Sequence[Sequence[PackedRow]],
    *,
    tp: int = 1,
    kv_replicas: int = 1,
    named: bool = True,
    stated: bool = True,
    profiling: int = 0,
    tops: bool = True,
) -> PackedRun:
    """The rows in passes, on `tp` ranks. `named`: the requests are reported, `stated`: the layouts are."""
    model = rows.model
    layers = model.num_layers or 0
    layouts = {spec.name: str(spec.layout) for spec in tap_specs(layers, {"qk_norm"}, kv_replicas)}
    run = PackedRun(Path("dump"), ForeignFacts("an engine 1.0", tp, "eager", model, "float32"))
    whole = [
        *[_profile(rows, 8) for _ in range(profiling)],
        *(_pass(rows, one, named, tops) for one in packing),
    ]
    for rank in range(tp):
        run.by_rank[rank] = [
            replace(
                one, rank=rank, index=index,
                tensors=[_part(x, layouts[x.tap], tp, rank, stated) for x in one.tensors],
            )
            for index, one in enumerate(whole)
        ]  # fmt: skip
    return run


def _profile(rows: Rows, count: int) -> ForeignPass:
    """A warm-up: one token over and over."""
    taps = [
        ForeignTensor(
            name,
            "",
            "float32",
            np.tile(next(iter(of[0].values())), (count, *(1,) * next(iter(of[0].values())).ndim)),
        )
        for name, of in rows.taps.items()
    ]
    return ForeignPass(0, 0, (0,) * count, (0,) * count, None, taps)


def _pass(rows: Rows, packing: Sequence[PackedRow], named: bool, tops: bool) -> ForeignPass:
    ids = tuple(0 if at is None else rows.ids[at[0]][at[1]] for at in packing)
    positions = tuple(0 if at is None else at[1] for at in packing)
    requests = tuple("" if at is None else f"request {at[0]}" for at in packing) if named else None
    last = sorted({at[0]: i for i, at in enumerate(packing) if at is not None}.values())
    tensors = []
    for name, of in rows.taps.items():
        if name == "logits" and not tops:
            continue
        chosen = last if name == "logits" else range(len(packing))
        noise = np.random.default_rng(0)
        some = next(iter(of[0].values()))
        found = [packing[i] for i in chosen]
        arrays = [
            noise.normal(size=some.shape).astype(some.dtype)
            if at is None
            else of[at[0]].get(at[1], some[::-1])
            for at in found
        ]
        tensors.append(ForeignTensor(name, "", "float32", np.ascontiguousarray(arrays, np.float32)))
    return ForeignPass(0, 0, ids, positions, requests, tensors)


def _part(tensor: ForeignTensor, layout: str, tp: int, rank: int, stated: bool) -> ForeignTensor:
    array = tensor.array
    assert array is not None
    if tensor.tap == "logits":  # gathered
        return replace(tensor, layout="replicate" if stated else "", array=array)
    if array.ndim == 3 and not stated:  # flat heads
        array = array.reshape(len(array), -1)
    part = np.ascontiguousarray(cut(layout, array, tp)[rank])
    return replace(tensor, layout=layout if stated else "", array=part)
