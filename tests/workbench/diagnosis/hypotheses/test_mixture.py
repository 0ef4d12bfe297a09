"""Experts in one kernel, recorded in transformers as attach does: right ones are not accused, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.workbench.diagnosis.diagnose import Explanation
from tests.checkpoints import tiny_variant
from tests.workbench.diagnosis.attached import attached_and_diagnosed

pytestmark = pytest.mark.sampled_file(3)

FAMILIES = (
    "qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "glm4-moe", "gpt-oss", "minimax-m2", "deepseek-v2", "deepseek-v3",
    "llama4",
)  # fmt: skip
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
#: What replaces a call of a layer's experts: of the right one, the module, hidden rows, ids and weights.
Kernel = Callable[[Experts, Any, Tensor, Tensor, Tensor], Tensor]


def explained(
    path: Path, scratch: Path, dtype: str, change: Callable[[Any], None] = lambda mlp: None
) -> Explanation:
    """What is found of a model all of whose mixtures were changed."""

    def put(model: Any) -> None:
        for layer in model.model.layers:
            mlp = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward
            if hasattr(mlp, "experts"):
                change(mlp)

    return attached_and_diagnosed(path, scratch, dtype, put)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_right_experts_are_judged_and_not_accused(name: str, dtype: str, tmp_path: Path) -> None:
    found = explained(tiny_variant(tmp_path, name), tmp_path, dtype)
    assert (found.causes, found.wrong, found.notes) == ((), (), ())
    assert not any(one.tap.endswith(".mlp.combine") for one in found.unjudged)


def _kernel(change: Kernel) -> Callable[[Any], None]:
    def put(mlp: Any) -> None:
        mlp.experts.forward = partial(change, mlp.experts.forward, mlp.experts)

    return put


def _weighed_inputs(f: Experts, m: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each slot by itself, whose expert reads the token's row times its weight, as in Llama 4."""
    slots = zip(ids.split(1, -1), w.split(1, -1), strict=True)
    return torch.stack([f(x * by, one, torch.ones_like(by)) for one, by in slots]).sum(0)


def _shared(times: float) -> Callable[[Any], None]:
    def put(mlp: Any) -> None:
        shared = mlp.shared_experts if hasattr(mlp, "shared_experts") else mlp.shared_expert
        shared.register_forward_hook(lambda _, args, out: times * out)

    return put


def _exchanged(mlp: Any) -> None:
    stack = mlp.experts.gate_up_proj
    stack.data = torch.cat(stack.data.chunk(2, 1)[::-1], 1)


def _in_turn(mlp: Any) -> None:
    stack = mlp.experts.gate_up_proj
    stack.data = torch.cat([stack.data[:, ::2], stack.data[:, 1::2]], 1)


def _activation(mlp: Any) -> None:
    mlp.experts.act_fn = nn.GELU()


def _without_bias(mlp: Any) -> None:
    mlp.experts.down_proj_bias.data.zero_()


def _flag(name: str, value: object) -> Callable[[Any], None]:
    return lambda mlp: setattr(mlp.gate, name, value)


def _doubled(mlp: Any) -> None:
    mlp.register_forward_hook(lambda _, args, out: 2 * out)


#: Bug -> model, what is changed, where it shows, and the name of the cause.
BUGS: dict[str, tuple[str, Callable[[Any], None], str, str]] = {
    "scaled twice": (
        "glm4-moe", _kernel(lambda f, m, x, ids, w: f(x, ids, 2.5 * w)), "combine", "weights_scaled_twice",
    ),
    "renormalised in the kernel": (
        "olmoe", _kernel(lambda f, m, x, ids, w: f(x, ids, w / w.sum(-1, keepdim=True))), "combine",
        "weights_renormalised_at_sum",
    ),
    "without weights": (
        "qwen3-moe", _kernel(lambda f, m, x, ids, w: f(x, ids, torch.ones_like(w))), "combine", "combine_unweighted",
    ),
    "weighed twice": (
        "olmoe", _kernel(lambda f, m, x, ids, w: f(x, ids, w * w)), "combine", "weights_applied_twice",
    ),
    "a lost expert": (
        "qwen3-moe", _kernel(lambda f, m, x, ids, w: f(x, ids, w.masked_fill(ids == 3, 0))), "combine", "experts_lost",
    ),
    "backwards": ("mixtral", _kernel(lambda f, m, x, ids, w: f(x, 7 - ids, w)), "combine", "experts_reversed"),
    "counted from 1": (
        "qwen2-moe", _kernel(lambda f, m, x, ids, w: f(x, (ids + 1) % 8, w)), "combine", "experts_counted_from_1",
    ),
    "gate and up": ("qwen3-moe", _exchanged, "combine", "activation_exchanged"),
    "a stack in turn": ("qwen3-moe", _in_turn, "combine", "activation_split"),
    "another activation": ("qwen3-moe", _activation, "combine", "activation_function"),
    "no shared expert": ("qwen2-moe", _shared(0), "combine", "shared_expert_missing"),
    "the shared expert twice": ("glm4-moe", _shared(2), "combine", "shared_expert_scaled"),
    "weighed inputs": ("qwen3-moe", _kernel(_weighed_inputs), "combine", "experts_weighed_elsewhere"),
    "the sum twice": ("mixtral", _doubled, "combine", "combine_applied"),
    "not renormalised": ("qwen3-moe", _flag("norm_topk_prob", False), "topk_weights", "weights_not_renormalised"),
    "renormalised": ("olmoe", _flag("norm_topk_prob", True), "topk_weights", "weights_renormalised"),
    "not scaled": ("glm4-moe", _flag("routed_scaling_factor", 1.0), "topk_weights", "weights_unscaled"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bug", BUGS)
def test_wrong_experts_are_named(bug: str, tmp_path: Path) -> None:
    model, change, tap, name = BUGS[bug]
    found = explained(tiny_variant(tmp_path, model), tmp_path, "float32", change)
    first = found.causes[0]
    assert (first.tap.split(".mlp.")[1], first.name) == (tap, name)
    assert all(one.alternative for one in found.causes[1:])


def _weighed_outputs(mlp: Any) -> None:
    """Llama 4's mixture with the weights of its experts where other models have them."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.reshape(-1, hidden.shape[-1])
        scores, logits = mlp.router(x)
        each = mlp.experts(x.repeat(scores.shape[1], 1)).unflatten(0, (scores.shape[1], -1))
        return mlp.shared_expert(x) + torch.einsum("enh,ne->nh", each, scores), logits

    mlp.forward = forward


def test_weights_on_what_the_experts_of_llama_4_give_are_named(tmp_path: Path) -> None:
    path = tiny_variant(tmp_path, "llama4", num_experts_per_tok=2)
    assert explained(path, tmp_path / "right", "float32").causes == ()
    found = explained(path, tmp_path, "float32", _weighed_outputs)
    assert [one.name for one in found.causes if not one.alternative] == ["experts_weighed_elsewhere"]
    assert all(one.tap.endswith(".mlp.combine") for one in found.causes)


def test_a_bias_of_the_experts_that_is_left_out_is_named(tmp_path: Path) -> None:
    """gpt-oss, whose biases are zeros unless they are set."""
    found = explained(tiny_variant(tmp_path, "gpt-oss"), tmp_path, "float32", _without_bias)
    assert [one.name for one in found.causes] == ["expert_bias_missing"]


def test_a_bias_of_the_experts_that_is_added_without_weights_is_named(tmp_path: Path) -> None:
    def unweighed(f: Experts, m: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return f(x, ids, w) + ((1 - w)[..., None] * m.down_proj_bias[ids]).sum(1)

    found = explained(tiny_variant(tmp_path, "gpt-oss"), tmp_path, "float32", _kernel(unweighed))
    assert [one.name for one in found.causes] == ["expert_bias_unweighed"]


def _with_corrections(path: Path, around: float) -> Path:
    """The checkpoint with correction biases about a value, as training leaves them."""
    weights = load_file(path / "model.safetensors")
    for name in [one for one in weights if one.endswith("e_score_correction_bias")]:
        noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))
        weights[name] = around + 0.2 * noise
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_correction_biases_in_fewer_bits_are_named(tmp_path: Path) -> None:
    """Far above the scores that they correct."""
    path = _with_corrections(tiny_variant(tmp_path, "glm4-moe"), around=4.0)

    def rounded(mlp: Any) -> None:
        bias = mlp.gate.e_score_correction_bias
        bias.data = bias.data.bfloat16().float()

    found = explained(path, tmp_path, "float32", rounded)
    assert (found.causes[0].tap[-12:], found.causes[0].name) == ("mlp.topk_ids", "correction_in_bfloat16")


def _router_with(name: str, method: Callable[..., Tensor]) -> Callable[[Any], None]:
    """The router runs with another method of tensors; the real one is its first argument."""
    real = getattr(Tensor, name)

    def put(mlp: Any) -> None:
        forward = mlp.gate.forward

        def routed(*args: Any) -> Any:
            with patch.object(Tensor, name, lambda *given: method(real, *given)):
                return forward(*args)

        mlp.gate.forward = routed

    return put


def test_scores_in_fewer_bits_are_named(tmp_path: Path) -> None:
    low = _router_with("sigmoid", lambda sigmoid, x: sigmoid(x).bfloat16().float())
    first = explained(tiny_variant(tmp_path, "deepseek-v3"), tmp_path, "float32", low).causes[0]
    assert (first.tap[-16:], first.name) == ("mlp.topk_weights", "scores_in_bfloat16")
