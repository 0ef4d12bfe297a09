"""Findings that have one cause are drawn together, those that have not stay apart; the place is reported in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lockstep.engine.graph.formula import FORMULAS
from lockstep.workbench.diagnosis.causes import Extent, causes_of, place_of, taps_in_words
from lockstep.workbench.diagnosis.confidence import confidences
from lockstep.workbench.diagnosis.consequences import folded, misshapen_by_input
from lockstep.workbench.diagnosis.findings import Hypothesis, Survey, WrongOperation
from lockstep.workbench.diagnosis.hypotheses.edits import Edit
from lockstep.workbench.diagnosis.hypotheses.operands import READER
from lockstep.workbench.diagnosis.hypotheses.setting import Setting
from lockstep.workbench.diagnosis.hypotheses.words import sentence_of
from lockstep.workbench.diagnosis.merging import groups
from lockstep.workbench.judgements.cause import cause_lines
from tests.workbench.diagnosis.variants.made import MODEL

EXTENT = Extent(layers=3, ranks=2, steps=(0, 1, 2), decode=frozenset({1, 2}), seqs=(0, 1))
KINDS = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def hypothesis(name: str, fitted: Mapping[str, object], parameters: int = 0, text: str = "") -> Hypothesis:
    return Hypothesis(name, "bias", text or name, fitted, parameters, 4000, 1e-6, 0.4, True, True)


def wrong(tap: str, *found: Hypothesis, order: int = 0, ranks: tuple[int, ...] = (0, 1), ratio: float = 1e5,
          steps: tuple[int, ...] = (0, 1, 2), heads: tuple[int, ...] = ()) -> WrongOperation:  # fmt: skip
    layer = int(tap.split(".")[1]) if tap.startswith("layers.") else None
    return WrongOperation(
        tap=tap, operation="linear", layer=layer, order=order, ranks=ranks, ratio=ratio, single=ratio, max_abs=1.0,
        rel_l2=0.1, steps=steps, seqs=(0, 1), heads=heads, positions=(0, 1), every_row=True, example="e",
        hypotheses=found, tried=("bias_dropped", "transposed"),
    )  # fmt: skip


def test_a_bias_lost_at_q_k_and_v_of_every_layer_is_one_cause() -> None:
    found = [
        wrong(f"layers.{i}.{kind}", hypothesis(
            "bias_dropped", {"bias": f"model.layers.{i}.self_attn.{kind[5:]}.bias", "times": 0},
            text=f"model.layers.{i}.self_attn.{kind[5:]}.bias is not added",
        ), order=10 * i + n)
        for i in range(3) for n, kind in enumerate(KINDS)
    ]  # fmt: skip
    (group,) = groups(found)
    (cause,) = causes_of(group, Survey({one.tap: 2 for one in found}, tuple(found), ()), EXTENT)
    assert (
        cause.in_words()
        == "layers.*.attn.{q,k,v}_proj: model.layers.*.self_attn.{q,k,v}_proj.bias is not added"
    )
    assert (cause.tap, cause.layers, cause.ranks, cause.fault) == (
        "layers.0.attn.q_proj", (0, 1, 2), (0, 1), "load_bias=false",
    )  # fmt: skip
    assert cause.ruled_out == ("transposed",)
    assert any("18 of 18 places" in words for words in cause.evidence)


def at(layer: int, module: str, rank: int = 0) -> Setting:
    """A product of queries, keys or values."""
    name = f"model.layers.{layer}.self_attn.{module}_proj"
    return Setting(
        "linear", f"attn.{module}_proj", layer, MODEL, FORMULAS["linear"], f"{name}.weight", f"{name}.bias", (), "",
        rank, 2, (0, 0), (64, 64), True,
    )  # fmt: skip


def test_modules_that_have_each_others_biases_are_one_cause_that_says_whose() -> None:
    """Told by the structure of the edits, whatever their sentences."""
    bias = "model.layers.{}.self_attn.{}_proj.bias"
    found = [
        wrong(f"layers.{i}.attn.{mine}_proj", replace(
            hypothesis("bias_of_another", {}), edits=(Edit((1,), "operand", (bias.format(i, other),)),),
            setting=at(i, mine),
        ), order=10 * i + n)
        for i in range(3) for n, (mine, other) in enumerate(("kv", "vk"))
    ]  # fmt: skip
    (group,) = groups(found)
    (cause,) = causes_of(group, Survey({one.tap: 2 for one in found}, tuple(found), ()), EXTENT)
    k, v = bias.format("*", "k"), bias.format("*", "v")
    assert cause.in_words() == (
        f"layers.*.attn.{{k,v}}_proj: {v} is added instead of {k}; {k} is added instead of {v}"
    )


def test_ranks_that_have_the_same_shard_are_told_together() -> None:
    same = [(at(i, "q", 1 + i), [Edit((), "map", ("shard",), at=(0.0,))]) for i in range(2)]
    module = "model.layers.*.self_attn.q_proj"
    assert sentence_of(same) == f"each of these ranks computes with rank 0's shard of {module}"


def test_ranks_whose_shards_begin_elsewhere_are_told_apart() -> None:
    shifted = [
        (at(i, "q", rank), [Edit((), "map", ("shard_shifted",), at=(8.0, due, "attn.q_proj", taken))])
        for i in range(2)
        for rank, due, taken in ((1, 24.0, 16.0), (3, 72.0, 64.0))
    ]
    module = "model.layers.*.self_attn.q_proj"
    assert sentence_of(shifted) == (
        f"rank 1 computes with rows 16 and on of {module} instead of 24 and on; "
        f"rank 3 computes with rows 64 and on of {module} instead of 72 and on"
    )


def test_two_causes_of_one_operation_stay_two() -> None:
    one = wrong("layers.0.attn.q_proj", hypothesis("bias_dropped", {"times": 0}))
    two = wrong("layers.2.attn.q_proj", hypothesis("transposed", {}), order=20)
    assert [group.chosen[0].name for group in groups([two, one])] == ["bias_dropped", "transposed"]


def test_other_figures_are_another_cause_and_other_ranks_are_not() -> None:
    near = [
        wrong(f"layers.{i}.attn_norm", hypothesis("eps", {"epsilon": 1e-5 * (1 + i / 100)})) for i in range(2)
    ]
    assert len(groups(near)) == 1
    far = [wrong(f"layers.{i}.attn_norm", hypothesis("eps", {"epsilon": 1e-5 * (1 + i)})) for i in range(2)]
    assert len(groups(far)) == 2
    ranks = [
        wrong("layers.0.mlp.up", hypothesis("shard", {"rank": r, "part": 0}), ranks=(r,)) for r in (0, 1)
    ]
    assert len(groups(ranks)) == 1


def test_what_explains_as_much_with_as_few_numbers_is_told_too() -> None:
    both = (hypothesis("stuck", {}), hypothesis("identity", {}), hypothesis("any_row", {}, parameters=500))
    (group,) = groups([wrong("layers.0.attn.q_rope", *both)])
    found = causes_of(group, Survey({}, (), ()), EXTENT)
    assert [(cause.name, cause.alternative) for cause in found] == [("stuck", False), ("identity", True)]
    first, second = (cause.confidence or 0.0 for cause in found)
    assert 0 < second < 0.2 < 0.8 < first < 0.95, "the first is nearly always right, never surely"
    assert 0.9 < first + second < 1


def test_what_leaves_more_than_rounding_comes_after_an_exact_number() -> None:
    near = replace(hypothesis("other_format", {}), residual=0.05, ratio=2.3)
    exact = replace(hypothesis("scaled", {"factor": 2.0}, parameters=1), residual=0.0, ratio=0.0)
    (group,) = groups([wrong("layers.0.attn.k_cache", near, exact)])
    assert group.chosen[0].name == "scaled"


@pytest.mark.parametrize(("left", "count"), [(0.02, 1), (0.2, 2)])
def test_a_cause_that_leaves_a_few_numbers_alone_at_one_place_is_the_same(left: float, count: int) -> None:
    right = hypothesis("misread", {"to": "int4"})
    nearly = replace(right, residual=left, ratio=0.6, accepted=False)
    found = groups([wrong("layers.0.attn.q_proj", right), wrong("layers.0.attn.k_proj", nearly, order=1)])
    assert len(found) == count


def test_what_none_explains_is_reported_with_what_was_ruled_out() -> None:
    (group,) = groups([wrong("layers.1.mlp.act", steps=(1, 2), ranks=(1,))])
    (cause,) = causes_of(group, Survey({"layers.1.mlp.act": 2}, (), ()), EXTENT)
    assert (cause.kind, cause.name, cause.confidence) == ("unknown", "unnamed", None)
    assert cause.place == "layers.1.mlp.act, rank 1 of 2, decode"
    assert cause.ruled_out == ("bias_dropped", "transposed")
    assert "e" in cause.evidence


def test_confidence_falls_with_noise_and_with_fitted_numbers() -> None:
    def sure(ratio: float, parameters: int) -> float:
        (group,) = groups([wrong("embed", hypothesis("a", {}, parameters), ratio=ratio)])
        return confidences(group)[0]

    assert sure(1e6, 0) > sure(20.0, 0) > sure(4.0, 0)
    assert sure(1e6, 0) > sure(1e6, 100) > sure(1e6, 900)
    assert 0 < sure(3.0, 900) < sure(1e6, 0) < 1


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        (["layers.0.attn.q_rope", "layers.0.attn.k_rope"], "layers.0.attn.{q,k}_rope"),
        ([f"layers.{i}.mlp.act" for i in range(3)], "layers.*.mlp.act"),
        (["layers.0.mlp.down", "layers.2.mlp.down"], "layers.{0,2}.mlp.down"),
        (["layers.0.attn_norm", "final_norm"], "layers.0.attn_norm, final_norm"),
        (["logits"], "logits"),
    ],
)
def test_taps_are_drawn_together(taps: list[str], words: str) -> None:
    assert taps_in_words(taps, 3) == words


def test_heads_and_steps_are_part_of_the_place() -> None:
    found = [wrong("layers.0.attn.scores", heads=(3,), steps=(0,))]
    assert place_of(found, EXTENT) == "layers.0.attn.scores, head 3, the prefill"


def test_one_bug_of_all_norms_is_one_cause_though_the_last_has_another_name() -> None:
    found = [
        wrong(tap, hypothesis("norm_plus_one", {"weight": name, "is": f"{name} is applied as 1 + w"}), order=order)
        for order, (tap, name) in enumerate(
            [("layers.0.attn_norm", "model.layers.0.input_layernorm.weight"),
             ("layers.0.mlp_norm", "model.layers.0.post_attention_layernorm.weight"),
             ("final_norm", "model.norm.weight")]
        )
    ]  # fmt: skip
    assert len(groups(found)) == 1


def positions(tap: str, recorded: bool) -> WrongOperation:
    fitted = {"position": 0, "recorded": recorded}
    return wrong(tap, replace(hypothesis("position_stuck", fitted), kind="positions"), steps=(1, 2))


def test_what_follows_from_the_engines_own_positions_is_reported_with_them() -> None:
    cache = replace(
        wrong("layers.0.attn.k_cache", order=1, steps=(1,)), shape="shape [13, 1, 8] instead of [14, 1, 8]"
    )
    mask = wrong(
        "layers.0.attn.scores", replace(hypothesis("mask_missing", {}), kind="mask"), order=2, steps=(1, 2)
    )
    ((group, after),) = folded(groups([positions("layers.0.attn.q_rope", True), cache, mask]))
    assert len(after) == 2
    (cause,) = causes_of(group, Survey({}, (), ()), EXTENT, after)
    assert cause.follows[0] == "layers.0.attn.k_cache, step 1: shape [13, 1, 8] instead of [14, 1, 8]"
    assert cause.follows[1].endswith("mask_missing")
    assert ("follows", "; ".join(cause.follows)) in list(cause_lines(cause))
    # Of positions that the rotation alone has wrong neither follows, nor does a mask that is wrong in the prefill.
    assert len(folded(groups([positions("layers.0.attn.q_rope", False), cache, mask]))) == 3
    early = replace(mask, steps=(0, 1))
    assert len(folded(groups([positions("layers.0.attn.q_rope", True), cache, early]))) == 2


def test_a_shape_that_an_input_brings_along_follows_from_it() -> None:
    shape = "shape [24, 64] instead of [24, 32]"
    cut = replace(wrong("layers.0.attn.q_proj", hypothesis("sharded_on_in_features", {})), shape=shape)
    turned = replace(wrong("layers.0.attn.q_rope", order=1), shape=shape)
    elsewhere = replace(wrong("layers.1.attn.q_rope", order=2), shape=shape)
    found = folded(groups([cut, turned]))
    assert [len(after) for _, after in found] == [1]
    assert [len(after) for _, after in folded(groups([cut, elsewhere]))] == [0, 0]
    right = replace(cut, shape="")
    assert [len(after) for _, after in folded(groups([right, turned]))] == [0, 0]
    assert misshapen_by_input(groups([cut, turned, elsewhere])) == {turned.tap}


def test_what_has_the_shape_of_a_cause_in_other_layers_is_reported_with_it() -> None:
    """Where NaN goes in, nothing else can be known of the same operation, nor of what comes after it."""
    shape = "shape [24, 64] instead of [24, 32]"
    cut = replace(wrong("layers.0.attn.q_proj", hypothesis("sharded_on_in_features", {})), shape=shape)
    turned = [replace(wrong(f"layers.{i}.attn.q_rope", order=10 * i + 1), shape=shape) for i in range(3)]
    unknown = [replace(wrong(f"layers.{i}.attn.q_proj", order=10 * i), shape=shape) for i in (1, 2)]
    ((head, after),) = folded(groups([cut, *turned, *unknown]))
    assert head.findings == (cut,)
    assert {one.tap for group in after for one in group.findings} == {one.tap for one in (*turned, *unknown)}
    assert misshapen_by_input(groups([cut, *turned, *unknown])) == {one.tap for one in turned}
    other = [replace(one, shape="shape [24, 16] instead of [24, 32]") for one in unknown]
    assert len(folded(groups([cut, *turned, *other]))) == 2


def test_a_norm_that_has_written_into_its_input_is_not_told_to_be_skipped() -> None:
    over = replace(hypothesis("residual_operand", {}), edits=(Edit((), "operand", (READER,)),))
    skipped = replace(hypothesis("norm_skipped", {}), edits=(Edit((), "skipped", ("x",)),))
    sums = [wrong(f"layers.{i}.{kind}_residual", over, order=i)
            for i in range(2) for kind in ("attn", "mlp")]  # fmt: skip
    norms = [
        wrong(tap, skipped, order=10)
        for tap in ("layers.0.mlp_norm", "layers.1.attn_norm", "layers.1.mlp_norm")
    ]
    ((head, after),) = folded(groups([*sums, *norms]), (), 3)
    assert {one.tap for group in after for one in group.findings} == {one.tap for one in norms}
    (cause,) = causes_of(head, Survey({}, (), ()), EXTENT, after)
    assert cause.place == "layers.{0,1}.{attn,mlp}_residual"
    # What reads another stream, or is off by something else, or at another step, is a cause of its own.
    first = wrong("layers.0.attn_norm", skipped, order=10)
    scaled = wrong("layers.1.attn_norm", hypothesis("norm_scaled", {}), order=10)
    for other in (first, scaled):
        assert len(folded(groups([*sums, other]), (), 3)) == 2
    early = [replace(one, steps=(0,)) for one in sums]
    assert not any(after for _, after in folded(groups([*early, *norms]), (), 3))


def test_layers_that_were_not_recorded_are_no_cause_beside_one_that_is_in_all_others() -> None:
    found = [wrong(f"layers.{i}.mlp.up", hypothesis("transposed", {}), order=i) for i in range(2)]
    judged = [*(one.tap for one in found), "layers.0.mlp.gate", "layers.2.mlp_residual"]
    unknown = replace(wrong("layers.2.mlp_residual", order=20), operation="layer")
    ((head, after),) = folded(groups([*found, unknown]), judged)
    (cause,) = causes_of(head, Survey({}, (), ()), EXTENT, after)
    assert cause.follows == ("layers.2.mlp_residual: off by 0.1 (relative L2), 1e+05 times its rounding",)
    # Of what is in one layer of two nothing follows for the others; nor of what was recorded.
    assert len(folded(groups([found[0], unknown]), [*judged, "layers.1.mlp.up"])) == 2
    assert len(folded(groups([*found, replace(unknown, operation="residual")]), judged)) == 2


LOADED = {
    "attn_norm": "input_layernorm", "attn.q_proj": "self_attn.q_proj", "attn.o_proj": "self_attn.o_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip


def loaded(layer: int, of: int, kinds: tuple[str, ...] = tuple(LOADED)) -> list[WrongOperation]:
    """A layer whose tensors are another one's. Beside it stands what would explain all projections at once."""
    found = []
    for n, kind in enumerate(kinds):
        names = {
            "weight": f"model.layers.{layer}.{LOADED[kind]}.weight",
            "is": f"model.layers.{of}.{LOADED[kind]}.weight",
        }
        other = hypothesis("weight_of_another", {**names, "of": f"layer {of}"})
        unrelated = hypothesis("weight_unrelated", {}, parameters=1)
        both = [replace(one, kind="weight") for one in (unrelated, other)]
        found.append(wrong(f"layers.{layer}.{kind}", *both, order=10 * layer + n))
    return found


@pytest.mark.parametrize(
    ("moved", "words", "fault"),
    [
        ({1: 2, 2: 1}, "layers 1 and 2 hold each other's weights", None),
        ({3: 0, 4: 1}, "layers hold the weights of others: layer 3 those of layer 0, layer 4 those of layer 1", None),
        (
            {0: 1, 1: 2, 2: 0},
            "the weights are those of the next layer, of the last those of the first",
            "tensor_of=next_layer",
        ),
        ({1: 0}, "the weights are those of the layer before", None),
    ],
)  # fmt: skip
def test_layers_that_hold_the_weights_of_others_are_one_cause(
    moved: Mapping[int, int], words: str, fault: str | None
) -> None:
    found = [one for layer, of in moved.items() for one in loaded(layer, of)]
    (group,) = groups(found)
    (cause,) = causes_of(group, Survey({}, tuple(found), ()), EXTENT)
    assert (cause.text, cause.kind, cause.fault) == (words, "weight", fault)
    assert (cause.layers, cause.tap) == (tuple(sorted(moved)), f"layers.{min(moved)}.attn_norm")


def test_one_matrix_of_another_layer_is_no_layer() -> None:
    """What is wrong beside whole layers stays a cause."""
    name = "model.layers.{}.mlp.down_proj.weight"
    single = hypothesis(
        "weight_of_another", {"weight": name.format(1), "is": name.format(2), "of": "the next layer"}
    )
    (group,) = groups([wrong("layers.1.mlp.down", replace(single, kind="weight"))])
    assert group.chosen[0].fitted == single.fitted
    mixed = [*loaded(1, 2), wrong("layers.0.mlp.up", hypothesis("bias_dropped", {}))]
    assert sorted(one.chosen[0].name for one in groups(mixed)) == ["bias_dropped", "weight_of_another"]


def test_whole_layers_are_reported_shortly() -> None:
    kinds = ("attn_norm", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp_norm", "mlp.down")
    assert taps_in_words([f"layers.{i}.{kind}" for i in (1, 2) for kind in kinds], 4) == "layers.{1,2}.*"


def test_ranks_that_have_each_others_shards_are_one_cause_that_tells_of_each() -> None:
    found = [
        wrong(f"layers.{i}.attn.{kind}_proj", replace(
            hypothesis("shard_of_another_rank", {"shard_of": 1 - rank}),
            edits=(Edit((), "map", ("shard",), at=(1.0 - rank,)),), setting=at(i, kind, rank),
        ), ranks=(rank,), order=10 * i)
        for i in range(2) for rank in (1, 0) for kind in "kv"
    ]  # fmt: skip
    (group,) = groups(found)
    (cause,) = causes_of(group, Survey({}, (), ()), EXTENT)
    assert cause.text == (
        "rank 1 computes with rank 0's shard of model.layers.*.self_attn.{k,v}_proj; "
        "rank 0 computes with rank 1's shard of model.layers.*.self_attn.{k,v}_proj"
    )
    assert (cause.ranks, cause.fault) == ((0, 1), None)


def test_what_every_rank_does_is_not_said_of_the_first() -> None:
    found = [
        wrong("layers.2.mlp.down", replace(hypothesis("not_reduced", {}),
              edits=(Edit((), "map", ("not_reduced", 1.0), at=(str(rank),)),), setting=at(2, "v", rank)), ranks=(rank,))
        for rank in (0, 1)
    ]  # fmt: skip
    (group,) = groups(found)
    (cause,) = causes_of(group, Survey({}, (), ()), EXTENT)
    assert cause.text == "no sum over the ranks: each of these ranks goes on with its own partial"
