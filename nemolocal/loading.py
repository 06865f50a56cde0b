"""From files to a running engine: look at the hardware, plan beside what is loaded, start. Remembers which
models failed. Knows nothing of requests and of whose turn it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemolocal import load_spec
from nemolocal.chat.template import ChatTemplate
from nemolocal.config import Config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import DoesNotFitError, EngineDiedError
from nemolocal.failures import Failures
from nemolocal.hardware import Hardware, mapped_bytes
from nemolocal.models import planning, room, sizing
from nemolocal.models.room import Footprint, Room, Tenant
from nemolocal.models.store import LocalModel
from nemolocal.residency import Candidates, MakeRoom, Resident, Start
from nemolocal.totals import Totals

log = logging.getLogger(__name__)

EngineStart = Callable[[LoadSpec, Path, Callable[[float], None]], Awaitable[EngineClient]]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a model is not loaded, in one line."""

    name: str
    text: str


class Loader:
    """`detect` looks at the hardware and `start_engine` starts a model; both are asked anew for each load.

    `name_of` is how a model is called here. `loading` is the name of the model that is being loaded, ""
    where none is, and `progress` how much of it is there, 0 to 1. `problem` says why the last load failed,
    None once anything went well again.
    """

    def __init__(
        self,
        config: Config,
        *,
        detect: Callable[[], Hardware],
        start_engine: EngineStart | None,
        name_of: Callable[[LocalModel], str],
        totals: Totals,
    ) -> None:
        self._config = config
        self._detect = detect
        self._start_engine = start_engine or partial(
            EngineClient.start, watchdog_s=config.settings.watchdog_s
        )
        self._name_of = name_of
        self._totals = totals
        self.failures = Failures()
        self.loading = ""
        self.progress = 0.0
        self.problem: Problem | None = None

    async def decide(self, candidates: Candidates, residents: Sequence[Resident]) -> Start | MakeRoom:
        """What has to go, or how to load one of these files beside the residents, which are given in the
        order in which they would have to go.

        Raises DoesNotFitError, UsageError and ModelFileError when it cannot be planned, EngineGaveUpError
        for a model that failed too often.
        """
        with self._reported(self._name_of(candidates[0])):
            hardware = await asyncio.to_thread(self._look, residents)
            found, note = await asyncio.to_thread(self._find_room, candidates, hardware, residents)
            model = next(x for x in candidates if str(x.path) == found.plan.candidate.file)
            self.failures.check(model.path, self._name_of(model))
            if found.leaving:
                return MakeRoom(tuple(residents[i] for i in found.leaving))
            spec = await asyncio.to_thread(load_spec.build, found.plan, hardware, self._config)
        taken = {resident.log_path for resident in residents}
        return partial(self._start, model, found.plan, spec, log_path=self._log_path(taken), note=note)

    def answered(self, resident: Resident) -> None:
        """Note that a model has answered a request."""
        self.failures.end_row(resident.model.path)
        self.problem = None

    def bury(self, resident: Resident) -> None:
        """Note that a model's process ended by itself."""
        death = resident.engine.death or EngineDiedError("The engine's process ended.")
        log.error("%s: %s", resident.name, death.message)
        self.failures.add(resident.model.path, death)

    def _look(self, residents: Sequence[Resident]) -> Hardware:
        """What is free beside the residents."""
        hardware = self._detect()
        if self._config.settings.hardware:  # a profile tells of the machine with nothing loaded
            return room.without(hardware, [resident.footprint for resident in residents])
        mapped = [min(mapped_bytes(x.engine.pid), x.footprint.ram_bytes) for x in residents]
        return room.without(hardware, [Footprint(ram_bytes=sum(mapped))])

    def _find_room(
        self, candidates: Candidates, hardware: Hardware, residents: Sequence[Resident]
    ) -> tuple[Room, str]:
        files = [planning.local_candidate(model) for model in candidates]
        wish = planning.wish(self._config)
        caution_bytes = max(self.failures.caution_bytes(model.path) for model in candidates)
        note = ""
        if caution_bytes:
            gib = caution_bytes / sizing.GIB
            note = f"{gib:.0f} GiB more are kept free on each device, since memory ran out before."

        def plan_on(view: Hardware) -> sizing.Plan:
            try:
                cautious = room.cautious(view, caution_bytes)
                return planning.decide(candidates[0].id, files, cautious, self._config, wish)
            except DoesNotFitError as error:
                error.hint = f"{note} {error.hint}".strip()
                raise

        tenants = [Tenant(resident.footprint, is_idle=not resident.n_leases) for resident in residents]
        return room.find(plan_on, hardware, tenants, n_most=self._config.settings.max_models), note

    async def _start(
        self, model: LocalModel, plan: sizing.Plan, spec: LoadSpec, *, log_path: Path, note: str
    ) -> Resident:
        name, began = self._name_of(model), time.monotonic()
        log.info("loading %s: %s", model.ref, " ".join([*plan.reasons, note]).strip())
        with self._reported(name):
            try:
                engine = await self._start_engine(spec, log_path, self._on_progress)
                template = await _read_template(engine)
            except Exception as error:
                self.failures.add(model.path, error)
                self._totals.load_failed(name)
                raise
        self.problem = None
        self._totals.loaded(name, seconds=time.monotonic() - began)
        device = _device(plan)
        log.info("loaded %s on %s, context %d", model.ref, device, engine.info.n_ctx)
        return Resident(
            model,
            engine,
            template,
            device=device,
            name=name,
            footprint=room.footprint(plan),
            log_path=log_path,
            note=note,
        )

    def _on_progress(self, fraction: float) -> None:
        self.progress = fraction

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Say that a model is being loaded, and why it was not."""
        self.loading, self.progress = name, 0.0
        try:
            yield
        except Exception as error:
            self.problem = Problem(name, " ".join(str(error).split()) or type(error).__name__)
            log.error("loading %s failed: %s", name, self.problem.text)
            raise
        finally:
            self.loading = ""

    def _log_path(self, taken: set[Path]) -> Path:
        """A file for the engine's last words that no other engine writes to."""
        names = ["engine.log", *(f"engine-{n}.log" for n in range(2, len(taken) + 2))]
        return next(path for name in names if (path := self._config.paths.logs / name) not in taken)


async def _read_template(engine: EngineClient) -> ChatTemplate:
    """The model's own template. Ends the engine where it is broken."""
    info = engine.info
    try:
        return ChatTemplate(
            info.chat_template, bos=info.bos, eos=info.eos, control_tokens=info.control_tokens
        )
    except BaseException:
        await engine.close()
        raise


def _device(plan: sizing.Plan) -> str:
    """The GPUs of a plan by name, or "CPU"."""
    n_of_name = Counter(gpu.name for gpu in plan.placement.gpus)
    names = [name if n == 1 else f"{n} × {name}" for name, n in n_of_name.items()]
    return " + ".join(names) or "CPU"
