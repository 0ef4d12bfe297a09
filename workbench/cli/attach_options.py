"""The options that `attach` and `regress` share."""

from __future__ import annotations

from typing import Annotated

import typer

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="auto|vllm|sglang|nano|torch",
        help="What to look for in its processes; torch: a model of transformers in any program. "
        "Packages may add others.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="GLOB",
        help="Record these taps alone, as layers.3.*; repeatable.",
        show_default=False,
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=0,
        help="Record no more after N passes of decode; the command goes on.",
        show_default=False,
    ),
]
