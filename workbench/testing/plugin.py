"""pytest's plugin: the fixtures `lockstep_check` and `lockstep_recording`, and the option `--lockstep-golden`.

pytest imports this module wherever Lockstep is installed, in runs that use none of it too. Hence pytest and the
standard library alone, until a fixture is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

import pytest

if TYPE_CHECKING:
    from lockstep.workbench.library.verdict import Verdict

#: Names the folder of reference recordings for what runs in this process: `workbench.paths.golden_directory`.
_GOLDEN = "LOCKSTEP_GOLDEN_DIR"


class CheckOptions(TypedDict, total=False):
    """What a check may be asked beside the model and the number of ranks; as the options of `lockstep check`."""

    prompt: str | Sequence[str]
    ids: Sequence[int]
    chat: bool
    steps: int
    faults: Mapping[str, str]
    device: str
    dtype: str
    weights: str


class ModelCheck(Protocol):
    """What the fixture `lockstep_check` is."""

    def __call__(self, model: str | Path, tp: int = 1, **options: Unpack[CheckOptions]) -> Verdict:
        """Run the check of `model` on `tp` ranks. The test fails unless it matches the reference."""
        ...


class RecordingCheck(Protocol):
    """What the fixture `lockstep_recording` is."""

    def __call__(self, path: str | Path, model: str | Path) -> Verdict:
        """Judge the recording at `path`, of the checkpoint `model`. The test fails unless it matches the reference."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.getgroup("lockstep", "Lockstep").addoption(
        "--lockstep-golden", metavar="DIR",
        help="Read reference recordings from this folder, and write new ones to it; for CI to cache.",
    )  # fmt: skip


@pytest.fixture
def lockstep_check(request: pytest.FixtureRequest, tmp_path: Path) -> ModelCheck:
    """`lockstep_check(model, tp=2)`: the model against transformers, tap by tap. The test fails with the first wrong
    operation, how wrong it is, the cause and the fix; else the verdict is returned."""
    sessions = (tmp_path / f"check-{number}.session" for number in range(1, 1_000_000))

    def check(model: str | Path, tp: int = 1, **options: Unpack[CheckOptions]) -> Verdict:
        __tracebackhide__ = True
        session = next(sessions)
        with _judging(request.config):
            from lockstep.workbench.library import judging

            result = judging.check(
                model, tp=tp, save=session, spare=session.with_suffix(".spare.session"), **options
            )
        return _passed(f"lockstep check {model} --tp {tp}", result)

    return check


@pytest.fixture
def lockstep_recording(request: pytest.FixtureRequest) -> RecordingCheck:
    """`lockstep_recording(path, model)`: a session that an engine recorded (`lockstep attach`, `lockstep import`),
    judged as by `lockstep check RUN --model MODEL`."""

    def check(path: str | Path, model: str | Path) -> Verdict:
        __tracebackhide__ = True
        with _judging(request.config):
            from lockstep.workbench.library import judging

            result = judging.check(path, model=model)
        return _passed(f"lockstep check {path} --model {model}", result)

    return check


def _passed(title: str, result: Verdict) -> Verdict:
    """The verdict. pytest's failure, with the report as its message, where it is no match."""
    __tracebackhide__ = True
    if not result.matches:
        first = result.first_divergence
        # On the first line, which is all that pytest's summary has of a failure.
        wrong = result.verdict if first is None else f"{first.tap} is the first wrong operation"
        pytest.fail(f"{wrong}: {title}\n{result}\nrecorded in {result.session}", pytrace=False)
    return result


@contextmanager
def _judging(config: pytest.Config) -> Iterator[None]:
    """References in the folder of the option, and what cannot be run as one line instead of a traceback of ours."""
    __tracebackhide__ = True
    kept, folder, trouble = sys.path[:], config.getoption("--lockstep-golden"), ""
    with pytest.MonkeyPatch.context() as patch:
        if folder is not None:
            patch.setenv(_GOLDEN, os.fspath(config.invocation_params.dir / folder))
        try:
            yield
        except Exception as error:
            from lockstep.workbench.debugger.failures import explain
            from lockstep.workbench.exit_codes import Exit

            code, trouble = explain(error)
            if code == Exit.DEFECT:
                raise
        finally:
            sys.path[:] = (
                kept  # the command line takes the working directory out, which is its own program's matter
            )
    if trouble:
        raise pytest.fail.Exception(f"lockstep: {trouble}", pytrace=False) from None
