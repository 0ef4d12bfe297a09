"""Running an engine in a test: real rank processes, or one runner in this process.

engine.load(path, {"load_bias": "false"}, block_size=1)
passes = engine.generate([[5, 6, 7]], steps=4)
passes[0].logits(0)                    # [vocab] of sequence 0, put together from all ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep import engine as public
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.config import EngineConfig, ModelConfig
from lockstep.engine.faults.resolve import resolve
from lockstep.engine.parallel.comm import Comm
from lockstep.engine.ranks.client import Client
from lockstep.engine.ranks.reports import LoadReport
from lockstep.engine.run.loading import Loader
from lockstep.engine.run.runner import Runner
from lockstep.engine.run.sampling import Sampling

PROGRAM = "lockstep.engine.faults.rank"
#: Where rank processes compute in tests that name none: `LOCKSTEP_TEST_DEVICE=cuda` takes the engine's tests to a GPU.
DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu")


class Pass(public.Pass):
    """One forward pass."""

    def logits(self, seq: int = 0) -> np.ndarray:
        """The last token's logits [vocab]."""
        return self.tensor("logits", seq)[0]


class Engine(public.Engine):
    """An engine that knows the faults; the same processes serve many models."""

    last: Pass  # for tests that run passes in a helper

    def __init__(self, tp: int, **config: Any) -> None:
        defaults = {"tp": tp, "threads": 1, "device": DEVICE}
        super().__init__(EngineConfig(**defaults | config), program=PROGRAM)
        self.first_config = self.client.config

    def load(self, path: Path, rules: Mapping[str, str] | None = None, **config: Any) -> list[LoadReport]:
        """Load a checkpoint, under the engine's first configuration with `config` on top."""
        self.client.config = replace(self.first_config, **config)
        return super().load(path, rules)

    def step(self, forced: Mapping[int, int] | None = None) -> Pass:
        """One pass."""
        return Pass(super().step(forced).reports, self.specs)

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int, sampling: Sampling | None = None
    ) -> list[Pass]:
        """Add one sequence a prompt, numbered from 0, and run so many passes."""
        for seq, ids in enumerate(prompts):
            self.add(ids, seq, sampling)
        return [self.step() for _ in range(steps)]

    def revive(self) -> None:
        """Start anew if a test has ended the ranks: the next one must not suffer for it."""
        if not self.client.alive:
            self.client = Client(self.first_config, program=PROGRAM)


def model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint."""
    model, source = open_checkpoint(path)
    source.close()
    return model


def local_runner(path: Path, rules: Mapping[str, str] | None = None, **config: Any) -> Runner:
    """A single rank in this process: no sockets, no start-up, the same code."""
    engine = EngineConfig(**config)
    comm = Comm(device=torch.device(engine.device))
    loader = Loader(path, engine, comm)
    return Runner(loader.model, engine, comm, resolve(rules or {}), loader)


def reference_logits(model: Any, ids: Sequence[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' greedy continuation without a cache: logits [steps, vocab] and the tokens."""
    ids, rows = list(ids), []
    with torch.inference_mode():
        for _ in range(steps):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return torch.stack(rows), ids[-steps:]
