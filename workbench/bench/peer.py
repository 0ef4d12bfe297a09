"""Another library in a process of its own: `python -m lockstep.workbench.bench.peer SPEC`, a `PeerSpec` as JSON."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lockstep.engine.children import loading
from lockstep.engine.peaks import held_on
from lockstep.engine.text import printable
from lockstep.workbench.bench.messages import (
    WORKLOADS,
    PeerAnswer,
    PeerFailure,
    PeerReady,
    PeerSpec,
    PeerTiming,
    Timing,
    Workload,
    prompt_ids,
)

Run = Callable[[Workload], Timing]


def transformers_run(spec: PeerSpec) -> tuple[Run, float]:
    """transformers as it comes, greedy, and the seconds that loading took."""
    with loading():
        import torch
        from transformers import DynamicCache

        from lockstep.workbench.references import wrapped
        from lockstep.workbench.references.loading import CACHE, TORCH_DTYPES, load_golden
    torch.set_num_threads(spec.threads)
    started, path, dtype = time.perf_counter(), Path(spec.model), TORCH_DTYPES[spec.dtype]  # type: ignore[index]
    model: Any
    if path.is_dir():
        config = wrapped.config_of(path)
        loaded = wrapped.auto_class(config).from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True
        )
        model = wrapped.text_model(loaded)
    else:
        model = load_golden(path, spec.dtype, "cpu")  # type: ignore[arg-type]
        model.set_attn_implementation("sdpa")
    model.train(False).to(spec.device)
    seconds = time.perf_counter() - started

    @torch.inference_mode()
    def run(work: Workload) -> Timing:
        """Prompts as one batch; greedy."""
        prompts = [prompt_ids(work.prompt, model.config.vocab_size, i) for i in range(work.batch)]
        ids = torch.tensor(prompts, device=spec.device)
        cache, taken = DynamicCache(config=model.config), []
        for _ in range(1 + work.steps):
            begun = time.perf_counter()
            logits = model(ids, logits_to_keep=1, **{CACHE: cache}).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            ids.tolist()  # as the tokens come to whoever reads them
            taken.append(time.perf_counter() - begun)
        return Timing(taken[0], tuple(taken[1:]))

    return run, seconds


def llamacpp_run(spec: PeerSpec) -> tuple[Run, float]:
    """llama.cpp on the file as it is, one sequence at a time, on the CPU."""
    if spec.device != "cpu":
        raise ValueError("it is timed on the CPU alone: use --device cpu")
    import llama_cpp

    started = time.perf_counter()
    model = llama_cpp.Llama(
        spec.model, n_ctx=spec.context, n_threads=spec.threads, n_threads_batch=spec.threads, verbose=False
    )
    seconds = time.perf_counter() - started

    def run(work: Workload) -> Timing:
        if work.batch > 1:
            raise ValueError("one sequence at a time")
        model.reset()
        ids, taken = prompt_ids(work.prompt, model.n_vocab()), []
        for _ in range(1 + work.steps):
            begun = time.perf_counter()
            model.eval(ids)
            ids = [model.sample(temp=0.0)]
            taken.append(time.perf_counter() - begun)
        return Timing(taken[0], tuple(taken[1:]))

    return run, seconds


LIBRARIES: dict[str, Callable[[PeerSpec], tuple[Run, float]]] = {
    "transformers": transformers_run,
    "llama.cpp": llamacpp_run,
}


def main() -> int:
    """Load, then answer a workload a line until the other end is closed."""
    spec = msgspec.json.decode(sys.argv[1], type=PeerSpec)
    with socket.socket(fileno=spec.socket) as host, host.makefile("rb") as asked:

        def send(answer: PeerAnswer) -> None:
            host.sendall(msgspec.json.encode(answer) + b"\n")

        try:
            run, seconds = LIBRARIES[spec.library](spec)
        except Exception as error:  # a library raises what it likes over a checkpoint: reported, and the end
            send(PeerFailure(f"{type(error).__name__}: {printable(error, 300)}"))
            return 0
        send(PeerReady(seconds, held_on(spec.device).now))
        for line in asked:
            try:
                before = held_on(spec.device).now
                timing = run(WORKLOADS.decode(line))
                send(PeerTiming(replace(timing, bytes=held_on(spec.device).peak - before)))
            except Exception as error:  # of this workload alone
                send(PeerFailure(f"{type(error).__name__}: {printable(error, 300)}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
