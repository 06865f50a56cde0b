"""From a plan and the settings to what an engine is told: the files beside the model's own, and where its
memory outlives it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from nemolocal.config import Config, expand
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import UsageError
from nemolocal.hardware import Hardware
from nemolocal.models import fingerprint, memory, planning, sizing

SHARE_OF_RAM = 0.25  # of what is free beside the model
SCALE_MOST = 100  # of a LoRA adapter; far beyond it the model computes what is no number


def build(plan: sizing.Plan, hardware: Hardware, config: Config) -> LoadSpec:
    """The engine's half of a plan. Reads the model's file, so not for the event loop.

    Raises UsageError for a LoRA adapter that is not there or whose scale is none, and what finding a draft
    model raises.
    """
    settings = config.settings
    adapters = tuple(_adapter(text) for text in settings.lora)
    load, is_generating = plan.load, not plan.candidate.shape.pooling
    draft = _draft(plan, config)
    return LoadSpec(
        path=plan.candidate.file,
        n_ctx=load.n_ctx,
        n_slots=load.n_slots,
        n_batch=plan.n_batch,
        n_ubatch=load.n_ubatch,
        kv_type=load.kv_type,
        kv_layout=load.kv_layout,
        n_gpu_layers=plan.placement.n_gpu_layers,
        split_mode=plan.split_mode,
        tensor_split=plan.placement.tensor_split,
        visible_devices=plan.visible_devices,
        n_threads=settings.threads or hardware.cpu.physical_cores,
        n_queue=settings.queue,
        pooling=plan.candidate.shape.pooling,
        n_drafted=0 if draft == "off" else memory.N_DRAFTED,
        draft=draft,
        adapters=adapters if is_generating else (),
        warm_folder=str(config.paths.cache / "states") if settings.warm_cache_mib and is_generating else "",
        warm_key=_warm_key(plan, adapters),
        warm_bytes=settings.warm_cache_mib << 20,
        state_bytes=min(settings.state_mib << 20, _spare_ram_bytes(plan, hardware)),
    )


def _spare_ram_bytes(plan: sizing.Plan, hardware: Hardware) -> int:
    """What of the RAM may go into states: a share of what the model leaves."""
    left = hardware.ram.available_bytes - plan.placement.ram_bytes
    return max(int(SHARE_OF_RAM * left), 0)


def _draft(plan: sizing.Plan, config: Config) -> str:
    shape = plan.candidate.shape
    if shape.pooling or not planning.can_guess(shape):
        return "off"
    model = planning.draft_model(config)
    return str(model.path) if model else config.settings.draft


def _adapter(text: str) -> tuple[str, float]:
    """PATH or PATH:SCALE. A colon may belong to the path (on Windows it mostly does)."""
    path, scale = text, 1.0
    before, _, after = text.rpartition(":")
    if before and not Path(expand(text)).exists():
        with contextlib.suppress(ValueError):
            scale, path = float(after), before
    file = Path(expand(path))
    if not file.is_file():
        raise UsageError(
            f"There is no LoRA adapter {path}.", hint="--lora wants FILE.gguf or FILE.gguf:SCALE."
        )
    if not abs(scale) <= SCALE_MOST:  # not a number is not within it either
        raise UsageError(
            f"The LoRA adapter {path} has a scale of {scale:g}, "
            f"which is not from -{SCALE_MOST} to {SCALE_MOST}."
        )
    return str(file), scale


def _warm_key(plan: sizing.Plan, adapters: tuple[tuple[str, float], ...]) -> str:
    """What shapes a saved state, but for the library, which the engine adds: with another of these it would
    be nonsense."""
    content = fingerprint.fingerprint(Path(plan.candidate.file))
    parts = [content, plan.load.kv_type, plan.load.kv_layout]
    for path, scale in adapters:
        status = Path(path).stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns} {scale}")
    return " ".join(parts)
