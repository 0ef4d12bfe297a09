"""Each formula in float64 gives what the engine has at that tap, whatever the family and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import ModelConfig
from lockstep.engine.config.rope_frequencies import frequencies
from lockstep.engine.graph import OUTSIDE, Operation, operation_of, operations_of, outside_of, parts_of
from lockstep.engine.graph.formula import FORMULAS, Node, evaluate, formula_of, numbers_of
from lockstep.engine.graph.layer_inputs import NORM
from lockstep.engine.graph.mamba_vectors import ssm_vectors
from lockstep.engine.parallel.shards import (
    DECAY,
    EXPERT_SCALE,
    LAYER_SCALAR,
    ROUTER_SCALE,
    SINKS,
    XIELU,
    correction_name,
)
from lockstep.engine.taps.flow import near
from tests.engine.harness import Engine, Pass

PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 97, 93, 23]  # longer than the windows


class Reported:
    """A pass of the engine, and the checkpoint: the leaves of every formula."""

    def __init__(self, found: Pass, model: ModelConfig, weights: dict[str, np.ndarray]) -> None:
        self.found, self.model, self.weights = found, model, weights

    def tap(self, name: str, layer: int | None) -> np.ndarray:
        whole = near(name, layer, self.model.num_layers)
        return self.found.tensor(whole).astype(np.float64)

    def weight(self, module: str, model: ModelConfig, kind: str = "weight") -> Any:
        """A matrix or vector, or those of all experts; 0 where there is none."""
        if "{}" not in module or model.experts is None:
            return self.weights.get(f"{module}.{kind}", 0.0)
        names = {e: f"{module.format(e)}.{kind}" for e in range(model.experts.count)}
        return {e: self.weights[name] for e, name in names.items() if name in self.weights}

    def recurrent(self, operation: Operation, model: ModelConfig, layer: int | None) -> dict[str, Any]:
        """What layers with a state have before the first token, and the tensors of linear attention's decay."""
        if operation.kind == "conv":
            return {"before": np.zeros((model.conv - 1, self.tap(operation.tap, layer).shape[1]))}
        if layer is not None and (mamba := model.mamba) is not None:
            vectors = ssm_vectors(model, operation.kind).items()
            before = np.zeros((mamba.heads, mamba.head_dim, mamba.state))
            return {
                "before": before,
                **{role: self.weights[f"model.layers.{layer}.{name}"] for role, name in vectors},
            }
        if layer is None or (linear := model.linear) is None:
            return {}
        return {
            "before": np.zeros((linear.value_heads, linear.key_dim, linear.value_dim)),
            **{role: self.weights[f"model.layers.{layer}.{name}"] for role, name in DECAY.items()},
        }

    def given(self, operation: Operation, layer: int | None) -> dict[str, Any]:
        model, tokens = self.model.of_layer(layer), np.arange(len(PROMPT))
        angle, factor = frequencies(model, model.rope_theta, len(PROMPT), np.asarray)
        window = (model.windows or (None,) * model.num_layers)[layer or 0] or len(PROMPT)
        apart = tokens[:, None] - tokens[None]
        module = operation.module if layer is None else f"model.layers.{layer}.{operation.module}"
        if operation.kind == "head" and model.tie_embeddings:
            module = OUTSIDE["embed"].module
        if operation.kind == "layer_inputs":
            module = NORM
        reads = {role: self.tap(tap, layer) for role, tap in operation.inputs.items()}
        if operation.form in ("heads", "cache") and not (operation.kind == "norm" and model.qk_norm_whole):
            reads = {role: x.reshape(len(x), -1, model.head_dim) for role, x in reads.items()}
        if operation.kind == "context":
            reads["v"] = reads["v"].reshape(len(PROMPT), -1, model.head_dim)
        if operation.kind == "reduce":
            reads["partial"] = reads["partial"][None]
        return {
            **numbers_of(model), "angles": tokens[:, None, None] * angle, "factor": factor, "token": np.array(PROMPT),
            "allowed": (apart >= 0) & (apart < tokens[:, None] % window + 1 if model.chunked else apart < window),
            "position": tokens[:, None, None],
            "weight": self.weights[f"model.layers.{layer}.{ROUTER_SCALE}"] if operation.kind == "channel_scale"
            else self.weight(module, model),
            "expert_scale": self.weights.get(f"model.layers.{layer}.{EXPERT_SCALE}"),
            "correction": 0.0 if operation.kind != "choice" or model.experts is None or not model.experts.correction
            else self.weights[f"model.layers.{layer}.{correction_name(model)}"],
            **{role: self.weights.get(f"model.layers.{layer}.{name}") for role, name in XIELU.items()},
            "layer_scalar": self.weights.get(f"model.layers.{layer}.{LAYER_SCALAR}"),
            "sinks": self.weights.get(f"model.layers.{layer}.{SINKS}"),
            "bias": self.weight(module, model, "bias") if operation.bias else 0.0,
            **reads, "whole": reads.get("x"), "whole_gate": reads.get("gate"),
            **self.recurrent(operation, model, layer),
        }  # fmt: skip


NAMES = (
    "qwen2-tied", "qwen3-bias", "llama-bias", "mistral-window", "llama-yarn", "olmo2-bias", "gemma2", "qwen3-moe",
    "mixtral", "qwen2-moe", "glm4-moe", "gpt-oss", "minimax-m2",
    "mixtral", "qwen2-moe", "glm4-moe", "qwen3-next", "qwen3.5", "gemma4", "llama4", "phimoe", "apertus",
    "gemma4-moe",
    "phi-normed", "olmo", "lfm2", "lfm2-moe", "granite4", "granite4-moe", "nemotron-h-moe",
    "falcon-h1", "falcon-h1-normed", "falcon-h1-norm-first",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.sampled(10)
def test_the_engine_computes_the_formulas(
    name: str, tp: int, variant: Callable[[str], Path], engine_of: Callable[[int], Engine]
) -> None:
    path = variant(name)
    model, source = open_checkpoint(path)
    with source:
        weights = {one: source.read(one).double().numpy() for one in source.names()}
    engine = engine_of(tp)
    engine.load(path)
    engine.capture("*")
    (found,) = engine.generate([PROMPT], 1)
    reported = Reported(found, model, weights)
    for layer in (None, *range(model.num_layers)):
        outside = (operation_of(model, one.tap) for one in outside_of(parts_of(model)))
        for operation in filter(None, outside) if layer is None else operations_of(model.of_layer(layer)):
            ours = evaluate(formula_of(operation, model.of_layer(layer)), reported.given(operation, layer))
            theirs = reported.tap(operation.tap, layer)
            if operation.kind == "head":
                ours = ours[-1:]
            np.testing.assert_allclose(
                theirs,
                ours.reshape(theirs.shape),
                rtol=2e-4,
                atol=2e-5,
                err_msg=f"{operation.tap}, layer {layer}",
            )


def test_a_formula_reads_as_one() -> None:
    assert str(FORMULAS["norm"]) == "(x / root(mean(square(x)) + eps)) * weight"
    assert str(FORMULAS["linear"]) == "product(x, weight) + bias"
    assert str(FORMULAS["activation"]) == "silu(gate) * up"
    assert str(Node("x")) == "x"
