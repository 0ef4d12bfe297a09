"""What is always on screen: what runs, where it stands, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.taps.names import count_layers
from sessions.text import clean
from workbench.views.branches import BranchLine, branch_lines
from workbench.views.candidates import emitted_probability
from workbench.views.source import SessionSource
from workbench.views.where import Where


@dataclass(frozen=True, slots=True)
class Overview:
    """The session as a whole; changes only when it grows."""

    name: str
    model: str
    ranks: int
    device: str
    dtype: str
    block_size: int
    taps: tuple[str, ...]
    layouts: tuple[str, ...]
    layers: int
    branches: tuple[BranchLine, ...]
    growing: bool

    def branch(self, branch: int) -> BranchLine:
        """The branch of that id."""
        return next(line for line in self.branches if line.id == branch)


@dataclass(frozen=True, slots=True)
class Present:
    """The present step."""

    steps: range
    phase: str
    position: int | None
    tokens_per_second: float | None
    emitted: str | None
    probability: float | None
    entropy: float | None
    sequences: tuple[int, ...]
    verdict: str | None  # the worst of this step; None: nothing judged
    first_wrong: str | None


def overview(source: SessionSource) -> Overview:
    """What the session is."""
    session, meta = source.session, source.meta
    config = meta.config
    names = tuple(clean(tap.name, limit=120) for tap in session.taps)
    path = meta.model_label or session.path.stem
    return Overview(
        name=clean(session.path.name, limit=60),
        model=clean(path.rstrip("/").rsplit("/", 1)[-1], limit=40),
        ranks=session.ranks,
        device=_device(config.device or "cpu", config.backend),
        dtype=_short_dtype(clean(config.dtype, limit=20)),
        block_size=config.block_size or 16,
        taps=names,
        layouts=tuple(clean(tap.layout, limit=60) for tap in session.taps),
        layers=count_layers(names),
        branches=branch_lines(session),
        growing=session.growing,
    )


def _device(device: str, backend: str) -> str:
    """Where the ranks run, and that they share GPUs where they do: their sums then pass through the host."""
    shared = device.startswith("cuda") and backend == "gloo"
    return clean(f"{device} over gloo" if shared else device, limit=20)


def _short_dtype(name: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def present(source: SessionSource, where: Where) -> Present | None:
    """The present step of a branch; None while it has none."""
    steps = source.session.steps(where.branch)
    if where.step not in steps:
        return None
    record = source.record(where.step, where.branch)
    sequence = source.sequence(where.step, where.branch, where.seq)
    verdicts = source.session.verdicts(branch=where.branch, step=where.step)
    wrong = next((v for v in verdicts if v.verdict == "fail"), None)
    worst = "fail" if wrong else max((v.verdict for v in verdicts), default=None)
    emitted = sequence.emitted if sequence else None
    return Present(
        steps=steps,
        phase=record.phase,
        position=sequence.positions[-1] if sequence and len(sequence.positions) else None,
        tokens_per_second=1 / record.wall_seconds
        if record.wall_seconds > 0 and record.phase == "decode"
        else None,
        emitted=source.texts.label(emitted) if emitted is not None else None,
        probability=emitted_probability(sequence),
        entropy=sequence.entropy if sequence else None,
        sequences=tuple(s.seq for s in record.sequences),
        verdict=worst,
        first_wrong=clean(wrong.tap, limit=120) if wrong else None,
    )
