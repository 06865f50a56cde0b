"""From a plan and the settings to what an engine is told: the files beside the model's own, and where its
memory outlives it."""

from __future__ import annotations

from pathlib import Path

from nemolocal.config import Config
from nemolocal.engine.messages import LoadSpec
from nemolocal.hardware import Hardware
from nemolocal.models import adapters, fingerprint, memory, planning, sizing

SHARE_OF_RAM = 0.25  # of what is free beside the model


def build(plan: sizing.Plan, hardware: Hardware, config: Config) -> LoadSpec:
    """The engine's half of a plan. Reads the model's file, so not for the event loop.

    Raises UsageError for a LoRA adapter that is not there or whose scale is none, and what finding a draft
    model raises.
    """
    settings = config.settings
    found = [adapters.parse(text) for text in settings.lora]
    scales = tuple((adapter.path, adapter.scale) for adapter in found)
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
        host_experts=plan.placement.host_experts,
        visible_devices=plan.visible_devices,
        n_threads=settings.threads or hardware.cpu.physical_cores,
        n_numa_nodes=1 if plan.placement.is_whole else hardware.cpu.n_numa_nodes,
        n_queue=settings.queue,
        pooling=plan.candidate.shape.pooling,
        n_drafted=0 if draft == "off" else memory.N_DRAFTED,
        draft=draft,
        adapters=scales if is_generating else (),
        warm_folder=str(config.paths.cache / "states") if settings.warm_cache_mib and is_generating else "",
        warm_key=_warm_key(plan, scales),
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


def _warm_key(plan: sizing.Plan, scales: tuple[tuple[str, float], ...]) -> str:
    """What shapes a saved state, but for the library, which the engine adds: with another of these it would
    be nonsense."""
    content = fingerprint.fingerprint(Path(plan.candidate.file))
    parts = [content, plan.load.kv_type, plan.load.kv_layout]
    for path, scale in scales:
        status = Path(path).stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns} {scale}")
    return " ".join(parts)
