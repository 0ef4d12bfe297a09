"""The options that several subcommands share. Light: `resolve` has what they mean to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face directory, a GGUF file, a hub id, or `demo`.",
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="Repeat it for a batch of several prompts.", show_default=False
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option("--ids", metavar="1,2,…", help="A prompt as token ids; repeatable.", show_default=False),
]
Chat = Annotated[bool, typer.Option("--chat", help="Put each prompt through the model's chat template.")]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        min=1,
        help="Make a prompt of N tokens up. Without any prompt it goes beyond the windows and original contexts of the "
        "model, where that is cheap.",
        show_default=False,
    ),
]
Tp = Annotated[int, typer.Option("--tp", metavar="N", min=1, help="Tensor parallelism: how many ranks.")]
Ep = Annotated[
    int,
    typer.Option(
        "--ep",
        metavar="N",
        min=1,
        help="Expert parallelism: so many groups of ranks divide the experts; divides --tp.",
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="Where the ranks compute.")]
DType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="auto: float32 on the CPU, the checkpoint's on a GPU.",
    ),
]
Load = Annotated[
    str,
    typer.Option(
        "--load", metavar="direct|rank0", help="Each rank reads its shards, or rank 0 reads for all."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="dequantised|quantised",
        help="Of a GGUF file: dense in memory, or kept in its blocks and dequantised whenever they are used.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="On the CPU: the same bits alone and in a batch, at two to four times the time of a step.",
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="Read prompts N tokens a pass: a long one takes the memory of N tokens' attention at a time.",
        show_default=False,
    ),
]


def _fault_words(incomplete: str) -> list[str]:
    """The known bugs that begin so, for the shell."""
    from lockstep.engine.faults.catalogue import FAULTS  # here: only completion needs them

    words = (f"{fault.seam}={fault.value}" for fault in FAULTS)
    return [word for word in words if word.startswith(incomplete)]


Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        "--rule",
        metavar="NAME=VALUE",
        autocompletion=_fault_words,
        help="Switch a known bug on; `lockstep faults` lists them. (--rule is its former name.)",
        show_default=False,
    ),
]
TIMEOUT = typer.Option(
    "--timeout", metavar="S", min=0.1, help="Seconds without progress after which a rank counts as hung."
)
START_TIMEOUT = typer.Option(
    "--start-timeout", metavar="S", min=0.1, help="The same while the ranks start and load."
)
Timeout = Annotated[float, TIMEOUT]
StartTimeout = Annotated[float, START_TIMEOUT]
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Await ranks that torchrun starts, here or on other machines, instead of starting them.",
        show_default=False,
    ),
]
Save = Annotated[
    Path | None,
    typer.Option("--save", metavar="FILE.session", help="Record the run there.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="RUN.session", help="Where the session goes.", show_default=False),
]
JUnit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit report.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Reference = Annotated[
    str,
    typer.Option(
        "--reference",
        metavar="transformers|llama.cpp",
        help="Who is right. llama.cpp reads GGUF files, and is the extra `llamacpp`.",
    ),
]
