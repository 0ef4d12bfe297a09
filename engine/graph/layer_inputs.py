"""The operations of per-layer inputs (Gemma-3n, Gemma-4): a second embedding gives each token a vector for each layer,
to which a product of the first one is added; at the end of a layer its own is let through a gate of the stream and
added to it.

All of it is whole on every rank, but for the embedding's rows.
"""

from __future__ import annotations

from functools import partial

from lockstep.engine.graph.operation import Operation

_one = partial(Operation, part="layer_inputs")

#: Before the first layer, [T, layers * width].
OF_ALL_LAYERS = (
    _one(
        "layer_inputs.embed", "embedding", width="layer_inputs", module="model.embed_tokens_per_layer",
        gguf="per_layer_token_embd",
    ),
    _one(
        "layer_inputs.proj", "linear", {"x": "embed"}, "layer_inputs", module="model.per_layer_model_projection",
        gguf="per_layer_model_proj",
    ),
    _one(
        "layer_inputs", "layer_inputs", {"x": "layer_inputs.proj", "embedded": "layer_inputs.embed"}, "layer_inputs"
    ),
)  # fmt: skip
#: Where the weights of the last of them lie, and in GGUF files.
NORM, GGUF_NORM = "model.per_layer_projection_norm", "per_layer_proj_norm"
#: Behind the MLP, in the place of its sum with the stream.
OF_A_LAYER = (
    _one("mlp_stream", "residual", {"x": "attn_residual", "y": "post_mlp_norm"}),
    _one("layer_input", "layer_input", {"x": "layer_inputs"}, "layer_input"),
    _one(
        "layer_input.gate",
        "linear",
        {"x": "mlp_stream"},
        "layer_input",
        module="per_layer_input_gate",
        gguf="inp_gate",
    ),
    _one("layer_input.act", "activation", {"gate": "layer_input.gate", "up": "layer_input"}, "layer_input"),
    _one("layer_input.proj", "linear", {"x": "layer_input.act"}, module="per_layer_projection", gguf="proj"),
    _one(
        "post_layer_input_norm",
        "norm",
        {"x": "layer_input.proj"},
        module="post_per_layer_input_norm",
        gguf="post_norm",
    ),
)
#: What a layer's last sum adds up instead.
LAST_SUM = {"x": "mlp_stream", "y": "post_layer_input_norm"}
