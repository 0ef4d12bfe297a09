"""Linear attention of transformers, recorded as attach does: what is right is not accused, what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from lockstep.workbench.diagnosis.hypotheses.head_orders import by_columns, interleaved
from tests.checkpoints import tiny_variant
from tests.workbench.diagnosis.attached import IDS, attached_and_diagnosed

pytestmark = pytest.mark.sampled_file(2)

FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_right_linear_attention_is_judged_and_not_accused(name: str, dtype: str, tmp_path: Path) -> None:
    found = attached_and_diagnosed(tiny_variant(tmp_path, name), tmp_path, dtype)
    assert (found.causes, found.wrong, found.notes, found.unjudged) == ((), (), (), ())


def _linear(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                change(layer.linear_attn)

    return put


def _cast(parameter: Any) -> None:
    parameter.data.copy_(parameter.data.bfloat16())


def _exchanged(part: Any) -> None:
    part.A_log.data, part.dt_bias.data = part.dt_bias.data, part.A_log.data


#: Bug -> what is changed, where it shows, and the name of the cause.
BUGS: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "the norm by 1 + weight": (
        _linear(lambda part: part.norm.weight.data.add_(1)), "attn.gated_norm", "gated_norm_applied",
    ),
    "the convolution backwards": (
        _linear(lambda part: part.conv1d.weight.data.copy_(part.conv1d.weight.data.flip(-1))), "attn.conv_q",
        "conv_applied",
    ),
    "the rate and the bias of decays exchanged": (_linear(_exchanged), "attn.decay", "decay_exchanged"),
    "the rates in bfloat16": (
        _linear(lambda part: [_cast(one) for one in (part.A_log, part.dt_bias)]), "attn.decay", "decay_precision",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_linear_attention_is_named(bug: str, tmp_path: Path) -> None:
    change, tap, name = BUGS[bug]
    first = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3-next"), tmp_path, "float32", change).causes[
        0
    ]
    assert (first.tap, first.name) == (f"layers.0.{tap}", name)


@_linear
def _heads_dealt(part: Any) -> None:
    """Value heads stand by key head in turn, not beside those that share one, as in files for llama.cpp."""
    order = torch.as_tensor(interleaved(part.num_v_heads, part.num_v_heads // part.num_k_heads))
    columns = torch.as_tensor(by_columns(order.numpy(), part.head_v_dim))
    of_keys = 2 * part.key_dim
    for weight in (part.in_proj_qkv.weight, part.conv1d.weight):
        weight.data[of_keys:] = weight.data[of_keys:][columns]
    part.in_proj_z.weight.data = part.in_proj_z.weight.data[columns]
    for vector in (part.in_proj_b.weight, part.in_proj_a.weight, part.A_log, part.dt_bias):
        vector.data = vector.data[order]
    part.out_proj.weight.data = part.out_proj.weight.data[:, columns]


def test_value_heads_in_another_order_are_named_wherever_they_are_read(tmp_path: Path) -> None:
    causes = attached_and_diagnosed(
        tiny_variant(tmp_path, "qwen3.5"), tmp_path, "float32", _heads_dealt
    ).causes
    named = {one.tap.removeprefix("layers.0.attn."): one.text for one in causes}
    assert named.keys() >= {"in_proj_v", "in_proj_z", "in_proj_b", "conv_v", "decay", "out_proj"}
    assert all("interleaved groups" in text for text in named.values()), named
    assert "A_log of heads" in named["decay"]
    assert "dt_bias of heads" in named["decay"]


def test_a_state_that_decode_steps_forget_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = modeling_qwen3_next.torch_recurrent_gated_delta_rule

    def forgetful(*args: Any, **named: Any) -> Any:
        return rule(*args, **{**named, "initial_state": 0 * named["initial_state"]})

    monkeypatch.setattr(modeling_qwen3_next, "torch_recurrent_gated_delta_rule", forgetful)
    first = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3-next"), tmp_path, "float32").causes[0]
    assert (first.tap, first.name, first.steps) == ("layers.0.attn.state", "state_operand", (1, 2))


def test_a_state_that_is_kept_in_16_bits_between_passes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Cache.update_recurrent_state
    monkeypatch.setattr(
        Cache, "update_recurrent_state", lambda self, x, *args: update(self, x.bfloat16().float(), *args)
    )
    found = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3-next"), tmp_path, "bfloat16").causes
    assert {one.text for one in found} == {"the sequence's own state is rounded to bfloat16"}
    assert {one.kind for one in found} == {"precision"}
    assert found[0].steps == (1, 2)
    assert all(
        set(one.steps) <= {1, 2} for one in found
    )  # what reads it may show the rounding in one of them alone


def test_what_is_read_from_a_state_times_a_factor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        right = getattr(modeling_qwen3_next, name)

        def rule(*args: Any, right: Any = right, **named: Any) -> Any:
            read, state = right(*args, **named)
            return 0.7 * read, state

        monkeypatch.setattr(modeling_qwen3_next, name, rule)
    first = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3-next"), tmp_path, "float32").causes[0]
    assert (first.tap, first.kind) == ("layers.0.attn.delta", "delta")
    assert first.text == "the result is multiplied by 0.7"


def test_any_operand_of_a_state_times_a_factor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        right = getattr(modeling_qwen3_next, name)

        def rule(*args: Any, right: Any = right, **named: Any) -> Any:
            return right(*args, **{**named, "beta": 0.6 * named["beta"]})

        monkeypatch.setattr(modeling_qwen3_next, name, rule)
    first = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3-next"), tmp_path, "float32").causes[0]
    assert (first.tap, first.name, first.text) == (
        "layers.0.attn.state", "state_applied", "beta is multiplied by 0.6",
    )  # fmt: skip


def test_rows_that_another_request_has_left_to_the_convolution_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[int, Any] = {}
    update = Cache.update_conv_state

    def kept(self: Any, x: Any, layer: int, *args: Any, **named: Any) -> Any:
        if layer in rows and self.get_conv_state(layer) is None:
            x = torch.cat([rows[layer], x], -1)
        out = update(self, x, layer, *args, **named)
        rows[layer] = self.layers[layer].conv_states[0]
        return out

    monkeypatch.setattr(Cache, "update_conv_state", kept)
    path = tiny_variant(tmp_path, "qwen3-next")
    causes = attached_and_diagnosed(path, tmp_path, "float32", prompts=(IDS, IDS[5:], IDS[3:])).causes
    stated = "what the sequence before it has left is read instead of the sequence's own last rows"
    assert {one.text for one in causes} == {stated}
    assert all(one.place.endswith("positions 0–2, sequences 1, 2") for one in causes if "conv" in one.tap)


def test_a_state_that_is_lost_between_chunks_of_a_prompt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, update = modeling_qwen3_next.torch_chunk_gated_delta_rule, LinearAttentionLayer.update_conv_state

    def fresh(self: Any, x: Any, *args: Any, **named: Any) -> Any:
        if x.shape[-1] > 1:
            self.has_previous_state = dict.fromkeys(self.has_previous_state, False)
        return update(self, x, *args, **named)

    monkeypatch.setattr(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule",
        lambda *args, **named: rule(*args, **{**named, "initial_state": None}),
    )  # fmt: skip
    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", fresh)
    path = tiny_variant(tmp_path, "qwen3-next")
    causes = attached_and_diagnosed(path, tmp_path, "float32", prefill_chunk_size=5).causes
    assert {one.name for one in causes} == {"conv_restarted", "state_restarted", "delta_restarted"}
    assert all("positions 5–7, 10–12" in one.place for one in causes if "conv" in one.tap)


def _undecayed(g: Any, tokens: slice) -> Any:
    g = g.clone()
    g[:, tokens] = 0
    return g


def _in_bfloat16(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


#: What the rule of the state is given instead -> dtype, and the sentence.
RULES: dict[str, tuple[Callable[..., dict[str, Any]], str, str]] = {
    "another key head": (
        lambda query, key, **named: {"query": query.flip(2), "key": key.flip(2)}, "float32",
        "value heads are given other key heads than their own: ",
    ),
    "the norm in bfloat16": (
        lambda query, key, **named: {
            "query": _in_bfloat16(query), "key": _in_bfloat16(key), "use_qk_l2norm_in_kernel": False,
        }, "bfloat16", "queries and keys are divided by their length in bfloat16",
    ),
    "the decay in bfloat16": (
        lambda g, **named: {"g": g.exp().bfloat16().float().log()}, "bfloat16",
        "the share of the state that is kept, the exponential of its decay, is rounded to bfloat16",
    ),
    "no decay where a chunk begins": (
        lambda g, **named: {"g": _undecayed(g, slice(8, None, 8))},
        "float32", "the decay of the first token of each chunk of 8 is lost",
    ),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", RULES)
def test_what_the_rule_of_the_state_is_given_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, dtype, words = RULES[case]
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        right = getattr(modeling_qwen3_5, name)

        def rule(query: Any, key: Any, value: Any, right: Any = right, **named: Any) -> Any:
            given = {"query": query, "key": key, "value": value, **named}
            return right(**{**given, **change(**given)})

        monkeypatch.setattr(modeling_qwen3_5, name, rule)
    first = attached_and_diagnosed(tiny_variant(tmp_path, "qwen3.5"), tmp_path, dtype).causes[0]
    assert first.tap == "layers.0.attn.state"
    assert first.text.startswith(words)
