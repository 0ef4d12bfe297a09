"""What the shared options mean to the engine: prompts as ids, rules, an EngineConfig."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.faults.catalogue import check_rules, parse_rule
from workbench.cli.exit import UsageError
from workbench.demo import DEFAULT_PROMPT
from workbench.generation import pick_dtype
from workbench.models import OpenedModel
from workbench.tokens import need_tokenizer


def prompt_ids(
    model: OpenedModel, texts: Sequence[str] | None, ids: Sequence[str] | None, chat: bool
) -> list[list[int]]:
    """The prompts as token ids: those given as text, then those given as ids. The demo has one to offer."""
    if not texts and not ids:
        if not model.offers_prompt:
            raise UsageError("nothing to run: give --prompt TEXT or --ids 1,2,3")
        texts, chat = [DEFAULT_PROMPT], True
    return [*(_encoded(model, text, chat) for text in texts or ()), *(_numbers(words) for words in ids or ())]


def _encoded(model: OpenedModel, text: str, chat: bool) -> list[int]:
    tokenizer = need_tokenizer(model.tokenizer, model.directory)
    if not text:
        raise RequestError("the prompt is empty: give at least one character")
    return tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)


def _numbers(words: str) -> list[int]:
    try:
        return [int(word) for word in words.split(",")] if words.strip() else []
    except ValueError:
        raise UsageError(f"--ids takes whole numbers with commas between them, not {words!r}") from None


def rules_of(words: Sequence[str] | None, model: OpenedModel, tp: int) -> dict[str, str]:
    """The rules given as NAME=VALUE; ConfigError for one that does not exist or cannot act on this model."""
    rules: dict[str, str] = {}
    for name, value in map(parse_rule, words or ()):
        if rules.setdefault(name, value) != value:
            raise UsageError(f"rule {name} is given as {rules[name]} and as {value}: choose one")
    check_rules(rules, model.config, tp)
    return rules


def engine_config(
    model: OpenedModel,
    *,
    tp: int,
    device: str,
    dtype: str,
    load: str = "direct",
    timeout: float = 60.0,
    listen: str = "",
) -> EngineConfig:
    """The options as an EngineConfig; UsageError and ConfigError for values that are none."""
    if load not in ("direct", "rank0"):
        raise UsageError(f"--load is direct or rank0, not {load!r}")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UsageError(f"--device is cpu or cuda (or cuda:N), not {device!r}")
    return EngineConfig(
        tp=tp,
        device=device,
        dtype=pick_dtype(dtype, model.config, kind),
        load="rank0" if load == "rank0" else "direct",
        timeout_seconds=timeout,
        listen=listen,
    )
