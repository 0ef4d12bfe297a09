"""`lockstep inspect A B`: two checkpoints of one model, tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.survey import TensorSurvey, survey
from lockstep.engine.config import ModelConfig
from lockstep.sessions.text import clean
from lockstep.workbench.diagnosis.relations import TensorRelation, relations
from lockstep.workbench.export.json import dumps
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.words.numbers import number

#: Fields of a configuration that state how it is stored and not what it computes.
_STORAGE = ("dtype", "notes", "block_types")


def inspect_pair(first: OpenedModel, second: OpenedModel, pattern: str, as_json: bool) -> tuple[int, bool]:
    """Print how each tensor of `second` is made from that of `first`; how many there were, and whether all that
    separates them is what their types can do."""
    apart = _configs_apart(first.config, second.config)
    found: list[TensorRelation] = []
    reported = []
    _, a = open_checkpoint(first.path)
    _, b = open_checkpoint(second.path)
    with a, b:
        if not as_json:
            print(clean(f"A {first.path}\nB {second.path}", newlines=True))
            for line in apart:
                print(f"! {clean(line)}")
        for relation in relations(a, b, first.config, pattern):
            found.append(relation)
            surveyed = next(iter(survey(b, second.config, pattern=_literally(relation.name))), None)
            if as_json:
                outliers = () if surveyed is None else surveyed.outliers
                reported.append(asdict(relation) | {"words": in_words(relation), "outliers": outliers})
            else:
                print(f"{clean(relation.name):56}  {clean(in_words(relation))}")
                for line in _outliers(surveyed, relation):
                    print(f"  ! {line}")
    within = all(one.within for one in found)
    if as_json:
        print(dumps({"configuration": apart, "tensors": reported, "within": within}))
    else:
        kinds = Counter(one.kind for one in found)
        print("\n" + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
        print(_verdict(found))
    return len(found), within


def in_words(one: TensorRelation) -> str:
    """A relation in one line."""
    types = f"{one.types[0]} → {one.types[1]}"
    off = f"max abs {number(one.max_abs)}, relative {number(one.rel_l2)}"
    largest = f"at most {number(one.steps)} steps, " if one.steps else ""
    beyond = f"{one.beyond} of {one.elements} elements are off by more than the type can be: {largest}{off}"
    rest = f"within the type: {largest}{off}" if one.within else beyond
    match one.kind:
        case "equal":
            return f"{types}  equal"
        case "rounded" | "quantised":
            return f"{types}  {one.kind}, {rest}"
        case "permuted" | "transposed":
            return f"{types}  {one.kind.upper()}: {one.layout}; then {'equal' if not one.max_abs else rest}"
        case "factor":
            return f"{types}  DIFFERENT: {one.layout}"
        case _:
            stated = one.layout or beyond
            return f"{types}  {one.kind.upper()}: {stated}"


def _configs_apart(first: ModelConfig, second: ModelConfig) -> list[str]:
    """Hyperparameters that differ, in words."""
    pairs = {
        field.name: (getattr(first, field.name), getattr(second, field.name))
        for field in fields(first)
        if field.name not in _STORAGE
    }
    return [f"{name}: {a} in A, {b} in B" for name, (a, b) in pairs.items() if not _same(a, b)]


def _same(a: object, b: object) -> bool:
    """Of numbers as far as GGUF's float32 goes."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-6))


def _outliers(one: TensorSurvey | None, relation: TensorRelation) -> Iterator[str]:
    """What stands out in the second, and whether the first has it too."""
    if one is None or not one.outliers or len(one.info.shape) > 1:
        return
    values = ", ".join(f"[{item.index}] = {number(item.value)}" for item in one.outliers[:4])
    also = (
        "the first has the same"
        if relation.within and relation.kind != "permuted"
        else "compare with the first"
    )
    more = f" and {one.outlier_count - 4} more" if one.outlier_count > 4 else ""
    yield f"stands out: {values}{more}; {also}"


def _literally(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _verdict(found: list[TensorRelation]) -> str:
    wrong = [one for one in found if not one.within]
    if wrong:
        named = ", ".join(clean(one.name, limit=60) for one in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return f"not one model: {named}{more}"
    moved = [one for one in found if one.kind in ("permuted", "transposed")]
    if moved:
        return f"the same numbers, {len(moved)} tensors in another layout: whoever loads B must undo it"
    return "the same numbers, as far as their types can hold them"
