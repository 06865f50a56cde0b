"""A plan as a value: what is loaded, where each byte goes, why, and how that is drawn."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from nemolocal.hardware import Gpu, Hardware
from nemolocal.models.choice import Candidate
from nemolocal.models.memory import Load
from nemolocal.models.placement import Placement, Share, SplitMode

N_BATCH: Final = 2048


@dataclass(frozen=True, slots=True)
class Bar:
    """One device's memory as it will be: `parts` are (what, bytes) in the order in which they are drawn, and
    add up to `total_bytes`. `device` is a GPU's UUID, "" for the RAM, and `n_layers` lie there."""

    name: str
    parts: tuple[tuple[str, int], ...]
    total_bytes: int
    device: str = ""
    n_layers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision: what is loaded, where each byte goes, and why.

    `tokens_per_s` is a forecast for one stream and `prompt_tokens_per_s` one for reading a long prompt, None
    where they cannot be told, and `measured_tokens_per_s` what this file did on this machine before.
    `kept_bytes` stay free on each GPU.
    """

    model: str
    candidate: Candidate
    load: Load
    placement: Placement
    reasons: tuple[str, ...]
    tokens_per_s: float | None
    measured_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    kept_bytes: int = 0

    @property
    def n_batch(self) -> int:
        """The most tokens that one step computes."""
        return max(N_BATCH, self.load.n_ubatch)

    @property
    def split_mode(self) -> SplitMode:
        return self.placement.split_mode

    @property
    def visible_devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs in use, in the order of `placement.tensor_split`: the engine's process is to
        see these and no others, so that no other numbering can come between."""
        return tuple(gpu.uuid for gpu in self.placement.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON; sizes in bytes. `host` is what stays in RAM."""
        devices = [
            {"id": gpu.uuid, "name": gpu.name, **_figures(share), "free_bytes": gpu.free_bytes}
            for gpu, share in zip(self.placement.gpus, self.placement.shares, strict=True)
        ]
        return {
            "model": self.model,
            "file": self.candidate.file,
            "quant": self.candidate.quant,
            "fits": True,
            "context": self.load.n_ctx,
            "slots": self.load.n_slots,
            "kv_type": self.load.kv_type,
            "kv_layout": self.load.kv_layout,
            "split_mode": self.split_mode,
            "n_ubatch": self.load.n_ubatch,
            "devices": devices,
            "host": _figures(self.placement.host),
            "host_experts": list(self.placement.host_experts),
            "margin_bytes": self.kept_bytes,
            "reasons": list(self.reasons),
            "forecast": {
                "prompt_tokens_per_s": self.prompt_tokens_per_s,
                "tokens_per_s": self.tokens_per_s,
            },
            "measured": {"tokens_per_s": self.measured_tokens_per_s},
        }

    def bars(self, hardware: Hardware) -> tuple[Bar, ...]:
        """How each of the machine's GPUs and then its RAM will be filled."""
        place = self.placement
        shares = dict(zip(self.visible_devices, place.shares, strict=True))
        usable = [gpu for gpu in hardware.gpus if gpu.state == "ok" and not gpu.shares_ram]
        bars = [_gpu_bar(gpu, shares.get(gpu.uuid), self.kept_bytes) for gpu in usable]
        ram = hardware.ram
        in_ram = [place.host, *(s for g, s in zip(place.gpus, place.shares, strict=True) if g.shares_ram)]
        parts = _share_parts(in_ram)
        used = sum(n for _, n in parts)
        others = ram.total_bytes - ram.available_bytes
        parts += [("other programs", others), ("free", max(ram.available_bytes - used, 0))]
        return (*bars, _bar("RAM", parts, n_layers=sum(share.n_layers for share in in_ram)))


def _gpu_bar(gpu: Gpu, share: Share | None, kept_bytes: int) -> Bar:
    parts = _share_parts([share] if share else [])
    left = max(gpu.free_bytes - sum(n for _, n in parts), 0)
    margin = min(kept_bytes, left) if share else 0
    others = gpu.total_bytes - gpu.free_bytes
    parts += [("margin", margin), ("other programs", others), ("free", left - margin)]
    return _bar(gpu.name, parts, device=gpu.uuid, n_layers=share.n_layers if share else 0)


def _share_parts(shares: list[Share]) -> list[tuple[str, int]]:
    return [
        ("weights", sum(share.weights_bytes for share in shares)),
        ("KV cache", sum(share.kv_bytes for share in shares)),
        ("state", sum(share.state_bytes for share in shares)),
        ("buffers", sum(share.compute_bytes for share in shares)),
        ("overhead", sum(share.overhead_bytes for share in shares)),
    ]


def _bar(name: str, parts: list[tuple[str, int]], *, n_layers: int, device: str = "") -> Bar:
    filled = tuple((what, n) for what, n in parts if n > 0)
    return Bar(name, filled, sum(n for _, n in filled), device, n_layers)


def _figures(share: Share) -> dict[str, int]:
    return {**asdict(share), "total_bytes": share.total_bytes}
