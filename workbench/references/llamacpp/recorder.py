"""The golden reference by llama.cpp: a session recorded through its `cb_eval`, teacher-forced, tap by tap."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.checkpoint.gguf.split import read_split
from lockstep.engine.graph import Part
from lockstep.engine.taps.names import tap_specs
from lockstep.engine.text import bytes_text, printable
from lockstep.sessions.meta import ConfigMeta, ModelMeta, SessionMeta
from lockstep.sessions.records import Tap
from lockstep.workbench.models.llamacpp_taps import ABSENT, Shape, TapNames, arrange
from lockstep.workbench.references.llamacpp.library import Array, LlamaContext, LlamaModel, dequantise
from lockstep.workbench.references.request import GoldenRequest, ReferenceFailure
from lockstep.workbench.references.steps import See, record_steps

#: Architectures whose taps are mapped -> whether they normalise q and k. Mistral is `llama` in GGUF.
ARCHITECTURES: Mapping[str, tuple[Part, ...]] = {"llama": (), "qwen2": (), "qwen3": ("qk_norm",)}

#: Bytes of a float32 file over those of the smallest quantised one (2.6 bits a weight), with room.
_LARGER = 13


def record(
    request: GoldenRequest, path: Path, *, checkpoint: str = "", progress: Callable[[], None] | None = None
) -> None:
    """Record the session that `request` asks for at `path`. `checkpoint` is the checkpoint's digest.

    The file with dequantised weights, where `request` asks for that, lies beside `path` meanwhile. ReferenceFailure
    where llama.cpp is not installed, cannot load the model, or the ids do not fit it.
    """
    if request.dtype != "float32" or request.device != "cpu":
        raise ReferenceFailure(
            f"llama.cpp records in float32 on the cpu, not {request.dtype} on {request.device}", 2
        )
    torch.set_num_threads(request.threads)
    model = Path(request.model)
    if not request.dequantised:
        _record(model, request, path, checkpoint, progress)
        return
    exact = path.with_suffix(".gguf")
    free = shutil.disk_usage(path.parent).free
    if free < (needed := _LARGER * sum(header.size for header in read_split(model).values())):
        raise ReferenceFailure(
            f"{model}: dequantised it may take {bytes_text(needed)}, and {path.parent} has {bytes_text(free)} free: "
            "let LOCKSTEP_CACHE_DIR name a larger place"
        )
    try:
        dequantise(model, exact, request.threads)
        _record(exact, request, path, checkpoint, progress)
    finally:
        exact.unlink(missing_ok=True)


def _record(
    file: Path, request: GoldenRequest, path: Path, checkpoint: str, progress: Callable[[], None] | None
) -> None:
    with LlamaModel(file, request.threads) as loaded:
        record_steps(_TappedModel.of(loaded, request, checkpoint), request, path, progress)


@dataclass(slots=True)
class _TappedModel:
    """A loaded model with a context for each sequence."""

    model: LlamaModel
    request: GoldenRequest
    shape: Shape
    described: ModelMeta
    taps: list[Tap]
    contexts: dict[int, _TappedContext] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LlamaModel, request: GoldenRequest, checkpoint: str) -> _TappedModel:
        """ReferenceFailure for an architecture whose tensors are not mapped."""
        arch = model.text("general.architecture") or ""
        if arch not in ARCHITECTURES:
            raise ReferenceFailure(
                f"{request.model}: architecture {printable(arch)!r}; llama.cpp's tensors are mapped for "
                f"{', '.join(ARCHITECTURES)}"
            )
        api = model.library.api
        layers, heads = api.llama_model_n_layer(model.handle), api.llama_model_n_head(model.handle)
        hidden = api.llama_model_n_embd(model.handle)
        reported = ModelMeta(
            name=Path(request.model).name,
            checkpoint=checkpoint,
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=int(model.number(f"{arch}.feed_forward_length") or 0) or None,
            num_heads=heads,
            num_kv_heads=api.llama_model_n_head_kv(model.handle),
            head_dim=int(model.number(f"{arch}.attention.key_length") or hidden // heads),
            vocab_size=model.vocab_size,
            max_position=api.llama_model_n_ctx_train(model.handle),
            rms_eps=model.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        )
        interleaved = api.llama_model_rope_type(model.handle) == api.LLAMA_ROPE_TYPE_NORM
        assert reported.num_kv_heads is not None
        assert reported.head_dim is not None
        shape = Shape(heads, reported.num_kv_heads, reported.head_dim, interleaved)
        specs = tap_specs(layers, ARCHITECTURES[arch])
        taps = [Tap(i, spec.name, str(spec.layout)) for i, spec in enumerate(specs)]
        return cls(model, request, shape, reported, taps)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.described.max_position or 0

    def forward(self, seq: int, ids: Sequence[int], see: See) -> Tensor:
        if seq not in self.contexts:
            prompt = self.request.sequences[seq].prompt
            self.contexts[seq] = _TappedContext(self, len(prompt) + self.request.steps)
        return torch.from_numpy(self.contexts[seq].forward(ids, see))

    def whole(self, ids: Sequence[int], last: int) -> Tensor | None:
        return None

    def cached(self, seq: int) -> list[int]:
        return [self.contexts[seq].context.read] * (self.described.num_layers or 0)

    def meta(self) -> SessionMeta:
        stored = (
            "weights dequantised to float32 by llama.cpp" if self.request.dequantised else "weights as stored"
        )
        return SessionMeta(
            source="llama.cpp",
            model=self.described,
            config=ConfigMeta(tp=1, device="cpu", dtype="float32"),
            versions={"llama-cpp-python": version("llama-cpp-python")},
            notes=(f"{stored}; no flash attention, the cache in float32", "each sequence ran on its own"),
            absent={
                f"layers.{i}.{name}": reason
                for i in range(self.described.num_layers or 0)
                for name, reason in ABSENT.items()
            },
        )


class _TappedContext:
    """A sequence's context, which names and arranges what llama.cpp hands over."""

    def __init__(self, model: _TappedModel, tokens: int) -> None:
        self.shape, self.expected = model.shape, {tap.name for tap in model.taps} - model.meta().absent.keys()
        self.context: LlamaContext = model.model.context(tokens, self._wants, self._takes)
        self._names = TapNames()
        self._next: str | None = None
        self._seen: dict[str, Array] = {}
        self._positions = range(0)

    def forward(self, ids: Sequence[int], see: See) -> Array:
        """One pass. A tensor that llama.cpp writes twice (a product, then with its bias) counts as it was last."""
        self._names, self._seen = TapNames(), {}
        self._positions = range(self.context.read, self.context.read + len(ids))
        logits = self.context.forward(ids)
        if missing := sorted(self.expected - self._seen.keys()):
            raise ReferenceFailure(
                f"llama.cpp computed no tensor for {', '.join(missing[:3])} ({len(missing)} in all): its graph is not "
                "the one that is mapped here; use the version of llama-cpp-python that lockstep[llamacpp] asks for"
            )
        for tap, tensor in self._seen.items():
            see(tap, torch.from_numpy(tensor))
        return logits

    def _wants(self, name: str, operation: str) -> bool:
        self._next = self._names.tap(name, operation)
        return self._next is not None

    def _takes(self, tensor: Array) -> None:
        assert self._next is not None, "only what was wanted is handed over"
        arranged = arrange(self._next, tensor, self.shape, self._positions)
        self._seen[self._next] = np.ascontiguousarray(arranged)
