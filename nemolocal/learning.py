"""What this machine teaches: measures each load and each answer that had the machine for itself, keeps the
figures, and hands them to the next plan.

What cannot be kept is logged and stops nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Final

from nemolocal import measuring
from nemolocal.config import Config
from nemolocal.engine.client import EngineClient
from nemolocal.errors import DatabaseError
from nemolocal.hardware import Hardware
from nemolocal.models import measured
from nemolocal.models.learned import Learned, placed
from nemolocal.models.plans import Plan
from nemolocal.types import Finish

log = logging.getLogger(__name__)

N_TOKENS_LEAST: Final = 32
"""A shorter answer says little of the speed."""
SHARE_DRAFTED: Final = 0.1
"""Where more was guessed ahead, the speed is the text's as much as the machine's."""
EVERY_S: Final = 60.0


class Learning:
    """`detect` looks at the hardware. Loads are measured in the caller's thread, speeds are kept in one of
    their own, which `close` waits for. `now` is a clock in seconds."""

    def __init__(
        self, config: Config, *, detect: Callable[[], Hardware], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._detect = detect
        self._now = now
        # A profile tells of another machine than the one that is measured.
        self._is_on = not config.settings.hardware
        self._hardware: Hardware | None = None
        self._kept_at: dict[tuple[str, str], float] = {}
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="nemolocal-learning")

    def learned(self, hardware: Hardware) -> Learned:
        """What is known for plans on this hardware."""
        return measured.learned(self._config, hardware)

    def loaded(
        self, name: str, plan: Plan, engine: EngineClient, *, before: Hardware, learned: Learned
    ) -> dict[str, int]:
        """Measure a model that was just loaded by a plan for the hardware as it was `before`; bytes that it
        holds of each GPU, by UUID, where that can be told. Blocks while the driver is asked."""
        if not self._is_on:
            return {}
        self._hardware = before
        held = engine.info.held
        used: dict[str, int] = {}
        sure: dict[str, int] = {}
        if plan.placement.gpus:
            after = self._detect()
            used = measuring.used_of_gpus(plan, held, before=before, after=after, pid=engine.pid)
            sure = measuring.credible(plan, held, used, after=after, pid=engine.pid)
        rows = measuring.compare(plan, held, used)
        if told := measuring.difference(plan, rows):
            log.info("%s took other than planned: %s", name, told)
        file = plan.candidate.file
        ratio = measuring.compute_ratio(plan, held, learned.compute_ratio(file, plan.load))
        taken = measured.LoadTaken(file, asdict(plan.load), bool(plan.placement.gpus), rows, ratio)
        try:
            if rows:
                measured.keep_load(taken, self._config, before)
        except (DatabaseError, OSError) as error:
            log.warning("what %s took is not kept: %s", name, error)
        return sure

    def wrote(self, plan: Plan, finish: Finish) -> None:
        """An answer that had the machine for itself has ended. Blocks for nothing."""
        n_tokens, timings = finish.usage.completion_tokens - 1, finish.timings  # the first ends the reading
        is_plain = finish.usage.drafted_tokens <= SHARE_DRAFTED * n_tokens
        if not self._is_on or n_tokens < N_TOKENS_LEAST or timings.decode_s <= 0 or not is_plain:
            return
        key = placed(plan.candidate.file, plan.placement)
        last = self._kept_at.get(key)
        if last is None or self._now() - last >= EVERY_S:
            self._kept_at[key] = self._now()
            self._keeper.submit(self._keep_speed, key, n_tokens / timings.decode_s)

    def close(self) -> None:
        """Wait for what is being kept."""
        self._keeper.shutdown()

    def _keep_speed(self, key: tuple[str, str], tokens_per_s: float) -> None:
        hardware = self._hardware or self._detect()
        try:
            measured.keep_speed(key, tokens_per_s, self._config, hardware)
        except (DatabaseError, OSError) as error:
            log.warning("how fast %s wrote is not kept: %s", key[0], error)
