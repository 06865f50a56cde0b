"""From files to a running engine: look at the hardware, plan beside what is loaded, start, and measure.
Remembers which models failed. Knows nothing of requests and of whose turn it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from nemolocal import load_settings, load_spec, measuring, shortage
from nemolocal.chat.template import ChatTemplate
from nemolocal.config import Config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import (
    DoesNotFitError,
    EngineDiedError,
    ModelNotFoundError,
    OutOfMemoryError,
    UsageError,
)
from nemolocal.failures import Failures
from nemolocal.hardware import Hardware, mapped_bytes
from nemolocal.learning import Learning
from nemolocal.measuring import RAM
from nemolocal.models import planning, room, sizing
from nemolocal.models.learned import Learned
from nemolocal.models.reference import NamedRef
from nemolocal.models.room import Footprint, Room, Tenant
from nemolocal.models.store import LocalModel
from nemolocal.residency import Candidates, MakeRoom, Resident, Start
from nemolocal.totals import Totals
from nemolocal.types import Finish

log = logging.getLogger(__name__)

LEAST_NOTED_BYTES: Final = 64 << 20

EngineStart = Callable[[LoadSpec, Path, Callable[[float], None]], Awaitable[EngineClient]]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a model is not loaded, in one line."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class _View:
    """What one decision is made of: the settings for the model, the machine as it is, what is known of it."""

    config: Config
    hardware: Hardware
    learned: Learned


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
        self._learning = Learning(config, detect=detect)
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
            view = await asyncio.to_thread(self._look, candidates, residents)
            try:
                found, note = await asyncio.to_thread(self._find_room, candidates, view, residents)
                model = next(x for x in candidates if str(x.path) == found.plan.candidate.file)
                self.failures.check(model.path, self._name_of(model))
                if len(candidates) > 1 and load_settings.get(model.ref, self._config):
                    return await self.decide((model,), residents)
                if found.leaving:
                    return MakeRoom(tuple(residents[i] for i in found.leaving))
                spec = await asyncio.to_thread(load_spec.build, found.plan, view.hardware, view.config)
            except (UsageError, ModelNotFoundError) as error:
                if view.config is not self._config:
                    error.hint = f"{error.hint} The load settings that are kept for this model ask for it."
                raise
        taken = {resident.log_path for resident in residents}
        log_path = self._log_path(taken)
        return partial(self._start, model, found.plan, spec, view=view, log_path=log_path, note=note)

    def answered(self, resident: Resident) -> None:
        """Note that a model has answered a request."""
        self.failures.end_row(resident.model.path)
        self.problem = None

    def wrote(self, resident: Resident, finish: Finish) -> None:
        """Note an answer that had the machine for itself."""
        if resident.plan:
            self._learning.wrote(resident.plan, finish)

    def close(self) -> None:
        """Wait for what is being noted."""
        self._learning.close()

    def bury(self, resident: Resident) -> None:
        """Note that a model's process ended by itself."""
        death = resident.engine.death or EngineDiedError("The engine's process ended.")
        log.error("%s: %s", resident.name, death.message)
        self.failures.add(resident.model.path, death)

    def _look(self, candidates: Candidates, residents: Sequence[Resident]) -> _View:
        """The machine as it is now, and what is kept of it and of the model."""
        refs = [candidates[0].ref, candidates[0].id] if len(candidates) == 1 else [candidates[0].id]
        hardware = self._free(residents)
        return _View(load_settings.applied(self._config, refs), hardware, self._learning.learned(hardware))

    def _free(self, residents: Sequence[Resident]) -> Hardware:
        """What is free beside the residents."""
        hardware = self._detect()
        if self._config.settings.hardware:  # a profile tells of the machine with nothing loaded
            return room.without(hardware, [resident.footprint for resident in residents])
        mapped = [min(mapped_bytes(x.engine.pid), x.footprint.ram_bytes) for x in residents]
        return room.without(hardware, [Footprint(ram_bytes=sum(mapped))])

    def _find_room(
        self, candidates: Candidates, view: _View, residents: Sequence[Resident]
    ) -> tuple[Room, str]:
        files = [planning.local_candidate(model) for model in candidates]
        wish = planning.wish(view.config)
        caution_bytes = max(self.failures.caution_bytes(model.path) for model in candidates)
        missing: Counter[str] = Counter()
        for model in candidates:
            missing |= Counter(self.failures.missing_bytes(model.path))
        kept_free = Footprint(tuple(missing.items()), missing[RAM])
        note = _note(caution_bytes, missing, view.hardware)

        def plan_on(hardware: Hardware) -> sizing.Plan:
            cautious = room.without(room.cautious(hardware, caution_bytes), [kept_free])
            try:
                return planning.decide(
                    candidates[0].id, files, cautious, view.config, wish, learned=view.learned
                )
            except DoesNotFitError as error:
                error.hint = f"{note} {error.hint}".strip()
                raise

        tenants = [Tenant(resident.footprint, is_idle=not resident.n_leases) for resident in residents]
        try:
            return room.find(plan_on, view.hardware, tenants, n_most=self._config.settings.max_models), note
        except DoesNotFitError as error:
            alone = room.given_back(view.hardware, [resident.footprint for resident in residents])
            planning.name_smaller(error, NamedRef(candidates[0].catalog_id), view.config, alone)
            raise

    async def _start(
        self,
        model: LocalModel,
        plan: sizing.Plan,
        spec: LoadSpec,
        *,
        view: _View,
        log_path: Path,
        note: str,
    ) -> Resident:
        name, began = self._name_of(model), time.monotonic()
        log.info("loading %s: %s", model.ref, " ".join([*plan.reasons, note]).strip())
        with self._reported(name):
            try:
                engine = await self._start_engine(spec, log_path, self._on_progress)
                template = await _read_template(engine)
            except OutOfMemoryError as error:
                self._totals.load_failed(name)
                raise await asyncio.to_thread(self._without_memory, model, plan, error) from None
            except Exception as error:
                self.failures.add(model.path, error)
                self._totals.load_failed(name)
                raise
        self.problem = None
        self._totals.loaded(name, seconds=time.monotonic() - began)
        device = _device(plan)
        log.info("loaded %s on %s, context %d", model.ref, device, engine.info.n_ctx)
        used = await asyncio.to_thread(
            self._learning.loaded, name, plan, engine, before=view.hardware, learned=view.learned
        )
        return Resident(
            model,
            engine,
            template,
            device=device,
            name=name,
            footprint=measuring.footprint(room.footprint(plan), used),
            plan=plan,
            log_path=log_path,
            note=note,
        )

    def _without_memory(
        self, model: LocalModel, plan: sizing.Plan, error: OutOfMemoryError
    ) -> OutOfMemoryError:
        """Remember by how much a plan was wrong; the error with all figures."""
        before = self.failures.missing_bytes(model.path)
        told = shortage.describe(self._name_of(model), plan, error, is_second=bool(before))
        n_bytes = shortage.missing_bytes(plan, error, self._detect(), before=before.get(error.device, 0))
        self.failures.add(model.path, told, missing={error.device: n_bytes})
        return told

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


def _note(caution_bytes: int, missing: Mapping[str, int], hardware: Hardware) -> str:
    """What is kept free since memory ran out before, "" where nothing is."""
    names = {RAM: "the RAM"} | {gpu.uuid: gpu.name for gpu in hardware.gpus}
    parts = (
        [f"{caution_bytes / sizing.GIB:.0f} GiB more are kept free on each device"] if caution_bytes else []
    )
    parts += [
        f"{n_bytes / sizing.GIB:.1f} GiB more are kept free on {names.get(device, device)}"
        for device, n_bytes in missing.items()
        if n_bytes >= LEAST_NOTED_BYTES
    ]
    return f"{' and '.join(parts)}, since memory ran out before." if parts else ""


def _device(plan: sizing.Plan) -> str:
    """The GPUs of a plan by name, or "CPU"."""
    n_of_name = Counter(gpu.name for gpu in plan.placement.gpus)
    names = [name if n == 1 else f"{n} × {name}" for name, n in n_of_name.items()]
    return " + ".join(names) or "CPU"
