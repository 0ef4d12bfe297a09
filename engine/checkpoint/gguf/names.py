"""Hugging Face names and layouts <-> GGUF's: a table of rules, read in both directions. Torch-free.

Sources: gguf-py's `tensor_mapping` and llama.cpp's converter. Dimensions need no rule: GGUF writes them fastest
first, so that reversed they are the Hugging Face shape. Norm weights are stored as they are, or with 1 added (`shift`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.graph import LAYER, OUTSIDE, instead_of
from lockstep.engine.graph.checkpoint_names import FUSED, GGUF_MODULES, GGUF_STACKS, MODULES
from lockstep.engine.parallel.shards import CORRECTION, SINKS, Span

#: A torch tensor or a numpy array: what the operations need is the same in both.
Array = TypeVar("Array", bound=Any)


class RowOperation(Protocol):
    """A change of layout along dimension 0 that can be undone. `rows`: how many rows it moves among each other."""

    @property
    def rows(self) -> int: ...

    def to_gguf(self, tensor: Array) -> Array: ...

    def from_gguf(self, tensor: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows of q and k for rotary embedding. Hugging Face turns rows (i, i + D/2) of a head together; llama.cpp's
    `llama` turns neighbours (2i, 2i + 1), and its converter reorders each head's rows so. By the head's width, not by
    the number of heads, so that q, k and any rank's rows of whole heads are treated alike."""

    head_dim: int

    @property
    def rows(self) -> int:
        return self.head_dim

    def to_gguf(self, tensor: Array) -> Array:
        return _swapped(tensor, 2, self.head_dim // 2)

    def from_gguf(self, tensor: Array) -> Array:
        return _swapped(tensor, self.head_dim // 2, 2)


def _swapped(tensor: Array, outer: int, inner: int) -> Array:
    """Each group of outer * inner rows, seen as a matrix, transposed; contiguous."""
    shape = tuple(tensor.shape)
    groups = tensor.reshape(shape[0] // (outer * inner), outer, inner, *shape[1:])
    swapped: Array = groups.swapaxes(1, 2).reshape(shape)
    return swapped


@dataclass(frozen=True, slots=True)
class NameRule:
    """One module: its name in either format, `{}` for the layer and for the expert. `rotated`: rows are reordered where
    the architecture turns neighbours. `kind`: what a GGUF file appends to the name of a parameter that has no module
    of its own."""

    hugging_face: str
    gguf: str
    rotated: bool = False
    kind: str = ""


#: Families whose GGUF architecture turns neighbouring rows, where Hugging Face turns (i, i + D/2).
PAIRED: frozenset[Family] = frozenset({"llama", "mistral", "mixtral", "granite", "smollm3", "arcee"})

_PARTS = re.compile(
    r"(?:(?P<before>model\.layers|blk)\.(?P<layer>0|[1-9]\d*)\.)?(?P<module>.+?)(?:\.(?P<kind>weight|bias))?"
)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of a family by either name."""

    by_hugging_face: Mapping[str, NameRule]
    by_gguf: Mapping[str, NameRule]


@cache
def _rules(family: Family) -> _Rules:
    modules, stacks = MODULES.get(family, {}), FUSED.get(family, {})
    theirs = GGUF_MODULES.get(family, {})
    stacked = {part: GGUF_STACKS[stack] for stack, parts in stacks.items() for part in parts}
    rotated = {tap for one in LAYER.values() if one.kind == "rope" for tap in instead_of(one.inputs["x"])}
    found: list[NameRule] = []
    for one in LAYER.values():
        tap = one.tap.removesuffix(".partial")
        if (
            one.module and one.gguf and (tap in modules or one.module not in modules.values())
        ):  # else another's by now
            module = modules.get(tap, one.module)
            turned = one.kind == "linear" and one.tap in rotated
            gguf = theirs.get(tap) or stacked.get(module, one.gguf)
            found.append(_layer_rule(module, gguf, turned))
    whole = [_layer_rule(stack, GGUF_STACKS[stack]) for stack in stacks]
    chooser = modules.get("mlp.topk_ids") or modules.get("mlp.router", "mlp.gate")
    found += [
        _layer_rule(f"{chooser}.{CORRECTION}", "exp_probs_b", kind="bias"),
        _layer_rule(SINKS, "attn_sinks", kind="weight"),
    ]
    found += [*(NameRule(one.module, one.gguf) for one in OUTSIDE.values()), *whole]
    # A stack's name means the stack, not one of its parts.
    return _Rules({one.hugging_face: one for one in found}, {one.gguf: one for one in found})


def _layer_rule(module: str, gguf: str, rotated: bool = False, kind: str = "") -> NameRule:
    return NameRule(f"model.layers.{{}}.{module}", f"blk.{{}}.{gguf}", rotated, kind)


def gguf_name(name: str, family: Family) -> str:
    """The GGUF name of a parameter, of one that is stacked there the stack's; a name that no rule knows stays what it
    is."""
    return _translated(name, _rules(family).by_hugging_face, "gguf")


def hugging_face_name(name: str, family: Family) -> str:
    """The Hugging Face name of a GGUF tensor, of a stack of experts with `{}` for the number of each; a name that no
    rule knows stays what it is."""
    return _translated(name, _rules(family).by_gguf, "hugging_face")


def shift(name: str, model: ModelConfig) -> float:
    """By how much the values of a GGUF file are larger than Hugging Face's: of norms that multiply by 1 + weight it
    holds the sum."""
    return 1.0 if model.norms_add_one and name.endswith("norm.weight") else 0.0


def operations(name: str, model: ModelConfig) -> tuple[RowOperation, ...]:
    """What separates the GGUF layout of the parameter `name` (Hugging Face's) from its own: applied in order
    `to_gguf`, undone in reverse order `from_gguf`."""
    rule = _rule(name, _rules(model.family).by_hugging_face)
    if rule is not None and rule.rotated and model.family in PAIRED:
        return (PairRows(model.head_dim),)
    return ()


def covering(span: Span, size: int, applied: tuple[RowOperation, ...]) -> Span:
    """The rows, of `size`, that must be read so that the operations can be undone for `span`."""
    for operation in applied:
        rows = operation.rows
        span = Span(span.start // rows * rows, min(size, -(-span.stop // rows) * rows))
    return span


def _pattern(match: re.Match[str]) -> str:
    """The name as a rule writes it: numbers of layer and expert replaced, without `.weight` or `.bias`."""
    layer = "" if match["layer"] is None else f"{match['before']}.{{}}."
    return layer + _EXPERT.sub("{}", match["module"])


def _rule(name: str, rules: Mapping[str, NameRule]) -> NameRule | None:
    match = _PARTS.fullmatch(name)
    return None if match is None else rules.get(_pattern(match))


def _translated(name: str, rules: Mapping[str, NameRule], to: str) -> str:
    match, rule = _PARTS.fullmatch(name), _rule(name, rules)
    if match is None or rule is None:
        return name
    # What follows the module's name here, and there: the same, but of parameters without a module.
    here, there = ("", rule.kind) if to == "gguf" else (rule.kind, "")
    kind = match["kind"] or ""
    if not rule.kind:
        here, there = kind, kind
    if kind != here or (not rule.kind and not kind):
        return name
    target: str = getattr(rule, to).format(match["layer"], "{}")
    return f"{target}.{there}" if there else target
