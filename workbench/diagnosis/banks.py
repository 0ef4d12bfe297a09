"""All variants by the operation that they replace. A bank is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.graph.operation import CHOICES, STATES
from lockstep.workbench.diagnosis.hypotheses.any_maps import any_maps, channel_maps, head_maps
from lockstep.workbench.diagnosis.hypotheses.attention.attention import likely, unlikely
from lockstep.workbench.diagnosis.hypotheses.attention.rows_read import rows_read
from lockstep.workbench.diagnosis.hypotheses.behind_rotation import query_scalings, rotated_norms
from lockstep.workbench.diagnosis.hypotheses.clipping import clippings, multiplications
from lockstep.workbench.diagnosis.hypotheses.expert_rows import (
    beyond_capacity,
    biases_of_experts,
    other_experts,
    other_matrix,
    products_scaled,
    rows_in_blocks,
    rows_scaled,
    weighed_rows,
)
from lockstep.workbench.diagnosis.hypotheses.expert_weights import experts_differ
from lockstep.workbench.diagnosis.hypotheses.latent_parts import other_parts, shared_parts
from lockstep.workbench.diagnosis.hypotheses.masked_groups import masked_groups
from lockstep.workbench.diagnosis.hypotheses.mixture import mixture_edits
from lockstep.workbench.diagnosis.hypotheses.mixture_inputs import weighed_elsewhere
from lockstep.workbench.diagnosis.hypotheses.mixture_ranks import terms_of_ranks
from lockstep.workbench.diagnosis.hypotheses.mixture_rows import other_experts_within
from lockstep.workbench.diagnosis.hypotheses.other_inputs import other_inputs
from lockstep.workbench.diagnosis.hypotheses.padded_heads import padded_heads
from lockstep.workbench.diagnosis.hypotheses.per_layer import (
    layer_parts,
    layer_sums,
    router_inputs,
    router_norms,
    value_norms,
)
from lockstep.workbench.diagnosis.hypotheses.products.block_terms import block_terms
from lockstep.workbench.diagnosis.hypotheses.products.logits import processed
from lockstep.workbench.diagnosis.hypotheses.products.products import (
    product_coarse,
    product_edits,
    product_fits,
    product_maps,
    product_unknown,
)
from lockstep.workbench.diagnosis.hypotheses.products.split_sums import rounded_partials, split_sums
from lockstep.workbench.diagnosis.hypotheses.recurrent import STATEFUL, pass_edits, recurrent_edits
from lockstep.workbench.diagnosis.hypotheses.rotation.lookups import misread_tables
from lockstep.workbench.diagnosis.hypotheses.rotation.parts import (
    partial_rotations,
    positions_of_pairs,
)
from lockstep.workbench.diagnosis.hypotheses.rotation.precision import coarse_rotations
from lockstep.workbench.diagnosis.hypotheses.rotation.rotation import rotations
from lockstep.workbench.diagnosis.hypotheses.rotation.solved import combined_rotations, fitted_frequencies
from lockstep.workbench.diagnosis.hypotheses.rotation.table import behind_the_table
from lockstep.workbench.diagnosis.hypotheses.routing import routing_edits, routing_pairs
from lockstep.workbench.diagnosis.hypotheses.rowwise import (
    EDITED,
    row_edit_pairs,
    row_edits,
    row_free_maps,
    row_maps,
)
from lockstep.workbench.diagnosis.hypotheses.variant import Bank
from lockstep.workbench.diagnosis.operations.mixture import MIXTURE
from lockstep.workbench.diagnosis.operations.recurrent import GATES, RECURRENT
from lockstep.workbench.diagnosis.variants.activation_cuts import wrapped_index
from lockstep.workbench.diagnosis.variants.attention.coarse_attention import (
    coarse_probabilities,
)
from lockstep.workbench.diagnosis.variants.attention.combined_scores import combined_scores
from lockstep.workbench.diagnosis.variants.attention.index_choices import (
    index_score_pairs,
    index_scores,
    key_choices,
    shared_choices,
    unsparse_scores,
)
from lockstep.workbench.diagnosis.variants.attention.mask import irregular_masks, masks
from lockstep.workbench.diagnosis.variants.attention.padded_keys import padded_keys
from lockstep.workbench.diagnosis.variants.attention.score_biases import score_biases
from lockstep.workbench.diagnosis.variants.attention.score_factors import score_factors
from lockstep.workbench.diagnosis.variants.attention.skipped_blocks import skipped_blocks
from lockstep.workbench.diagnosis.variants.attention.softmax_fits import softmax_fits
from lockstep.workbench.diagnosis.variants.attention.softmax_functions import other_functions
from lockstep.workbench.diagnosis.variants.attention.split_keys import denominators, split_keys
from lockstep.workbench.diagnosis.variants.attention.strided_parts import strided_parts
from lockstep.workbench.diagnosis.variants.caches.cache_lengths import cache_lengths
from lockstep.workbench.diagnosis.variants.caches.cached_numbers import cached_numbers
from lockstep.workbench.diagnosis.variants.caches.caches import caches
from lockstep.workbench.diagnosis.variants.caches.cells import cached_cells, scaled_rows
from lockstep.workbench.diagnosis.variants.caches.foreign_inside import foreign_inside
from lockstep.workbench.diagnosis.variants.caches.foreign_rows import foreign_prefix
from lockstep.workbench.diagnosis.variants.caches.index_maps import index_maps
from lockstep.workbench.diagnosis.variants.caches.inside import caches_inside
from lockstep.workbench.diagnosis.variants.caches.layouts import other_layouts
from lockstep.workbench.diagnosis.variants.caches.stored_stages import stages_of_other_heads, stored_stages
from lockstep.workbench.diagnosis.variants.grids import on_a_grid
from lockstep.workbench.diagnosis.variants.layers import repeated, skipped
from lockstep.workbench.diagnosis.variants.low_precision import (
    coarse_inputs,
    coarse_results,
    in_eight_bits,
)
from lockstep.workbench.diagnosis.variants.other_layers import results_of_other_layers
from lockstep.workbench.diagnosis.variants.overflow import not_finite, overflows

#: Operation -> banks that are always tried.
BANKS: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (product_edits, product_maps),
    "norm": (row_edits,),
    "linear": (product_maps, product_edits),
    "rope": (rotations, partial_rotations, coarse_rotations),
    "cache": (caches, cache_lengths, cached_numbers),
    "keys": (shared_parts, other_parts),
    "values": (other_parts,),
    "scores": (unsparse_scores, likely, score_biases, score_factors, masks),
    "softmax": (likely, softmax_fits),
    "context": (likely, padded_heads),
    "weights": (likely, caches_inside),
    "attention": (likely, padded_heads, caches_inside),
    "reduce": (product_maps, product_edits),
    "residual": (row_edits,),
    "activation": (row_edits,),
    "head": (product_maps, product_edits, processed),
    "choice": (routing_edits, masked_groups),
    "index_scores": (index_scores,),
    "key_choice": (key_choices,),
    "shared_choice": (shared_choices,),
    "choice_weights": (routing_edits,),
    "combine": (routing_edits,),
    MIXTURE: (terms_of_ranks, weighed_elsewhere, mixture_edits, other_experts_within),
    "experts": (
        weighed_rows,
        other_matrix,
        rows_in_blocks,
        rows_scaled,
        products_scaled,
        other_experts,
        biases_of_experts,
        beyond_capacity,
    ),
    "layer": (skipped,),
    **dict.fromkeys(STATEFUL, (recurrent_edits,)),
    "unit_norm": (value_norms, rotated_norms, router_norms),
    "channel_scale": (router_inputs,),
    "query_scaling": (query_scalings,),
    "clip": (clippings,),
    "multiplier": (multiplications,),
    "mixed": (multiplications,),
    "expert_input": (routing_edits,),
    "layer_inputs": (layer_sums,),
    "layer_input": (layer_parts,),
}

#: Banks that are always tried, whatever the operation.
EVERYWHERE: tuple[Bank, ...] = (overflows, coarse_results, in_eight_bits)

#: Of attention that was computed in one kernel.
_FUSED: tuple[Bank, ...] = (
    unlikely,
    padded_keys,
    coarse_probabilities,
    split_keys,
    strided_parts,
    results_of_other_layers,
)

#: Row-wise operations of which what is read and the result have one size.
_OF_ONE_SIZE = ("unit_norm", "channel_scale", "query_scaling", "clip", "multiplier", "mixed")

#: Operation -> banks that are tried where no variant of the others fits: they cost more, or fit more numbers.
LAST: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (product_fits, coarse_inputs),
    "norm": (repeated, coarse_inputs),
    "cache": (stored_stages, index_maps, other_layouts, cached_cells, scaled_rows),
    "rope": (
        fitted_frequencies,
        misread_tables,
        positions_of_pairs,
        combined_rotations,
        coarse_inputs,
        behind_the_table,
        results_of_other_layers,
    ),
    "residual": (row_maps, coarse_inputs),
    "activation": (row_maps, wrapped_index, coarse_inputs),
    "linear": (product_coarse, split_sums, product_fits, block_terms),
    "head": (product_coarse, split_sums, product_fits, block_terms),
    "reduce": (product_coarse, rounded_partials, product_fits),
    "scores": (
        combined_scores,
        unlikely,
        irregular_masks,
        results_of_other_layers,
    ),
    "softmax": (
        padded_keys,
        coarse_probabilities,
        split_keys,
        denominators,
        unlikely,
        other_functions,
        skipped_blocks,
        results_of_other_layers,
    ),
    "context": (unlikely, coarse_probabilities, split_keys, strided_parts, results_of_other_layers),
    "weights": _FUSED,
    "attention": _FUSED,
    **dict.fromkeys((*GATES, *_OF_ONE_SIZE), (row_edits, row_maps)),
    **dict.fromkeys(RECURRENT, (pass_edits,)),
}


#: Operation -> two edits at once, where no single one fits.
PAIRS: Mapping[str, tuple[Bank, ...]] = {
    **dict.fromkeys((*EDITED, *GATES, *_OF_ONE_SIZE), (row_edit_pairs,)),
    "attention": (rows_read,),
    "cache": (stages_of_other_heads,),
    **dict.fromkeys(("choice", "choice_weights"), (routing_pairs,)),
    "index_scores": (index_score_pairs,),
}

#: Operations with a row for each token of which no bank tries every map.
_OF_TOKENS = (
    *GATES, "rope", "keys", "values", "choice_weights", "combine", "unit_norm", "channel_scale", "query_scaling",
    "multiplier", "mixed", "layer_inputs", "layer_input", "expert_input",
)  # fmt: skip

#: Operation -> what can be stated where no variant at all fits.
UNKNOWN: Mapping[str, tuple[Bank, ...]] = {
    **dict.fromkeys(_OF_TOKENS, (any_maps,)),
    **dict.fromkeys(STATES, (head_maps,)),
    **dict.fromkeys(EDITED, (row_free_maps,)),
    **dict.fromkeys(("linear", "head", "embedding"), (product_unknown,)),
    "experts": (experts_differ,),
    "cache": (channel_maps, foreign_prefix),
    "attention": (foreign_inside,),
}


#: Operations of a form that only some models have: what knows of no form.
ANY_FORM: tuple[tuple[Bank, ...], ...] = (EVERYWHERE, (other_inputs,))


def stages(operation: str) -> tuple[tuple[Bank, ...], ...]:
    """The banks that are tried first, and those that are tried where no variant of these fits. Whole numbers, as those
    of experts, are neither rounded nor scaled."""
    if operation in CHOICES:
        return BANKS[operation], PAIRS.get(operation, ())
    return (
        (*BANKS.get(operation, ()), *EVERYWHERE),
        (*LAST.get(operation, ()), other_inputs, on_a_grid, not_finite),
        PAIRS.get(operation, ()),
        UNKNOWN.get(operation, ()),
    )
