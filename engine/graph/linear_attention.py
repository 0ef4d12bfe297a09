"""The operations of a layer with a recurrent state in place of attention: Gated DeltaNet (arXiv:2412.06464), with the
short convolution and the gated norm of Qwen3-Next.

The state of each head after a pass is `attn.state` [1, heads, key_dim, value_dim], what is read from it at each token
`attn.delta`. Queries and keys have fewer heads than values.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Form, Kind, Operation, Width


def _one(
    tap: str,
    kind: Kind,
    inputs: dict[str, str],
    width: Width,
    module: str = "",
    gguf: str = "",
    form: Form = "rows",
) -> Operation:
    """An operation of such layers alone."""
    module = module and f"linear_attn.{module}"
    return Operation(f"attn.{tap}", kind, inputs, width, form, module, gguf, part="delta_net")


def _projection(name: str, width: Width, gguf: str) -> Operation:
    return _one(f"in_proj_{name}", "linear", {"x": "attn_norm"}, width, f"in_proj_{name}", gguf)


_MIXED: tuple[tuple[str, Width], ...] = (("q", "linear_keys"), ("k", "linear_keys"), ("v", "linear_values"))
_RECURRENT = {"k": "attn.k_l2", "v": "attn.conv_v", "beta": "attn.beta", "decay": "attn.decay"}
LINEAR_ATTENTION = (
    *(_projection(name, width, "attn_qkv") for name, width in _MIXED),
    _projection("z", "linear_values", "attn_gate"),
    _projection("b", "linear_heads", "ssm_beta"),
    _projection("a", "linear_heads", "ssm_alpha"),
    *(
        _one(f"conv_{name}", "conv", {"x": f"attn.in_proj_{name}"}, width, f"conv1d_{name}", "ssm_conv1d")
        for name, width in _MIXED
    ),
    *(_one(f"{name}_l2", "l2_norm", {"x": f"attn.conv_{name}"}, "linear_keys") for name in "qk"),
    _one("beta", "sigmoid", {"x": "attn.in_proj_b"}, "linear_heads"),
    _one("decay", "decay", {"x": "attn.in_proj_a"}, "linear_heads"),
    _one("state", "state", _RECURRENT, "linear_values", form="state"),
    _one("delta", "delta", {"q": "attn.q_l2", **_RECURRENT}, "linear_values"),
    _one(
        "gated_norm", "gated_norm", {"x": "attn.delta", "gate": "attn.in_proj_z"}, "linear_values", "norm", "ssm_norm"
    ),
)  # fmt: skip
#: Behind whatever has a state.
OUTPUT = (
    Operation(
        "attn.out_proj.partial", "linear", {"x": "attn.gated_norm"}, module="linear_attn.out_proj", gguf="ssm_out",
        summed=True, part="linear_attn",
    ),
    Operation(
        "attn.out_proj", "reduce", {"partial": "attn.out_proj.partial"}, module="linear_attn.out_proj",
        bias="ssm_bias", part="linear_attn",
    ),
)  # fmt: skip
