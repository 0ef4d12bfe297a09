"""The diagnosis held against bugs that were built without knowing it. The figures: `python -m benchmarks.diagnosis`."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import numpy as np
import pytest

from lockstep.engine.graph.operation import Kind
from lockstep.engine.taps.names import layer_of, local_name
from lockstep.sessions import Session
from tests.workbench.diagnosis.bugs.all_bugs import bugs
from tests.workbench.diagnosis.bugs.bug import Bug, Place
from tests.workbench.diagnosis.bugs.engine_proofs import misplaced, moved
from tests.workbench.diagnosis.bugs.recording import Recordings
from tests.workbench.diagnosis.bugs.scoring import Score, as_fused, diagnose_recorded, score

#: A few of each kind, which the fast suite asks for; most share a model and prompts.
QUICK = (
    "cache_of_the_layer_before",
    "epsilon_of_the_final_norm",
    "head_tied_though_it_is_not",
    "kv_heads_tiled",
    "o_never_reduced",
    "positions_one_too_far",
    "positions_restart_with_each_chunk",
    "q_transposed_in_one_layer",
    "residual_missing_after_attention",
)
#: Named as well from what engines show whose attention is one kernel; harmless changes that are seen to be so there.
FUSED = (
    "decoded_rows_land_in_the_first_slot_of_their_page",
    "fallback_kernel_knows_neither_scale_nor_window",
    "prefix_computed_under_an_adapter_serves_a_request_without",
    "prompt_written_in_pages_of_eight_and_read_in_pages_of_four",
    "rows_of_the_cache_read_without_the_scale_between_them",
    "scale_is_that_of_the_part_without_positions",
    "sum_of_the_exponentials_starts_anew_at_the_second_tile",
)
FUSED_CONTROLS = ("root_of_the_scale_folded_into_both_projections",)
#: Of a norm over all heads at once.
FUSED_QUICK = ("second_rank_attends_without_windows",)
QUICK_CONTROLS = (
    "unchanged_llama_float32",
    "ranks_summed_backwards",
    "products_summed_in_parts",
    "scale_applied_to_q",
    "context_by_fused_attention",
    "silu_by_its_exponential",
)
#: Recorded alone: what the diagnosis says of them is not looked at.
QUICK_UNSEEN = (
    "keys_and_values_mapped_to_each_other",
    "decode_takes_the_position_of_the_first_sequence",
    "global_head_number_on_the_local_keys",
    "rank_1_keeps_its_partial_sum_in_decode",
    "splits_joined_by_a_base_two_logarithm_taken_for_natural",
    "second_norm_divides_by_the_root_of_the_first",
    "odd_last_token_is_normed_on_no_rank",
    "second_sequence_reads_the_decoded_token_of_the_first",
    "second_prompt_begins_with_the_last_token_of_the_first",
    "window_of_the_second_chunk_measured_from_its_first_row",
    "second_sequence_adds_one_mlp_twice",
    "second_rank_adds_nothing_in_decode",
    "one_layer_turns_neighbours",
    "keys_of_one_layer_begin_with_the_shared_part",
    "decode_convolves_rows_that_have_moved_on_already",
)
#: Of the eleventh set and those after it, not named when they were measured: each by the class that was mended.
MENDED = (
    "absorbed_keys_of_decode_are_those_of_the_next_head",
    "all_pairs_of_the_global_heads_are_turned",
    "bias_of_down_is_added_behind_the_weights",
    "bias_of_gate_and_up_is_left_interleaved",
    "block_of_four_rows_goes_through_the_expert_of_its_first",
    "correction_of_the_last_layer_is_that_of_the_layer_before",
    "decays_are_powers_of_two",
    "decode_adds_what_the_shared_expert_gave_a_layer_before",
    "decode_clamps_up_behind_the_one_that_is_added",
    "decode_convolves_rows_that_have_moved_on_already",
    "decode_expands_the_context_by_the_half_of_the_keys",
    "decode_goes_to_the_experts_of_the_step_before",
    "decode_lets_a_state_decay_behind_its_update",
    "decode_lets_the_routed_through_the_gate_of_the_shared",
    "decode_reads_the_state_before_it_is_updated",
    "decoded_keys_saturate_at_the_largest_of_the_prompt",
    "dispatched_rows_arrive_with_the_scale_of_the_row_before",
    "every_chunk_of_tokens_is_weighed_by_the_first_one_s_weights",
    "experts_share_a_softmax_where_each_has_a_sigmoid",
    "fallback_chooses_without_groups_and_without_the_correction",
    "fused_store_of_decode_forgets_the_turn_and_exchanges_the_heads",
    "gate_before_one_convolution_is_activated",
    "groups_are_ranked_before_the_correction_is_added",
    "groups_of_the_norm_are_as_many_on_each_rank_as_on_all",
    "heads_are_normed_before_they_are_turned",
    "index_keys_of_decode_are_read_without_their_scales",
    "indexer_gives_half_of_the_keys_that_it_may_choose",
    "indexer_may_choose_the_token_behind_the_query",
    "jitter_of_the_sparse_mixer_is_the_default",
    "kernel_of_decode_chooses_among_the_first_six_experts",
    "keys_go_into_the_cache_through_a_hadamard_matrix_and_queries_do_not",
    "large_keys_lie_beyond_the_range_of_their_eight_bits",
    "last_indexer_adds_its_heads_without_relu_and_without_weights",
    "latents_in_eight_bits_are_read_without_their_scale",
    "layer_that_shares_a_choice_takes_that_of_the_step_before",
    "logit_scale_divides_the_logits",
    "logits_are_compared_by_their_bits",
    "logits_of_decode_are_capped_by_model_and_sampler",
    "logits_of_the_router_are_capped_at_thirty",
    "mlp_stands_behind_attention_where_it_stands_beside_it",
    "norms_stand_before_the_blocks_that_they_stand_behind",
    "one_rank_convolves_queries_by_the_kernels_of_keys",
    "padded_convolution_is_cut_off_at_its_beginning",
    "padding_behind_the_shorter_prompt_lets_its_state_decay",
    "padding_of_the_sorted_rows_is_added_to_the_first_token",
    "padding_of_the_values_is_cut_off_behind_all_heads",
    "partner_of_a_channel_is_half_a_head_away_though_a_part_is_rotated",
    "rank_0_sums_what_rank_1_left_in_the_buffer_last_time",
    "rate_is_taken_for_a_logarithm_once_more",
    "replayed_choice_of_the_last_layer_is_that_of_the_layer_before",
    "replicated_router_is_finished_by_a_sum_over_the_ranks",
    "router_of_decode_divides_by_the_sum_of_corrected_scores",
    "router_reads_what_the_experts_read",
    "rows_that_are_kept_are_the_first_of_the_prompt",
    "scale_of_each_expert_is_applied_before_the_shares_are_made",
    "scale_of_each_expert_is_read_by_the_slot",
    "second_of_the_sparse_mixer_has_its_share_beside_the_first",
    "second_rank_never_loads_the_numbers_of_the_router_s_channels",
    "sequences_of_decode_share_the_choice_of_the_first",
    "shared_expert_reads_what_the_routed_ones_have_written",
    "shares_are_of_the_sum_over_all_experts",
    "sinks_are_powers_of_two",
    "sinks_are_put_in_front_of_the_scores_and_cut_off_behind",
    "sinks_of_one_layer_are_in_the_order_of_the_groups",
    "skip_goes_past_the_convolution",
    "skip_takes_the_exponential_of_d",
    "slot_is_kept_free_for_a_shared_expert_that_is_not_fused",
    "softmax_of_the_router_is_made_behind_the_choice_of_groups",
    "softmax_of_the_router_is_made_in_bfloat16",
    "state_behind_a_chunk_that_is_not_whole_has_not_decayed",
    "state_does_not_decay_from_chunk_to_chunk",
    "state_that_is_kept_is_that_of_the_last_whole_chunk",
    "step_sizes_are_limited_before_their_softplus",
    "steps_are_limited_by_the_range_of_their_initial_values",
    "sum_is_compiled_for_two_slots_of_three",
    "sum_of_the_weights_counts_the_slot_of_the_shared_expert",
    "taken_experts_are_marked_by_a_logit_of_zero",
    "values_alone_are_multiplied_by_the_rate",
    "weights_are_multiplied_by_what_experts_read",
    "what_is_read_from_a_state_is_scaled_by_the_width_of_values",
    "windows_are_looked_up_by_the_number_of_the_request",
    "zero_points_of_gptq_are_one_too_low",
)
QUICK_UNSEEN_CONTROLS = (
    "root_of_the_scale_on_both_sides",
    "last_shard_padded_to_the_size_of_the_others",
    "stream_kept_in_float32_in_a_bfloat16_model",
    "sum_of_each_part_begins_at_another_rank",
    "tokens_shared_out_for_the_norms_and_gathered",
)
ALL = bugs()
FIRST = ("open", "held_out")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("bugs"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """One decode step: enough for the quick ones."""
    return Recordings(tmp_path_factory.mktemp("short"), steps=1)


def _scored(bug: Bug, recordings: Recordings) -> Score:
    return score(bug, diagnose_recorded(recordings.of(bug)))


def test_there_are_enough_and_each_lies_in_its_part():
    counts = Counter(bug.part for bug in ALL.values())
    assert counts["open"] + counts["held_out"] >= 130
    assert counts["controls"] >= 45
    assert 0.4 < counts["held_out"] / (counts["open"] + counts["held_out"]) < 0.6
    assert all(bug.held_out == (bug.folder == "held_out") for bug in ALL.values() if bug.part in FIRST)


#: What each later set has at least: bugs, controls, groups, on several ranks, from a decode step on, in one layer, on
#: one rank, in one head, in bfloat16.
SETS = {
    "unseen": (72, 16, 13, 0, 12, 12, 8, 8, 0),
    "unseen_2": (40, 0, 11, 0, 8, 8, 4, 3, 0),
    "unseen_3": (60, 15, 13, 18, 12, 12, 6, 0, 8),
    "unseen_4": (80, 20, 13, 27, 14, 14, 10, 3, 8),
    "unseen_5": (60, 15, 13, 20, 14, 10, 6, 0, 12),
    "unseen_6": (50, 10, 13, 18, 10, 8, 6, 0, 12),
    "unseen_7": (70, 15, 16, 24, 14, 12, 8, 3, 24),
    "unseen_8": (60, 15, 14, 28, 15, 10, 8, 3, 15),
    "unseen_9": (100, 30, 18, 36, 20, 12, 16, 2, 25),
    "unseen_10": (60, 14, 16, 30, 20, 20, 12, 0, 25),
    "unseen_11": (71, 15, 30, 40, 14, 20, 7, 0, 25),
    "unseen_12": (66, 14, 30, 50, 17, 20, 5, 0, 28),
    "unseen_13": (71, 15, 31, 60, 10, 11, 3, 0, 36),
    "unseen_14": (78, 16, 40, 60, 12, 5, 3, 0, 16),
    "unseen_15": (100, 30, 56, 53, 27, 14, 15, 1, 34),
    "unseen_16": (100, 30, 50, 62, 14, 8, 3, 0, 47),
}
#: How the bugs of a set are spread over its files, where that was laid down before it was written.
SPREAD = {
    "unseen_9": {
        "cache": 12,
        "rotation": 12,
        "mask": 12,
        "attention": 12,
        "sharding": 7,
        "collectives": 5,
        "weights": 6,
        "quantisation": 8,
        "network": 14,
        "vocabulary": 6,
        "pairs": 6,
    },
    "unseen_11": {"routing": 12, "experts": 12, "attention": 13, "network": 7, "latent": 12, "state": 15},
    "unseen_12": {"routing": 11, "experts": 12, "attention": 18, "latent": 12, "state": 14},
    "unseen_13": {"routing": 9, "experts": 15, "attention": 20, "latent": 12, "state": 15},
}


@pytest.mark.parametrize("folder", SETS)
def test_a_set_has_bugs_of_every_kind(folder: str):
    found = [bug for bug in ALL.values() if bug.part == folder]
    counts = (
        len(found),
        sum(bug.part == f"{folder}_controls" for bug in ALL.values()),
        len({bug.group for bug in found}),
        sum(bug.tp > 1 for bug in found),
        sum(bug.place.step > 0 for bug in found),
        sum(len(bug.place.layers or ()) == 1 for bug in found),
        sum(len(bug.place.ranks) == 1 for bug in found),
        sum(len(bug.place.heads) == 1 for bug in found),
        sum(bug.dtype == "bfloat16" for bug in found),
    )
    assert all(is_ >= least for is_, least in zip(counts, SETS[folder], strict=True)), counts


@pytest.mark.parametrize("folder", SPREAD)
def test_a_set_is_spread_as_it_was_to_be(folder: str):
    found = Counter(bug.patch.__module__.split(".")[-1] for bug in ALL.values() if bug.part == folder)
    assert found == SPREAD[folder]


def test_every_expected_class_can_be_answered():
    """A class that no answer has would make a right answer wrong. Of the families that came with the graph they are
    its kinds of operations as well."""
    known = {kind for bug in ALL.values() if bug.part in FIRST for kind in bug.accepted} | set(get_args(Kind))
    for bug in ALL.values():
        assert bug.harmless == (not bug.accepted), bug.name
        assert set(bug.accepted) <= known, bug.name


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_named(name: str, short: Recordings):
    assert ALL[name].part == "open"
    found = _scored(ALL[name], short)
    assert found.outcome == "named", found


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_a_bug_that_was_not_named_is_named(name: str, short: Recordings, recordings: Recordings):
    found = _scored(ALL[name], _long_enough(ALL[name], short, recordings))
    assert (found.outcome, found.worded) == ("named", True), found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK_CONTROLS)
def test_a_harmless_change_is_not_accused(name: str, short: Recordings):
    found = _scored(ALL[name], short)
    assert found.outcome == "named", found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.slow) for one in FUSED), *FUSED_CONTROLS, *FUSED_QUICK]
)
def test_what_is_inside_of_a_fused_attention_is_told_from_its_context(name: str, recordings: Recordings):
    recorded = recordings.of(ALL[name])
    found = score(as_fused(ALL[name], recorded), diagnose_recorded(recorded, fused=True))
    assert (found.outcome, found.worded) == ("named", True), found


def test_attention_in_stages_has_the_recorder_s_bits(short: Recordings):
    """What a bug replaces is a part of the recorder's own attention: with nothing replaced nothing moves."""
    same = Bug("staged", "", (), "", Place(()), lambda p: (p.attention(), p.cache())[0], "llama")
    recorded = short.of(same)
    with Session.open(recorded.engine) as ours, Session.open(recorded.floor) as theirs:
        for tap in theirs.taps:
            if tap.name in theirs.meta.absent:
                continue
            for step in (0, 1):
                left, right = (side.rebuilt(tap.name, step=step, seq=0).array for side in (ours, theirs))
                assert np.array_equal(left, right), (tap.name, step)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", QUICK_UNSEEN)
def test_an_unseen_bug_shows_first_where_it_was_put(name: str, short: Recordings):
    """Nobody asks the diagnosis about these."""
    assert _misplaced(ALL[name], short) == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUICK_UNSEEN_CONTROLS)
def test_an_unseen_control_ends_in_the_right_logits(name: str, short: Recordings):
    assert _logits_apart(ALL[name], short) < 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["slots_are_summed_from_the_last", "convolution_of_mamba_adds_its_bias_last"]
)
def test_an_unseen_control_of_our_engine_moves_bits_and_no_more(name: str, short: Recordings):
    assert moved(ALL[name], short) == ""


def _long_enough(bug: Bug, short: Recordings, recordings: Recordings) -> Recordings:
    """Those of one decode step, where the bug shows by then. What is wrong with a state shows in the logits of the next
    step, which is looked at in our own engine."""
    return short if bug.place.step + (bug.ep > 0) <= 1 else recordings


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("folder", [*FIRST, *SETS])
def test_every_bug_shows_first_where_it_was_put(folder: str, short: Recordings, recordings: Recordings):
    """A property of the bugs: at its place each is far above the noise of transformers itself, and nowhere before.
    Every sixth one; `python -m benchmarks.diagnosis` counts which are placed of all."""
    bugs_of_it = [bug for bug in ALL.values() if bug.part == folder][::6]
    found = {bug.name: _misplaced(bug, _long_enough(bug, short, recordings)) for bug in bugs_of_it}
    assert found
    assert not {name: why for name, why in found.items() if why}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(12))
def test_every_control_ends_in_the_right_logits(first: int, recordings: Recordings):
    controls = [bug for bug in ALL.values() if bug.harmless and not bug.ep][first::12]
    found = {bug.name: _logits_apart(bug, recordings) for bug in controls}
    assert found
    assert not {name: apart for name, apart in found.items() if apart >= 1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(12))
def test_every_control_of_our_engine_moves_bits_and_no_more(first: int, recordings: Recordings):
    controls = [bug for bug in ALL.values() if bug.harmless and bug.ep][first::12]
    found = {bug.name: moved(bug, recordings) for bug in controls}
    assert found
    assert not {name: why for name, why in found.items() if why}


def _misplaced(bug: Bug, recordings: Recordings) -> str:
    """Where a bug shows first, if that is not its place; "" if it is."""
    if bug.ep:
        return misplaced(bug, recordings)
    recorded, place = recordings.of(bug), bug.place
    layer = (place.layers or (0,))[0]
    with (
        Session.open(recorded.engine) as ours,
        Session.open(recorded.golden) as golden,
        Session.open(recorded.floor) as floor,
    ):
        taps = [tap.name for tap in golden.taps if tap.name not in golden.meta.absent]
        for step in range(place.step + 1):
            sequences = [one.seq for one in golden.step(step).sequences]
            for name in taps:
                if not any(_shows(name, step, seq, ours, golden, floor) for seq in sequences):
                    continue
                here = (
                    step == place.step and local_name(name) in place.taps and layer_of(name) in (layer, None)
                )
                return "" if here else f"{name} at step {step}"
    return "nowhere"


def _shows(name: str, step: int, seq: int, ours: Session, golden: Session, floor: Session) -> bool:
    seen = ours.rebuilt(name, step=step, seq=seq)
    right, near = (side.rebuilt(name, step=step, seq=seq).array for side in (golden, floor))
    if seen.array is None or seen.array.shape != right.shape or seen.disagreeing_ranks:
        return True
    return _apart(seen.array, right) > 4 * max(_apart(near, right), 2e-7)


def _logits_apart(bug: Bug, recordings: Recordings) -> float:
    """How far a control's logits are from the right ones, in units of what noise may do; surplus ids do not count."""
    recorded, worst = recordings.of(bug), 0.0
    with (
        Session.open(recorded.engine) as ours,
        Session.open(recorded.golden) as golden,
        Session.open(recorded.floor) as floor,
    ):
        for step in range(recordings.steps + 1):
            for one in golden.step(step).sequences:
                at = {"step": step, "seq": one.seq}
                right, near = (side.rebuilt("logits", **at).array for side in (golden, floor))
                seen = ours.rebuilt("logits", **at).array[:, : right.shape[1]]
                worst = max(worst, _apart(seen, right) / (4 * max(_apart(near, right), 2e-7)))
    return worst


def _apart(seen: np.ndarray, right: np.ndarray) -> float:
    finite = np.isfinite(right)
    if not (np.isfinite(seen) == finite).all():
        return np.inf
    seen, right = seen[finite].astype(float), right[finite].astype(float)
    return float(np.linalg.norm(seen - right) / max(np.linalg.norm(right), 1e-30))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 12, 3))
@pytest.mark.parametrize("folder", FIRST)
def test_all_bugs(folder: str, first: int, short: Recordings, recordings: Recordings):
    """Detected, placed, and not accused of something else. Every third one; `benchmarks.diagnosis` counts all."""
    asked = {bug.name: bug for bug in [one for one in ALL.values() if one.part == folder][first::12]}
    scores = {name: _scored(bug, _long_enough(bug, short, recordings)) for name, bug in asked.items()}
    outcomes = Counter(found.outcome for found in scores.values())
    assert outcomes["missed"] == 0, [name for name, found in scores.items() if found.outcome == "missed"]
    assert sum(found.placed for found in scores.values()) >= 0.95 * len(scores)
