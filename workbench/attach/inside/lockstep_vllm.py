"""vLLM (V1 engine; model runners V1 and V2): tapped in each worker from the first scheduled batch on.

Profiling, warm-up and idle passes are not scheduled, so they are not recorded. The names of the requests come from the
model runner's batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from . import lockstep_report
from .lockstep_modules import attach
from .lockstep_names import FUSED
from .lockstep_recorder import arguments_asked, as_started, guarded, open_tape, weights_alone
from .lockstep_tap import Tape
from .lockstep_vllm_cache import cache_accesses, unobserved


def vllm_arguments(module: Any) -> None:
    """After `vllm.engine.arg_utils`: whatever starts the engine, a command or a program, goes through here."""
    create = module.EngineArgs.create_engine_config

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if as_started():
            return create(self, *args, **kwargs)
        asked = arguments_asked()
        for name, value in {"enforce_eager": True, **asked}.items():  # compiled code runs no hooks
            _set(self, name, value)
        config = create(self, *args, **kwargs)
        why, cache = unobserved(config), getattr(config, "cache_config", None)
        if why and getattr(cache, "enable_prefix_caching", False) and "enable_prefix_caching" not in asked:
            _set(self, "enable_prefix_caching", False, why)
            config = create(self, *args, **kwargs)
        return config

    module.EngineArgs.create_engine_config = create_engine_config


def _set(arguments: Any, name: str, value: Any, why: str = "") -> None:
    """Change an argument that the engine has and that is not so already."""
    if getattr(arguments, name, value) != value:
        setattr(arguments, name, value)
        lockstep_report.changed(f"vLLM runs with {name}={value}" + (f": {why}" if why else ""))


#: Asked for as an argument, and none of vLLM's: a running request that has decoded so many tokens loses its cache.
PREEMPTED = "preempted_after"


def vllm_scheduler(module: Any) -> None:
    """After `vllm.v1.core.sched.scheduler`: each request is preempted once, if that is the variant of the run."""
    after = arguments_asked().get(PREEMPTED)
    if as_started() or after is None:
        return
    schedule = module.Scheduler.schedule

    @functools.wraps(schedule)
    def preempted(self: Any, *args: Any, **kwargs: Any) -> Any:
        guarded("preempting requests of vLLM", _preempt)(self, after)
        return schedule(self, *args, **kwargs)

    module.Scheduler.schedule = preempted


def _preempt(scheduler: Any, after: int) -> None:
    """Take the cache from all that run, as vLLM does where its cache is reset, once one has decoded enough."""
    known: set[str] = vars(scheduler).setdefault("lockstep_preempted", set())
    due = {one.request_id for one in scheduler.running if one.num_output_tokens >= after} - known
    if due:
        known |= due
        scheduler.reset_prefix_cache(reset_running_requests=True)
        lockstep_report.changed(
            f"vLLM runs with {PREEMPTED}={after}: requests lose their cache and are read anew"
        )


def vllm_worker(module: Any) -> None:
    """After `vllm.v1.worker.worker_base`: the wrapper by which every executor drives its worker."""
    if weights_alone():
        return
    execute = module.WorkerWrapperBase.execute_model

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if "lockstep" not in vars(self) and scheduler_output.total_num_scheduled_tokens:
            self.lockstep = guarded("tapping a vLLM worker", _tapped)(self.worker)
        tapped: VllmWorker | None = vars(self).get("lockstep")
        if tapped is None:
            return execute(self, scheduler_output, *args, **kwargs)
        with tapped.scheduled(scheduler_output):
            result = execute(self, scheduler_output, *args, **kwargs)
            if result is not None:  # else `sample_tokens` is next, which may compute the logits
                tapped.tape.end()
            return result

    module.WorkerWrapperBase.execute_model = execute_model


def _tapped(worker: Any) -> VllmWorker:
    from vllm.distributed import parallel_state

    config = worker.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        raise RuntimeError("pipeline parallelism is not recorded: use tensor parallelism alone")
    group, model = parallel_state.get_tp_group(), config.model_config
    tape = open_tape(
        "vllm", group.rank_in_group, group.world_size, config=model.hf_text_config, model=model.model,
        mode="eager" if model.enforce_eager else "compiled",
    )  # fmt: skip
    return VllmWorker(worker, tape)


class VllmWorker:
    """One rank's worker with its tape."""

    def __init__(self, worker: Any, tape: Tape) -> None:
        self.runner, self.tape = worker.model_runner, tape
        self.output: Any = None  # of the scheduler, while its batch is executed
        self.batch: Any = None  # of model runner V2
        self.greedy: dict[str, int] = {}  # by request that is decoded greedily: the length of its prompt
        self.processed = bool(getattr(worker.vllm_config.model_config, "logits_processors", None))
        model = worker.get_model()
        hook = model.register_forward_pre_hook(
            guarded("a pass of vLLM", self._before, tape), with_kwargs=True
        )
        tape.undo.append(hook.remove)
        attach(model, tape, FUSED)
        if hasattr(self.runner, "prepare_inputs"):
            self._after(self.runner, "prepare_inputs", self._prepared)
        self._after(worker, "sample_tokens", lambda _: tape.end())

    def scheduled(self, output: Any) -> VllmWorker:
        """A context in which the calls of the model belong to a schedule."""
        self.output = output
        return self

    def __enter__(self) -> None:
        self.tape.end()

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        self.output = None
        if error is not None:
            self.tape.end(f"{type(error).__name__}: {error}")

    def _prepared(self, batch: Any) -> None:
        self.batch = batch

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called. Without a schedule it is a dummy run."""
        if self.output is None:
            return
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        count = positions.shape[-1]
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:  # embeddings go in, of images for instance
            ids = self.runner.input_ids.gpu[:count] if self.batch is None else self.batch.input_ids[:count]
        spans = list(self._spans())
        requests = [name for name, rows in spans for _ in range(rows)]
        self.tape.step(
            ids,
            positions,
            requests + [""] * (count - len(requests)),
            greedy=guarded("sampling", self._chosen)(),
        )
        if hasattr(self.runner, "attn_groups") and not unobserved(self.runner.vllm_config):
            self.tape.cache(guarded("the cache of vLLM", cache_accesses)(self.runner, self.output, spans))

    def _chosen(self) -> list[str] | None:
        """The requests whose next token is the likeliest by the logits of this pass; None where the schedule of this
        version does not give what requests ask for."""
        output = self.output
        if not hasattr(output, "scheduled_new_reqs"):
            return None
        for one in output.scheduled_new_reqs:
            self.greedy.pop(one.req_id, None)
            if (
                one.prompt_token_ids is not None
                and not self.processed
                and _takes_the_likeliest(one.sampling_params)
            ):
                self.greedy[one.req_id] = len(one.prompt_token_ids)
        later = output.scheduled_cached_reqs
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        computed |= dict(zip(later.req_ids, later.num_computed_tokens, strict=True))
        drafted = getattr(output, "scheduled_spec_decode_tokens", None) or {}
        return [
            name
            for name, rows in output.num_scheduled_tokens.items()
            if name in self.greedy
            and name not in drafted
            and computed.get(name, 0) + rows >= self.greedy[name]
        ]

    def _spans(self) -> Iterable[tuple[str, int]]:
        """Each request with its number of rows, in the order of the batch."""
        if self.batch is not None:
            return zip(self.batch.req_ids, self.batch.num_scheduled_tokens.tolist(), strict=True)
        rows = self.output.num_scheduled_tokens
        return [(name, rows[name]) for name in self.runner.input_batch.req_ids if rows.get(name)]

    def _after(self, owner: Any, name: str, see: Callable[[Any], None]) -> None:
        """See what a method of `owner` returns, until the tape is closed."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            see(result)
            return result

        setattr(owner, name, call)
        self.tape.undo.append(lambda: vars(owner).pop(name, None))


#: What a request may ask for that changes its logits before the likeliest token is taken, and what it is without.
_PROCESSORS = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": None,
    "allowed_token_ids": None, "bad_words": None, "structured_outputs": None, "guided_decoding": None,
    "logits_processors": None, "extra_args": None, "watermarking": None,
}  # fmt: skip


def _takes_the_likeliest(sampling: Any) -> bool:
    """Whether a request takes the likeliest token by the logits of the model as they are."""
    if sampling is None or sampling.temperature != 0:
        return False
    return not any(
        (getattr(sampling, name, None) or without) != without for name, without in _PROCESSORS.items()
    )
