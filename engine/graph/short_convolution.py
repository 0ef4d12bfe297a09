"""The operations of a layer with a short gated convolution in place of attention (LFM2, arXiv:2511.23404): two gates,
one of what goes into the convolution and one of what comes out.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Kind, Operation


def _one(tap: str, kind: Kind, inputs: dict[str, str], module: str = "", gguf: str = "") -> Operation:
    return Operation(
        f"attn.{tap}", kind, inputs, "conv_channels", module=module, gguf=gguf, part="short_conv"
    )


#: What the layer makes of its input, in the order of one product.
PROJECTED = ("attn.conv_in_gate", "attn.conv_out_gate", "attn.conv_x")
SHORT_CONVOLUTION = (
    *(
        _one(
            tap.removeprefix("attn."),
            "linear",
            {"x": "attn_norm"},
            f"conv.in_proj_{name}",
            "shortconv.in_proj",
        )
        for tap, name in zip(PROJECTED, "bcx", strict=True)
    ),
    _one("conv_in", "times", {"x": "attn.conv_x", "gate": "attn.conv_in_gate"}),
    _one("conv", "conv", {"x": "attn.conv_in"}, "conv.conv", "shortconv.conv"),
    _one("conv_gated", "times", {"x": "attn.conv", "gate": "attn.conv_out_gate"}),
)
