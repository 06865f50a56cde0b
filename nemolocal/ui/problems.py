"""The page's border for errors: whatever was raised becomes one line that a person can read."""

from __future__ import annotations

import logging

from nemolocal.errors import NemoLocalError

log = logging.getLogger(__name__)


def as_problem(error: BaseException) -> str:
    """The line to show. A fault of our own goes to the log in full."""
    if isinstance(error, NemoLocalError):
        return str(error)
    log.error("The page met an error that is our own.", exc_info=error)
    return f"NemoLocal itself failed ({type(error).__name__}). The log says more; please report it."
