"""Fixtures that every test gets: a home of its own, and no network by accident."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import starter

# A shell that runs this in the background makes all its children deaf to Ctrl-C, those of the tests too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

USER_MODELS_DIR = starter.user_models_dir()  # asked now: later on each test has a home of its own


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that NemoLocal writes goes below a temporary folder."""
    folder = tmp_path / "home"
    monkeypatch.setenv("NEMOLOCAL_HOME", str(folder))
    for variable in (
        "HF_TOKEN",
        "HF_ENDPOINT",
        "HF_HUB_OFFLINE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
    ):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.fixture(scope="session")
def starter_path() -> Path:
    """The starter model's file; for tests marked `model`."""
    return starter.find_starter(USER_MODELS_DIR)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
