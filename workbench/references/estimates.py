"""The memory that a golden recorder will take, from shapes alone (torch-free): what would not fit is refused before it
starts."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.checkpoint.source import DTYPE_BITS
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.parallel import shards
from lockstep.engine.run.estimates import largest_passes, refuse_beyond, working_bytes
from lockstep.engine.run.memory import weight_bytes
from lockstep.workbench.references.request import GoldenRequest

#: A process that has imported torch and transformers and records, before it holds anything.
LIBRARY_BYTES = 400 << 20
#: A recorder's tensors of a pass over an engine's, which holds one layer's activations: what is computed, its copy that
#: is measured, and its copy that is written.
_COPIES = 3


def golden_bytes(model: ModelConfig, request: GoldenRequest, chunk: int | None) -> dict[str, int]:
    """What a recorder takes at its height, by what takes it. Its sequences run one after the other, attention is made
    and written by tiles."""
    width = DTYPE_BITS[request.dtype] // 8
    plain = EngineConfig()
    scale = width / (DTYPE_BITS[plain.dtype] // 8)
    longest = max(len(one.prompt) for one in request.sequences)
    cached = sum(len(one.prompt) for one in request.sequences) + request.steps * len(request.sequences)
    held = (shards.cached(model.of_layer(layer), 1, 0) for layer in range(model.num_layers))
    rows = sum(heads * sum(widths) for heads, widths in held)
    return {
        "weights": int(scale * weight_bytes(model, plain, 0)),
        "its cache": cached * rows * width,
        "activations": int(scale * _COPIES * working_bytes(model, plain, largest_passes([longest], chunk))),
        "its libraries": LIBRARY_BYTES,
    }


def check_recorder_room(model: ModelConfig, request: GoldenRequest) -> None:
    """RequestError where recording would take more memory than is free."""
    if request.device != "cpu":
        return
    lengths = [len(one.prompt) for one in request.sequences]

    def parts(chunk: int | None) -> Mapping[str, int]:
        return golden_bytes(model, request, chunk)

    tokens = " + ".join(map(str, lengths))
    what = f"a reference by {request.reference} over {tokens} tokens in {request.dtype}"
    refuse_beyond(what, parts, lengths, request.chunk)
