"""`lockstep generate`: text or token ids in, tokens out as they come, and how fast they came."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer

from lockstep.engine.run.sampling import Sampling
from lockstep.sessions.errors import RecordingLost
from lockstep.sessions.meta import ModelMeta, SessionMeta
from lockstep.workbench.cli import options
from lockstep.workbench.cli.progress import Status
from lockstep.workbench.cli.streaming import display
from lockstep.workbench.cli.terminal import report_line
from lockstep.workbench.exit_codes import Exit, UsageError
from lockstep.workbench.export.json import dumps
from lockstep.workbench.inferior.destination import may_write
from lockstep.workbench.inferior.generation import Generated, Speed, add_prompts, run_to_end
from lockstep.workbench.inferior.inferior import Inferior
from lockstep.workbench.inferior.recorder import StepRecorder
from lockstep.workbench.inferior.session import create_session
from lockstep.workbench.models import requests
from lockstep.workbench.models.capture import NOTHING
from lockstep.workbench.models.opening import OpenedModel, open_to_run
from lockstep.workbench.references.request import ReferenceName

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def generate(
    model: options.Model,
    prompt: options.Prompts = None,
    ids: options.Ids = None,
    chat: options.Chat = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="New tokens at most.")
    ] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample among the likeliest of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same at every --tp.")] = 0,
    tp: options.Tp = 1,
    ep: options.Ep = 1,
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    load: options.Load = "direct",
    weights: options.Weights = "dequantised",
    batch_invariant: options.BatchInvariant = False,
    chunk: options.Chunk = None,
    fault: options.Faults = None,
    save: options.Save = None,
    capture: Annotated[
        list[str] | None,
        typer.Option(
            "--capture",
            metavar="WHAT",
            help="What --save records: stats, last, full, off, or globs of taps to keep whole; repeatable.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str,
        typer.Option(
            "--compare",
            metavar="transformers|llama.cpp",
            help="Then report where its text would part from this one.",
            show_default=False,
        ),
    ] = "",
    timeout: options.Timeout = 60.0,
    start_timeout: options.StartTimeout = 300.0,
    listen: options.Listen = "",
    as_json: options.Json = False,
) -> None:
    """Generate text from one or more prompts, under tensor parallelism.

    Tokens go to stdout as they come, speed to stderr. Exit code 1: the text parts from that of --compare.
    """
    if capture and not save:
        raise UsageError("--capture selects what --save records: give --save FILE.session")
    reference = _reference(compare) if compare else None
    opened = open_to_run(model)
    if reference is not None:
        from lockstep.workbench.references.golden import need_readable

        need_readable(opened.path, reference)
    prompts = requests.prompt_ids(opened, prompt, ids, chat)
    config = requests.engine_config(
        opened,
        tp=tp,
        ep=ep,
        device=device,
        dtype=dtype,
        load=load,
        weights=weights,
        batch_invariant=batch_invariant,
        chunk=chunk,
        timeout=timeout,
        start_timeout=start_timeout,
        listen=listen,
    )
    captured = requests.capture_of(capture, opened, tp) if save else NOTHING
    config = requests.plan(opened, config, prompts, max_tokens, captured)
    rules = requests.faults_of(fault, opened, tp)
    sampling = Sampling(temperature, top_k, top_p, seed)
    target = may_write(save) if save else None
    lost: list[RecordingLost] = []
    with (
        Inferior(opened.path, opened.config, config, rules, captured, _warn) as inferior,
        ExitStack() as stack,
    ):
        sequences = add_prompts(inferior, prompts, sampling)
        if target is not None:
            reported = SessionMeta(
                source="lockstep generate", model=ModelMeta(name=opened.name), prompts=tuple(prompt or ())
            )
            create_session(inferior, target, reported, overwrite=True)
            stack.callback(_close, inferior.recorder, lost)
        with display(opened.tokenizer, len(prompts), json=as_json) as shown:
            speed = run_to_end(inferior, sequences, max_tokens, shown.token)
        _report_where(inferior)
    done = list(sequences.values())
    compared = None
    if reference is not None:
        from lockstep.workbench.checking.texts import compare_texts
        from lockstep.workbench.cli.comparison import comparison_text

        with Status() as status:
            compared = compare_texts(
                opened.path, sequences, sampling, reference, config.dtype,
                progress=lambda number, of: status.count(reference, number, of), warn=status.warn,
            )  # fmt: skip
    if as_json:
        report = _report(opened, done, tp, speed)
        print(dumps(report if compared is None else report | {"compared": asdict(compared)}))
    elif compared is not None:
        print(comparison_text(compared, opened.tokenizer))
    _report_nan(done)
    _report_speed(done, speed)
    if lost:
        raise lost[0]
    if compared is not None and compared.partings:
        raise typer.Exit(Exit.DIVERGED)


def _reference(named: str) -> ReferenceName:
    # Imported here, as all that only a comparison needs: the first token waits for what is imported before.
    from lockstep.workbench.library.checked_model import reference_of

    return reference_of(named, "--compare")


def _close(recorder: StepRecorder, lost: list[RecordingLost]) -> None:
    """Close the session. What it lacks is reported when all else was."""
    try:
        recorder.close()
    except RecordingLost as error:
        lost.append(error)


def _report(model: OpenedModel, sequences: Sequence[Generated], tp: int, speed: Speed) -> dict[str, object]:
    return {
        "sequences": [
            {
                "prompt_ids": one.prompt_ids,
                "ids": one.ids,
                "text": None if model.tokenizer is None else model.tokenizer.decode(one.ids),
                "finish_reason": one.finish_reason,
                "first_bad_tap": None if one.first_bad_tap is None else asdict(one.first_bad_tap),
            }
            for one in sequences
        ],
        "tp": tp,
        "tokens_per_second": speed.tokens_per_second,
        "gigabytes_per_second": speed.bandwidth / 1e9,
        "prefill_seconds": speed.prefill_seconds,
    }


def _report_nan(sequences: Sequence[Generated]) -> None:
    """Once, however many sequences have met NaN: where the first did."""
    bad = [one.first_bad_tap for one in sequences if one.finish_reason == "nan"]
    if bad:
        first = min((tap for tap in bad if tap is not None), key=lambda tap: tap.step, default=None)
        where = (
            "" if first is None else f": {first.tap} of step {first.step} is the first tap with NaN or Inf"
        )
        _warn(f"the logits of {len(bad)} of {len(sequences)} sequences hold NaN{where}")


def _report_speed(sequences: Sequence[Generated], speed: Speed) -> None:
    read = sum(len(one.prompt_ids) for one in sequences)
    written = sum(len(one.ids) for one in sequences)
    stated = f"{read} prompt tokens in {speed.prefill_seconds:.2f} s, {written} new tokens"
    if speed.decode_steps:
        stated += f" at {speed.tokens_per_second:.1f} tokens/s, {speed.bandwidth / 1e9:.2f} GB/s of weights"
    report_line(stated)


def _report_where(inferior: Inferior) -> None:
    """On a GPU: what carries the ranks' sums, which attention serves, and how decode steps run: all change speed, and
    the first two last bits."""
    if not inferior.config.device.startswith("cuda"):
        return
    shared = inferior.client.backend == "gloo"
    unpaged, unrepeatable = inferior.loaded[0].unpaged, inferior.loaded[0].unrepeatable
    stated = "ranks share GPUs, sums pass through the host (gloo); " if shared else ""
    stated += (
        "paged FlashAttention where no tap looks" if unpaged is None else f"attention by SDPA: {unpaged}"
    )
    how = "as CUDA graphs" if unrepeatable is None else f"kernel by kernel: {unrepeatable}"
    report_line(f"{stated}; decode steps {how}")


def _warn(message: str) -> None:
    report_line(f"warning: {message}")
