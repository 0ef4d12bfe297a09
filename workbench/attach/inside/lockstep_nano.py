"""nano-vllm: each run of the model runner on scheduled sequences is a pass; its warm-up is not."""

from __future__ import annotations

import functools
from typing import Any

from . import lockstep_report
from .lockstep_modules import attach, follow
from .lockstep_names import FUSED
from .lockstep_recorder import as_started, guarded, ids_alone, open_tape, weights_alone
from .lockstep_tap import Tape
from .lockstep_weights import keep_weights


def nano_runner(module: Any) -> None:
    """After `nanovllm.engine.model_runner`. Ranks above 0 stay in `__init__`, so all is done before it."""
    runner = module.ModelRunner
    init, warm_up, run = runner.__init__, runner.warmup_model, runner.run

    @functools.wraps(init)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not config.enforce_eager and not as_started():
            config.enforce_eager = True
            lockstep_report.changed("nano-vllm runs with enforce_eager=True")
        init(self, config, *args, **kwargs)

    @functools.wraps(warm_up)
    def warmup_model(self: Any) -> Any:
        if weights_alone():
            keep_weights(self.model, "nano-vllm", self.rank, self.world_size, self.config.model)
        self.lockstep_warms_up = True
        try:
            return warm_up(self)
        finally:
            self.lockstep_warms_up = False

    @functools.wraps(run)
    def tapped(self: Any, seqs: Any, is_prefill: bool) -> Any:
        if "lockstep" not in vars(self) and not weights_alone() and not self.lockstep_warms_up:
            self.lockstep = guarded("tapping a nano-vllm model runner", _tapped)(self)
        tape: Tape | None = vars(self).get("lockstep")
        if tape is None:
            return run(self, seqs, is_prefill)
        guarded("a batch of nano-vllm", _scheduled, tape)(self, tape, seqs, is_prefill)
        try:
            return run(self, seqs, is_prefill)
        finally:
            tape.end()

    runner.lockstep_warms_up = False
    runner.__init__, runner.warmup_model, runner.run = __init__, warmup_model, tapped


def _tapped(runner: Any) -> Tape:
    config = runner.config
    tape = open_tape(
        "nano-vllm", runner.rank, runner.world_size, config=config.hf_config, model=config.model,
        mode="eager" if config.enforce_eager else "compiled",
    )  # fmt: skip
    if not ids_alone():
        attach(runner.model, tape, FUSED)
        follow(
            runner.model,
            tape,
            lambda args, kwargs: (args[0], args[1], runner.lockstep_requests, runner.lockstep_places),
        )
    return tape


def _scheduled(runner: Any, tape: Tape, seqs: Any, is_prefill: bool) -> None:
    """Note whose rows the batch has. Sequences that were sent to another rank have lost their numbers there."""
    spans = [range(seq.num_cached_tokens if is_prefill else len(seq) - 1, len(seq)) for seq in seqs]
    rows = [(seq, at) for seq, span in zip(seqs, spans, strict=True) for at in span]
    known = all(hasattr(seq, "seq_id") for seq in seqs)
    runner.lockstep_requests = [str(seq.seq_id) for seq, _ in rows] if known else None
    runner.lockstep_places = [at for _, at in rows]
    if ids_alone():  # a CUDA graph does not call the model
        ids = [seq[at] if is_prefill else seq.last_token for seq, at in rows]
        tape.step(ids, runner.lockstep_places, runner.lockstep_requests)
