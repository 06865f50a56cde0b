"""What earlier loads on this machine have shown, as values that a plan can use.

Knows neither where it is stored nor how it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemolocal.models.memory import Load
from nemolocal.models.placement import Placement


@dataclass(frozen=True, slots=True)
class Learned:
    """Corrections to the plan's arithmetic; empty where nothing was loaded yet.

    `overhead_bytes` is by a GPU's UUID what it held beyond llama.cpp's own figures (CUDA's context, kernels,
    scratch), `compute_ratios` by a file's path and how it was loaded what the buffers took over what was
    planned for them, and `tokens_per_s` by `placed` what one stream was measured to write.
    """

    overhead_bytes: Mapping[str, int] = field(default_factory=dict)
    compute_ratios: Mapping[tuple[str, Load], float] = field(default_factory=dict)
    tokens_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def compute_ratio(self, file: str, load: Load) -> float:
        """What to multiply the buffers of a load by. That one load took less says nothing of another, where
        something else may be the most that is alive at once; that one took more is a warning for all."""
        known = self.compute_ratios.get((file, load))
        if known is not None:
            return known
        return max(
            (ratio for (other, _), ratio in self.compute_ratios.items() if other == file and ratio > 1),
            default=1.0,
        )


def placed(file: str, place: Placement) -> tuple[str, str]:
    """A file and where its layers are, which decides how fast it writes."""
    if not place.gpus:
        return file, "CPU"
    gpus = ",".join(gpu.uuid for gpu in place.gpus)
    return file, f"{gpus} {place.split_mode} {place.n_gpu_layers} -{len(place.host_experts)}"
