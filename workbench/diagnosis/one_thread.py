"""numpy's products on one thread, while a short recording is judged.

Products of few rows take as long as reading the weight, so that a second thread gains nothing. Where cores are not idle
it costs much: OpenBLAS's threads wait for each other in a loop that gives up the core. On two idle cores a product of
12 rows with [2432, 896] takes 4.5 ms by two threads and 3 by one; beside other work 40 and 3.7.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

from lockstep.sessions.session import Session

#: Tokens of a recording, which are judged at once, from which on a second thread gains more than it risks.
MANY = 64


def one_thread_for(session: Session, branch: int = 0) -> AbstractContextManager[Any]:
    """Inside, numpy's products have one thread if the branch has few tokens. What others have set is there again
    afterwards; libraries other than OpenBLAS, and torch, keep their threads."""
    if not has_few_tokens(session, branch):
        return nullcontext()
    limited: AbstractContextManager[Any] = _openblas().limit(limits=1)
    return limited


def has_few_tokens(session: Session, branch: int = 0) -> bool:
    """Whether the branch is judged on one thread."""
    steps = session.steps(branch)
    if len(steps) >= MANY:
        return False
    return sum(len(one.ids) for step in steps for one in session.step(step, branch).sequences) < MANY


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")
