"""Single bits of a recording turned over, and what its reader makes of that: equal, reported, or silently different.

`recording` writes a small session of everything that a session may hold, `flips` chooses bits, `shown` reads what is
shown of a file, `silent` compares two readings. Nothing here knows of pytest: longer runs use it too.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.sessions import Session, SessionError, SessionWriter, TensorRecord, VerdictRecord
from lockstep.sessions.format.schema import CHUNK_STEPS
from lockstep.sessions.meta import ModelMeta
from tests.sessions.samples import TAPS, create, record

#: What a place shows when it is refused: the message.
Refusal = SessionError


@dataclass(slots=True)
class Shown:
    """All that is shown of a file: by place what is read there, or the refusal; and what is reported of the whole."""

    places: dict[str, object] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)


def recording(path: Path, steps: int = CHUNK_STEPS + 3, *, finished: bool = True) -> Path:
    """A session with branches, chunks, tensors, verdicts, events and pages of token texts. Not `finished`: as a
    killed writer leaves it, with its log beside it."""
    work = path if finished else path.with_name("work-" + path.name)
    writer = create(
        work, source="a recorder", model=ModelMeta(name="model", num_layers=3), rules={"mask": "none"}
    )
    for step in range(steps):
        writer.step(0, record(step, tensors=step % 8 == 0))
        writer.event(0, step, "command", "next", {"step": step})
    for page in range(3):
        writer.token_texts(page, {100 * page + i: f"text {i}" for i in range(40)})
    for name, fork in (("other", 4), ("third", steps - 1)):
        branch = writer.branch(name, parent=0, fork_step=fork, rules={"rope": "half"})
        for step in range(fork, fork + 3):
            writer.step(branch, record(step))
        writer.event(branch, fork, "fork", name, {"at": fork})
    for tap in TAPS:
        writer.verdicts(
            [VerdictRecord(0, step, tap.name, "pass", {"ratio": step / 7}) for step in range(0, steps, 9)]
        )
    writer.tensors(0, 1, [TensorRecord("embed", 0, 0, np.ones((1, 3), np.float32), "float32", "-1:")])
    if finished:
        writer.close()
    else:
        _copy_growing(writer, work, path)
    return path


def _copy_growing(writer: SessionWriter, work: Path, path: Path) -> None:
    for suffix in ("", "-wal"):
        shutil.copyfile(work.with_name(work.name + suffix), path.with_name(path.name + suffix))
    writer.close()
    work.unlink()


def flips(file: Path, count: int, seed: int, page: int = 16384) -> Iterator[tuple[int, int]]:
    """(byte, bit) to turn over: a third anywhere, a third where there is content, a third where pages have their
    structure (the file's header and the beginning of each page)."""
    rng = random.Random(seed)
    content = np.frombuffer(file.read_bytes(), np.uint8)
    written = np.flatnonzero(content)
    for at in range(count):
        if at % 3 == 0:
            byte = rng.randrange(len(content))
        elif at % 3 == 1:
            byte = int(written[rng.randrange(len(written))])
        else:
            byte = min(rng.randrange(0, len(content), page) + rng.randrange(100), len(content) - 1)
        yield byte, rng.randrange(8)


def flip(file: Path, byte: int, bit: int) -> None:
    """Turn over one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        (value,) = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([value ^ 1 << bit]))


def shown(path: Path) -> Shown:
    """Everything that the reader shows of a session."""
    result = Shown()
    try:
        with Session.open(path) as session:
            _read(session, result)
            result.reported += session.losses
    except SessionError as error:
        result.places["session"] = error
    return result


def _read(session: Session, result: Shown) -> None:
    def look(place: str, read: Callable[..., object], *arguments: object, **named: object) -> None:
        try:
            result.places[place] = _plain(read(*arguments, **named))
        except SessionError as error:
            result.places[place] = error

    look("meta", lambda: (session.meta, session.ranks, session.taps))
    look("branches", session.branches)
    look("events", session.events)
    look("verdicts", session.verdicts)
    for branch in [branch.id for branch in session.branches()]:
        look(f"steps of branch {branch}", session.steps, branch)
        look(f"captured taps of branch {branch}", session.captured_taps, branch)
        look(f"forks of branch {branch}", session.events, branch=branch, kind="fork")
        for tap in session.taps:
            look(f"{tap.name} of branch {branch}", session.series, tap.name, "rms", 1, branch)
        for step in session.own_steps(branch):
            at = f"step {step} of branch {branch}"
            look(at, session.step, step, branch)
            look(f"{at}, statistics", session.stats, step, branch)
            look(f"{at}, checksums", session.checksums, step, branch)
            look(f"{at}, captured", session.captured, step, branch)
            look(f"{at}, verdicts", session.verdicts, branch=branch, step=step)
            look(f"{at}, part", session.parts, "embed", step=step, branch=branch, slice="-1:")
            for tap in session.taps:
                look(f"{at}, {tap.name}", session.rebuilt, tap.name, step=step, branch=branch)


def _plain(value: object) -> object:
    """As something that compares: arrays by their bits."""
    with np.printoptions(threshold=1 << 20, floatmode="unique"):
        return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


def silent(whole: Shown, damaged: Shown) -> list[str]:
    """The places that show something else than the undamaged file without a word about it.

    What is refused is reported. A place that is not there any more must have been reported as a whole."""
    if isinstance(damaged.places.get("session"), SessionError):
        return []
    wrong = [
        place
        for place, value in damaged.places.items()
        if not isinstance(value, SessionError) and value != whole.places.get(place)
    ]
    wrong += [place for place in whole.places if place not in damaged.places]
    return [] if damaged.reported else wrong


def changed(whole: Shown, damaged: Shown) -> bool:
    """Whether anything is not shown as it was."""
    return (
        bool(damaged.reported)
        or any(
            isinstance(value, SessionError) or value != whole.places.get(place)
            for place, value in damaged.places.items()
        )
        or whole.places.keys() != damaged.places.keys()
    )
