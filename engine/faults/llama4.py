"""What Llama 4 has beside other models: attention in chunks, norms of rotated heads without weight, queries scaled by
their position, experts whose inputs are weighed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.engine.config import ModelConfig
from lockstep.engine.config.query_scaling import QueryScaling
from lockstep.engine.faults.fault import one_seam

if TYPE_CHECKING:
    from torch import Tensor


def whole_context(q_positions: Tensor, rows: slice, kv_positions: Tensor, chunk: int) -> Tensor:
    """Tokens see all earlier ones."""
    from lockstep.engine.rules.defaults import within_window

    return within_window(q_positions, rows, kv_positions, None)


def sliding(q_positions: Tensor, rows: slice, kv_positions: Tensor, chunk: int) -> Tensor:
    """The chunk is taken for a window: tokens see the end of the chunk before."""
    from lockstep.engine.rules.defaults import within_window

    return within_window(q_positions, rows, kv_positions, chunk)


def not_normalised(x: Tensor, eps: float) -> Tensor:
    """Rotated heads as they are."""
    return x


def unscaled(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """The same factor everywhere: 1."""
    return (positions * 0 + 1).float()


def unweighed(x: Tensor, weights: Tensor) -> Tensor:
    """Each expert reads the token's row itself."""
    return x.unsqueeze(1).repeat(1, weights.shape[1], 1)


def in_chunks(model: ModelConfig, tp: int) -> str | None:
    """Some layer's attention is in chunks."""
    return None if model.chunked and any(model.windows) else "no layer's attention is in chunks"


def has_unit_norm(model: ModelConfig, tp: int) -> str | None:
    """Rotated heads are normalised."""
    return None if model.unit_qk_norm else "the model does not normalise rotated heads without a weight"


def scales_queries(model: ModelConfig, tp: int) -> str | None:
    """Some layer scales its queries by their position."""
    layers = (model.of_layer(i) for i in range(model.num_layers))
    scaled = any(one.query_scaling is not None for one in layers)
    return None if scaled else "no layer scales its queries by their position"


def weighs_inputs(model: ModelConfig, tp: int) -> str | None:
    """Weights are multiplied by what goes into the experts."""
    there = model.experts is not None and model.experts.weighed_inputs
    return None if there else "the model weighs no inputs of experts"


FAULTS = (
    one_seam(
        "chunk", "ignored", "config", whole_context, "layers.*.attn.scores", "attention not in chunks",
        "right up to the end of the first chunk, then attends to everything", in_chunks, group="attention",
    ),
    one_seam(
        "chunk", "sliding", "config", sliding, "layers.*.attn.scores", "chunk of attention taken for a sliding window",
        "right up to the end of the first chunk, then attends to the end of the one before", in_chunks,
        group="attention",
    ),
    one_seam(
        "unit_qk_norm", "missing", "by_head", not_normalised, "layers.*.attn.q_unit_norm",
        "norm of rotated heads left out", "scores are too large or too small, head by head", has_unit_norm,
        group="norm",
    ),
    one_seam(
        "query_factor", "missing", "by_position", unscaled, "layers.*.attn.q_scaled",
        "queries not scaled by their position", "right in short sequences, then attention is too even", scales_queries,
        group="attention",
    ),
    one_seam(
        "expert_input", "unweighed", "weighed", unweighed, "layers.*.mlp.experts.input",
        "inputs of experts not weighed", "experts read rows that are too large", weighs_inputs, group="mlp",
    ),
)  # fmt: skip
