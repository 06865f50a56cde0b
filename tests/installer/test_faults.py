"""A failure is told in one line with the way to mend it."""

from __future__ import annotations

import pytest
from faults import find_fault


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("OSError: [Errno 28] No space left on device", "The disk is full.", "Free about 4 GB"),
        ("cc1plus: error: No space left on device", "The disk is full.", "Free about 4 GB"),
        (
            "No CMAKE_CXX_COMPILER could be found.",
            "The engine has to be compiled, and no working C and C++ compiler was found.",
            "Install one",
        ),
        (
            "CMAKE_CXX_COMPILER not set, after EnableLanguage",
            "The engine has to be compiled, and no working C and C++ compiler was found.",
            "Install one",
        ),
        (
            "g++: fatal error: Killed signal terminated program cc1plus",
            "The memory ran out while compiling.",
            "CMAKE_BUILD_PARALLEL_LEVEL=1",
        ),
        (
            "WARNING: connection broken by 'NewConnectionError('Temporary failure in name resolution')'",
            "The package index cannot be reached.",
            "HTTPS_PROXY",
        ),
        (
            "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed'))",
            "The package index's certificate is not trusted.",
            "PIP_CERT",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/x'",
            "A file cannot be written: permission denied.",
            "make the folder yours",
        ),
        (
            "ERROR: No matching distribution found for gradio<7,>=6.31",
            "A package that NemoLocal needs is not offered for this Python and system.",
            "The log names it.",
        ),
    ],
)
def test_known_faults_are_explained(line: str, message: str, hint: str) -> None:
    fault = find_fault(["Collecting x", line, "note: see above"], "pip")
    assert fault.message == message
    assert hint in fault.hint


def test_missing_package_is_not_blamed_where_the_network_is() -> None:
    lines = ["WARNING: Retrying: NewConnectionError", "ERROR: No matching distribution found for gradio"]
    assert find_fault(lines, "pip").kind == "network"


def test_fault_that_was_overcome_is_not_blamed() -> None:
    lines = ["WARNING: Retrying: NewConnectionError", *["compiling"] * 500, "ERROR: the compiler crashed"]
    assert find_fault(lines, "pip").message == "pip failed: ERROR: the compiler crashed"
    lines = ["WARNING: Retrying: NewConnectionError", "cc1: No space left on device", "ERROR: build failed"]
    assert find_fault(lines, "pip").kind == "disk"


def test_unknown_fault_shows_the_last_error() -> None:
    lines = ["ERROR: first", "error: metadata-generation-failed", "", "hint: see above"]
    assert find_fault(lines, "pip").message == "pip failed: error: metadata-generation-failed"
    assert find_fault([], "pip").message == "pip failed: without a word"
