"""Modules of other engines as our taps: one table for every format that names tensors by module.

The names are those of Hugging Face's decoders and of the engines that fuse them (vLLM, SGLang, nano-vllm):

| module | its outputs | its input (where a format has inputs) |
| --- | --- | --- |
| `embed_tokens` | `embed` | |
| `input_layernorm` | `attn_norm`, fused: and the sum that went in, the layer before's `mlp_residual` | that sum |
| `self_attn.{q,k,v}_proj`, `{q,k}_norm` | their taps | |
| `self_attn.qkv_proj` | `q_proj`, `k_proj`, `v_proj` side by side | |
| `self_attn.rotary_emb` | fused: `q_rope`, `k_rope` | |
| `self_attn.attn` | fused: `attn.context` | |
| `self_attn.o_proj` | `attn.o_proj` (or what this rank adds to it) | `attn.context` |
| `post_attention_layernorm` | `mlp_norm`, fused: and `attn_residual` | `attn_residual` |
| `mlp.{gate,up}_proj`, `mlp.gate_up_proj` | `mlp.gate`, `mlp.up` | |
| `mlp.act_fn` | beside `gate_up_proj`: `mlp.act`; else the activation alone, which is no tap of ours | |
| `mlp.down_proj` | `mlp.down` (or what this rank adds to it) | `mlp.act` |
| `norm` | `final_norm`, fused: and the last layer's `mlp_residual` | that residual |
| `lm_head`, `logits_processor` | `logits` | |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.engine import graph
from lockstep.engine.graph import LAYER, LAYER_OUTPUT, STREAM, Operation, Width
from lockstep.engine.graph.operation import WHOLE
from lockstep.engine.text import printable
from lockstep.sessions.meta import ModelMeta
from lockstep.workbench.foreign.readers.shape import Sizes

Array = NDArray[Any]

#: How a tap lies on the ranks: the same on each, cut in columns, cut by KV head, or not stated by its name (a
#: row-parallel linear gives the sum, or this rank's part of it where the engine reduces later).
Spread = Literal["replicate", "columns", "kv", "unknown"]


def _outputs(operation: Operation) -> tuple[str, ...]:
    """What a module gives: its tap, and of a norm that adds up the stream first, that sum."""
    read = operation.inputs.get("x", "")
    if operation.kind == "norm" and read == STREAM:
        return operation.tap, _STREAM
    if operation.kind == "norm" and LAYER[read].kind == "residual":
        return operation.tap, read
    return (operation.tap,)


_STREAM = STREAM + LAYER_OUTPUT  # the layer before's
#: Module -> its outputs: those of the checkpoint's, and what engines make of several.
OUTPUTS: Mapping[str, tuple[str, ...]] = {
    **{one.module: _outputs(one) for one in LAYER.values() if one.module},
    "self_attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "self_attn.rotary_emb": ("attn.q_rope", "attn.k_rope"),
    "self_attn.attn": ("attn.context",),
    "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    "mlp.act_fn": ("mlp.act",),
    "mlp.gate": ("mlp.router",),
}
#: Module -> its input, where no module gives that.
INPUTS: Mapping[str, str] = {
    one.module: _STREAM if read == STREAM else read
    for one in LAYER.values()
    if one.module and (read := one.inputs.get("x")) and (read == STREAM or not LAYER[read].module)
}
OUTSIDE: Mapping[str, tuple[str, ...]] = {
    **{
        module.rpartition(".")[2]: _outputs(graph.OUTSIDE[tap])
        for module, tap in graph.OUTSIDE_MODULES.items()
    },
    "logits_processor": ("logits",),
}


_BEHIND = {"post_attention_layernorm": "post_attn_norm", "post_feedforward_layernorm": "post_mlp_norm"}

_BY_WIDTH: Mapping[Width, Spread] = {
    "heads": "columns", "value_heads": "columns", "kv_heads": "kv", "intermediate": "columns",
}  # fmt: skip


def _spread(operation: Operation) -> Spread:
    reported = (
        operation.kind != "reduce" and operation.part != "partial" and operation.form in ("rows", "heads")
    )
    if not reported:
        return "unknown"
    return "replicate" if operation.width in WHOLE else _BY_WIDTH.get(operation.width, "unknown")


SPREAD: Mapping[str, Spread] = {one.tap: _spread(one) for one in (*LAYER.values(), *graph.OUTSIDE.values())}

_LAYER = re.compile(r"(?:(?P<prefix>.*)\.)?layers\.(?P<layer>\d{1,5})(?:\.(?P<part>.+))?", re.ASCII)
_LAYERS = re.compile(r"((?:^|\.)layers\.)\d+(?=\.|$)", re.ASCII)
_OTHER_TOWER = re.compile(r"vision|visual|audio|image|speech", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor under its tap's name; `layout` as in `Tap`, "" where the module's name does not show it."""

    tap: str
    layout: str
    array: Array


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of one model on `ranks` ranks; built from all module names of a dump.

    `sizes` are those of one rank, or None; `layers` how many there are, None where that is not known. `fused`: the
    engine's modules are fused ones. `behind`: norms stand behind the blocks, under names that Llama has
    elsewhere. `containers` give what the last module in them gives.
    """

    ranks: int
    sizes: Sizes | None
    layers: int | None
    fused: bool
    behind: bool
    containers: frozenset[str]

    @classmethod
    def of(cls, modules: Iterable[str], ranks: int, model: ModelMeta) -> ModuleNames:
        found = [one for module in modules if (one := _decoder(module)) is not None]
        layers, parts = {int(one["layer"]) for one in found}, {one["part"] for one in found}
        count = model.num_layers or (len(layers) if layers == set(range(len(layers))) else None)
        fused = bool(parts & {"self_attn.qkv_proj", "mlp.gate_up_proj"})
        inside = {"self_attn.o_proj": "self_attn", "mlp.down_proj": "mlp"}
        containers = frozenset(("", *(outer for inner, outer in inside.items() if inner in parts)))
        behind = "post_feedforward_layernorm" in parts
        return cls(ranks, Sizes.of(model, ranks), count, fused, behind, containers)

    def outputs(self, module: str, arrays: Sequence[Array], context: int | None = None) -> list[Named]:
        """The outputs of a module. `context` is the width of this rank's attention output, which shows how a fused
        `qkv_proj` is cut where no config does."""
        base, part = self._place(module)
        if not arrays or (base and part in self.containers) or part == "model":
            return []  # what the last module inside gives
        if any(x.ndim == 0 for x in arrays):
            return self.generic(module, arrays)
        taps = self._known(base, part)
        if part == "self_attn.qkv_proj" and len(arrays) == 1:
            arrays = self._split(arrays[0], context)
        elif part == "mlp.gate_up_proj" and len(arrays) == 1 and arrays[0].shape[-1] % 2 == 0:
            arrays = np.split(arrays[0], 2, axis=-1)
        if len(taps) < len(arrays) or (
            len(taps) > len(arrays) and not taps[1].startswith(("<", "attn_residual"))
        ):
            return self.generic(module, arrays)
        named = (self._named(base, tap, array) for tap, array in zip(taps, arrays, strict=False))
        return [one for one in named if one is not None]

    def generic(self, module: str, arrays: Sequence[Array]) -> list[Named]:
        """The outputs of a module under its own name."""
        base, part = self._place(module)
        return [self._generic(base, part, i, array) for i, array in enumerate(arrays)]

    def inputs(self, module: str, arrays: Sequence[Array]) -> list[Named]:
        """What a module's only tensor input is, where that is a tap of ours."""
        base, part = self._place(module)
        tap = (
            _STREAM
            if base == "" and "final_norm" in OUTSIDE.get(part, ())
            else INPUTS.get(part)
            if base
            else None
        )
        if tap is None or len(arrays) != 1 or (self.behind and part == "post_attention_layernorm"):
            return []
        named = self._named(base, tap, arrays[0])
        return [] if named is None else [named]

    def called(self, name: str, layer: int | None, array: Array) -> Named:
        """A tensor that a user named: one of our taps, within its layer or outside of all, or a generic one."""
        base = "" if layer is None else f"layers.{layer}"
        if name in (LAYER if base else graph.OUTSIDE):
            return Named(f"{base}.{name}" if base else name, self.layout(name), array)
        return self._generic(base, name, 0, array)

    def _place(self, module: str) -> tuple[str, str]:
        """ "model.layers.3.mlp.down_proj" -> ("layers.3", "mlp.down_proj"); outside the layers ("", its last name)."""
        found = _decoder(module)
        if found is not None:
            return f"layers.{int(found['layer'])}", found["part"] or ""
        last = module.rpartition(".")[2]
        return "", last if last in OUTSIDE and not _OTHER_TOWER.search(module) else module

    def _known(self, base: str, part: str) -> tuple[str, ...]:
        if base == "":
            return OUTSIDE.get(part, ())
        if part in ("mlp.act_fn", "self_attn.rotary_emb") and not self.fused:
            return ()  # the activation alone, cosines and sines
        if (
            self.behind and part in _BEHIND
        ):  # Gemma and OLMo normalise what a block gives: names of other places
            return (_BEHIND[part],)
        if part == "pre_feedforward_layernorm":
            return OUTPUTS["post_attention_layernorm"]
        return OUTPUTS.get(part, ())

    def _split(self, array: Array, context: int | None) -> Sequence[Array]:
        """q, k and v of a fused product; the product itself where nothing shows its parts."""
        width = array.shape[-1]
        q = self.sizes.q if self.sizes is not None else context
        kv = None if q is None else self.sizes.kv if self.sizes is not None else (width - q) // 2
        if q is None or kv is None or kv <= 0 or q + 2 * kv != width:
            return [array]
        return np.split(array, [q, q + kv], axis=-1)

    def _named(self, base: str, tap: str, array: Array) -> Named | None:
        if not tap.startswith("<"):
            return Named(f"{base}.{tap}" if base else tap, self.layout(tap), array)
        layer = int(base.removeprefix("layers.")) if base else self.layers
        # What goes into the first norm is the embedding; which layer is the last may not be known.
        return Named(f"layers.{layer - 1}.{tap[1:]}", self.layout(tap[1:]), array) if layer else None

    def layout(self, tap: str) -> str:
        """How a tap (within its layer) lies on the ranks; "" where its name does not show it."""
        spread = SPREAD.get(tap, "unknown")
        if spread == "replicate" or (spread == "unknown" and self.ranks == 1):
            return "replicate"
        if spread == "columns" or (spread == "kv" and self.ranks == 1):
            return "shard(1)"
        if spread == "kv" and self.sizes is not None:
            return "shard(1)" if self.sizes.replicas == 1 else f"shard(1,replicas={self.sizes.replicas})"
        return ""

    def _generic(self, base: str, part: str, index: int, array: Array) -> Named:
        """A tensor without a counterpart keeps its engine's name, which never reads like one of ours."""
        name = printable(part, 160) or "out"
        if name in (LAYER if base else graph.OUTSIDE):
            name += "[out]"
        return Named((f"{base}." if base else "") + name + (f"[{index}]" if index else ""), "", array)


def in_layer(module: str, layer: int) -> str:
    """The module of the same name in another layer: what a module that layers share is called there."""
    return _LAYERS.sub(rf"\g<1>{layer}", module, count=1)


def _decoder(module: str) -> re.Match[str] | None:
    """A module of the language model's layers; not of an encoder of images or sound."""
    found = _LAYER.fullmatch(module)
    return None if found is None or _OTHER_TOWER.search(found["prefix"] or "") else found
