"""Logging: one rotating file, one format. Nothing of a conversation and no secret is ever written."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path

ROOT = "nemolocal"


def start(folder: Path, level: str) -> Path:
    """Send the package's log to `folder`/nemolocal.log and return that path.

    At most 3 files of 2 MiB. A folder that cannot be written leaves the log on stderr.
    """
    path = folder / "nemolocal.log"
    logger = logging.getLogger(ROOT)
    logger.setLevel(level.upper())
    logger.propagate = False
    handler: logging.Handler
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=2 << 20, backupCount=2, encoding="utf-8"
        )
    except OSError:
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    return path
