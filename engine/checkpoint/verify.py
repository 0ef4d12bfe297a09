"""Whether a checkpoint's tensors are those that its configuration describes: by headers alone. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from lockstep.engine.checkpoint.source import DTYPE_BITS, Source
from lockstep.engine.checkpoint.ties import HEAD, is_unread
from lockstep.engine.checkpoint.wrapped import other_part
from lockstep.engine.config import DTYPES, ModelConfig
from lockstep.engine.errors import CheckpointError
from lockstep.engine.parallel import shards
from lockstep.engine.text import bytes_text, printable

_SHOWN = 5


def verify(source: Source, model: ModelConfig) -> None:
    """Hold the checkpoint's tensors against the configuration, reading headers only.

    One CheckpointError names what is missing, unexpected, misshapen or of a dtype that cannot be loaded (the
    first few of each). What transformers ignores is no error: `ModelConfig.notes` names it.
    """
    expected = shards.parameters(model)
    names = source.names()
    surplus = names - expected.keys()
    ignored = {name for name in surplus if is_unread(name, model) or (name == HEAD and model.tie_embeddings)}
    problems = [
        *_listed("missing", sorted(expected.keys() - names), lambda n: f"{n} {list(expected[n])}"),
        *_listed(
            "unexpected",
            sorted(surplus - ignored),
            lambda n: f"{printable(n)} (in {source.info(n).file.name})",
        ),
        *_listed(
            "misshapen",
            [n for n in expected if n in names and source.info(n).shape != expected[n]],
            lambda n: (
                f"{n} is {list(source.info(n).shape)} in {source.info(n).file.name}, "
                f"the configuration expects {list(expected[n])}"
            ),
        ),
        *_listed(
            f"not {', '.join(DTYPES)}",
            [n for n in expected if n in names and source.info(n).dtype not in DTYPES],
            lambda n: f"{n} is {source.info(n).dtype} in {source.info(n).file.name}",
        ),
    ]
    if problems:
        where = sorted({str(source.info(name).file.parent) for name in names})[:1] or ["the checkpoint"]
        described = sum(map(prod, expected.values())) * DTYPE_BITS[model.dtype] // 8
        present = sum(source.info(name).nbytes for name in names)
        hint = _hint(expected.keys() - names, surplus, model)
        if described > 2 * present:
            reported = f"{bytes_text(described)} of weights, the files hold {bytes_text(present)}"
            hint += f". The configuration describes {reported}"
        raise CheckpointError(
            f"{where[0]}: tensors do not fit the configuration ({model.family}): {'; '.join(problems)}{hint}"
        )


def _listed(what: str, names: Sequence[str], describe: Callable[[str], str]) -> list[str]:
    """At most one sentence: how many tensors have the problem, and the first few of them."""
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(describe(name) for name in names[:_SHOWN])}{more}"]


def _hint(missing: set[str], surplus: set[str], model: ModelConfig) -> str:
    """What most likely happened, for the mistakes that are made again and again."""
    if missing == shards.parameters(model).keys() and any(map(other_part, surplus)):
        return ". The files hold nothing of the text model, only what reads images"
    if any(f"model.{name}" in missing for name in surplus):
        return ". The names lack `model.`: saved from the bare model, without its head; save the whole model"
    if missing == {"lm_head.weight"}:
        return ". If the head shares the embedding, config.json must have tie_word_embeddings: true"
    if any(name.endswith((".qweight", ".weight_scale", ".scales")) for name in surplus):
        return ". The weights are quantised; use the original ones"
    return ""
