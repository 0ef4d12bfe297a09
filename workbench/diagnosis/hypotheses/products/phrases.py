"""What edits and maps of products are called: a table of their names, classes and sentences.

`{0}`, `{1}` are figures: of a map first those that it is, then those of the place (`Edit.at`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.workbench.diagnosis.hypotheses.maps import NOT_WRITTEN
from lockstep.workbench.diagnosis.hypotheses.setting import Setting


@dataclass(frozen=True, slots=True)
class Phrase:
    """`text` has places for `figures` and for the fields of `at`: names of tensors, and of whom. `apart`: places at
    which it is another are reported one by one."""

    name: str
    kind: str
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fitted: Mapping[str, object] = field(default_factory=dict)
    apart: object = None
    figures: tuple[object, ...] = ()


_CLAMPED = "clamped, or saturated by a scale for smaller numbers"
_LOGITS = "each row of logits is off by a constant: the choice of tokens is the same"
_FACTORS = (
    "{0:g} out features are each off by a factor of their own, {1:.4g} to {2:.4g}, as by a scale per channel"
)
_TOKEN = "each token's input{0} has a factor of its own ({2:.4g} for the first wrong one)"
_BUFFER = "the output is {2}: the buffer was read before it was written, or never was"
_LORA = "{weight} is off by a matrix of rank {0:g}: a low-rank adapter (LoRA) is merged, missing or counted wrongly"
_PARTS = (
    "the tokens of a pass are cut into a part a rank, and the parts stand in the wrong order: {0} (gathered after a "
    "reduce-scatter, as in sequence parallelism)"
)
_FOREIGN = (
    "{0} adds a row for ids of other ranks' parts of the vocabulary: these are {1} instead of masked to zero before "
    "the sum"
)
_SLICES = "slices of the result's columns stand elsewhere: column {1:g} shows column {2:g}"
_AT_IDS = "logits stand at other ids: id {0:g} has that of id {1:g}"
_ORDER = "rows of {module} are in another order{0}: column {2:g} is row {4:g}"
_IN_FEATURES = "{2:g} {0} of {weight} are left out, as if their columns were zero"
_COUNTED = "{2:g} {0} count {3} times what they should: their columns are off by a factor (scale)"
_NEVER = "{weight} is all zeros, as if it was never loaded: {0}, {1}"
_ALONE = "no sum over the ranks: {rank} goes on with its own partial"
_ROW = "another row of {0} was chosen"
_UNRELATED = (
    "nothing of {weight} is in the output, which is a product of its inputs with other numbers, of standard deviation "
    "{0:.2g} (the checkpoint's have {1:.2g}): "
)
_DIFFER = (
    " differ from the checkpoint's by {0:.2g} of their size, in no simple pattern: the error is a product of the "
    "inputs with another matrix (weights of another checkpoint, quantised weights whose groups, scales or order are "
    "read wrongly)"
)
#: Key -> name, class and sentence.
_PHRASES: Mapping[str, tuple[str, str, str]] = {
    "formula": ("another_formula", "weight", "{0} is computed instead of {1}"),
    "formula:head": ("another_formula", "head", "{0} is computed instead of {1}"),
    "formula:embedding": ("another_formula", "embedding", "{0} is computed instead of {1}"),
    "formula:reduce": ("another_formula", "reduce", "{0} is computed instead of {1}"),
    "formula_of_weight": ("another_formula", "weight", "{0} is computed instead of {1}"),
    "formula_of_x": ("another_formula", "input", "{0} is computed instead of {1}"),
    "formula_of_bias": ("another_formula", "bias", "{0} is computed instead of {1}"),
    "bias_dropped": ("bias_dropped", "bias", "{bias} is not added"),
    "bias_subtracted": ("bias_repeated", "bias", "{bias} is subtracted"),
    "bias_repeated": ("bias_repeated", "bias", "{bias} is added {0:g} times"),
    "bias_scaled": ("bias_scaled", "bias", "{bias} is added {0} times: multiplied by a scale"),
    "bias_on_every_rank":
        ("bias_on_every_rank", "bias", "{bias} is added by every rank before the sum: {0:g} times"),
    "bias_of_other_rank": ("bias_of_other_rank", "bias", "rank {0}'s part of {bias} is added"),
    "bias_of_another": ("bias_of_another", "bias", "{other} is added instead of {bias}"),
    "wrong_input": ("wrong_input", "input", "it is computed from {other}{0}, not from its own input"),
    "head_pooled": ("head_input", "head", "the head reads the {0} of the pass, not the last one of them"),
    "head_input": ("head_input", "head", "the head reads {0}: the logits are those of {0} as it is"),
    "head_unnormed":
        ("head_unnormed", "head", "the last norm is skipped: the logits are those of {0} as it is"),
    "misread": ("misread", "weight", "{other} is misread: {0}"),
    "columns_of_rank": ("shard_of_another_rank", "sharding",
        "{rank} computes with the columns of {weight} that are rank {0}'s"),
    "transposed": ("transposed", "weight", "{weight} is used transposed"),
    "sharded_strided": ("sharded_strided", "sharding",
        "{rank} takes every {0}th column of {weight} instead of its neighbouring ones"),
    "shard_start": ("shard_start", "sharding",
        "{rank} computes with the {0} of {weight} from {1} on, not from {2}: its shard is cut at the wrong place{3}"),
    "other_table": ("other_table", "embedding", "rows of the output head are taken for the embedding's"),
    "head_from_embedding": ("head_from_embedding", "head",
        "the embedding is used as the output head, which is a matrix of its own"),
    "weight_of_sibling":
        ("weight_of_sibling", "weight", "{other}{0} of {1} {2} used instead of {weight}"),
    "weight_of_another":
        ("weight_of_another", "weight", "{other}{0} of {1} {2} used instead of {weight}"),
    "clamped_within": ("input_clamped", "input", f"its input is cut off at ±{{0:.4g}}: {_CLAMPED}"),
    "scaled_late": ("input_scaled_late", "input",
        "its input is brought to {0} by a scale that is made of {1}, as by delayed scaling"),
    "columns_of_another": ("columns_of_another", "input", NOT_WRITTEN),
    "saturated": ("input_clamped", "input", f"its input is cut off at ±{{0:.4g}}, in eight bits: {_CLAMPED}"),
    "capped": ("soft_cap", "head", "the logits are capped softly at {0:.6g} (tanh)"),
    "uncapped": ("uncapped", "head",
        "logits do not pass through this model's soft cap: {0:.4g} * tanh(logit / {0:.4g})"),
    "other_cap": ("soft_cap", "head", "logits are capped at {0:.4g} instead of {1:.4g}"),
    "other_divisor": ("factor", "head", "the logits are divided by {0:.6g} instead of {1:.6g}"),
    "undivided": ("undivided", "head", "the logits are not divided by {0:.6g}"),
    "unmultiplied": ("unmultiplied", "embedding", "the embedding is not multiplied by {0:.6g}"),
    "log_softmax": ("log_softmax", "head", "these are log-probabilities, not logits"),
    "probabilities": ("probabilities", "head", "these are probabilities, not logits"),
    "centred": ("embedding_normed", "embedding", "the embedding's rows are centred"),
    "unit_length":
        ("embedding_normed", "embedding", "the embedding's rows are divided by their L2 norm"),
    "layer_normed": ("embedding_normed", "embedding", "the embedding's rows are layer-normed"),
    "normed": ("embedding_normed", "embedding",
        "the embedding's rows are divided by their root mean square{0}{1}"),
    "product_rounded": ("low_precision", "precision", "the product is rounded to {0}"),
    "result_rounded": ("low_precision", "precision", "the result is rounded to {0}"),
    "x_rounded": ("low_precision_input", "precision", "its input is rounded to {0}"),
    "weight_rounded": ("low_precision_weight", "precision", "{weight} is rounded to {0}"),
    "weight_and_input_rounded":
        ("low_precision_weight", "precision", "{weight} and inputs are rounded to {0}"),
    "weight_misread": ("misread", "weight", "{weight} is read wrongly: {0}"),
    "factor": ("factor", "weight", "the product is {0:.6g} times what it should be{1}"),
    "factor_of_ranks": ("factor", "reduce", "the product is {0:.6g} times what it should be{1}"),
    "factor:reduce": ("factor", "reduce", "the sum is {0:.6g} times what it should be{1}"),
    "factor:head": ("factor", "head", "the logits are {0:.6g} times what they should be{1}"),
    "factor:embedding": ("factor", "embedding", "the embedding is {0:.6g} times what it should be{1}"),
    "embedding_scaled":
        ("embedding_scaled", "embedding", "the embedding is {0:.6g} times what it should be{1}"),
    "head_zero": ("head_zero", "head", "all logits are zero: the output head was never filled"),
    "head_rows_zero":
        ("rows_zero", "head", "the logits of {0} are zero, as of rows of {weight} that are zero or on no rank"),
    "table_added": ("positions_added", "embedding", "{0} of the position is added to that of the token"),
    "waves_added": ("positions_added", "embedding", "sinusoids of the position are added ({0}{1})"),
    "residual_in_sum":
        ("residual_in_sum", "residual", "the residual stream is in the sum over the ranks: {0:g} times"),
    "added_to_former":
        ("added_to_former", "reduce", "the result is added onto that of {0}: the buffer is not cleared"),
    "added_to_former:linear":
        ("added_to_former", "input", "the result is added onto that of {0}: the buffer is not cleared"),
    "heads_reversed": ("head_order", "heads", "it multiplies the heads in reverse order"),
    "heads_transposed": ("head_order", "heads",
        "it multiplies the transposed heads: (head_dim, heads) instead of (heads, head_dim)"),
    "heads_dealt": ("head_order", "heads",
        "it multiplies the heads in another order: in {0} interleaved groups, the first of each group first"),
    "columns_ordered": ("columns_permuted", "weight",
        "columns of {weight}, or its in features, are in another order ({0})"),
    "token_rows": ("row_of_another_token", "input",
        "tokens have another's row: position {0:g} of sequence {1:g} that of position {2:g} of sequence {3:g}"),
    "rows_added": ("row_of_another_added", "input",
        "the row of {0} is added to each of the wrong rows, times {1:g}"),
    "token_rows_by": ("row_of_another_token", "input", "tokens have the row of the one {1:g} {0}"),
    "token_parts": ("token_parts_exchanged", "reduce", _PARTS),
    "columns_zero": ("rows_zero", "weight", "{0:g} rows of {weight} are zero or were never computed"),
    "columns_zero:reduce": ("columns_zero", "reduce", "{0:g} columns of the sum are zero or were never written"),
    "bias_zero": ("rows_zero", "weight", "{0:g} rows of {weight} are zero or were never computed, nor its bias"),
    "columns_scaled": ("channel_scale", "weight", _FACTORS),
    "row_added": ("constant_row", "bias", "every token is off by the same vector, as by a wrong bias"),
    "row_added:embedding":
        ("constant_row", "embedding", "every token is off by the same vector, as by a token type's row"),
    "row_added:head": ("head_bias", "bias", "the logits of every step are off by the same vector: a bias of the head"),
    "rows_scaled": ("input_token_scales", "input", _TOKEN),
    "rows_scaled_by": ("input_token_scales", "input", f"{_TOKEN}: the scale of {{1}}"),
    "rows_scaled:embedding":
        ("token_factor", "embedding", "each row of the embedding is off by a factor of its own, {3:.4g} to {4:.4g}"),
    "bias_permuted": ("bias_permuted", "bias",
        "{bias} is added in another order: column {0:g} gets the number of column {1:g}"),
    "single_weight": ("single_weights", "weight",
        "one weight differs in {weight}: [{1:g}, {2:g}] counts as {3:.4g} instead of {4:.4g}"),
    "single_weights": ("single_weights", "weight",
        "{0:g} weights differ in {weight}: [{1:g}, {2:g}] counts as {3:.4g} instead of {4:.4g}"),
    "features_left_out":
        ("features_changed", "weight", "{0:g} in features of {weight} are left out: the first is {1:g}"),
    "features_changed":
        ("features_changed", "weight", "{0:g} in features of {weight} have other weights: the first is {1:g}"),
    "low_rank": ("low_rank", "weight", _LORA),
    "low_rank_of_some": ("low_rank", "weight", f"{_LORA}, for {{1:g}} of {{2:g}} tokens"),
    "features_zero": ("feature_scale", "weight", _IN_FEATURES),
    "features_scaled": ("feature_scale", "weight", _COUNTED),
    "columns_permuted": ("columns_permuted", "weight",
        "columns of {weight}, or its in features, are in another order: column {0:g} meets in feature {1:g}"),
    "cut_along_inputs": ("sharded_on_in_features", "sharding",
        "{weight} is cut along in_features: each rank holds a partial sum that is never added up"),
    "weight_zero": ("weight_zero", "weight", _NEVER),
    "input_zero": ("input_zero", "input", "its input is all zeros, or its weight: {0}"),
    "input_zero_there": ("input_zero", "input", "its input is all zeros where it is wrong: {0}"),
    "shard": ("shard_of_another_rank", "sharding", "{rank} computes with rank {0:g}'s shard of {module}"),
    "shard_shifted": ("shard_of_another_rank", "sharding",
        "{rank} computes with rows {3:g} and on of {module} instead of {1:g} and on"),
    "rows_repeated": ("rows_repeated", "weight", _ORDER),
    "rows_permuted": ("rows_permuted", "weight", _ORDER),
    "heads_repeated": ("rows_repeated", "heads", _ORDER),
    "heads_permuted": ("rows_permuted", "heads", _ORDER),
    "pack_offsets": ("pack_offsets", "sharding",
        "q, k and v are cut out of the rank's pack where they begin in the pack of all ranks"),
    "pack_by_kv_heads": ("pack_by_kv_heads", "heads",
        "q, k and v, which lie one after the other, are cut out as if the pack held each KV head's together"),
    "stack_cut": ("stack_cut", "sharding", "{0}"),
    "not_cut": ("not_cut", "sharding",
        "{rank} computes with all of {module}, not with its part: nothing is cut, and a sum over the ranks counts what "
        "follows {0:g} times"),
    "columns_moved": ("columns_moved", "sharding",
        "{0:g} columns hold other columns of the pack: column {1:g} is {2}'s column {3:g}"),
    "columns_exchanged": ("columns_exchanged", "reduce", _SLICES),
    "slices_exchanged":
        ("columns_exchanged", "reduce", f"{_SLICES}: the ranks' slices are gathered in the order {{0}}"),
    "summed_wrongly":
        ("summed_wrongly", "reduce", "the ranks' partial products count {0} times in the sum"),
    "summed_twice": ("reduce_repeated", "reduce",
        "the product is {1:g} times what it should be: summed twice over the ranks"),
    "summed_already": ("summed_already", "reduce",
        "{rank} has the whole sum where its own term is due: the product is summed over the ranks already, and counts "
        "{0:g} times once the ranks' terms are added up"),
    "averaged": ("reduce_averaged", "reduce",
        "the product is 1/{2:g} of what it should be: averaged over the ranks, not summed"),
    "product_missing":
        ("product_missing", "reduce", "the product is left out: nothing but the bias comes out"),
    "not_reduced": ("not_reduced", "reduce", _ALONE),
    "one_partial":
        ("one_partial", "reduce", "{rank} has rank {1}'s partial instead of the sum over the ranks"),
    "rank_missing": ("rank_missing", "reduce", "the partial of rank {1} is missing from the sum"),
    "rank_repeated": ("rank_repeated", "reduce", "the partial of rank {1} counts twice in the sum"),
    "reduced_otherwise": ("reduced_otherwise", "reduce", "the ranks' partials are not summed: {0} goes on"),
    "partials_by_one_scale": ("partials_by_one_scale", "reduce",
        "the partials are summed in eight bits and all restored by the scale of rank {0:g} (one a {1})"),
    "stale_output": ("stale_output", "reduce", _BUFFER),
    "stale_output:linear": ("stale_output", "input", _BUFFER),
    "stale_partial": ("stale_partial", "reduce", "rank {3:g}'s partial in the sum is {2}"),
    "hidden_rows": ("row_of_another_token", "head",
        f"the logits of sequence {{1:g}} at step {{2:g}} are those of position {{3:g}} of sequence {{4:g}}: {_ROW}"),
    "hidden_rows_before": ("row_of_another_token", "head",
        "the logits of sequence {1:g} at step {2:g} are those of position {3:g}, {4:g} before the last: " + _ROW),
    "vocabulary_shifted": ("vocabulary_shifted", "head", _AT_IDS),
    "vocabulary_joined": ("vocabulary_shifted", "head",
        f"{_AT_IDS} (the ranks' shards of the vocabulary are joined in the wrong order)"),
    "vocabulary_permuted": ("vocabulary_permuted", "head", _AT_IDS),
    "shifted": ("shifted", "head", _LOGITS),
    "head_is_hidden":
        ("head_is_hidden", "head", "the logits are the final hidden state: there is no output head"),
    "head_untrained": ("head_untrained", "head",
        "the logits are noise of size {0:g} * |final_norm|: the output head is at its initial values"),
    "ids_off": ("ids_differ", "embedding", "token ids are off by {0:+g}: id {1:g} gets row {2:g}"),
    "ids_local": ("ids_differ", "embedding",
        "ids counted from the rank's first row are looked up in the whole table: {0:g} gets row {1:g}"),
    "ids_alike": ("ids_differ", "embedding", "ids {0:g} to {1:g} all get row {2:g}: clamped, or taken for unknown"),
    "ids_differ": ("ids_differ", "embedding",
        "id {0:g} gets row {1:g} of the embedding, {2:g} tokens a row that is not theirs"),
    "rows_not_summed": ("not_reduced", "reduce",
        "{rank} has the rows of its own part of the vocabulary ({0}) alone: no sum over the ranks"),
    "vocabulary_range": ("vocabulary_range", "embedding",
        "the rows of ids {0} are found on no rank: a rank's range of the vocabulary is wrong"),
    "another_input": ("another_input", "input",
        "what comes out is the product of {weight} with another input than the recorded one{0}"),
    "weight_unrelated":
        ("weight_unrelated", "weight", _UNRELATED + "another weight, or its numbers in an unknown order"),
    "weight_initial":
        ("weight_unrelated", "weight", _UNRELATED + "as if it was never loaded and kept its initial values"),
    "weight_differs": ("weight_differs", "weight", "{weight}" + _DIFFER),
    "some_weights_differ":
        ("weight_differs", "weight", "{1:g} rows of {weight} (the first is {2:g})" + _DIFFER),
    "row_masked": ("rows_masked", "embedding", "the row of id {0} is zero, as of padding"),
    "rows_masked": ("rows_masked", "embedding", "the rows of ids {0} are zero"),
    "foreign_ids": ("foreign_ids_not_masked", "embedding", _FOREIGN),
    "ids_of_a_rank":
        ("ids_of_a_rank_differ", "embedding", "rank {0:g} looks up other ids than it is given: {1}"),
    "by_position": ("positions_added", "embedding",
        "a vector for each position is added, the same in all sequences"),
    "rows_differ": ("embedding_rows_differ", "embedding",
        "the rows of {0} in {weight} hold other numbers than the checkpoint's"),
    "rows_unrelated": ("embedding_rows_differ", "embedding",
        "the rows of {0} in {weight} hold other numbers than the checkpoint's, of standard deviation {1:.2g}, with "
        "nothing of these: never loaded, or drawn anew"),
}  # fmt: skip
#: Phrases whose first figure is how often the bias counts.
_BIASED = (
    "summed_twice",
    "averaged",
    "product_missing",
    "not_reduced",
    "one_partial",
    "rank_missing",
    "rank_repeated",
)


def phrase(
    at: Setting, key: str, *figures: object, apart: object = None, fitted: Mapping[str, object] | None = None,
    **fields: str,
) -> Phrase:  # fmt: skip
    """The phrase of that key with its figures. `fields` are names beside those of the place."""
    name, kind, text = _PHRASES.get(f"{key}:{at.operation}", _PHRASES[key])
    if key in _BIASED and figures[0] != 1:
        text += "; {bias} counts {0:g} times"
    module = at.weight.removesuffix(".weight")
    own = {"weight": at.weight, "bias": at.bias or "nothing", "module": module, "rank": f"rank {at.rank}"}
    return Phrase(name, kind, text, {**own, **fields}, fitted or {"figures": list(figures)}, apart, figures)
