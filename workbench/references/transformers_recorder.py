"""The golden reference: a session recorded from Hugging Face transformers, teacher-forced, tap by tap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from lockstep.sessions.meta import HUGGING_FACE, ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import Tap
from lockstep.workbench.references.doubles import DoubleWhereFloat, rotary_of
from lockstep.workbench.references.hooks import absent_taps, golden_taps, model_config, tapped
from lockstep.workbench.references.loading import CACHE, load_golden
from lockstep.workbench.references.request import GoldenRequest, model_path
from lockstep.workbench.references.steps import See, record_steps


def record(
    request: GoldenRequest, path: Path, *, checkpoint: str = "", progress: Callable[[], None] | None = None
) -> None:
    """Record the session that `request` asks for at `path`. `checkpoint` is the checkpoint's digest.

    `progress` is called after every step. ReferenceFailure where the model cannot be loaded or the
    ids do not fit it.
    """
    torch.set_num_threads(request.threads)
    model = load_golden(model_path(request.model), request.dtype, request.device)
    record_steps(_TransformersModel(model, request, checkpoint), request, path, progress)


@dataclass(slots=True)
class _TransformersModel:
    """A loaded model with a cache for each sequence."""

    model: Any
    request: GoldenRequest
    checkpoint: str
    caches: dict[int, DynamicCache] = field(default_factory=dict)

    @property
    def taps(self) -> list[Tap]:
        return [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(golden_taps(self.model))]

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def context(self) -> int:
        return model_config(self.model).context

    def forward(self, seq: int, ids: Sequence[int], see: See) -> Tensor:
        with tapped(self.model, see):
            return self._logits(ids, 1, self.caches.setdefault(seq, self._empty()))[-1]

    def whole(self, ids: Sequence[int], last: int) -> Tensor | None:
        return self._logits(ids, last, self._empty()) if self.model.dtype is torch.float64 else None

    def _logits(self, ids: Sequence[int], last: int, cached: DynamicCache) -> Tensor:
        """[last, vocab]; `cached` is what went before, and has the tokens afterwards."""
        wide = DoubleWhereFloat() if self.model.dtype is torch.float64 else nullcontext()
        # Dynamic frequencies would stay those of the longest sequence that the model has seen.
        if (rotary := rotary_of(self.model)) is not None:
            getattr(self.model.model, rotary).max_seq_len_cached = 0
        with torch.inference_mode(), wide:
            out = self.model(
                input_ids=torch.tensor([ids], device=self.model.device),
                use_cache=True,
                logits_to_keep=last,
                **{CACHE: cached},
                **self._positions(len(ids), cached),
            )
        logits: Tensor = out.logits[0]
        return logits

    def _positions(self, new: int, cached: DynamicCache) -> dict[str, Tensor]:
        """Where the new tokens stand, of a model that without a word has them begin at 0 in each pass."""
        if self.model.config.model_type != "bamba":
            return {}
        start = cached.get_seq_length()
        return {"position_ids": torch.arange(start, start + new, device=self.model.device)[None]}

    def cached(self, seq: int) -> list[int]:
        cache = self.caches[seq]
        tracked = [hasattr(layer, "get_seq_length") for layer in cache.layers]  # a state does not grow
        return [cache.get_seq_length(layer if counts else 0) for layer, counts in enumerate(tracked)]

    def _empty(self) -> DynamicCache:
        """Without a config every layer of the cache is complete; sliding-window layers would drop old keys. Where some
        have states it has to know which."""
        config = self.model.config
        ours = model_config(self.model)
        typed = (
            bool(ours.stateful) or ours.indexer is not None
        )  # whose layers keep other things than keys and values
        return DynamicCache(config=config if typed else None)

    def meta(self) -> SessionMeta:
        config = self.model.config.to_dict()
        shape = {
            ours: config[theirs] for theirs, ours in HUGGING_FACE.items() if config.get(theirs) is not None
        }
        return SessionMeta(
            source="transformers",
            model=ModelMeta(name=Path(self.request.model).name, checkpoint=self.checkpoint, **shape),
            config=ConfigMeta(tp=1, device=self.request.device, dtype=self.request.dtype),
            versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
            notes=(
                "eager attention; the cache is complete, sliding windows act through the mask alone",
                "each sequence ran on its own",
            ),
            absent=absent_taps(self.model),
            biases=_biases(self.model),
        )


def _biases(model: Any) -> dict[str, bytes]:
    """Checkpoint name -> the bias as little-endian float64: what a dropped bias is recognised by."""
    return {
        name: parameter.detach().double().cpu().numpy().astype("<f8").tobytes()
        for name, parameter in model.named_parameters()
        if name.endswith(".bias")
    }
