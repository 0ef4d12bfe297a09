"""Record a `Bug`: its model, the golden session and the noise floor, and the spoilt model's own session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from lockstep.workbench.demo import MODEL_DIR
from lockstep.workbench.references import transformers_recorder
from lockstep.workbench.references.golden import forced_onto
from lockstep.workbench.references.loading import load_golden
from lockstep.workbench.references.request import GoldenRequest, GoldenSequence
from lockstep.workbench.references.transformers_recorder import record
from tests.checkpoints import EVERY_VARIANT, tiny_checkpoint
from tests.workbench.diagnosis.bugs.bug import Bug, Patch
from tests.workbench.diagnosis.bugs.engine_ranks import record_engine
from tests.workbench.diagnosis.bugs.patched import Patched, dispatching
from tests.workbench.diagnosis.bugs.sharded import Ring, record_ranks, shard

STEPS = 4
#: Tokens of the prompts, by model; those of `LENGTHS` else.
LENGTHS = (13, 6)
LONG = {
    "llama-long": (300,),
    "qwen3-long": (270,),
    "mistral-long": (150,),
    "llama-three": (5, 17, 9),
    "qwen2-three": (9, 4, 17),
}

_QWEN3 = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


def _larger(name: str, factor: float) -> Callable[[dict[str, Any]], None]:
    """Weights whose name holds `name`, times `factor`."""

    def edit(weights: dict[str, Any]) -> None:
        for key in weights:
            if name in key:
                weights[key] = weights[key] * factor

    return edit


#: Models beside `EVERY_VARIANT`: family, overrides, what is done to the weights.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], None]]] = {
    "qwen2-deep": ("qwen2", {"num_hidden_layers": 6}, lambda weights: None),
    "llama-deep": ("llama", {"num_hidden_layers": 6}, lambda weights: None),
    "qwen3-kv4": ("qwen3", {"num_key_value_heads": 4}, lambda weights: None),
    "llama-long": ("llama", {"max_position_embeddings": 1024, "num_hidden_layers": 2}, lambda weights: None),
    "qwen3-long": ("qwen3", {"max_position_embeddings": 1024, "num_hidden_layers": 2}, lambda weights: None),
    "mistral-long": ("mistral", {"sliding_window": 64, "num_hidden_layers": 2}, lambda weights: None),
    "llama-three": ("llama", {}, lambda weights: None),
    "qwen2-three": ("qwen2", {}, lambda weights: None),
    "llama-twelve": ("llama", {"num_hidden_layers": 12}, lambda weights: None),
    "llama-massive": ("llama", {}, _larger("embed_tokens", 3000.0)),
    "llama-sharp": ("llama", {}, _larger("q_proj", 12.0)),
    "qwen2-large-bias": ("qwen2", {}, _larger("k_proj.bias", 40.0)),
    "qwen2-kv8": ("qwen2", {"num_key_value_heads": 8, "tie_word_embeddings": False}, lambda weights: None),
    **{
        name: (family, overrides, lambda weights: None) for name, (family, overrides) in EVERY_VARIANT.items()
    },
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where the three sessions of a bug and its checkpoint lie."""

    engine: Path
    golden: Path
    floor: Path
    checkpoint: Path


@dataclass(slots=True)
class Recordings:
    """Records bugs under `root`, `steps` decode steps of each. References that several share are recorded once."""

    root: Path
    steps: int = STEPS
    _references: dict[tuple[str, int], Path] = field(default_factory=dict)

    def of(self, bug: Bug) -> Recorded:
        """Record the bug. A session that exists is used again."""
        engine = self.spoilt(bug)
        checkpoint, golden = self.reference(bug.model, bug.seed)
        floor = golden.with_name(f"{bug.dtype}.session")
        if not floor.exists():
            record(self._request(bug), floor)
        return Recorded(engine, golden, floor, checkpoint)

    def spoilt(self, bug: Bug) -> Path:
        """The session with the bug alone."""
        torch.set_num_threads(1)
        _, golden = self.reference(bug.model, bug.seed)
        path = golden.with_name(f"{bug.name}.session")
        if not path.exists():
            spoil(bug, self._request(bug), path)
        return path

    def faultless(self, bug: Bug) -> Path:
        """The session of our engine without the bug, of the same model, prompts, dtype and ranks."""
        _, golden = self.reference(bug.model, bug.seed)
        path = golden.with_name(f"engine-{bug.dtype}-{bug.tp}-{bug.ep}.session")
        if not path.exists():
            _run_engine(bug, lambda p: None, self._request(bug), path)
        return path

    def _request(self, bug: Bug) -> GoldenRequest:
        checkpoint, golden = self.reference(bug.model, bug.seed)
        return GoldenRequest(str(checkpoint), forced_onto(golden), self.steps, bug.dtype)  # type: ignore[arg-type]

    def reference(self, model: str, seed: int) -> tuple[Path, Path]:
        """A model's checkpoint and its golden session."""
        folder = self.root / f"{model}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        golden = folder / "golden.session"
        if (model, seed) not in self._references:
            self._references[model, seed] = _checkpoint(folder, model, seed)
        checkpoint = self._references[model, seed]
        if not golden.exists():
            lengths = LONG.get(model, LENGTHS)
            request = GoldenRequest(
                str(checkpoint), prompts(lengths, vocabulary(model), seed), self.steps, "float64"
            )
            record(request, golden)
        return checkpoint, golden


def vocabulary(model: str) -> int:
    return 131 if model != "demo" else 2003


def prompts(lengths: tuple[int, ...], size: int, seed: int) -> tuple[GoldenSequence, ...]:
    """Random token ids; the first sequence has the highest among them, the second the lowest."""
    generator = torch.Generator().manual_seed(100 + seed)
    drawn = [torch.randint(3, size, (length,), generator=generator).tolist() for length in lengths]
    drawn[0][-2] = size - 1
    drawn[-1][1] = 3
    return tuple(GoldenSequence(tuple(ids)) for ids in drawn)


def _checkpoint(folder: Path, model: str, seed: int) -> Path:
    if model == "demo":
        return MODEL_DIR
    family, overrides, edit = MODELS[model]
    path = folder / f"tiny-{family}"
    if not path.exists():
        path = tiny_checkpoint(folder, family, seed=seed, **overrides)
        weights = load_file(path / "model.safetensors")
        edit(weights)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def spoil(bug: Bug, request: GoldenRequest, path: Path) -> None:
    """Record the model with the bug in it, by the project's own recorder; by ranks where there are several; or our own
    engine."""
    if bug.ep:
        _run_engine(bug, bug.patch, request, path)
        return
    model = load_golden(Path(request.model), request.dtype, "cpu")
    model.prompt_lengths = [len(one.prompt) for one in request.sequences]
    torch.manual_seed(bug.seed)
    with ExitStack() as stack:
        if bug.tp == 1:
            bug.patch(Patched(model))
            stack.enter_context(dispatching(model))
            stack.enter_context(mock.patch.object(transformers_recorder, "load_golden", return_value=model))
            record(request, path)
            return
        ring = Ring(bug.tp)
        models = []
        for rank in range(bug.tp):
            one = copy.deepcopy(model)
            one.prompt_lengths = model.prompt_lengths
            shard(one, rank, ring)
            bug.patch(Patched(one, rank, bug.tp, model, ring))
            models.append(one)
        stack.enter_context(dispatching(model))
        record_ranks(models, ring, request, path)


def _run_engine(bug: Bug, patch: Patch, request: GoldenRequest, path: Path) -> None:
    torch.manual_seed(bug.seed)
    record_engine(patch, request, path, tp=bug.tp, ep=bug.ep)
