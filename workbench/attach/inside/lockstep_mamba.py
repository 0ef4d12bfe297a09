"""What to take of layers with Mamba-2, as transformers has them: the parts of the product that goes in, what the scan
meets and gives, and of Granite's layers the experts with the MLP beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

#: Module -> what to take of it -> tap. "ssm z", a part of the product; "scan x", what the scan meets or gives.
MAMBA: dict[str, dict[str, str]] = {
    ".mamba.in_proj": {f"ssm {one}": f".attn.ssm_{one}" for one in ("z", "x", "b", "c", "dt")},
    ".mamba": {
        **{f"scan {one}": f".attn.ssm_conv_{one}" for one in "xbc"},
        **{f"scan {one}": f".attn.ssm_{one}" for one in ("step", "state", "read")},
    },
    ".mamba.conv1d": {},
    ".mamba.act": {},
    ".mamba.norm": {},
    ".mamba.out_proj": {"in": ".attn.ssm_norm", "out": ".attn.out_proj"},
}
#: Of layers with one block alone (Nemotron-H), whose modules are named alike: what they are called by the layer's kind.
_BY_KIND = {
    "linear_attention": (".input_layernorm", ".mamba"),
    "full_attention": (".input_layernorm", ".self_attn"),
    "mlp": (".norm_of_mlp", ".mlp"),
    "moe": (".norm_of_mlp", ".mlp"),
}
NEMOTRON_H: dict[str, dict[str, str]] = {
    "embeddings": {"out": "embed"},
    "norm_f": {"out": "final_norm"},
    ".norm_of_mlp": {"out": ".mlp_norm"},
    ".mlp.fc1_latent_proj": {},
    ".mlp.fc2_latent_proj": {},
}


def named_by_kind(local: str, layer: Any) -> str:
    """The name of a part of a layer that shows what the part is; of other layers the name itself."""
    kind = getattr(layer, "block_type", None)
    if not hasattr(layer, "mixer") or kind not in _BY_KIND:
        return local
    norm, mixer = _BY_KIND[kind]
    if local == ".norm":
        return norm
    return f"{mixer}{local.removeprefix('.mixer')}" if local.startswith(".mixer") else local


#: Granite's MLP, and where experts stand beside it (`mixed`).
_SHARED = {"input_linear": {"left": "gate", "right": "up"}, "output_linear": {"in": "act", "out": "down"}}


def granite(mixed: bool) -> dict[str, dict[str, str]]:
    """Of Granite 4's blocks behind attention."""
    block = ".mlp.shared." if mixed else ".mlp."
    own = {
        f".shared_mlp.{module}": {take: f"{block}{one}" for take, one in takes.items()}
        for module, takes in _SHARED.items()
    }
    own[".shared_mlp.activation"] = {}
    if not mixed:
        return own
    return own | {
        ".mlp": {"first of two": ".mlp.combine"},
        ".shared_mlp": {"sum of two": ".mlp.combine"},
        ".mlp.router": {"first": ".mlp.router"},
    }


PARTS = ("z", "x", "b", "c", "dt")


def part_of(name: str, x: Tensor, owner: Any) -> Tensor:
    """Of the product that goes in."""
    channels, groups = owner.intermediate_size, owner.n_groups * owner.ssm_state_size
    parts: tuple[Tensor, ...] = x.split([channels, channels, groups, groups, owner.num_heads], -1)
    return parts[PARTS.index(name)]


def _of_scan(name: str, call: Any, owner: Any) -> Any:
    """Of a call over several tokens x [B, T, H, P], or over one, x [B, H, P] behind the state."""
    args, named, out = call
    if "return_final_states" in named:
        if name == "step":
            return softplus(args[1] + named["dt_bias"]).clamp(*named["dt_limit"])
        if name in ("read", "state"):
            read, state = out if isinstance(out, tuple) else (out, None)
            return state if name == "state" else read.flatten(2)
        return args[{"x": 0, "b": 3, "c": 4}[name]].flatten(2)
    if name == "state":
        return args[0]
    if name == "step":
        return softplus(args[2][..., 0] + named["dt_bias"][..., 0]).unsqueeze(1)
    if name == "read":
        found = out if named.get("z") is None else _before_gate(*args[:2], *args[5:7])
    else:
        found = args[{"x": 1, "b": 4, "c": 5}[name]]
    return found.flatten(1).unsqueeze(1)


def _before_gate(state: Tensor, x: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """What one token x [B, H, P] reads from the states [B, H, P, N] that it has met, where the call gives it behind its
    gate: C [B, groups, N], D [H, P]."""
    of_heads = c.repeat_interleave(x.shape[1] // c.shape[1], 1)
    return ((state.to(c.dtype) @ of_heads.unsqueeze(-1)).squeeze(-1) + x * d).to(x.dtype)


def _keep(x: Any, owner: Any) -> None:
    """The first of two that are summed up outside of either."""
    owner.__dict__["lockstep_first"] = x


#: To take, of what a module gives; and of a call of a function, with its positional and named arguments and its result.
MAMBA_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    **{f"ssm {one}": partial(part_of, one) for one in PARTS},
    **{f"scan {one}": partial(_of_scan, one) for one in (*"xbc", "step", "state", "read")},
    "first of two": _keep,
    "sum of two": lambda x, owner: owner.__dict__.pop("lockstep_first") + x,
    "first": lambda x, owner: x[0],
}


def scans_of(part: Any) -> Iterator[tuple[Any, str]]:
    """The functions that scan, which a module's code calls by their names: the mapping in which they stand, the
    name."""
    home = vars(sys.modules[type(part).__module__])
    yield from (
        (home, name) for name in ("mamba2_chunk_scan", "mamba2_selective_state_update") if name in home
    )
