"""Tap the parts of an nn.Module by their names: those of transformers, or those that vLLM, SGLang and nano-vllm share.

attach(model, tape)      # every part
follow(model, tape)      # every call of the model is a pass; else call `tape.step` before each
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .lockstep_calls import CallInputs
from .lockstep_falcon_h1 import FALCON_H1_TAKE, falcon_h1
from .lockstep_gemma4 import GEMMA4_TAKE, gemma4_names, more_of, rotated_calls
from .lockstep_indexer import INDEXER, INDEXER_TAKE, SHARED_CHOICE, register_choice
from .lockstep_latent import LATENT, LATENT_TAKE, OF_CACHED, new_rows
from .lockstep_limits import refuse_capture
from .lockstep_linear import CLIPPED, GATED, TAKE, functions_of, shown_call
from .lockstep_llama4 import LLAMA4, LLAMA4_TAKE, every_other
from .lockstep_mamba import MAMBA_TAKE, granite, named_by_kind, scans_of
from .lockstep_megatron import MEGATRON, MEGATRON_TAKE, is_megatron, logits_layout, megatron_names
from .lockstep_names import (
    BEHIND,
    FUSED,
    HEADS_FIRST,
    IN_PART,
    OVER_ALL_HEADS,
    TRANSFORMERS,
    TURNED,
    UNDIVIDED,
    Names,
)
from .lockstep_wrappers import home_of, plain_modules

if TYPE_CHECKING:
    from .lockstep_tap import Tape

#: Spellings of the expert that every token goes to, whose parts are those of an MLP.
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_OF_MLP = {
    f".mlp.{one}" for one in ("gate_proj", "up_proj", "gate_up_proj", "act_fn", "activation_fn", "down_proj")
}
#: Mixtral's and MiniMax' name of the block and Llama 4's, which others call `mlp`.
_BLOCKS = re.compile(r"^\.(block_sparse_moe|feed_forward)(?=\.|$)", re.ASCII)
_SHARDED = (
    "q_proj", "q_b_proj", "kv_b_proj", "q_clip", "q_norm", "q_rope", "q_rope_norm", "q_unit_norm", "context",
    "gated", "gate", "up", "act",
)  # fmt: skip
_KV = ("k_clip", "v_clip", "k_proj", "k_norm", "k_rope", "k_rope_norm", "k_unit_norm", "v_proj", "v_norm")
_TAKE: dict[str, Callable[[Any, Any], Any]] = {  # of what goes in or comes out, and of the module's owner
    **TAKE,
    **FALCON_H1_TAKE,
    **GEMMA4_TAKE,
    **INDEXER_TAKE,
    **LATENT_TAKE,
    **LLAMA4_TAKE,
    **MAMBA_TAKE,
    **MEGATRON_TAKE,
    "in": lambda x, owner: x[0],
    "out": lambda x, owner: _first(x),
    "sum": lambda x, owner: x[1] if isinstance(x, tuple) else None,
    "q": lambda x, owner: _cut(x, owner)[0],
    "k": lambda x, owner: _cut(x, owner)[1],
    "v": lambda x, owner: _cut(x, owner)[2],
    "left": lambda x, owner: _first(x).chunk(2, -1)[0],
    "right": lambda x, owner: _first(x).chunk(2, -1)[1],
    "partial": lambda x, owner: x,
    "chosen": lambda x, owner: _in_order(x[1], x[2])[0],
    "weights": lambda x, owner: _in_order(x[1], x[2])[1],
    "routed": lambda x, owner: _in_order(x[1], x[0])[0],
    "routed weights": lambda x, owner: _in_order(x[1], x[0])[1] * _scale_of_sum(owner),
    "expert sum": lambda x, owner: x,
    "multiplied": lambda x, owner: _multiplied(_first(x), owner),
    "finished": lambda x, owner: _finished(_first(x), getattr(owner, "config", None)),
    "unrotated q": lambda x, owner: x[1],
    "unrotated k": lambda x, owner: x[2],
    "turned": lambda x, owner: x.transpose(1, 2),
    "rotary q": lambda x, owner: x[0].transpose(1, 2),
    "rotary k": lambda x, owner: x[1].transpose(1, 2),
}

Inputs = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...] | None]


def attach(module: nn.Module, tape: Tape, names: Names | None = None) -> None:
    """Tap the parts of `module` that `names` lists, and under their own names (`…[out]`) the leaves that it does not.

    `names` None: TRANSFORMERS or FUSED, whichever fits. `tape.close()` takes all hooks away again. Of a tape that keeps
    ids alone the module is left as it is.
    """
    if tape.facts["capture"] == "ids":
        return
    parts = list(plain_modules(module))
    paths, times = dict(parts), Counter(id(part) for _, part in parts)
    megatron = names is None and is_megatron(paths)
    if names is None and megatron:
        names = MEGATRON
    if names is None:
        names = FUSED if any(hasattr(part, "q_size") for part in paths.values()) else TRANSFORMERS
    prefix = _decoder(paths)
    places = {path: _place(path, prefix) for path in paths}
    for path, (layer, local) in places.items():
        if layer is not None:
            places[path] = layer, named_by_kind(local, paths[f"{prefix}layers.{layer}"])
    mixtures = {layer for layer, local in places.values() if local == ".mlp.experts"}
    names = _fitting(names, {local for _, local in places.values()})
    if tape.facts["config"].get("model_type") in HEADS_FIRST and "in" in names[".self_attn.o_proj"]:
        names = names | TURNED
    if tape.facts["config"].get("model_type") in IN_PART and "rotary q" in names.get(".self_attn", {}):
        names = names | {".self_attn": {}}
    if tape.facts["config"].get("model_type") in ("llama4_text", "llama4") and "rotary q" in names.get(
        ".self_attn", {}
    ):
        names = names | LLAMA4
    if tape.facts["config"].get("model_type") == "falcon_h1" and "rotary q" in names.get(".self_attn", {}):
        names = falcon_h1(names, tape.facts["config"])
    if ".shared_mlp.input_linear" in {local for _, local in places.values()}:
        names = names | granite(bool(mixtures))
    if tape.facts["config"].get("clip_qkv") and "rotary q" in names.get(".self_attn", {}):
        names = names | CLIPPED
    if ".self_attn.rotary_emb" in names and any(
        local == ".self_attn.q_norm" and _is_over_all_heads(paths, path)
        for path, (_, local) in places.items()
    ):
        names = names | OVER_ALL_HEADS
    layers = 1 + max((layer for layer, _ in places.values() if layer is not None), default=-1)
    layouts = {"partial": "partial"} | dict.fromkeys(_SHARDED, "shard(1)")
    layouts |= dict.fromkeys(_KV, _kv_layout(tape, paths.values()))
    if megatron and tape.facts["size"] > 1:
        layouts["logits"] = logits_layout(module)
    if _attention_is_whole(tape, paths):
        layouts |= dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "q_rope", "context"), "replicate")
    plain = "in" in names.get(".self_attn.o_proj", {})  # transformers' names
    if plain and tape.facts["config"].get("model_type") in UNDIVIDED:
        layouts |= dict.fromkeys((*_SHARDED, *_KV), "replicate")
    gathered = tape.facts["size"] > 1 and _attention_is_gathered(module)
    if gathered:
        whole = ("q_proj", "q_norm", "q_rope", "context", *_KV)
        layouts |= dict.fromkeys(whole, "replicate")
    for path, part in parts:
        count = times.pop(id(part), 0)  # what layers share comes once, and is of the layer we are in
        if not count or not path:
            continue
        layer, local = places[path]
        if layer is not None and not local:
            _hook(tape, part.register_forward_pre_hook(_entering(tape, layer)))
        if local == ".mlp" and layer not in mixtures:
            continue
        leaf = {} if any(True for _ in part.children()) else {"out": f"{local}[out]"}
        owner = paths[path.rpartition(".")[0]]
        found = names.get(local, leaf) | more_of(local, owner)
        if megatron and local in MEGATRON:
            found = megatron_names(local, part, owner)
        for take, tap in found.items():
            if gathered and tap == ".attn.o_proj.partial":  # of a part of what is recorded whole
                continue
            kind = "" if tap.startswith(".layer_input") else tap.rpartition(".")[2]  # these are whole
            layout = "" if tap.endswith("]") else layouts.get(kind, "replicate")
            if tap.startswith(".mlp.shared."):
                take, layout = _of_shared(take, tap, part, tape)
            home = layers if layer is None else layer if count == 1 else None
            see = _See(tape, take, tap, home, layout, owner, tokens_first=megatron)
            _register(part, see)


def _fitting(names: Names, parts: set[str]) -> Names:
    """The map for a model with these parts in its layers: Gemma's and OLMo's norms bear Llama's names elsewhere."""
    shared = {
        path: {
            take: tap.replace(".mlp.", ".mlp.shared.")
            for take, tap in names[path].items()
            if take != "partial"
        }
        for path in _OF_MLP & names.keys()
    }
    names = names | {f".mlp.{one}{path[4:]}": taps for path, taps in shared.items() for one in _SHARED}
    if ".self_attn.kv_b_proj" in parts and ".self_attn" in names:  # which rotates a part of each head alone
        names = names | LATENT
        if ".self_attn.indexer.wq_b" in parts:
            names = names | INDEXER | {".self_attn": names[".self_attn"] | SHARED_CHOICE}
    if ".linear_attn" in parts and "in" in names[".post_attention_layernorm"]:
        names = names | GATED
    if ".post_feedforward_layernorm" not in parts:
        return names
    before = names[".post_attention_layernorm"]
    found = names | BEHIND
    if ".pre_feedforward_layernorm" in parts:
        found |= {".pre_feedforward_layernorm": before}
        if "in" in before and ".self_attn.q_norm" in parts:  # transformers' Gemma-3 norms [B, heads, T, D]
            found |= TURNED
        if "in" in before:
            found |= gemma4_names(parts)
    elif "in" in before:
        for path in (".mlp.gate_proj", ".mlp"):
            found[path] = names[path] | {"in": ".attn_residual"}
    return found


def _is_over_all_heads(paths: dict[str, nn.Module], norm: str) -> bool:
    """Whether a norm of queries has a weight for more than one head."""
    weight: Any = getattr(paths[norm], "weight", None)
    head = getattr(paths[norm.rpartition(".")[0]], "head_dim", None)
    return weight is not None and head is not None and weight.numel() > head


def _of_shared(take: str, tap: str, part: nn.Module, tape: Tape) -> tuple[str, str]:
    """What to take of a part of the shared expert, and its layout: some engines leave it whole on every rank."""
    size, last = tape.facts["size"], tap.endswith(".down")
    if size > 1 and not _is_cut(part):
        return take, "replicate"
    if not last:
        return take, "shard(1)"
    whole = size == 1 or hasattr(part, "reduce_results")  # vLLM's, which are summed with the others' sum
    return ("out" if whole else "partial"), "partial"


def _is_cut(part: nn.Module) -> bool:
    """Whether a rank has only its part of the weight; of what has none, as activations, of its input's."""
    weight = getattr(part, "weight", None)
    placements = getattr(weight, "placements", ())  # of a DTensor
    return weight is None or any(one.is_shard() for one in placements) or getattr(part, "tp_size", 1) > 1


def _in_order(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Experts [N, S] in the order of their numbers, and their weights alike."""
    order = ids.argsort(-1)
    return ids.gather(-1, order), weights.gather(-1, order)


def _scale_of_sum(owner: Any) -> float:
    """What vLLM multiplies the experts' sum by, outside of their weights."""
    return float(getattr(getattr(owner, "experts", None), "routed_scaling_factor", 1.0))


def _multiplied(x: Any, owner: Any) -> Any:
    """The embedding as the model multiplies it outside of that: by Granite's number, in vLLM by Gemma's root."""
    found = (
        getattr(one, name, None)
        for one in (owner, getattr(owner, "config", None))
        for name in ("normalizer", "embedding_multiplier")
    )
    by = next((one for one in found if one is not None), None)
    return x if by is None else x * by


def _finished(logits: Any, config: Any) -> Any:
    """What transformers' model makes of its head's product."""
    kind = getattr(config, "model_type", "")
    # Gemma-4 applies its text model's cap where it reads images, as Gemma-3 does not.
    config = config.get_text_config() if kind == "gemma4" else config
    scaling = getattr(config, "logits_scaling", 1)
    scaling = 1 / scaling if kind == "hyperclovax" else scaling
    logits = logits / scaling * getattr(config, "logit_scale", 1) * getattr(config, "lm_head_multiplier", 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def follow(module: nn.Module, tape: Tape, inputs: Inputs | None = None) -> None:
    """Every call of `module` is a pass, which ends when `logits` were tapped and the call has returned.

    `inputs(args, kwargs)` gives what `tape.step` takes of a call, None for one that is not to be recorded; without it
    they are taken as vLLM, nano-vllm ([T]: one request) and transformers ([batch, T]) call their models.
    """
    reported = inputs or CallInputs()

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tape.closed:
            return
        try:
            refuse_capture()
            found = reported(args, kwargs)
        except Exception as error:
            tape.stop("inputs", error)
            return
        if found is None:
            tape.end()
            tape.skip()
        else:
            tape.step(*found)
            tape.held = getattr(reported, "held", None)

    def returned(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        error = sys.exc_info()[1]
        if out is None and error is not None:  # an "always called" hook learns no more of it
            tape.end(f"{type(error).__name__}: {error}")
        tape.reached("return")

    _hook(tape, module.register_forward_pre_hook(begin, with_kwargs=True))
    _hook(tape, module.register_forward_hook(returned, always_call=True))


class _See:
    """What is taken of one part, as a tap of `layer`; None: of the layer that the tape is in."""

    def __init__(
        self, tape: Tape, take: str, tap: str, layer: int | None, layout: str, owner: nn.Module,
        *, tokens_first: bool = False,
    ) -> None:  # fmt: skip
        self.tokens_first = tokens_first
        self.tape, self.take, self.tap, self.layer, self.layout, self.owner = (
            tape,
            take,
            tap,
            layer,
            layout,
            owner,
        )
        if take in "qkv":
            _ = _key_groups(owner)  # an error here reaches the caller, not a running engine

    def __call__(self, value: Any) -> None:
        tape = self.tape
        if tape.line is None:
            return
        layer = tape.layer if self.layer is None else self.layer
        back = self.tap.startswith("<")
        name = f"layers.{layer - back}{self.tap[back:]}" if self.tap[back] == "." else self.tap
        try:
            x = _TAKE[self.take](value, self.owner)
            x = x.transpose(0, 1) if self.tokens_first and isinstance(x, Tensor) and x.ndim > 2 else x
            if isinstance(x, Tensor) and x.numel() and layer >= back:
                self._tap(name, x)
        except Exception as error:
            tape.stop(name, error)
        if name == "logits":
            tape.reached(name)

    def _tap(self, name: str, x: Tensor) -> None:
        """A row a token, whatever the shape; an unknown module's output that has not is counted."""
        shape, rows, own = self.tape.shape, None, name.endswith("]")
        n = math.prod(shape)
        if self.take in ("rule state", "scan state"):  # one of each sequence, after its last token
            self.tape.tap(name, x, self.layout, range(n // len(x) - 1, n, n // len(x)))
            return
        if self.take in OF_CACHED:
            found = new_rows(x, self.tape.held, shape[-1])
            if found is None:
                self.tape.skip()
                return
            x = found
        if own and x.shape[: len(shape)] != shape and len(x) != n:
            self.tape.skip()
            return
        if self.take.startswith("conv "):  # behind rows of earlier passes
            x = x[:, -shape[-1] :]
        if len(shape) == 2 and x.ndim > 2 and len(x) == shape[0]:
            length, new = (
                shape[1],
                x.shape[1],
            )  # tokens of each sequence, and how many of them, the last, are here
            rows = [row for row in range(n) if row % length >= length - new] if new < length else None
            x = x.flatten(0, 1)
        elif len(x) > n and len(x) % n == 0:  # heads are rows of their own
            x = x.reshape(n, -1)
        self.tape.tap(name, x, self.layout, rows)


def _register(part: nn.Module, see: _See) -> None:
    tape, take = see.tape, see.take
    if take in ("in", "second", "chosen", "weights", "unrotated q", "unrotated k"):
        _hook(tape, part.register_forward_pre_hook(lambda _, args: see(args)))
    elif take.startswith("rotated"):
        if (mine := rotated_calls(part, take, tape.undo)) is not None:
            _replace(tape, home_of(part, "apply_rotary_pos_emb"), "apply_rotary_pos_emb", see, mine)
    elif take == "all layers":
        _replace(tape, see.owner, "project_per_layer_inputs", see, lambda args: True)
    elif take.startswith("rotary"):
        name = "apply_rotary_emb" if "rows" in take else "apply_rotary_pos_emb"
        if (home := home_of(part, name)) is not None:
            _replace(tape, home, name, see, lambda args: tape.layer == see.layer)
    elif take.startswith(("attended", "rule", "turned ", "conv ", "scan ")):
        for functions, name in scans_of(part) if take.startswith("scan ") else functions_of(take, part):
            mine = (
                (lambda args: args[0] is part)
                if take.startswith("attended")
                else (lambda args: tape.layer == see.layer)
            )
            shown_call(tape, functions, name, see, mine)
    elif take in ("chosen keys", "shared keys"):
        if (handle := register_choice(part, take, see)) is not None:
            _hook(tape, handle)
    elif take in _METHODS:
        (owner, name), before = _METHODS[take](part), take == "expert sum"
        if hasattr(owner, name):
            _replace(tape, owner, name, see, lambda args: True, before)
    elif take.endswith(" call"):
        seeing = every_other(see, take)
        _hook(tape, part.register_forward_hook(lambda _, args, out: seeing(out)))
    elif take != "partial":
        _hook(tape, part.register_forward_hook(lambda _, args, out: see(out)))
    elif hasattr(getattr(part, "quant_method", None), "apply"):
        _replace(tape, part.quant_method, "apply", see, lambda args: args[0] is part)
    elif tape.facts["size"] > 1:  # what it hands to all_reduce
        inside: list[bool] = []
        _hook(tape, part.register_forward_pre_hook(lambda _, args: inside.append(True)))
        _hook(tape, part.register_forward_hook(lambda _, args, out: inside.clear(), always_call=True))
        _replace(tape, torch.distributed, "all_reduce", see, lambda args: bool(inside), before=True)


#: What methods of vLLM's runner of experts show.
_METHODS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "routed": lambda part: (getattr(part, "router", None), "select_experts"),
    "routed weights": lambda part: (getattr(part, "router", None), "select_experts"),
    "expert sum": lambda part: (part, "_maybe_reduce_final_output"),
}


def _hook(tape: Tape, handle: Any) -> None:
    tape.undo.append(handle.remove)


def _entering(tape: Tape, layer: int) -> Callable[[nn.Module, Any], None]:
    def enter(_: nn.Module, args: Any) -> None:
        tape.layer = layer

    return enter


def _replace(
    tape: Tape, owner: Any, name: str, see: _See, ours: Callable[[Any], bool], before: bool = False
) -> None:
    """Have a function show what it returns, or, `before` it runs, its first argument, in the calls that are `ours`."""
    real, own = getattr(owner, name), name in vars(owner)

    def shown(*args: Any, **kwargs: Any) -> Any:
        mine = tape.line is not None and ours(args)
        if mine and before:
            see(args[0])
        out = real(*args, **kwargs)
        if mine and not before:
            see(out)
        return out

    setattr(owner, name, shown)
    tape.undo.append(lambda: setattr(owner, name, real) if own else delattr(owner, name))


def _decoder(paths: dict[str, nn.Module]) -> str:
    """What stands before `layers.N` in the decoder's paths: where `embed_tokens` is too, else where most layers are."""
    found = Counter(m[1] for path in paths if (m := re.fullmatch(r"(|.*?\.)layers\.\d+", path)))
    return max(found, key=lambda prefix: (f"{prefix}embed_tokens" in paths, found[prefix]), default="")


def _place(path: str, prefix: str) -> tuple[int | None, str]:
    """ "model.layers.3.mlp.up_proj" -> 3, ".mlp.up_proj"; outside the layers None and the name, bare if it is near."""
    if path.startswith(prefix) and (m := re.fullmatch(r"layers\.(\d+)(\..+)?", path[len(prefix) :])):
        return int(m[1]), _BLOCKS.sub(".mlp", m[2] or "")
    above, _, leaf = path.rpartition(".")
    return None, leaf if prefix.startswith(f"{above}." if above else "") else path


def _kv_layout(tape: Tape, parts: Any) -> str:
    """shard(1), with replicas where there are more ranks than heads."""
    reported = [part.total_num_kv_heads for part in parts if hasattr(part, "total_num_kv_heads")]
    size = tape.facts["size"]
    heads = reported[0] if reported else tape.facts["config"].get("num_key_value_heads") or size
    return f"shard(1,replicas={size // heads})" if size > heads else "shard(1)"


def _attention_is_whole(tape: Tape, paths: dict[str, nn.Module]) -> bool:
    """Whether each rank has all heads: transformers' plans of some models with latent attention split the MLP alone."""
    config = tape.facts["config"]
    heads, dim = config.get("num_attention_heads"), config.get("v_head_dim")
    outputs = [part for path, part in paths.items() if path.endswith(".self_attn.o_proj")]
    weights: list[Any] = [part.weight for part in outputs if hasattr(part, "weight")]
    if not weights or not heads or not dim:
        return False
    return bool(getattr(weights[0], "_local_tensor", weights[0]).shape[1] == heads * dim)


def _attention_is_gathered(model: nn.Module) -> bool:
    """Whether each rank has all heads, of which it makes a part: transformers' plans where norms are over all heads."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return any("gather" in style for path, style in plan.items() if path.endswith(".self_attn.q_proj"))


def _first(x: Any) -> Any:
    """The tensor that a module returns: alone, first of several, or the logits of an object."""
    x = x[0] if isinstance(x, (tuple, list)) and x else x
    return next((getattr(x, name) for name in ("next_token_logits", "logits") if hasattr(x, name)), x)


def _cut(x: Any, owner: Any) -> Any:
    x, queries = _first(x), _key_groups(owner)
    keys = round(x.shape[-1] / (queries + 2))
    return x.split([x.shape[-1] - 2 * keys, keys, keys], -1)


def _key_groups(owner: Any) -> float:
    """How many times as wide as its keys an attention's queries are."""
    if hasattr(owner, "q_size"):
        return float(owner.q_size / owner.kv_size)
    return float(owner.num_key_value_groups)
