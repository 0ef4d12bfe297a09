"""Exit codes: 2 usage, 3 cannot load, 4 timeout, 5 rank lost, 130 interrupted; the same wherever an error is met."""

from __future__ import annotations

import pytest

from lockstep.engine.errors import CheckpointError, ConfigError, RankError, RankTimeout, RequestError
from lockstep.sessions import SessionError
from lockstep.workbench.debugger.errors import CommandError, Interrupted
from lockstep.workbench.debugger.failures import exit_code, explain
from lockstep.workbench.debugger.host.server import described
from lockstep.workbench.exit_codes import UsageError
from lockstep.workbench.references.request import ReferenceFailure


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (CommandError("no"), 2),
        (ConfigError("no"), 2),
        (RequestError("no"), 2),
        (FileExistsError("no"), 2),
        (CheckpointError("no"), 3),
        (SessionError("no"), 3),
        (PermissionError("no"), 3),
        (ReferenceFailure("no", 4), 4),
        (RankTimeout("no"), 4),
        (RankError("no"), 5),
        (Interrupted("no"), 130),
        (KeyError("no"), 70),
    ],
)
def test_an_error_ends_the_program_as_the_host_reports_it(error: Exception, code: int) -> None:
    assert exit_code(error) == explain(error)[0] == code
    assert described(error).exit_code == code


def test_ctrl_c_is_an_interruption_and_no_defect() -> None:
    assert exit_code(KeyboardInterrupt()) == 130
