"""Each family of models: a faultless engine matches with every operation judged, and what is planted in the parts that
are its own is found where it begins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from lockstep.engine.config import DType, EngineConfig
from lockstep.sessions import Session
from lockstep.workbench.checking.forced_run import check, record_reference
from lockstep.workbench.checking.pipeline import CheckResult, Reference
from lockstep.workbench.diagnosis.operations.facts import Facts
from lockstep.workbench.diagnosis.operations.recorded import RecordedTaps
from lockstep.workbench.diagnosis.operations.site import Site
from lockstep.workbench.diagnosis.operations.sites import sites
from lockstep.workbench.diagnosis.recording import Recording
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.models.capture import FULL
from lockstep.workbench.models.opening import open_model
from tests.by_turns import by_turns
from tests.checkpoints import ALIKE, ALIKE_WITH_EXPERTS, tiny_variant

#: Longer than every window, and a short one.
PROMPTS = [[3, 130, 17, 99, 4, 64, 5, 12, 77, 120, 31, 8, 56], [3, 130, 17, 99, 4]]
STEPS = 3
FAMILIES = (
    "olmo2", "gemma2", "gemma3", "phi3-window", "granite", "smollm3", "glm4", "olmo3", "starcoder2", "qwen3.5",
    "gemma4", "cohere2", "hunyuan", "nemotron", "apertus", "phi-normed", "olmo", "lfm2", "granite4",
    "falcon-h1", "falcon-h1-normed", "falcon-h1-norm-first",
)  # fmt: skip
#: Those that have experts; groups of ranks among which these are divided.
WITH_EXPERTS = (
    "qwen3-moe", "mixtral", "olmoe", "qwen2-moe", "glm4-moe", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3",
    "glm4-moe-lite", "deepseek-v32", "glm-moe-dsa", "gpt-oss", "minimax-m2", "qwen3-next",
    "qwen3.5-moe", "llama4", "phimoe", "lfm2-moe", "gemma4-moe",
    "granite4-moe", "nemotron-h-moe",
)  # fmt: skip
#: (model, rule) -> where it shows first.
PLANTED = {
    ("olmo2", "sum_squares=own"): "layers.0.attn.q_norm",
    ("olmo2", "norm=unweighted"): "layers.0.post_attn_norm",
    ("gemma2", "norm=without_one"): "layers.0.attn_norm",
    ("gemma2", "embedding=unscaled"): "embed",
    ("gemma2", "soft_cap=missing"): "layers.0.attn.scores",
    ("gemma2", "logits=raw"): "logits",
    ("gemma2", "window=ignored"): "layers.0.attn.scores",
    ("gemma3", "layer_rope=same"): "layers.0.attn.q_rope",
    ("gemma3", "window=ignored"): "layers.0.attn.scores",
    ("phi3-window", "layer_rope=whole"): "layers.0.attn.q_rope",
    ("phi3-window", "act=swapped"): "layers.0.mlp.act",
    ("granite", "embedding=unscaled"): "embed",
    ("granite", "residual_factor=one"): "layers.0.attn_residual",
    ("granite", "logits=raw"): "logits",
    ("smollm3", "layer_rope=same"): "layers.1.attn.q_rope",
    ("glm4", "layer_rope=halves"): "layers.0.attn.q_rope",
    ("glm4", "layer_rope=whole"): "layers.0.attn.q_rope",
    ("starcoder2", "window=ignored"): "layers.0.attn.scores",
    ("starcoder2", "load_bias=false"): "layers.0.attn.q_proj",
    ("olmo3", "layer_rope=same"): "layers.0.attn.q_rope",
    ("olmo3", "sum_squares=own"): "layers.0.attn.q_norm",
    ("cohere2", "logits=raw"): "logits",
    ("cohere2", "layer_rope=halves"): "layers.0.attn.q_rope",
    ("cohere2", "layer_rope=same"): "layers.1.attn.q_rope",
    ("hunyuan", "norm=unweighted"): "layers.0.attn_norm",
    ("nemotron", "load_bias=false"): "layers.0.attn.q_proj",
    ("apertus", "xielu=raw_slope"): "layers.0.mlp.act",
    ("lfm2", "conv_kept=frozen"): "layers.0.attn.conv",
    ("lfm2", "plain_conv=backwards"): "layers.0.attn.conv",
    ("lfm2", "conv_in_gate=missing"): "layers.0.attn.conv_in",
    ("lfm2", "conv_out_gate=missing"): "layers.0.attn.conv_gated",
    ("falcon-h1", "multiplied=without_parts"): "layers.0.attn.ssm_z_scaled",
    ("falcon-h1", "multiplied=without_key"): "layers.0.attn.k_scaled",
    ("falcon-h1", "mixed=states"): "layers.0.attn.mixed",
    ("falcon-h1", "mixed=attention"): "layers.0.attn.mixed",
    ("falcon-h1-normed", "ssm_norm=gate_after"): "layers.0.attn.ssm_norm",
    ("olmo", "clip_qkv=missing"): "layers.0.attn.q_clip",
}


#: (model, rule) -> where it shows first, and the cause that is named first.
PLANTED_IN_EXPERTS = {
    ("qwen3-moe", "choice=worst"): ("layers.0.mlp.topk_ids", ""),
    ("qwen3-moe", "choice_weights=as_they_are"): ("layers.0.mlp.topk_weights", "not renormalised"),
    ("mixtral", "tensor_of=next_expert"): ("layers.0.mlp.experts.gate", "expert 1 after the chosen one"),
    ("mixtral", "act=swapped"): ("layers.0.mlp.experts.act", "is computed instead of silu"),
    ("olmoe", "choice_weights=as_shares"): ("layers.0.mlp.topk_weights", "renormalised over the chosen"),
    ("olmoe", "router_scores=sigmoid"): ("layers.0.mlp.topk_weights", "sigmoids of the logits"),
    ("olmoe", "own_experts=without_last"): ("layers.*.mlp.experts.gate", "computed by nobody"),
    ("qwen2-moe", "shared_expert=ungated"): ("layers.1.mlp.combine.partial", "not multiplied by its gate"),
    ("qwen2-moe", "combine=unweighted"): ("layers.1.mlp.combine.partial", "without their weights"),
    ("glm4-moe", "router_scores=softmax"): ("layers.1.mlp.topk_*", ""),
    ("glm4-moe", "choice=uncorrected"): ("layers.1.mlp.topk_ids", "without the correction bias"),
    ("glm4-moe", "choice=ungrouped"): ("layers.1.mlp.topk_ids", "from all groups"),
    ("glm4-moe", "choice_weights=scaled_twice"): ("layers.1.mlp.topk_weights", "applied twice"),
    ("glm4-moe", "choice_weights=unscaled"): ("layers.1.mlp.topk_weights", "routed_scaling_factor is not applied"),
    ("glm4-moe", "choice_weights=corrected"): ("layers.1.mlp.topk_weights", "correction bias is in the weights"),
    ("glm4-moe", "own_experts=in_reverse"): ("layers.1.mlp.experts.gate", "another expert|reverse order"),
    ("glm4-moe", "shared_expert=missing"): ("layers.1.mlp.combine.partial", "shared expert is not added"),
    ("glm4-moe", "shared_expert=on_every_rank"): ("layers.1.mlp.combine.partial", "shared expert counts 2 times"),
    ("deepseek-v2", "choice=ungrouped"): ("layers.1.mlp.topk_ids", "from all groups"),
    ("deepseek-v2", "scale=v_head_dim"): ("layers.0.attn.scores", "width of a value"),
    ("deepseek-v3", "scale=without_mscale"): ("layers.0.attn.scores", "mscale_all_dim is left out"),
    ("deepseek-v3", "scale=mscale_twice"): ("layers.0.attn.scores", "applied twice"),
    ("deepseek-v3", "scale=mscale"): ("layers.0.attn.scores", "factor of mscale, which"),
    ("deepseek-v3", "scale=nope_dim"): ("layers.0.attn.scores", "not rotated"),
    ("deepseek-v3", "layer_rope=first"): ("layers.0.attn.q_rope", "first channels"),
    ("deepseek-v3", "layer_rope=halves"): ("layers.0.attn.q_rope", "not neighbours"),
    ("deepseek-v3", "query_latent=unnormed"): ("layers.0.attn.q_a_norm", "norm is skipped"),
    ("deepseek-v3", "split_latent=unnormed"): ("layers.0.attn.kv_a_norm", "norm is skipped"),
    ("deepseek-v3", "split_latent=together"): ("layers.0.attn.kv_a_norm", "latent and rotated part of the key"),
    ("deepseek-v3", "split_latent=key_too"): ("layers.0.attn.rope_key", "normed before, by itself"),
    ("deepseek-v3", "written_latent=shard"): ("layers.0.attn.kv_a_norm", "this rank's share"),
    ("deepseek-v3", "written_latent=summed"): ("layers.0.attn.*", "multiplied by 2|2 times"),
    ("deepseek-v3", "latent_keys=first_head"): ("layers.0.attn.keys", "head 0 of each rank alone"),
    ("deepseek-v3", "latent_keys=rotated_first"): ("layers.0.attn.keys", "before the part of each head"),
    ("deepseek-v3", "cache_heads=float8"): ("layers.0.attn.latent_cache", "float8"),
    ("deepseek-v32", "index_norm=unbiased"): ("layers.0.attn.index_k_norm", r"indexer\.k_norm\.bias is not added"),
    ("deepseek-v32", "index_keys=unrotated"): ("layers.0.attn.index_k_rope", "not applied at all"),
    ("deepseek-v32", "index_sight=bidirectional"): ("layers.0.attn.index_scores", "no causal mask"),
    ("deepseek-v32", "key_choice=one_fewer"): ("layers.0.attn.index_chosen", "7 keys instead of 8"),
    ("deepseek-v32", "chosen_keys=ignored"): ("layers.0.attn.scores", "what the indexer chose is ignored"),
    ("gpt-oss", "sinks=left_out"): ("layers.0.attn.probs", "sinks are left out"),
    ("gpt-oss", "sinks=afterwards"): ("layers.0.attn.probs", "made already, are divided by"),
    ("gpt-oss", "sinks=unshifted"): ("layers.0.attn.probs", "not off the sinks"),
    ("gpt-oss", "sinks=next_head"): ("layers.0.attn.probs", "heads that share a KV head"),
    ("gpt-oss", "shard=sinks_of_rank_0"): ("layers.0.attn.probs", "those of rank 0's heads"),
    ("gpt-oss", "act=unclamped"): ("layers.*.mlp.experts.act", "not clamped"),
    ("gpt-oss", "act=plain_sigmoid"): ("layers.0.mlp.experts.act", "alpha is 1 instead of 1.702"),
    ("gpt-oss", "act=without_one"): ("layers.0.mlp.experts.act", "1 is not added to up"),
    ("gpt-oss", "expert_gate_up=exchanged"): ("layers.0.mlp.experts.gate", "up_proj of each expert is used"),
    ("gpt-oss", "expert_gate_up=halves"): ("layers.0.mlp.experts.gate", "halves of the experts' stack"),
    ("gpt-oss", "expert_bias=missing"): ("layers.0.mlp.experts.down", "bias is not added"),
    ("gpt-oss", "expert_bias=on_every_rank"): ("layers.0.mlp.experts.down", ""),
    ("gpt-oss", "choice_weights=as_they_are"): ("layers.0.mlp.topk_weights", "a softmax before the choice"),
    ("gpt-oss", "window=ignored"): ("layers.0.attn.scores", "window"),
    ("minimax-m2", "expert_gate_up=in_turn"): ("layers.0.mlp.experts.gate", "read in turn"),
    ("minimax-m2", "sum_squares=own"): ("layers.0.attn.q_norm", ""),
    ("minimax-m2", "choice=uncorrected"): ("layers.0.mlp.topk_ids", "without the correction bias"),
    ("minimax-m2", "layer_rope=whole"): ("layers.0.attn.q_rope", ""),
    ("phimoe", "choice_weights=softmax"): ("layers.0.mlp.topk_weights", "not SparseMixer's"),
    ("gemma4-moe", "expert_scale=missing"): ("layers.0.mlp.topk_weights", "number of each expert"),
    ("gemma4-moe", "router_norm=missing"): ("layers.0.mlp.router_norm", "its own norm is left out"),
    ("llama4", "chunk=ignored"): ("layers.0.attn.scores", "not cut into chunks of 8"),
    ("llama4", "chunk=sliding"): ("layers.0.attn.scores", "a sliding window of 8 takes the place of chunks"),
    ("llama4", "unit_qk_norm=missing"): ("layers.0.attn.q_unit_norm", "not normalised"),
    ("llama4", "query_factor=missing"): ("layers.1.attn.q_scaled", "not multiplied by the factor"),
    ("llama4", "expert_input=unweighed"): ("layers.1.mlp.experts.input", "not multiplied by their weights"),
}  # fmt: skip


#: Rule -> where it shows first in a model with linear attention, and the cause that is named first.
PLANTED_IN_STATES = {
    "state_before=left": ("layers.0.attn.state", "state of sequence 0 is read instead of the sequence's own"),
    "state_before=restarted": ("layers.0.attn.state", "the pass begins with zeros"),
    "conv_kept=one_short": ("layers.0.attn.conv_q", "state is one token short"),
    "conv_kept=frozen": ("layers.0.attn.conv_q", "which decode steps do not update"),
    "short_conv=linear": ("layers.0.attn.conv_q", "SiLU after the short convolution is left out"),
    "l2_norm=missing": ("layers.0.attn.q_l2", "no l2 norm"),
    "beta=linear": ("layers.0.attn.beta", "not passed through a sigmoid"),
    "decay=linear": ("layers.0.attn.decay", "without softplus"),
    "decay=unbiased": ("layers.0.attn.decay", "without dt_bias"),
    "key_heads=tiled": ("layers.0.attn.state", "key heads are tiled, not repeated"),
    "state_kept=bfloat16": ("layers.0.attn.state", "rounded to bfloat16"),
    "gated_norm=ungated": ("layers.0.attn.gated_norm", "not multiplied by its gate"),
    "output_gate=missing": ("layers.1.attn.gated", "output gate is left out"),
    "norm=without_one": ("layers.0.attn_norm", ""),
}


#: The same in a model with Mamba-2.
PLANTED_IN_MAMBA = {
    "state_before=left": (
        "layers.0.attn.ssm_state",
        "state of sequence 0 is read instead of the sequence's own",
    ),
    "state_before=restarted": ("layers.0.attn.ssm_state", "the pass begins with zeros"),
    "conv_kept=one_short": ("layers.0.attn.ssm_conv_x", "state is one token short"),
    "state_kept=bfloat16": ("layers.0.attn.ssm_state", "rounded to bfloat16"),
    "ssm_conv=unbiased": ("layers.0.attn.ssm_conv_x", "bias of the convolution is left out"),
    "ssm_step=unbiased": ("layers.0.attn.ssm_step", "without dt_bias"),
    "ssm_step=linear": ("layers.0.attn.ssm_step", "without softplus"),
    "ssm_rate=log": ("layers.0.attn.ssm_state", "A_log itself"),
    "ssm_skip=missing": ("layers.0.attn.ssm_read", "the skip is left out"),
    "ssm_norm=gate_after": ("layers.0.attn.ssm_norm", "after the norm, not before"),
    "sum_squares=own_channels": ("layers.0.attn.ssm_norm", "the rank's own channels"),
}


#: The same in Gemma-4.
PLANTED_IN_GEMMA4 = {
    "value_norm=missing": ("layers.0.attn.v_norm", "not normalised"),
    "value_norm=keys": ("layers.0.attn.v_norm", "through the norm of keys"),
    "shared_cache=first": ("layers.4.attn.k_cache", "keys of layer 0, not those of layer 2"),
    "rope_frequencies=unscaled": (
        "layers.1.attn.q_rope",
        "proportional scaling of the frequencies is not applied",
    ),
    "layer_inputs=unscaled": ("layer_inputs", "not divided by the root of 2"),
    "layer_inputs=embedding_alone": ("layer_inputs", "lack the product"),
    "layer_input=next": ("layers.0.layer_input", "per-layer input of layer 1"),
    "layer_scalar=missing": ("layers.0.mlp_residual", "not multiplied by its scalar"),
}


@contextmanager
def running(
    folder: Path, name: str, tp: int, dtype: DType = "float32", ep: int = 1
) -> Iterator[tuple[Inferior, Reference]]:
    """A tiny model of that variant on so many ranks, which leave everything behind, and what it is held against."""
    model = open_model(str(tiny_variant(folder, name)))
    config = EngineConfig(tp=tp, ep=ep, dtype=dtype, max_tokens=64, threads=1)
    with Inferior(model.path, model.config, config, capture=FULL) as inferior:
        yield inferior, record_reference(model.path, PROMPTS, STEPS, dtype)


def checked(folder: Path, inferior: Inferior, reference: Reference, **rules: str) -> CheckResult:
    return check(inferior, reference, folder / "run.session", rules=rules)


#: (ranks, groups of ranks that divide the experts, dtype): every model is tried with one of these, and those that are
#: not made of the parts of others with one rank as well.
DIVIDED: tuple[tuple[int, int, DType], ...] = (
    (2, 1, "float32"),
    (4, 1, "float32"),
    (2, 1, "bfloat16"),
    (2, 1, "float16"),
)
DIVIDED_EXPERTS: tuple[tuple[int, int, DType], ...] = (
    (2, 2, "float32"),
    (2, 1, "float32"),
    (4, 2, "bfloat16"),
    (4, 1, "float32"),
    (4, 2, "float32"),
    (2, 1, "bfloat16"),
)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", [*FAMILIES, *WITH_EXPERTS])
def test_a_faultless_engine_matches_and_every_operation_is_judged_right(name: str, tmp_path: Path) -> None:
    assert_right(tmp_path, name, 1, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *by_turns((*FAMILIES, *ALIKE), DIVIDED),
        *by_turns((*WITH_EXPERTS, *ALIKE_WITH_EXPERTS), DIVIDED_EXPERTS),
    ],
)
def test_so_does_one_that_is_divided(name: str, layout: tuple[int, int, DType], tmp_path: Path) -> None:
    tp, ep, dtype = layout
    assert_right(tmp_path, name, tp, dtype, ep)


def assert_right(folder: Path, name: str, tp: int, dtype: DType, ep: int = 1) -> None:
    """A faultless engine matches, and every operation is judged."""
    with running(folder, name, tp, dtype, ep) as (inferior, reference):
        result = checked(folder, inferior, reference)
    assert result.judgement.verdict == "match"
    absent = {one.tap for one in result.judgement.taps if one.verdict == "absent"}
    assert all(tap.endswith(".partial") for tap in absent)
    with Session.open(folder / "run.session") as session:
        found = list(sites(RecordedTaps(Recording(session)), Facts.of(inferior.path, dtype)))
        assert {one.tap for one in found} == {tap.name for tap in session.taps}
    assert [one for one in found if not isinstance(one, Site) or one.deviation is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in PLANTED))
def test_what_is_planted_is_found_where_it_begins(name: str, tmp_path: Path) -> None:
    with running(tmp_path, name, 2) as (inferior, reference):
        for fault, tap in ((rule, tap) for (of, rule), tap in PLANTED.items() if of == name):
            rule, _, value = fault.partition("=")
            result = checked(tmp_path, inferior, reference, **{rule: value})
            first = result.judgement.first_divergence
            assert first is not None
            assert first.tap == tap, fault
            assert result.causes[0].name != "unnamed", fault


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ep"), by_turns(WITH_EXPERTS, (1, 2)))
def test_what_is_planted_in_experts_is_found_and_named(name: str, ep: int, tmp_path: Path) -> None:
    with running(tmp_path, name, 2, ep=ep) as (inferior, reference):
        for fault, (tap, words) in (
            (rule, reported) for (of, rule), reported in PLANTED_IN_EXPERTS.items() if of == name
        ):
            rule, _, value = fault.partition("=")
            result = checked(tmp_path, inferior, reference, **{rule: value})
            first = result.judgement.first_divergence
            if (
                ep == 2 and fault == "expert_bias=on_every_rank"
            ):  # each expert is whole on its rank: nothing is summed
                assert first is None
                continue
            assert first is not None, fault
            assert fnmatchcase(first.tap, tap), fault
            assert re.search(words, result.causes[0].text), fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "planted"),
    [("qwen3.5", PLANTED_IN_STATES), ("granite4-moe", PLANTED_IN_MAMBA), ("gemma4", PLANTED_IN_GEMMA4)],
    ids=["states", "mamba", "gemma4"],
)
def test_what_is_planted_in_its_own_parts_is_found_and_named(
    name: str, planted: dict[str, tuple[str, str]], tmp_path: Path
) -> None:
    with running(tmp_path, name, 2) as (inferior, reference):
        for fault, (tap, words) in planted.items():
            rule, _, value = fault.partition("=")
            result = checked(tmp_path, inferior, reference, **{rule: value})
            first = result.judgement.first_divergence
            assert first is not None, fault
            assert first.tap == tap, fault
            assert re.search(words, result.causes[0].text), fault


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), [("granite", "0.3"), ("gemma3", "0.20412 = 1/sqrt(24)")])
def test_a_wrong_scale_is_reported_beside_the_model_s_own(name: str, scale: str, tmp_path: Path) -> None:
    with running(tmp_path, name, 1) as (inferior, reference):
        result = checked(tmp_path, inferior, reference, scale="one")
    first, cause = result.judgement.first_divergence, result.causes[0]
    assert first is not None
    assert first.tap == "layers.0.attn.scores"
    assert f"scores are scaled by 1 instead of the configured {scale}" in cause.text
    assert "the scale is missing" in cause.text
