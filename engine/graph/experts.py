"""The operations of a mixture of experts: routing, the chosen experts' MLPs, the shared expert, their sum.

Rows of an expert are a token's, one for each expert that it goes to ("slots", in the order of the experts' numbers). A
rank that does not hold an expert has zeros there.
"""

from __future__ import annotations

from lockstep.engine.graph.operation import Operation

#: The router, and what chooses by it: perhaps by a correction, the router's or that of the module at the choice.
_ROUTING = (
    Operation(
        "mlp.router", "linear", {"x": "mlp_norm"}, "experts", module="mlp.gate", gguf="ffn_gate_inp",
        bias="expert_bias", part="experts",
    ),
    Operation("mlp.topk_ids", "choice", {"logits": "mlp.router"}, "slots", part="experts"),
    Operation(
        "mlp.topk_weights", "choice_weights", {"logits": "mlp.router", "ids": "mlp.topk_ids"}, "slots",
        part="experts",
    ),
)  # fmt: skip
#: What each of a token's experts reads, where its weight is multiplied in there (Llama 4).
_INPUT = Operation(
    "mlp.experts.input", "expert_input", {"x": "mlp_norm", "weights": "mlp.topk_weights"}, form="slots",
    part="weighed_inputs",
)  # fmt: skip
#: `module`s are one of each expert: `{}` stands for its number; a GGUF file has one stack of all of them.
_CHOSEN = (
    *(
        Operation(
            f"mlp.experts.{one}", "experts", {"x": "mlp_norm", "ids": "mlp.topk_ids"}, "expert", "slots",
            module=f"mlp.experts.{{}}.{one}_proj", gguf=f"ffn_{one}_exps", bias="expert_bias", part="experts",
            unless=("ungated",) if one == "gate" else (),
        )
        for one in ("gate", "up")
    ),
    Operation(
        "mlp.experts.act", "activation", {"gate": "mlp.experts.gate", "up": "mlp.experts.up"}, "expert", "slots",
        part="experts", optional=("gate",),
    ),
    Operation(
        "mlp.experts.down", "experts", {"x": "mlp.experts.act", "ids": "mlp.topk_ids"}, form="slots",
        module="mlp.experts.{}.down_proj", gguf="ffn_down_exps", bias="expert_bias", summed=True, part="experts",
    ),
)  # fmt: skip
_SHARED = (
    *(
        Operation(
            f"mlp.shared.{one}", "linear", {"x": "mlp_norm"}, "shared_expert",
            module=f"mlp.shared_expert.{one}_proj", gguf=f"ffn_{one}_shexp", part="shared_expert",
            unless=("ungated",) if one == "gate" else (),
        )
        for one in ("gate", "up")
    ),
    Operation(
        "mlp.shared.act", "activation", {"gate": "mlp.shared.gate", "up": "mlp.shared.up"}, "shared_expert",
        part="shared_expert", optional=("gate",),
    ),
    Operation(
        "mlp.shared.down", "linear", {"x": "mlp.shared.act"}, module="mlp.shared_expert.down_proj",
        gguf="ffn_down_shexp", summed=True, part="shared_expert",
    ),
    Operation(
        "mlp.shared_gate", "linear", {"x": "mlp_norm"}, "one", module="mlp.shared_expert_gate",
        gguf="ffn_gate_inp_shexp", part="shared_gate",
    ),
)  # fmt: skip
_SUM = (
    Operation(
        "mlp.combine.partial", "combine",
        {
            "x": "mlp.experts.down", "weights": "mlp.topk_weights", "shared": "mlp.shared.down",
            "gate": "mlp.shared_gate",
        },
        summed=True, part="experts", optional=("shared", "gate"),
    ),
    Operation("mlp.combine", "reduce", {"partial": "mlp.combine.partial"}, part="experts"),
)  # fmt: skip
EXPERTS = (*_ROUTING, _INPUT, *_CHOSEN, *_SHARED, *_SUM)
#: What operations read instead where inputs are weighed, and what the experts give is not.
WEIGHED_INPUTS = {
    **{f"mlp.experts.{one}": {"x": "mlp.experts.input", "ids": "mlp.topk_ids"} for one in ("gate", "up")},
    "mlp.combine.partial": {role: tap for role, tap in _SUM[0].inputs.items() if role != "weights"},
}
