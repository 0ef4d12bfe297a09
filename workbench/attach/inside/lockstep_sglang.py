"""SGLang (srt): each scheduled forward batch of the model runner is a pass.

The model is called by its `forward`, so hooks on the whole model do not run; those on its parts do. What the runner
runs apart from `forward`, as to capture CUDA graphs, is no pass.
"""

from __future__ import annotations

import functools
from typing import Any

from . import lockstep_report
from .lockstep_modules import attach
from .lockstep_names import FUSED
from .lockstep_recorder import as_started, guarded, ids_alone, open_tape, weights_alone
from .lockstep_tap import Tape
from .lockstep_weights import keep_weights

#: Set in every server: graphs run no hooks, what the radix cache holds is not computed, the warm-up is no request.
ARGUMENTS = {
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
}


def sglang_arguments(module: Any) -> None:
    """After `sglang.srt.server_args`."""
    init = module.ServerArgs.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in ({} if as_started() else ARGUMENTS).items():
            if name in type(self).__dataclass_fields__ and kwargs.get(name) != value:
                kwargs[name] = value
                lockstep_report.changed(f"SGLang runs with {name}={value}")
        init(self, *args, **kwargs)

    module.ServerArgs.__init__ = __init__


def sglang_runner(module: Any) -> None:
    """After `sglang.srt.model_executor.model_runner`."""
    forward = module.ModelRunner.forward

    @functools.wraps(forward)
    def tapped(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if "lockstep" not in vars(self):
            self.lockstep = guarded("tapping an SGLang model runner", _tapped)(self)
        tape = self.lockstep
        if tape is None or forward_batch.forward_mode.is_idle():
            return forward(self, forward_batch, *args, **kwargs)
        guarded("a pass of SGLang", _begin, tape)(tape, forward_batch)
        try:
            return forward(self, forward_batch, *args, **kwargs)
        finally:
            tape.end()

    module.ModelRunner.forward = tapped


def _tapped(runner: Any) -> Tape | None:
    from sglang.srt.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if getattr(runner, "is_draft_worker", False):
        return None
    if getattr(runner, "pp_size", 1) > 1:
        raise RuntimeError("pipeline parallelism is not recorded: use tensor parallelism alone")
    config = runner.model_config
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if weights_alone():
        keep_weights(runner.model, "sglang", rank, size, config.model_path)
        return None
    tape = open_tape(
        "sglang", rank, size, config=config.hf_text_config, model=config.model_path,
        mode="as started" if ids_alone() else "eager",
    )  # fmt: skip
    attach(runner.model, tape, FUSED)
    return tape


def _begin(tape: Tape, batch: Any) -> None:
    """A request has as many rows as it extends by, or one. Where nothing else names it, its slot in the pool does."""
    names = getattr(batch, "rids", None) or batch.req_pool_indices.tolist()
    counts = getattr(batch, "extend_seq_lens_cpu", None) if batch.forward_mode.is_extend() else None
    counts = [1] * len(names) if counts is None else counts
    requests = [str(name) for name, rows in zip(names, counts, strict=True) for _ in range(rows)]
    requests += [""] * (len(batch.input_ids) - len(requests))
    tape.step(batch.input_ids, batch.positions, requests)
