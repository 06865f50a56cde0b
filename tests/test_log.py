"""The log file, and what happens where there can be none."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from nemolocal import log


def test_file_that_cannot_be_written_leaves_the_log_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger(log.ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    (tmp_path / "nemolocal.log").mkdir()
    try:
        log.start(tmp_path, "info")
        logger.info("heard")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    printed = capsys.readouterr().err
    assert "heard" in printed
    assert "Traceback" not in printed
