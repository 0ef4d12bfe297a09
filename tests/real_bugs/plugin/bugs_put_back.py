"""How a bug is put in the place of the code that mends it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def after_init(owner: Any, change: Callable[..., None]) -> None:
    """Change what a class has built: `change(self, *args, **kwargs)`, with what it was built of."""
    init = owner.__init__

    @functools.wraps(init)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        change(self, *args, **kwargs)

    owner.__init__ = built


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what was there)` in the place of an attribute."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(make(real)))
