"""All variants by the operation that they replace. A bank is added here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.workbench.diagnosis.hypotheses.attention.attention import likely, unlikely
from lockstep.workbench.diagnosis.hypotheses.rotation.parts import partial_rotations, positions_of_pairs
from lockstep.workbench.diagnosis.hypotheses.rotation.precision import coarse_rotations
from lockstep.workbench.diagnosis.hypotheses.rotation.rotation import rotations
from lockstep.workbench.diagnosis.hypotheses.rotation.solved import combined_rotations, fitted_frequencies
from lockstep.workbench.diagnosis.hypotheses.routing import other_experts, other_matrix, routing_edits
from lockstep.workbench.diagnosis.hypotheses.rowwise import (
    EDITED,
    row_edit_pairs,
    row_edits,
    row_free_maps,
    row_maps,
)
from lockstep.workbench.diagnosis.hypotheses.variant import Bank
from lockstep.workbench.diagnosis.variants import embedding, head, logits, vocab_parallel
from lockstep.workbench.diagnosis.variants.activation_cuts import wrapped_index
from lockstep.workbench.diagnosis.variants.attention.coarse_attention import (
    coarse_probabilities,
    coarse_products,
)
from lockstep.workbench.diagnosis.variants.attention.combined_scores import combined_scores
from lockstep.workbench.diagnosis.variants.attention.context import contexts
from lockstep.workbench.diagnosis.variants.attention.head_maps import score_heads, softmax_heads, value_heads
from lockstep.workbench.diagnosis.variants.attention.mask import irregular_masks, masks
from lockstep.workbench.diagnosis.variants.attention.merged_heads import merged_heads
from lockstep.workbench.diagnosis.variants.attention.padded_keys import padded_keys
from lockstep.workbench.diagnosis.variants.attention.score_biases import score_biases
from lockstep.workbench.diagnosis.variants.attention.score_factors import score_dimensions, score_factors
from lockstep.workbench.diagnosis.variants.attention.scores import scores
from lockstep.workbench.diagnosis.variants.attention.softmax import softmaxes
from lockstep.workbench.diagnosis.variants.attention.softmax_fits import softmax_fits
from lockstep.workbench.diagnosis.variants.attention.softmax_functions import other_functions
from lockstep.workbench.diagnosis.variants.attention.split_keys import denominators, split_keys
from lockstep.workbench.diagnosis.variants.caches.cache_lengths import cache_lengths
from lockstep.workbench.diagnosis.variants.caches.cached_numbers import cached_numbers
from lockstep.workbench.diagnosis.variants.caches.caches import caches
from lockstep.workbench.diagnosis.variants.caches.cells import cached_cells, scaled_rows
from lockstep.workbench.diagnosis.variants.caches.index_maps import index_maps
from lockstep.workbench.diagnosis.variants.caches.offsets import cached_offsets
from lockstep.workbench.diagnosis.variants.caches.stored_stages import stored_stages
from lockstep.workbench.diagnosis.variants.grids import on_a_grid
from lockstep.workbench.diagnosis.variants.layers import repeated, skipped
from lockstep.workbench.diagnosis.variants.linear import (
    block_terms,
    buffers,
    collectives,
    feature_orders,
    inputs,
    linear,
    matrices,
    moved,
    precision,
    reduce,
    shard_starts,
    split_sums,
    unknown,
    unloaded,
)
from lockstep.workbench.diagnosis.variants.low_precision import coarse_inputs, coarse_operands, coarse_results
from lockstep.workbench.diagnosis.variants.moved_tokens import token_moved
from lockstep.workbench.diagnosis.variants.overflow import not_finite, overflows
from lockstep.workbench.diagnosis.variants.table_rows import other_numbers

#: Operation -> banks that are always tried.
BANKS: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (
        embedding.misread,
        embedding.other_rows,
        embedding.masked,
        embedding.scaled,
        embedding.added,
        embedding.normed,
        vocab_parallel.foreign_rows,
        token_moved,
    ),
    "norm": (row_edits,),
    "linear": (
        reduce.summed_products,
        matrices.misread,
        linear.bias,
        linear.scale,
        moved.rows_moved,
        token_moved,
        matrices.transposed,
        matrices.sliced_inputs,
        matrices.zeroed,
        matrices.single_weights,
        linear.other_input,
        linear.input_heads,
        unloaded.nothing_multiplied,
        feature_orders.features_permuted,
        shard_starts.other_start,
        reduce.with_stream,
    ),
    "rope": (rotations, partial_rotations, coarse_rotations),
    "cache": (caches, cache_lengths, cached_numbers),
    "scores": (scores, score_heads, score_biases, score_factors, masks),
    "softmax": (softmaxes, softmax_fits, softmax_heads),
    "context": (contexts, merged_heads, value_heads),
    "weights": (likely,),
    "attention": (likely, merged_heads),
    "reduce": (reduce.summed, reduce.with_stream, reduce.other_bias, token_moved),
    "residual": (row_edits,),
    "activation": (row_edits,),
    "head": (
        head.not_the_head,
        head.other_head,
        head.changed_logits,
        head.other_hidden,
        head.other_columns,
        logits.processed,
    ),
    "choice": (routing_edits,),
    "choice_weights": (routing_edits,),
    "combine": (routing_edits,),
    "experts": (other_matrix, other_experts),
    "layer": (skipped,),
}

#: Banks that are always tried, whatever the operation.
EVERYWHERE: tuple[Bank, ...] = (overflows, coarse_results)

#: Operation -> banks that are tried where no variant of the others fits: they cost more, or fit more numbers.
LAST: Mapping[str, tuple[Bank, ...]] = {
    "embedding": (vocab_parallel.one_rank_s_ids, coarse_inputs),
    "norm": (repeated, coarse_inputs),
    "cache": (stored_stages, index_maps, cached_cells, scaled_rows, cached_offsets),
    "rope": (fitted_frequencies, positions_of_pairs, combined_rotations, coarse_inputs),
    "residual": (row_maps, coarse_inputs),
    "activation": (row_maps, wrapped_index, coarse_inputs),
    "linear": (
        matrices.other_matrix,
        linear.channel_scale,
        linear.constant,
        matrices.features_changed,
        precision.rounded_operands,
        precision.rounded_result,
        inputs.clamped_input,
        inputs.token_scales,
        buffers.former_output,
        collectives.accumulated,
        split_sums.split_sums,
        linear.feature_scale,
        block_terms.block_terms,
        matrices.low_rank,
    ),
    "head": (
        precision.rounded_operands,
        precision.rounded_result,
        inputs.clamped_input,
        inputs.token_scales,
        split_sums.split_sums,
        matrices.single_weights,
        matrices.zeroed,
        matrices.features_changed,
        linear.channel_scale,
        linear.feature_scale,
        block_terms.block_terms,
        shard_starts.other_start,
        matrices.low_rank,
    ),
    "reduce": (
        buffers.former_partials,
        buffers.former_output,
        split_sums.rounded_partials,
        collectives.other_reductions,
        collectives.accumulated,
        collectives.columns_elsewhere,
    ),
    "scores": (coarse_operands, coarse_products, combined_scores, score_dimensions, irregular_masks),
    "softmax": (
        padded_keys,
        coarse_probabilities,
        split_keys,
        denominators,
        coarse_operands,
        other_functions,
    ),
    "context": (coarse_operands, coarse_probabilities, split_keys),
    "weights": (coarse_operands, unlikely, padded_keys, coarse_probabilities, split_keys),
    "attention": (coarse_operands, unlikely, padded_keys, coarse_probabilities, split_keys),
}


#: Operation -> two edits at once, where no single one fits.
PAIRS: Mapping[str, tuple[Bank, ...]] = dict.fromkeys(("norm", "residual", "activation"), (row_edit_pairs,))

#: Operation -> what can be said where no variant at all fits.
UNKNOWN: Mapping[str, tuple[Bank, ...]] = {
    **dict.fromkeys(EDITED, (row_free_maps,)),
    "embedding": (other_numbers,),
    "linear": (unknown.another_input, unloaded.unrelated_weight, unknown.other_weight),
    "head": (unknown.another_input, unknown.other_weight),
}


def stages(operation: str) -> tuple[tuple[Bank, ...], ...]:
    """The banks that are tried first, and those that are tried where no variant of these fits. Whole numbers, as those
    of experts, are neither rounded nor scaled."""
    if operation == "choice":
        return (BANKS[operation],)
    return (
        (*BANKS.get(operation, ()), *EVERYWHERE),
        (*LAST.get(operation, ()), on_a_grid, not_finite),
        PAIRS.get(operation, ()),
        UNKNOWN.get(operation, ()),
    )
