"""What a user's words mean to the engine: prompts as ids, faults, a capture, an EngineConfig (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from lockstep.engine.config import DType, EngineConfig, ModelConfig, check_fit
from lockstep.engine.errors import ConfigError, RequestError
from lockstep.engine.faults.catalogue import check_faults, parse_fault
from lockstep.engine.run.estimates import check_room
from lockstep.engine.run.memory import check_loadable
from lockstep.engine.run.prompts import check_prompt
from lockstep.engine.taps.names import model_taps
from lockstep.workbench.demo import DEFAULT_PROMPT
from lockstep.workbench.models.capture import STATS, Capture, parse_capture
from lockstep.workbench.models.opening import OpenedModel
from lockstep.workbench.models.tokenizer import need_tokenizer


def texts_of(
    model: OpenedModel, texts: Sequence[str] | None, ids: Sequence[str] | None, chat: bool
) -> tuple[Sequence[str], bool]:
    """The texts to run and whether they are a chat's: those given, or where there is nothing the demo's question.

    RequestError for a model that has none to offer.
    """
    if texts or ids:
        return texts or (), chat
    if not model.offers_prompt:
        raise RequestError("nothing to run: give --prompt TEXT or --ids 1,2,3")
    return [DEFAULT_PROMPT], True


def prompt_ids(
    model: OpenedModel, texts: Sequence[str] | None, ids: Sequence[str] | None, chat: bool
) -> list[list[int]]:
    """The prompts as token ids: those given as text, then those given as ids. RequestError for what is none."""
    if chat and ids and not texts:
        raise RequestError(
            "--chat puts text into the chat template, --ids are tokens already: give --prompt TEXT"
        )
    texts, chat = texts_of(model, texts, ids, chat)
    return [*(_encoded(model, text, chat) for text in texts), *map(_numbers, ids or ())]


def faults_of(words: Sequence[str] | None, model: OpenedModel, tp: int) -> dict[str, str]:
    """The faults given as NAME=VALUE that are switched on.

    ConfigError for one that does not exist, cannot act on this model, or is given two values.
    """
    faults: dict[str, str] = {}
    for name, value in map(parse_fault, words or ()):
        if faults.setdefault(name, value) != value:
            raise ConfigError(f"fault {name} is given as {faults[name]} and as {value}: choose one")
    wrong = {fault.seam for fault in check_faults(faults, model.config, tp)}
    return {name: value for name, value in faults.items() if name in wrong}


def engine_config(
    model: OpenedModel,
    *,
    tp: int,
    device: str,
    dtype: str,
    ep: int = 1,
    load: str = "direct",
    weights: str = "dequantised",
    batch_invariant: bool = False,
    chunk: int | None = None,
    timeout: float = 60.0,
    start_timeout: float = 300.0,
    listen: str = "",
) -> EngineConfig:
    """The options as an EngineConfig; ConfigError for values that are none."""
    if load not in ("direct", "rank0"):
        raise ConfigError(f"--load is direct or rank0, not {load!r}")
    if weights not in ("dequantised", "quantised"):
        raise ConfigError(f"--weights is dequantised or quantised, not {weights!r}")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"--device is cpu or cuda (or cuda:N), not {device!r}")
    return EngineConfig(
        tp=tp,
        ep=ep,
        device=device,
        dtype=pick_dtype(dtype, model.config, kind),
        load="rank0" if load == "rank0" else "direct",
        weights="quantised" if weights == "quantised" else "dequantised",
        batch_invariant=batch_invariant,
        chunk_tokens=chunk,
        timeout_seconds=timeout,
        start_timeout_seconds=start_timeout,
        listen=listen,
    )


def plan(
    model: OpenedModel,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    capture: Capture,
) -> EngineConfig:
    """`config` with room for these prompts and `max_tokens` further tokens each, as far as the context reaches, when
    every pass leaves `capture` behind.

    ConfigError, RequestError and CheckpointError for what cannot run, before anything is started or allocated.
    """
    check_fit(model.config, config)
    vocab_size, context = model.config.vocab_size, model.config.context
    for prompt in prompts:
        check_prompt(prompt, vocab_size=vocab_size, context=context)
    longest = max(len(prompt) for prompt in prompts)
    planned = replace(
        config, max_tokens=min(longest + max_tokens, context), max_sequences=max(1, len(prompts))
    )
    check_loadable(model.path, planned)
    wanted = capture.leaves(model_taps(model.config, planned.tp, planned.ep))
    check_room(model.config, planned, [*map(len, prompts)], wanted, loaded=planned.weights == "quantised")
    return planned


def pick_dtype(asked: str, model: ModelConfig, device: str) -> DType:
    """`auto` is float32 on the CPU, where half precision gains nothing, and the checkpoint's on a GPU."""
    if asked == "auto":
        return "float32" if device == "cpu" else model.dtype
    return cast(DType, asked)  # EngineConfig refuses what is none


def capture_of(words: Sequence[str] | None, model: OpenedModel, tp: int) -> Capture:
    """What to record: statistics, unless words ask for more. RequestError for a glob that selects no tap."""
    specs = model_taps(model.config, tp)
    return parse_capture(words, specs) if words else STATS


def _encoded(model: OpenedModel, text: str, chat: bool) -> list[int]:
    tokenizer = need_tokenizer(model.tokenizer, model.directory)
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not UTF-8 (character {error.start + 1}): give it as UTF-8 text"
        ) from None
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def _numbers(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")] if words.strip() else []
    except ValueError:
        raise RequestError(f"--ids takes whole numbers with commas between them, not {words!r}") from None
