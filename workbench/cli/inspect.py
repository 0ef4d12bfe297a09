"""`lockstep inspect`: what a checkpoint holds, which rank gets what of it, and what stands out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sized
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from lockstep.engine.checkpoint.block_types import blocks_of
from lockstep.engine.checkpoint.gguf.names import gguf_name
from lockstep.engine.checkpoint.gguf.source import GgufSource
from lockstep.engine.checkpoint.resolve import open_checkpoint
from lockstep.engine.checkpoint.survey import NOT_FINITE, TensorSurvey, survey
from lockstep.engine.checkpoint.ties import is_unread
from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.extras import need
from lockstep.engine.parallel import shards
from lockstep.engine.text import bytes_text
from lockstep.sessions.text import clean
from lockstep.workbench.cli import options
from lockstep.workbench.cli.gguf_head import head_lines, metadata_fields
from lockstep.workbench.cli.inspect_pair import inspect_pair
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.models.identify import of_wrapper
from lockstep.workbench.models.opening import OpenedModel, open_model
from lockstep.workbench.words.numbers import number

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
_STATISTICS = ("absmax", "mean", "std", "min", "max", "zeros", "nan", "inf")


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint, a hub id, or `demo`.", show_default=False)
    ],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="Another of the same model, to compare with.", show_default=False),
    ] = None,
    tensor: Annotated[
        str, typer.Option("--tensor", metavar="GLOB", help="Only these: 'model.layers.0.*bias'.")
    ] = "*",
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", min=1, help="Show each rank's part at this parallelism.")
    ] = 1,
    ep: options.Ep = 1,
    statistics: Annotated[bool, typer.Option(help="Read the tensors, not only the headers.")] = True,
    as_json: options.Json = False,
) -> None:
    """Names, shapes, dtypes, ranks' parts, statistics and outliers of a checkpoint's tensors.

    Of a GGUF file also the metadata, and values as they are dequantised, in Hugging Face's names and layout. What
    stands out is shown as what it is, and never changed. With a second checkpoint (safetensors or GGUF): how each of
    its tensors is made from the first's. Exit code 1: not all that separates them is what their types can do.
    """
    if statistics or other is not None:
        need("engine", "reading tensors (--no-statistics: their names, shapes and dtypes)")
    model = open_model(path)
    if other is not None:
        compared, within = inspect_pair(model, open_model(other), tensor, as_json)
        _need_some(range(compared), tensor)
        raise typer.Exit(Exit.OK if within else Exit.DIVERGED)
    check_fit(model.config, EngineConfig(tp=tp, ep=ep))
    _, source = open_checkpoint(model.path)
    with source:
        names = source.names()
        _need_some([name for name in names if fnmatchcase(name, tensor)], tensor)
        found = survey(source, model.config, tp=tp, ep=ep, pattern=tensor, statistics=statistics)
        if as_json:
            tensors = [_tensor_facts(one, model.config) for one in found]
            head = {"metadata": metadata_fields(source.headers)} if isinstance(source, GgufSource) else {}
            print(dumps(asdict(_summary(model, names)) | head | {"tp": tp, "tensors": tensors}))
            return
        print(clean(_headline(model, names), newlines=True))
        if isinstance(source, GgufSource) and tensor == "*":
            print("\n".join(head_lines(source.headers)))
        _print_all(found, names, tp, statistics=statistics)


def _need_some(shown: Sized, pattern: str) -> None:
    if not shown:
        raise UsageError(
            f"no tensor matches {pattern!r}: the glob is held against whole names, such as 'model.*.bias'"
        )


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint as a whole; `wrapper`: the model whose text model it runs; tensors that the model needs and lacks,
    has and does not know, or leaves unread."""

    path: str
    family: str
    wrapper: str
    layers: int
    missing: list[str]
    unexpected: list[str]
    unread: list[str]
    notes: tuple[str, ...]


def _summary(model: OpenedModel, names: set[str]) -> CheckpointSummary:
    expected = shards.parameters(model.config).keys()
    unread = {name for name in names - expected if is_unread(name, model.config)}
    return CheckpointSummary(
        path=str(model.path),
        family=model.config.family,
        wrapper=model.config.wrapper,
        layers=model.config.num_layers,
        missing=sorted(expected - names),
        unexpected=sorted(names - expected - unread),
        unread=sorted(unread),
        notes=model.config.notes,
    )


def _tensor_facts(one: TensorSurvey, model: ModelConfig) -> dict[str, object]:
    return {
        "name": one.name,
        "dtype": one.info.dtype,
        "encoding": one.info.encoding or None,
        "stored_as": gguf_name(one.name, model) if one.info.encoding else one.info.stored_as or one.name,
        "shape": one.info.shape,
        "file": one.info.file.name,
        "shards": [
            {
                "rank": rank,
                "dim": part.dim,
                "start": part.span.start,
                "stop": part.span.stop,
                "replicas": part.replicas,
            }
            for rank, part in enumerate(one.shards)
        ],
        "statistics": one.statistics,
        "not_finite": one.not_finite,
        "outliers": one.outliers,
        "outlier_count": one.outlier_count,
        "note": one.note,
    }


def _headline(model: OpenedModel, names: set[str]) -> str:
    config = model.config
    heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} KV"
    lines = [
        f"{clean(model.name)}: {of_wrapper(config)}, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"{heads}, vocabulary {config.vocab_size}",
    ]
    reported = _summary(model, names)
    for what, tensors in (("missing", reported.missing), ("unexpected", reported.unexpected)):
        if tensors:
            listed = ", ".join(clean(name, limit=60) for name in tensors[:5])
            more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
            lines.append(f"! {what}: {listed}{more}")
    lines += (f"! {note}" for note in reported.notes)
    return "\n".join(lines)


def _print_all(found: Iterable[TensorSurvey], names: set[str], tp: int, *, statistics: bool) -> None:
    """Print each tensor as soon as it was read."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    longest = max(map(len, names), default=0)
    header = f"{'tensor':{longest}}  {'dtype':6}  {'shape':>12}"
    header += "".join(f"  {key:>8}" for key in _STATISTICS if statistics) + "  size"
    print(header[:width].rstrip())
    notes: dict[str, int] = {}
    for one in found:
        print(_row(one, longest)[:width].rstrip())
        if tp > 1:
            print(f"    {_parts(one)}")
        if one.statistics is not None and one.not_finite:
            print(f"  ! not finite: {one.statistics.nan} NaN, {one.statistics.inf} Inf")
            notes[NOT_FINITE] = notes.get(NOT_FINITE, 0) + 1
        if one.outliers:
            print(f"  ! {_outliers(one, tp)}")
            notes[one.note] = notes.get(one.note, 0) + 1
    for note, count in notes.items():
        print(f"\n! {count} tensor{'s' * (count > 1)}: {note}")


def _row(one: TensorSurvey, longest: int) -> str:
    dtype = one.info.encoding or _DTYPES.get(one.info.dtype, one.info.dtype)
    shape = "×".join(map(str, one.info.shape)) or "scalar"
    values = one.statistics
    cells = "" if values is None else "".join(f"  {number(getattr(values, key)):>8}" for key in _STATISTICS)
    return f"{clean(one.name):{longest}}  {dtype:6}  {shape:>12}{cells}  {bytes_text(one.info.nbytes)}"


def _parts(one: TensorSurvey) -> str:
    """Which rank holds which part, and reads which blocks for it; ranks with the same part together."""
    parts = one.shards
    if not parts:
        return "no parameter of this model: not loaded"
    if parts[0].dim is None:
        return f"ranks 0-{len(parts) - 1}: whole"
    what = "rows" if parts[0].dim == 0 else "columns"
    spans: dict[str, list[str]] = {}
    for rank, part in enumerate(parts):
        text = f"{what} {part.span.start}-{part.span.stop - 1}" if part.span.size else "nothing"
        if part.dim == len(part.shape) - 1 and (kind := blocks_of(one.info.encoding)):
            first, last = part.span.start // kind.elements, -(-part.span.stop // kind.elements) - 1
            blocks = f"blocks {first}-{last}" if last > first else f"block {first}"
            text += f" ({blocks} of {part.shape[part.dim] // kind.elements} a row)"
        spans.setdefault(text, []).append(str(rank))
    return " · ".join(
        f"rank{'s' * (len(ranks) > 1)} {','.join(ranks)}: {text}" for text, ranks in spans.items()
    )


def _outliers(one: TensorSurvey, tp: int) -> str:
    """The strongest in words, with where they fall."""
    words = []
    for item in one.outliers[:4]:
        where = f"[{item.index}]" if len(one.info.shape) == 1 else f"row {item.index} rms"
        spot = [f"head {item.head} channel {item.channel}"] if item.head is not None else []
        spot += (
            [f"rank{'s' * (len(item.ranks) > 1)} {','.join(map(str, item.ranks))}"]
            if tp > 1 and item.ranks
            else []
        )
        words.append(f"{where} = {number(item.value)}" + (f" ({', '.join(spot)})" if spot else ""))
    more = f" and {one.outlier_count - len(words)} more" if one.outlier_count > len(words) else ""
    return f"stands out: {'; '.join(words)}{more}"
