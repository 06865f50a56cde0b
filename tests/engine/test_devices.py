"""The engine's process shows CUDA the planned GPUs and no others, in an order that cannot differ."""

from __future__ import annotations

import os

import pytest

from nemolocal.engine.llama import library
from nemolocal.engine.messages import LoadSpec


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_devices_are_chosen_before_cuda_looks(monkeypatch: pytest.MonkeyPatch, order: str | None) -> None:
    """An order that the user has set is left alone: UUIDs mean the same in any."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order or "")
    if order is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    spec = LoadSpec(path="m.gguf", n_ctx=512, n_slots=1, n_gpu_layers=9, visible_devices=("GPU-b", "GPU-a"))
    library._choose_devices(spec)
    assert os.environ["CUDA_DEVICE_ORDER"] == (order or "PCI_BUS_ID")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
