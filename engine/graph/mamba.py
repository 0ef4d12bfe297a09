"""The operations of a Mamba-2 layer in place of attention (arXiv:2405.21060).

One product gives the gate z, what is convolved (x, and B and C of each group of heads) and each head's step size. The
state of each head after a pass is `attn.ssm_state` [1, heads, head_dim, state]; what is read from it at each token,
with the skip D x, is `attn.ssm_read`.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Bias, Form, Kind, Operation, Part, Width

_WIDTHS: tuple[tuple[str, Width], ...] = (
    ("z", "ssm_channels"), ("x", "ssm_channels"), ("b", "ssm_groups"), ("c", "ssm_groups"), ("dt", "ssm_heads"),
)  # fmt: skip
_CONVOLVED = _WIDTHS[1:4]
PROJECTED_WIDTHS = tuple(width for _, width in _WIDTHS)
#: What the layer makes of its input, in the order of one product; what its convolution gives.
PROJECTED, CONVOLVED = (
    tuple(f"attn.ssm_{before}{one}" for one, _ in widths)
    for before, widths in (("", _WIDTHS), ("conv_", _CONVOLVED))
)


def _one(
    tap: str,
    kind: Kind,
    inputs: dict[str, str],
    width: Width,
    module: str = "",
    bias: Bias = "",
    form: Form = "rows",
    gguf: str = "",
    part: Part = "mamba",
    unless: tuple[Part, ...] = (),
) -> Operation:
    module = module and f"mamba.{module}"
    return Operation(
        f"attn.ssm_{tap}", kind, inputs, width, form, module, gguf=gguf, bias=bias, part=part, unless=unless
    )


_SCANNED = {"x": "attn.ssm_conv_x", "b": "attn.ssm_conv_b", "step": "attn.ssm_step"}
MAMBA = (
    *(
        _one(name, "linear", {"x": "attn_norm"}, width, f"in_proj_{name}", "ssm_bias")
        for name, width in _WIDTHS
    ),
    *(
        _one(f"conv_{name}", "conv", {"x": f"attn.ssm_{name}"}, width, f"conv1d_{name}", "conv_bias")
        for name, width in _CONVOLVED
    ),
    _one("step", "step_size", {"x": "attn.ssm_dt"}, "ssm_heads"),
    _one("state", "ssm_state", _SCANNED, "ssm_channels", form="state"),
    _one("read", "ssm_read", {**_SCANNED, "c": "attn.ssm_conv_c"}, "ssm_channels"),
    _one(
        "norm", "gated_norm", {"x": "attn.ssm_read", "gate": "attn.ssm_z"}, "ssm_channels", "norm",
        gguf="ssm_norm", unless=("gate_alone",),
    ),
    _one(
        "gated", "activation", {"gate": "attn.ssm_z", "up": "attn.ssm_read"}, "ssm_channels", part="gate_alone"
    ),
)  # fmt: skip
