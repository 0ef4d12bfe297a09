"""`lockstep bench`: how fast a model runs here, beside other libraries, in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from lockstep.engine.config import EngineConfig
from lockstep.engine.extras import MissingExtra
from lockstep.engine.machine import default_threads
from lockstep.engine.text import bytes_text
from lockstep.sessions.text import clean
from lockstep.workbench.bench.contenders import (
    Contender,
    ContenderFailure,
    EngineContender,
    PeerContender,
    loaded_engine,
    memory_of,
)
from lockstep.workbench.bench.measure import QUICK, BenchRow, Plan, fitted, measure, on_gpu
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.reports import write_report
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.bench_plot import of_rows
from lockstep.workbench.export.json import dumps
from lockstep.workbench.export.lines import line_charts
from lockstep.workbench.export.svg import standalone
from lockstep.workbench.models import requests
from lockstep.workbench.models.opening import OpenedModel, open_to_run
from lockstep.workbench.references.golden import need_readable
from lockstep.workbench.references.request import REFERENCES, ReferenceFailure

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_OURS, _MEASURED = "lockstep", "lockstep, statistics"
_BAR = 8


@app.command()
def bench(
    model: options.Model,
    against: Annotated[
        str,
        typer.Option("--against", metavar="NAME,…", help="Beside whom: transformers, llama.cpp, or none."),
    ] = "transformers",
    tp: options.Tp = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    weights: options.Weights = "dequantised",
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", min=1, help="Of each contender in all; default: the cores."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sizes and turns: a minute for a small model.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw it.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time a model beside other libraries: decode by batch, prefill by length, statistics on and off, memory, load.

    Contenders take turns, each in processes of its own, on the same device and with the same number of threads; a
    figure is the median of its passes, with the least. Memory is the device's. Ratios are speeds over the first
    library's.

    Exit code 3: a library that was asked for is missing or cannot run the model; the others are measured.
    """
    asked = peers_of(against)
    opened, cores = open_to_run(model), threads or default_threads()
    config = requests.engine_config(opened, tp=tp, device=device, dtype=dtype, weights=weights)
    sizes = QUICK if quick else Plan()
    plan, config = fitted(
        opened.config,
        sizes if device == "cpu" else on_gpu(sizes),
        replace(config, threads=max(1, cores // tp)),
    )
    with ExitStack() as stack, Status() as status:
        contenders, missing = _contenders(opened, asked, config, plan, cores, stack, status)
        baseline = next((one.name for one in contenders if one.name in asked), _OURS)
        rows = measure(contenders, plan, baseline, status.report)
    for why in missing:
        report_line(f"error: {why}")
    if as_json:
        print(dumps({
            "model": opened.name, "tp": tp, "device": device, "dtype": config.dtype, "threads": cores,
            "baseline": baseline, "missing": missing,
            "rows": [msgspec.to_builtins(row) for row in rows],
        }))  # fmt: skip
    else:
        render(rows, baseline, Console(highlight=False))
    drawn = standalone(line_charts(of_rows(rows), f"{opened.name} on this machine"))
    lost = write_report(plot, lambda out: out.write(drawn))
    for words in lost:
        report_line(f"error: {words}")
    raise typer.Exit(Exit.CANNOT_LOAD if missing else Exit.NOT_SAVED if lost else Exit.OK)


def peers_of(words: str) -> list[str]:
    """The libraries that --against names; UsageError for one that is none."""
    named = [word.strip() for word in words.split(",") if word.strip() not in ("", "none")]
    for word in named:
        if word not in REFERENCES:
            raise UsageError(f"--against is a list of {', '.join(REFERENCES)}, or none, not {word!r}")
    return list(dict.fromkeys(named))


def _contenders(
    opened: OpenedModel, asked: Sequence[str], config: EngineConfig, plan: Plan, threads: int,
    stack: ExitStack, status: Status,
) -> tuple[list[Contender], list[str]]:  # fmt: skip
    """Those that can be had, loaded, and a line for each library that cannot."""
    status.report(f"loading {opened.name}")
    engine, seconds = loaded_engine(opened.path, config)
    stack.callback(engine.close)
    held = memory_of(engine).now
    found: list[Contender] = [
        EngineContender(_OURS, engine, opened.path, seconds, held),
        EngineContender(_MEASURED, engine, opened.path, seconds, held, statistics=True),
    ]  # fmt: skip
    missing = []
    for name in asked:
        status.report(f"loading {name}")
        try:
            if name == "llama.cpp":
                need_readable(opened.path, "llama.cpp")
            found.append(
                stack.enter_context(
                    PeerContender(name, opened.path, config.dtype, threads, plan.context, config.device)
                )
            )
        except (ContenderFailure, ReferenceFailure, MissingExtra) as error:
            missing.append(clean(str(error), limit=400))
    return found, missing


def render(rows: Sequence[BenchRow], baseline: str, console: Console) -> None:
    """A line a figure: median and least, memory, and the speed over the baseline's as a number and a bar."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("what", "", "ms", "least", "memory", "speed"):
        table.add_column(title, justify="left" if title in ("what", "") else "right", no_wrap=True)
    table.add_column("", width=_BAR)
    most = max((one.ratio or 0.0 for row in rows for one in row.figures), default=0.0) or 1.0
    for row in rows:
        what = f"{row.what} {row.size}".removesuffix(" 0")
        for one in row.figures:
            table.add_row(
                what, one.contender, f"{1e3 * one.seconds:.1f}", f"{1e3 * one.least:.1f}", bytes_text(one.bytes),
                "" if one.ratio is None else f"{one.ratio:.2f}", Bar(most, 0, one.ratio or 0.0, width=_BAR),
            )  # fmt: skip
            what = ""
    console.print(table)
    reported = (
        f"ms: medians of a pass; memory: its peak, of a load what is held; speed: times that of {baseline}"
    )
    console.print(reported, style="dim")
