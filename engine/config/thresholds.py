"""From how many tokens on a model computes something that shorter sequences never show. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.engine.config.model import ModelConfig


class Threshold(NamedTuple):
    """`what` begins to matter in sequences of more than `tokens`."""

    tokens: int
    what: str


def thresholds(model: ModelConfig, chunk: int | None = None) -> list[Threshold]:
    """Windows and chunks of attention, as many keys as an indexer chooses, the contexts beyond which rotations or
    queries are scaled, and `chunk` (the tokens of a prompt that one pass reads), shortest first; without those that no
    sequence of the model's context can outgrow."""
    kind = "attention in chunks" if model.chunked else "the window"
    found = {window: f"{kind} of {window}" for window in model.windows if window is not None}
    ropes = [model.of_layer(layer).rope_scaling for layer in range(model.num_layers)]
    for scaling in dict.fromkeys((model.rope_scaling, *ropes)):
        length = model.max_position if scaling.kind == "dynamic" else scaling.original_max_position
        if length:
            found[length] = f"the original context of {length} ({scaling.kind} rotary scaling)"
    if (indexer := model.indexer) is not None:
        found.setdefault(indexer.top_k, f"the {indexer.top_k} keys that an indexer chooses")
    if (queries := model.query_scaling) is not None:
        found.setdefault(
            queries.begins, f"the first {queries.begins} positions, whose queries are not scaled"
        )
    if chunk is not None:
        found[chunk] = f"the chunk of {chunk}"
    return [Threshold(tokens, found[tokens]) for tokens in sorted(found) if tokens < model.context]
