"""Names and plain words for edits of formulas whose places differ from model to model: those of routing, and others."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.workbench.diagnosis.hypotheses.operands import sum_of_ranks
from lockstep.workbench.diagnosis.hypotheses.roundings import READ_AS_OTHER

#: (operation, the function or leaf at the place, or its formula, kind of the edit, the first of its detail) -> name,
#: and what ran.
ROUTING_WORDS: Mapping[tuple[str, str, str, object], tuple[str, str]] = {
    ("choice", "add", "left_out", 0.0): ("choice_uncorrected", "experts are chosen without the correction bias"),
    **{
        (kind, leaf, "applied", dtype): (f"{name}_in_{dtype}", f"{what} are rounded to {dtype}")
        for kind in ("choice", "choice_weights")
        for leaf, name, what in (
            ("correction", "correction", "the correction biases, by which experts are chosen,"),
            ("logits", "router", "the router's logits"),
            *((function, "scores", "the router's scores") for function in ("sigmoid", "softmax")),
        )
        for dtype in ("bfloat16", "float16")
    },
    **{
        (kind, "logits", "applied", how): ("router_logits_misread", f"the router's logits are misread: {how}")
        for kind in ("choice", "choice_weights")
        for how in READ_AS_OTHER.values()
    },
    **{
        (kind, "softmax", "function", f"rows_softmax_of_{of}"): (
            "softmax_over_tokens",
            f"the router's softmax is taken over the tokens of {what}, of each expert by itself, not over the experts",
        )
        for kind in ("choice", "choice_weights")
        for of, what in (("sequence", "a sequence's pass"), ("step", "all sequences of a pass"))
    },
    ("choice", "chosen", "function", "chosen_in_turn"): (
        "groups_in_turn",
        "experts are dealt to the {groups:g} groups in turn, expert e to group e % {groups:g}, not neighbours to one "
        "group",
    ),
    ("choice", "chosen", "function", "chosen_overwriting"): (
        "experts_chosen_again",
        "the logit of an expert that is chosen is set to 0, not to minus infinity: where all others are negative it is "
        "chosen again",
    ),
    **{
        ("choice", function, "function", how): (name, text)
        for function in ("softmax", "sigmoid")
        for how, name, text in (
            (
                "by_bits", "choice_by_bits",
                "experts are chosen by the bits of their logits, taken for whole numbers: of negative logits the "
                "lowest is the best",
            ),
            ("size", "choice_by_size", "experts are chosen by the size of their logits: the sign is lost"),
            ("negative", "choice_of_the_lowest", "the experts with the lowest logits are chosen, not the highest"),
        )
    },
    ("choice_weights", "taken", "applied", "least_dropped"): (
        "least_weight_dropped",
        "of a token's experts the one with the least weight counts for nothing: its slot is lost",
    ),
    ("choice_weights", "shares", "function", "shares_of_all"): (
        "weights_over_all", "weights are divided by the sum over all experts, not over the chosen ones",
    ),
    **{
        ("choice_weights", "shares", "function", f"rows_shares_of_{of}"): (
            "weights_over_tokens",
            f"weights are divided by the sum over the tokens of {what}, of each slot by itself, not of a token",
        )
        for of, what in (("sequence", "a sequence's pass"), ("step", "all sequences of a pass"))
    },
    ("combine", "weights", "applied", "first_of_row"): (
        "weights_of_the_first_slot", "all of a token's experts are weighed by the weight of its first one",
    ),
    **{
        ("combine", leaf, "applied", which): (name, text)
        for leaf in ("weights", "x")
        for which, name, text in (
            (
                "first_slots", "slots_left_out",
                "only the first {a:g} of a token's {top_k:g} slots are added up: the last ones are left out",
            ),
            ("slots_behind", "slots_left_out", "the first {a:g} of a token's {top_k:g} slots are left out of the sum"),
        )
    },
    **{
        ("combine", "weighed_sum", "function", how): (name, text)
        for how, name, text in (
            (
                "bias_behind_weights", "expert_bias_unweighed",
                "the experts' bias is added behind their weights: each of a token's experts adds all of it",
            ),
            ("bias_left_out", "expert_bias_missing", "the experts' bias is left out of the sum"),
            (
                "bias_twice", "expert_bias_twice",
                "the experts' bias is in the sum twice: in what they give, and once more",
            ),
        )
    },
    ("choice_weights", "times_of_experts", "applied", "shares"): (
        "expert_scale_before_shares",
        "weights are multiplied by the number of each expert (per_expert_scale) before they are renormalised, not "
        "after it: they add up to one again",
    ),
    ("choice", "chosen", "function", "chosen_in_groups_before"): (
        "groups_uncorrected",
        "groups are ranked by the scores without the correction biases, the experts in them with these",
    ),
    **{
        (kind, function, "function", f"{function}_in_{dtype}"): (
            f"scores_in_{dtype}",
            f"the router's {function} is made in {dtype}: the logits are rounded to it, and the scores",
        )
        for kind in ("choice", "choice_weights")
        for function in ("softmax", "sigmoid")
        for dtype in ("bfloat16", "float16")
    },
    ("choice_weights", "times_of_experts", "function", "times_of_slots"): (
        "expert_scale_by_slot",
        "the number of each expert (per_expert_scale) is read by the slot that the expert has, not by its own number",
    ),
    **{
        (kind, "logits", "applied", "capped"): (
            "router_logits_capped",
            "the router's logits go through a soft cap, cap tanh(logits / cap), that this model has not",
        )
        for kind in ("choice", "choice_weights")
    },
    ("choice_weights", "shares", "function", "shares_and_more"): (
        "weights_over_more",
        "weights are divided by the sum of the chosen ones and {a:.4g}, as with one more expert that counts in it",
    ),
    ("choice_weights", "shares", "function", "shares_of_corrected"): (
        "weights_over_corrected",
        "weights are divided by the sum of the chosen experts' scores with their correction biases, not of the scores",
    ),
    ("choice_weights", "taken", "function", "softmax_of_chosen"): (
        "weights_by_softmax_of_chosen", "weights are a softmax of the logits of the chosen experts alone",
    ),
    **{
        ("choice_weights", function, "function", "softmax_within_groups"): (
            "weights_within_groups",
            "weights are a softmax over the experts of the groups that are left, not over all: other groups are masked "
            "before it",
        )
        for function in ("softmax", "sigmoid")
    },
    **{
        ("choice", root, "applied", "columns_within"): (
            "choice_among_fewer", "only experts from {a:g} to {b:g} are chosen among: others never are",
        )
        for root in ("softmax", "sigmoid", "add", "logits")
    },
    ("choice_weights", "mixed", "function", "mixed_beside"): (
        "mixer_first_not_taken_out",
        "the expert that is chosen first is not taken out of the softmax of the second, as SparseMixer does",
    ),
    ("choice_weights", "shares", "function", "shares_within"): (
        "weights_renormalised_by_rank",
        "weights are renormalised over those of the chosen experts that the rank has, not over all chosen ones",
    ),
    ("choice", "groups", "number", 1.0):
        ("choice_ungrouped", "experts are chosen from all groups, not from the best ones alone"),
    ("choice", "chosen", "applied", "masked_by_zero"): (
        "groups_masked_by_zero",
        "experts of groups that are out have the score 0, not minus infinity: they come before those whose scores are "
        "negative",
    ),
    ("choice", "sigmoid", "function", "softmax"):
        ("choice_by_softmax", "experts are chosen by a softmax of the logits, not by sigmoids"),
    ("choice", "softmax", "function", "sigmoid"):
        ("choice_by_sigmoids", "experts are chosen by sigmoids of the logits, not by a softmax"),
    ("choice_weights", "sigmoid", "function", "softmax"):
        ("weights_by_softmax", "weights are a softmax of the logits, not sigmoids"),
    ("choice_weights", "softmax", "function", "sigmoid"):
        ("weights_by_sigmoids", "weights are sigmoids of the logits, not a softmax"),
    ("choice_weights", "shares", "left_out", 0.0): (
        "weights_not_renormalised",
        "weights are not renormalised: a token's do not add up to one, as by a softmax before the choice alone",
    ),
    ("choice_weights", "taken", "applied", "shares"): (
        "weights_renormalised",
        "weights are renormalised over the chosen experts, as by a softmax over these alone: they should not be",
    ),
    ("choice_weights", "sigmoid", "applied", "plus"):
        ("weights_corrected", "the correction bias is in the weights, not in the choice alone"),
    ("choice_weights", "multiply", "left_out", 0.0): ("weights_unscaled", "routed_scaling_factor is not applied"),
    ("choice_weights", "times_of_experts", "left_out", 0.0): (
        "expert_scale_missing", "weights are not multiplied by the number of each expert (per_expert_scale)",
    ),
    ("choice_weights", "multiply", "applied", "multiply"):
        ("weights_scaled_twice", "routed_scaling_factor is applied twice"),
    ("experts", "added_to_rows", "left_out", 0.0): ("expert_bias_missing", "the experts' bias is not added"),
    ("experts", "added_to_rows", "function", "unweighed_to_rows"): (
        "expert_bias_unweighed",
        "the experts' bias is added without their weights: once a token's weights are in, not before",
    ),
    ("experts", "added_to_rows", "function", "repeatedly_to_rows"): (
        "expert_bias_on_every_rank",
        "the experts' bias is added by each of the ranks before their sum: it counts {a:g} times",
    ),
    ("combine", "weighed_sum", "function", "unweighted_sum"):
        ("combine_unweighted", "experts' outputs are added up without their weights"),
    ("combine", "weights", "applied", "shares"):
        ("weights_renormalised_at_sum", "weights are renormalised once more where the experts' outputs are added up"),
    ("combine", "weights", "applied", "squared"): (
        "weights_applied_twice",
        "experts' outputs are multiplied by their weights twice, as by a kernel that has done so and behind it",
    ),
    ("combine", "weights", "applied", "rows_of_first_chunk"): (
        "weights_of_first_chunk",
        "each chunk of {a:g} tokens of a pass is weighed by the weights of the first chunk's tokens",
    ),
    ("combine", "weights", "applied", "backwards"): (
        "slots_backwards", "experts' outputs meet the weights of their slots in reverse order",
    ),
    **{
        ("choice_weights", root, "applied", "falling"): (
            "weights_by_size",
            "weights stand in the order of their size, the largest first, not in that of the experts' ids",
        )
        for root in ("taken", "shares", "multiply", "mixed", "times_of_experts")
    },
    ("combine", "weights", "applied", "multiply"): (
        "weights_scaled_twice",
        "routed_scaling_factor is applied twice: to the weights, and where the experts' outputs are added up",
    ),
    ("activation", "softplus", "left_out", 0.0):
        ("xielu_raw_alpha", "an alpha of xIELU is not passed through softplus"),
    ("choice_weights", "mixed", "function", "softmax_taken"):
        ("weights_by_plain_softmax", "weights are a softmax over all experts, not SparseMixer's"),
    ("choice_weights", "jitter", "number", 0.0):
        ("weights_without_jitter", "each expert's weight is 1: no other one counts as near to it"),
    ("expert_input", "weighed", "function", "unweighed"):
        ("expert_input_unweighed", "what goes into the experts is not multiplied by their weights"),
    ("clip", "clamped_within", "left_out", 0.0):
        ("clip_missing", "queries, keys or values are not clamped to ±{clip:g}"),
    ("multiplier", "multiply", "left_out", 0.0):
        ("multiplier_missing", "a multiplier of the model is left out"),
    ("mixed", "add", "left_out", 0.0):
        ("attention_beside_missing", "what attention gives is not added to what Mamba-2 beside it does"),
    ("mixed", "add", "left_out", 1.0):
        ("states_beside_missing", "what Mamba-2 gives is not added to what attention beside it does"),
    ("query_scaling", "multiply", "left_out", 0.0):
        ("query_scaling_missing", "queries are not multiplied by the factor of their position"),
    ("query_scaling", "floor", "left_out", 0.0):
        ("query_scaling_smooth", "the factor of queries grows with every position, not in steps of {query_length:g}"),
    ("query_scaling", "log1p", "left_out", 0.0):
        ("query_scaling_linear", "the factor of queries grows with the position itself, not with its logarithm"),
    ("query_scaling", "query_offset", "number", 0.0): (
        "query_scaling_offset",
        "positions of queries are counted from 0, not from {query_offset:g}, for their factor",
    ),
    ("query_scaling", "query_offset", "number", 1.0): (
        "query_scaling_offset",
        "positions of queries are counted from 1, not from {query_offset:g}, for their factor",
    ),
    ("query_scaling", "position", "operand", "position in the pass"): (
        "query_scaling_in_the_pass",
        "queries are scaled by their place in the pass, not in the sequence",
    ),
    ("combine", "add", "left_out", 0.0): ("shared_expert_missing", "the shared expert is not added"),
    ("combine", "add", "left_out", 1.0):
        ("routed_experts_missing", "the routed experts are not added, the shared one alone is"),
    ("combine", "add", "function", "gated_together"): (
        "routed_experts_gated", "the shared expert's gate is multiplied by the routed experts' sum as well",
    ),
    ("combine", "multiply", "left_out", 1.0):
        ("shared_expert_ungated", "the shared expert is not multiplied by its gate"),
    ("combine", "shared", "applied", "scaled"): ("shared_expert_scaled", "the shared expert counts {by} times"),
    ("combine", "shared", "operand", sum_of_ranks("shared")): (
        "shared_expert_on_every_rank",
        "each rank adds the shared expert's sum over the ranks, not its own term of it: it counts {ranks} times",
    ),
    ("combine", "x", "operand", sum_of_ranks("x")): (
        "routed_experts_on_every_rank",
        "each rank adds the experts' sums over the ranks, not its own terms of them: they count {ranks} times",
    ),
    ("combine", "weights", "applied", "scaled"): ("routed_experts_scaled", "the routed experts count {by} times"),
    ("index_scores", "where", "left_out", 1.0): (
        "index_not_causal", "an indexer scores keys after the query: its scores have no causal mask",
    ),
    ("index_scores", "allowed", "applied", "own_hidden"): (
        "index_own_key_hidden", "an indexer hides each query's own key: its mask is strictly causal",
    ),
    ("index_scores", "allowed", "applied", "newest_seen"):
        ("index_window", "an indexer scores the {a:g} newest keys alone"),
    ("index_scores", "allowed", "applied", "later_seen"): (
        "index_sees_later_keys",
        "an indexer scores keys after the query's own as well, {a:g} of them: its mask ends too late",
    ),
    ("index_scores", "weights * index_weight", "left_out", 0.0): (
        "index_weights_unscaled",
        "the weights of an indexer's heads are not divided by the root of their number",
    ),
    ("index_scores", "dot(q, k) * scale", "left_out", 0.0): (
        "index_products_unscaled",
        "an indexer's products are not divided by the root of the width of its heads",
    ),
    ("index_scores", "above_zero", "left_out", 0.0):
        ("index_without_relu", "an indexer's scores lack ReLU: negative products count as well"),
    ("index_scores", "weights", "operand", "ones"):
        ("index_unweighted", "an indexer's heads are added up without their weights"),
    **{
        ("index_scores", "weights", "applied", function): (
            f"index_weights_{function}",
            f"the weights of an indexer's heads go through a {function}: they should be as they are",
        )
        for function in ("softmax", "sigmoid", "softplus", "relu")
    },
    **{
        ("index_scores", leaf, "applied", "codes"): (
            "index_codes",
            f"an indexer reads the codes of {what} without their scales: the largest of each row is {{a:g}}",
        )
        for leaf, what in (("q", "queries"), ("k", "keys"), ("weights", "weights"))
    },
}  # fmt: skip
