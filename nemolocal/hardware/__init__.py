"""What this machine is made of: GPUs, CPU, RAM, disk. Knows nothing of models or plans.

`survey(config)` is what the program asks; `detect()` looks at the machine itself, `load_profile()` reads a
description in its place.
"""

from nemolocal.hardware.detect import detect, survey
from nemolocal.hardware.host import mapped_bytes
from nemolocal.hardware.monitor import Monitor, Sample, latest
from nemolocal.hardware.parts import Cpu, Gpu, Hardware, Holder, Ram
from nemolocal.hardware.profile import load_profile

__all__ = [
    "Cpu",
    "Gpu",
    "Hardware",
    "Holder",
    "Monitor",
    "Ram",
    "Sample",
    "detect",
    "latest",
    "load_profile",
    "mapped_bytes",
    "survey",
]
