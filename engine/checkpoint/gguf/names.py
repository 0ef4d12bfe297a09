"""Hugging Face names and layouts <-> GGUF's: a table of rules, read in both directions. Torch-free.

Sources: gguf-py's `tensor_mapping` and llama.cpp's converter. Dimensions need no rule: GGUF writes them fastest
first, so that reversed they are the Hugging Face shape. Norm weights are stored as they are, or with 1 added, the decay
of linear attention as -exp of it (`as_hugging_face`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.graph import LAYER, OUTSIDE, instead_of
from lockstep.engine.graph.checkpoint_names import (
    EXPERT_STACKS,
    FUSED,
    GGUF_MIXED,
    GGUF_MODULES,
    GGUF_STACKS,
    MODULES,
    USUAL_EXPERT_STACKS,
)
from lockstep.engine.graph.layer_inputs import GGUF_NORM, NORM
from lockstep.engine.parallel.shards import (
    CORRECTION,
    CORRECTIONS,
    DECAY,
    EXPERT_SCALE,
    LAYER_SCALAR,
    ROUTER_SCALE,
    SINKS,
    Span,
)

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


@dataclass(frozen=True, slots=True)
class TiledHeads:
    """Heads of values of linear attention, `width` rows each. Hugging Face has those that share a head of keys one
    behind the other; `qwen35` has the first of each head of keys, then the second of each."""

    key_heads: int
    group: int
    width: int

    @property
    def rows(self) -> int:
        return self.key_heads * self.group * self.width

    def to_gguf(self, tensor: Array) -> Array:
        return _swapped(tensor, self.key_heads, self.group, self.width)

    def from_gguf(self, tensor: Array) -> Array:
        return _swapped(tensor, self.group, self.key_heads, self.width)


def _swapped(tensor: Array, outer: int, inner: int, width: int = 1) -> Array:
    """Each group of outer * inner blocks of `width` rows, seen as a matrix of blocks, transposed; contiguous."""
    shape = tuple(tensor.shape)
    groups = tensor.reshape(shape[0] // (outer * inner * width), outer, inner, width, *shape[1:])
    swapped: Array = groups.swapaxes(1, 2).reshape(shape)
    return swapped


@dataclass(frozen=True, slots=True)
class NameRule:
    """One module: its name in either format, `{}` for the layer and for the expert. `rotated`: rows are reordered where
    the architecture turns neighbours. `kind`: what a GGUF file appends to the name of a parameter that has no module
    of its own, which may be nothing."""

    hugging_face: str
    gguf: str
    rotated: bool = False
    kind: str | None = None


#: Whose converters are Granite's, and reorder rows where nothing rotates as well.
_GRANITES: tuple[Family, ...] = ("granitemoe", "granitemoehybrid", "nemotron_h")
#: Families whose GGUF architecture turns neighbouring rows, where Hugging Face turns (i, i + D/2).
PAIRED: frozenset[Family] = frozenset(
    {"llama", "mistral", "mixtral", "granite", "smollm3", "arcee", "olmo", *_GRANITES}
)
#: Families in whose GGUF files the heads of values of linear attention are in another order.
TILED: frozenset[Family] = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})

#: The one norm that Falcon-H1's files name without a kind (gguf-py's table has the whole name).
_BARE_NORM = ".ffn_norm"
#: What Mamba-2's stacks are called.
_SSM_IN, _SSM_CONV = "ssm_in", "ssm_conv1d"
_PARTS = re.compile(
    r"(?:(?P<before>model\.layers|blk)\.(?P<layer>0|[1-9]\d*)\.)?(?P<module>.+?)(?:\.(?P<kind>weight|bias))?"
)
_EXPERT = re.compile(r"(?:(?<=\.experts\.)|(?<=^experts\.))\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules of a family by either name."""

    by_hugging_face: Mapping[str, NameRule]
    by_gguf: Mapping[str, NameRule]


@cache
def _rules(family: Family, shared: bool = True) -> _Rules:
    """`shared`: whether there may be a shared expert: what Granite calls so is its MLP where there is none."""
    modules, stacks = MODULES.get(family, {}), FUSED.get(family, {})
    theirs = GGUF_MODULES.get(family, {})
    there = {stack: parts for stack, parts in stacks.items() if stack in GGUF_STACKS}
    stacked = {part: GGUF_STACKS[stack] for stack, parts in there.items() for part in parts}
    mixer = next((stack.partition(".")[0] for stack in there if GGUF_STACKS[stack] == _SSM_IN), None)
    stacked |= {f"{mixer}.{one}": _SSM_CONV for one in ("conv1d_x", "conv1d_b", "conv1d_c") if mixer}
    rotated = {tap for one in LAYER.values() if one.kind == "rope" for tap in instead_of(one.inputs["x"])}
    found: list[NameRule] = []
    for one in LAYER.values():
        if (one.part == "shared_expert" and not shared) or (one.part == "mamba" and not mixer):
            continue
        tap = one.tap.removesuffix(".partial")
        module = modules.get(tap, one.module)
        gguf = theirs.get(tap) or stacked.get(module, one.gguf)
        if not module or not gguf or (tap not in modules and module in modules.values()):
            continue
        if tap in theirs or gguf not in theirs.values():  # else another's by now
            turned = one.kind == "linear" and one.tap in rotated
            found.append(_layer_rule(module, gguf, turned))
    further = GGUF_MIXED if "linear_attn.in_proj_qkv" in stacks else {}
    whole = [_layer_rule(stack, (GGUF_STACKS | further)[stack]) for stack in (*there, *further)]
    chooser = modules.get("mlp.topk_ids") or modules.get("mlp.router", "mlp.gate")
    found += [
        _layer_rule(f"{chooser}.{CORRECTIONS.get(family, CORRECTION)}", "exp_probs_b", kind="bias"),
        _layer_rule(SINKS, "attn_sinks", kind="weight"),
        _layer_rule(LAYER_SCALAR, "layer_output_scale", kind="weight"),
        _layer_rule(ROUTER_SCALE, "ffn_gate_inp.scale", kind=""),
        _layer_rule(EXPERT_SCALE, "ffn_down_exps.scale", kind=""),
        _layer_rule(f"{mixer}.A_log" if mixer else DECAY["A_log"], "ssm_a", kind=""),
        _layer_rule(f"{mixer}.dt_bias" if mixer else DECAY["dt_bias"], "ssm_dt", kind="bias"),
    ]
    if mixer:
        found.append(_layer_rule(f"{mixer}.D", "ssm_d", kind=""))
        whole.append(_layer_rule(f"{mixer}.conv1d", _SSM_CONV))
    # Where the converter leaves an expert's gate and up in one.
    stack = EXPERT_STACKS.get(family, USUAL_EXPERT_STACKS)[0]
    named = stack.removesuffix(".weight")
    whole.append(_layer_rule(named, "ffn_gate_up_exps", kind="weight" if named == stack else None))
    outside = [(modules.get(one.tap, one.module), theirs.get(one.tap, one.gguf)) for one in OUTSIDE.values()]
    outside = [*(names for names in outside if names[1]), (NORM, GGUF_NORM)]
    found += [*(NameRule(*names) for names in outside), *whole]
    # A stack's name means the stack, not one of its parts.
    return _Rules({one.hugging_face: one for one in found}, {one.gguf: one for one in found})


def _layer_rule(module: str, gguf: str, rotated: bool = False, kind: str | None = None) -> NameRule:
    return NameRule(f"model.layers.{{}}.{module}", f"blk.{{}}.{gguf}", rotated, kind)


def gguf_name(name: str, model: ModelConfig) -> str:
    """The GGUF name of a parameter, of one that is stacked there the stack's; a name that no rule knows stays what it
    is."""
    found = _translated(name, _rules(model.family, model.experts is not None).by_hugging_face, "gguf")
    return found.removesuffix(".weight") if model.family == "falcon_h1" and _BARE_NORM in found else found


def hugging_face_name(name: str, family: Family) -> str:
    """The Hugging Face name of a GGUF tensor, of a stack of experts with `{}` for the number of each; a name that no
    rule knows stays what it is."""
    if family == "falcon_h1" and name.endswith(_BARE_NORM):
        name = f"{name}.weight"
    return _translated(name, _rules(family).by_gguf, "hugging_face")


def as_hugging_face(name: str, model: ModelConfig, values: Array) -> Array:
    """The values of the parameter from those that a GGUF file has: of norms that multiply by 1 + weight it holds the
    sum, of the decay of a recurrent state what the step is multiplied by, -exp(A_log)."""
    found: Array = values
    if model.norms_add_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        found = values - 1.0
    if name.endswith(".A_log"):
        import numpy as np

        logarithm: Any = np.log(-np.asarray(values, np.float64)).astype(np.float32)
        found = logarithm if isinstance(values, np.ndarray) else values.new_tensor(logarithm)
    return found


def operations(name: str, model: ModelConfig) -> tuple[RowOperation, ...]:
    """What separates the GGUF layout of the parameter `name` (Hugging Face's) from its own: applied in order
    `to_gguf`, undone in reverse order `from_gguf`."""
    rule = _rule(name, _rules(model.family).by_hugging_face)
    if rule is not None and rule.rotated and model.family in PAIRED:
        return (PairRows(model.head_dim),)
    _, _, part = name.partition(".linear_attn.")
    if part in ("in_proj_v.weight", "in_proj_z.weight", "conv1d_v.weight"):
        heads = _tiled_heads(model)
    elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        heads = _tiled_heads(model, 1)
    else:
        return ()
    return () if heads is None else (heads,)


def tiled_columns(name: str, model: ModelConfig) -> TiledHeads | None:
    """The same of the columns of the product that reads the heads of values."""
    return _tiled_heads(model) if name.endswith(".linear_attn.out_proj.weight") else None


def _tiled_heads(model: ModelConfig, width: int | None = None) -> TiledHeads | None:
    """The order of heads of values, `width` rows each (None: their own width); None where it is Hugging Face's."""
    linear = model.linear
    if linear is None or linear.group == 1 or model.family not in TILED:
        return None
    return TiledHeads(linear.key_heads, linear.group, linear.value_dim if width is None else width)


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
    kind = match["kind"] or ""
    if rule.kind is None:
        here, there = kind or "weight", kind
    else:
        here, there = ("", rule.kind) if to == "gguf" else (rule.kind, "")
    if kind != here:
        return name
    target: str = getattr(rule, to).format(match["layer"], "{}")
    return f"{target}.{there}" if there else target
