"""`lockstep invariant`: what must not matter to a right engine, tried axis by axis or as a table of relations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from lockstep.workbench.cli import options
from lockstep.workbench.cli.attach_options import EngineName
from lockstep.workbench.cli.invariants import check_invariants
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.library.checked_model import ModelToCheck
from lockstep.workbench.library.invariance import Invariance, invariant

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("invariant")
def invariant_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL | -- CMD…",
            help="A model, for our engine; or another engine's own command.",
            show_default=False,
        ),
    ],
    axis: Annotated[
        str | None,
        typer.Option(
            "--axis",
            metavar="batch,order,preempt,chunk,prefix,tp,ep,speculation,graph|all",
            help="The same requests in variants of the run along these axes, every tap bit by bit. Without it: what is "
            "true of every right engine, such as prefill = decode, no token sees a later one.",
            show_default=False,
        ),
    ] = None,
    prompt: options.Prompts = None,
    ids: options.Ids = None,
    chat: options.Chat = False,
    prompt_tokens: options.PromptTokens = None,
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=0, help="Decode steps after the prefill.")
    ] = 4,
    fault: options.Faults = None,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    load: options.Load = "direct",
    weights: options.Weights = "dequantised",
    batch_invariant: options.BatchInvariant = False,
    chunk: options.Chunk = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Of a command: its checkpoint, by which operations are judged on their own inputs.",
            show_default=False,
        ),
    ] = None,
    engine: EngineName = "auto",
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="AXIS=WORDS",
            help="Of a command: words that, put behind it, make it a variant along that axis, as "
            "'prefix=--no-prefix-cache'. May be repeated.",
            show_default=False,
        ),
    ] = None,
    junit_file: options.JUnit = None,
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    as_json: options.Json = False,
) -> None:
    """Run a model, or another engine's own command, in ways that must not matter, and compare every tap.

    With --axis: what is rounding (which operation's bits depend on the batch, the chunk, the ranks, and by how much)
    and what is a bug (the first operation that does not give what its inputs give in one of the runs, its requests,
    positions and cache blocks) are distinguished. A command is run as it is, and again with an argument of the engine
    changed (vLLM: batch, preempt, chunk, prefix, tp, ep); its options are the command's own. What a CUDA graph replays
    calls no hooks: on the axis graph the tokens of the command as it is are held against the logits of an eager run.

    Exit code 0: invariant, or rounding alone. 1: a bug, or a relation that is broken. 6: inconclusive.
    """
    command = model is not None or variant is not None or len(words) > 1
    if junit_file is not None and (axis is not None or command):
        raise UsageError("--junit is of a model's relations: leave out --axis")
    if axis is None and not command:
        if len([*(prompt or ()), *(ids or ())]) > 1:
            raise UsageError("the relations are tried on one prompt: give one, or --axis")
        asked = ModelToCheck.of(
            words[0], texts=prompt, ids=ids, chat=chat, prompt_tokens=prompt_tokens, steps=steps, faults=fault, tp=tp,
            ep=ep, device=device, dtype=dtype, load=load, weights=weights, batch_invariant=batch_invariant, chunk=chunk,
            timeout=timeout, start_timeout=start_timeout,
        )  # fmt: skip
        raise typer.Exit(check_invariants(asked, junit_file, as_json))
    with Status() as status:
        found = invariant(
            words if command else words[0], axis=axis, model=model, engine=engine, variants=variants_of(variant),
            prompt=prompt, ids=ids,
            chat=chat, prompt_tokens=prompt_tokens, tp=tp, ep=ep, steps=steps, faults=fault, device=device, dtype=dtype,
            load=load, weights=weights, batch_invariant=batch_invariant, chunk=chunk, timeout=timeout,
            start_timeout=start_timeout, progress=status,
        )  # fmt: skip
    print(dumps(found.to_json()) if as_json else found)
    raise typer.Exit(code_of(found))


def variants_of(given: Sequence[str] | None) -> dict[str, str]:
    """ "prefix=--no-prefix-cache" by its axis. UsageError for what names none."""
    odd = [one for one in given or () if "=" not in one]
    if odd:
        raise UsageError(f"--variant is AXIS=WORDS, not {odd[0]!r}")
    return dict(one.split("=", 1) for one in given or ())


def code_of(found: Invariance) -> Exit:
    """The exit code of a verdict."""
    return Exit.OK if found else Exit.DIVERGED if found.bugs else Exit.INCONCLUSIVE
