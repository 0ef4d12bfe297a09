"""What Mamba-2 computes (arXiv:2405.21060), as formulas (torch-free)."""

from __future__ import annotations

from lockstep.engine.graph.node import Node, of

#: Mamba-2: what a state was before, x and B by heads, step sizes, and the shares that are kept from token to token.
_SSM_HEADS = of("by_heads", Node("x"), Node("ssm_dim"))
_SCANNED = (
    Node("before"),
    _SSM_HEADS,
    of("paired", of("by_heads", Node("b"), Node("state_dim")), Node("step")),
    Node("step"),
    of("exp", of("multiply", of("negative", of("exp", Node("A_log"))), Node("step"))),
)
_GATED, _WHOLE_GATED = (
    of("multiply", Node(x), of("silu", Node(gate))) for x, gate in (("x", "gate"), ("whole", "whole_gate"))
)
#: RMSNorm of groups of channels, of what has gone through its gate. `whole`: of all ranks that share a group.
GATE_FIRST_NORM = of(
    "multiply",
    of(
        "divide",
        _GATED,
        of(
            "root",
            of(
                "add",
                of("mean_of_groups", of("square", _WHOLE_GATED), Node("x"), Node("norm_width")),
                Node("eps"),
            ),
        ),
    ),
    Node("weight"),
)
#: The same of what has not, and the gate behind it.
NORM_FIRST = of(
    "multiply",
    of(
        "multiply",
        of(
            "divide",
            Node("x"),
            of(
                "root",
                of(
                    "add",
                    of("mean_of_groups", of("square", Node("whole")), Node("x"), Node("norm_width")),
                    Node("eps"),
                ),
            ),
        ),
        Node("weight"),
    ),
    of("silu", Node("gate")),
)
STATE = of("scanned", *_SCANNED)
#: What C reads of it, and the skip D x.
READ = of(
    "side_by_side",
    of(
        "add",
        of("scan_read", of("paired", of("by_heads", Node("c"), Node("state_dim")), Node("step")), *_SCANNED),
        of("multiply", _SSM_HEADS, of("each_head", Node("D"))),
    ),
)
