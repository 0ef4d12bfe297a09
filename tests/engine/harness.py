"""Running an engine in a test: real rank processes, or one runner in this process.

engine.load(path, {"load_bias": "false"}, block_size=1)
passes = engine.generate([[5, 6, 7]], steps=4)
passes[0].logits(0)                    # [vocab] of sequence 0, put together from all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig, ModelConfig
from engine.faults.resolve import resolve
from engine.parallel.comm import Comm
from engine.parallel.shards import kv_replicas
from engine.ranks.client import Client
from engine.ranks.wire import unpack_array, widen
from engine.run.loading import Loader, model_config
from engine.run.runner import Runner
from engine.run.sampling import Sampling
from engine.taps.names import STATISTICS, TapSpec, tap_specs

PROGRAM = "engine.faults.rank"


@dataclass(frozen=True)
class Pass:
    """One forward pass as all ranks answered it."""

    answers: list[dict[str, Any]]
    specs: Sequence[TapSpec]

    @property
    def sequences(self) -> dict[int, dict[str, Any]]:
        """What rank 0 told of each sequence."""
        return {one["seq"]: one for one in self.answers[0]["sequences"]}

    def token(self, seq: int = 0) -> int:
        """The token that the pass emitted."""
        emitted = self.sequences[seq]["emitted"]
        assert emitted is not None, "the pass was part of a chunked prefill"
        return int(emitted)

    def parts(self, tap: str, seq: int = 0) -> list[np.ndarray]:
        """What each rank captured at a tap, in rank order."""
        place = [spec.name for spec in self.specs].index(tap)
        found = []
        for answer in self.answers:
            (one,) = (t for t in answer["tensors"] if (t["tap"], t["seq"]) == (place, seq))
            found.append(widen(*unpack_array(one)))
        return found

    def tensor(self, tap: str, seq: int = 0) -> np.ndarray:
        """The tensor that one rank alone would have had, put together by the tap's layout."""
        layout = next(spec.layout for spec in self.specs if spec.name == tap)
        parts = self.parts(tap, seq)
        if layout.kind == "partial":
            return np.sum(parts, axis=0)
        if layout.kind == "replicate":
            return parts[0]
        return np.concatenate(parts[:: layout.replicas], axis=layout.dim)

    def logits(self, seq: int = 0) -> np.ndarray:
        """The last token's logits [vocab]."""
        return self.tensor("logits", seq)[0]

    @property
    def checksums(self) -> np.ndarray:
        """[ranks, taps] uint64."""
        return np.stack([np.frombuffer(answer["checksums"], np.uint64) for answer in self.answers])

    @property
    def statistics(self) -> np.ndarray:
        """[ranks, taps, statistics] float32."""
        rows = [np.frombuffer(answer["stats"], np.float32) for answer in self.answers]
        return np.stack(rows).reshape(len(rows), -1, len(STATISTICS))


class Engine:
    """Rank processes under a client, with a model loaded; the same processes serve many models."""

    specs: tuple[TapSpec, ...]
    last: Pass  # for tests that run passes in a helper

    def __init__(self, tp: int, **config: Any) -> None:
        self.client = Client(EngineConfig(**{"tp": tp, "threads": 1} | config), program=PROGRAM)
        self.first_config = self.client.config

    def load(self, path: Path, rules: Mapping[str, str] | None = None, **config: Any) -> list[dict[str, Any]]:
        """Load a checkpoint, under the engine's first configuration with `config` on top."""
        model = model_config(path)
        self.client.config = replace(self.first_config, **config)
        self.specs = self.client.specs = specs_of(model, self.client.config.tp)
        return self.client.load(path, rules)

    def watch(self, *full: str, last: Sequence[str] = (), statistics: bool = False) -> None:
        """Capture these taps whole or their last row, and statistics of all taps."""
        names = [spec.name for spec in self.specs]
        places = {"full": [names.index(tap) for tap in full], "last": [names.index(tap) for tap in last]}
        self.client.call("watch", statistics=statistics, **places)

    def rules(self, rules: Mapping[str, str], *, reload: bool = False) -> None:
        """Put rules in force from an empty cache."""
        self.client.call("rules", rules=dict(rules), reload=reload)

    def add(self, ids: Sequence[int], seq: int = 0, sampling: Sampling | None = None) -> None:
        """A new sequence."""
        self.client.call("add", seq=seq, ids=list(ids), sampling=asdict(sampling or Sampling()))

    def step(self, forced: Mapping[int, int] | None = None, pause: dict[str, Any] | None = None) -> Pass:
        """One pass."""
        return Pass(self.client.call("step", forced=dict(forced or {}), pause=pause), self.specs)

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int, sampling: Sampling | None = None
    ) -> list[Pass]:
        """Add one sequence a prompt, numbered from 0, and run so many passes."""
        for seq, ids in enumerate(prompts):
            self.add(ids, seq, sampling)
        return [self.step() for _ in range(steps)]

    def close(self) -> None:
        """End the ranks."""
        self.client.close()

    def revive(self) -> None:
        """Start anew if a test has ended the ranks: the next one must not suffer for it."""
        if not self.client.alive:
            self.client = Client(self.first_config, program=PROGRAM)


def specs_of(model: ModelConfig, tp: int) -> tuple[TapSpec, ...]:
    """The taps of a model."""
    return tap_specs(num_layers=model.num_layers, qk_norm=model.qk_norm, kv_replicas=kv_replicas(model, tp))


def local_runner(path: Path, rules: Mapping[str, str] | None = None, **config: Any) -> Runner:
    """A single rank in this process: no sockets, no start-up, the same code."""
    engine = EngineConfig(**config)
    loader = Loader(path, engine, Comm())
    return Runner(loader.model, engine, Comm(), resolve(rules or {}), loader)


def reference_logits(model: Any, ids: Sequence[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' greedy continuation without a cache: logits [steps, vocab] and the tokens."""
    ids, rows = list(ids), []
    with torch.inference_mode():
        for _ in range(steps):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return torch.stack(rows), ids[-steps:]
