"""transformers in any process: the first causal language model that is called, whole or sharded by its `tp_plan`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from . import lockstep_report
from .lockstep_modules import attach, follow
from .lockstep_names import TRANSFORMERS
from .lockstep_recorder import as_started, guarded, ids_alone, open_tape, weights_alone
from .lockstep_weights import keep_weights

#: What a rank of several puts into the all-reduces.
PARTIALS = {
    path: TRANSFORMERS[path] | {"partial": tap}
    for path, tap in {
        ".self_attn.o_proj": ".attn.o_proj.partial",
        ".mlp.down_proj": ".mlp.down.partial",
        ".mlp.c_proj": ".mlp.down.partial",
        ".self_attn.dense": ".attn.o_proj.partial",
        ".mlp.fc2": ".mlp.down.partial",
    }.items()
}


def transformers_models(module: Any) -> None:
    """After `transformers.modeling_utils`."""
    call = module.PreTrainedModel.__call__
    recorded: list[Any] = []

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorded and self.get_output_embeddings() is not None:
            recorded.append(self)
            guarded("tapping a transformers model", _tap)(self)
        return call(self, *args, **kwargs)

    module.PreTrainedModel.__call__ = __call__
    # vLLM and SGLang import this module, and are asked to run eager separately.
    if not as_started() and not {"vllm", "sglang"} & sys.modules.keys():
        torch.compiler.set_stance("force_eager")
        lockstep_report.changed("torch.compile is switched off")


def _run_all_tokens(model: Any) -> None:
    """Gemma-4's layers that read the keys and values of others run the last token of a prompt alone, whose logits are
    asked for: let them run all, so that their taps have the rows of the other layers."""
    for part in model.modules():
        if hasattr(part, "_maybe_slice_kv_shared_inputs"):
            part._maybe_slice_kv_shared_inputs = lambda *inputs, **_: inputs[:4]
            lockstep_report.changed("layers that share keys and values run all tokens of a prompt")


def _tap(model: Any) -> None:
    size = getattr(model, "_tp_size", None) or 1
    if size == 1 and dist.is_available() and dist.is_initialized() and dist.get_rank():
        return  # every rank holds the whole model
    rank = dist.get_rank() % size if size > 1 else 0
    if weights_alone():
        keep_weights(model, "transformers", rank, size, getattr(model, "name_or_path", ""))
        return
    tape = open_tape(
        "transformers", rank, size, config=model.config.get_text_config(), model=model.name_or_path,
        mode="as started" if ids_alone() else "eager",
    )  # fmt: skip
    if not as_started():
        _run_all_tokens(model)
    attach(model, tape, TRANSFORMERS | (PARTIALS if size > 1 else {}))
    follow(model, tape)
