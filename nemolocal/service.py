"""Service: the one object that the command line, the port and the page hold.

It knows which models are here, plans and loads the one that a request names, swaps it for another when its
requests have ended, and streams answers. One model is resident at a time. Knows nothing of HTTP or pages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemolocal import hardware as hardware_module
from nemolocal.chat.template import ChatTemplate
from nemolocal.config import Config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import EngineError, ModelNotFoundError, NemoLocalError, TemplateError
from nemolocal.hardware import Hardware
from nemolocal.models import catalog, planning, reference, sizing, store
from nemolocal.models.reference import PathRef
from nemolocal.models.store import LocalModel
from nemolocal.residency import Candidates, Residency, Resident
from nemolocal.totals import ModelTotals, Totals
from nemolocal.types import (
    Finish,
    GenerationParams,
    Message,
    Prompt,
    SamplingParams,
    Segment,
    StreamItem,
    TextModel,
)

log = logging.getLogger(__name__)

LISTING_S = 1.0  # every request looks models up, and looking costs milliseconds


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model that can be named in a request. `size_bytes` is the file's, `n_ctx` the loaded context
    (the trained one where it is not loaded)."""

    id: str
    name: str
    owned_by: str
    created: int
    size_bytes: int
    quant: str
    n_params: int | None
    n_ctx: int | None
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class Status:
    """What the service is doing. `progress` is the share of the load, 0 to 1. `device` reads like
    "RTX 4090" or "CPU"; `problem` is one line when the last load failed."""

    state: Literal["idle", "loading", "ready", "failed"]
    model: str = ""
    device: str = ""
    n_ctx: int = 0
    n_slots: int = 0
    progress: float = 0.0
    problem: str = ""


EngineStart = Callable[[LoadSpec, Path, Callable[[float], None]], Awaitable[EngineClient]]


class Service:
    """`detect` looks at the hardware and `start_engine` starts a model; both are asked anew for each load."""

    def __init__(
        self,
        config: Config,
        *,
        detect: Callable[[], Hardware] | None = None,
        start_engine: EngineStart = EngineClient.start,
    ) -> None:
        self.config = config
        self._detect = detect or (lambda: hardware_module.survey(config))
        self._start_engine = start_engine
        self._residency = Residency(self._load)
        self._status = Status("idle")
        self._totals = Totals()
        self._start_up: asyncio.Task[None] | None = None
        self._admitted: dict[str, LocalModel] = {}  # by the reference as it was written
        self._listing: tuple[float, list[LocalModel]] | None = None

    # Life ----------------------------------------------------------------------------------------

    async def start(self, refs: Sequence[str] = ()) -> None:
        """Begin to load the named models in the background; returns at once.

        With several, the first is loaded and the others are loaded when they are asked for. Raises
        ModelNotFoundError when a reference names no model on this machine.
        """
        for ref in refs:
            self.admit(ref)
        if self.config.settings.model:
            with suppress(NemoLocalError):  # met again by the first request that names no model
                self.admit(self.config.settings.model)
        if refs:
            self._status = Status("loading", model=refs[0])
            self._start_up = asyncio.create_task(self._load_at_start(refs[0]))

    async def close(self) -> None:
        """Unload everything; waits for the engine's process to end."""
        if self._start_up:
            self._start_up.cancel()
            await asyncio.gather(self._start_up, return_exceptions=True)
        await self._residency.close()
        self._status = Status("idle")

    def status(self) -> Status:
        resident = self._residency.resident
        if resident and not resident.engine.is_alive and self._status.state == "ready":
            return replace(self._status, state="idle", problem="The engine's process ended.")
        return self._status

    def totals(self) -> dict[str, ModelTotals]:
        """What each model has done since the program started, by its id."""
        return self._totals.snapshot()

    # Models --------------------------------------------------------------------------------------

    def list_models(self) -> list[ModelCard]:
        """The models on this machine, the loaded one first."""
        usable = self._usable()
        names = _names(usable)
        cards = [self._card(model, names[model.path]) for model in usable]
        return sorted(cards, key=lambda card: (not card.is_loaded, card.id))

    def find_model(self, ref: str | None) -> TextModel:
        """The model that answers to `ref` (None: the loaded or configured or only one).

        It is loaded on its first use. Raises ModelNotFoundError at once when no model on this machine
        answers to the reference, ModelFileError when its file cannot be used.
        """
        candidates = self._candidates(ref or self._default_ref())
        name = _names(self._usable()).get(candidates[0].path) if len(candidates) == 1 else None
        return ServedModel(self, name or ref or candidates[0].id, candidates)

    def admit(self, ref: str | None) -> TextModel:
        """The same for whoever runs this program, who may also name a file by its path: it is then listed
        and served like the others. Clients of the port may only name what is listed."""
        ref = ref or self._default_ref()
        parsed = reference.parse(ref)
        if isinstance(parsed, PathRef):
            model = store.resolve(parsed, self.config)
            self._admitted[ref] = model
            self._listing = None
        return self.find_model(ref)

    async def load(self, ref: str) -> None:
        """Load a model, unloading the one before it once its requests have ended.

        Raises DoesNotFitError, EngineError or another NemoLocalError when it cannot be loaded.
        """
        async with self.lease(self._candidates(ref)):
            pass

    def sampling_defaults(self, ref: str | None) -> SamplingParams:
        """How a model is sampled where a request does not say: the user's settings, else the advice of the
        model's makers, else llama.cpp's defaults."""
        settings, sources = self.config.settings, self.config.sources
        advice = self._advice(ref or self._default_ref())
        temperature, top_p = settings.temperature, settings.top_p
        if advice and advice.temperature is not None and sources["temperature"] == "default":
            temperature = advice.temperature
        if advice and advice.top_p is not None and sources["top_p"] == "default":
            top_p = advice.top_p
        return SamplingParams(
            temperature=temperature, top_p=top_p, top_k=settings.top_k, min_p=settings.min_p
        )

    def _usable(self) -> list[LocalModel]:
        """What can be loaded; looked up anew when the last look is LISTING_S old."""
        now = time.monotonic()
        if self._listing is None or now - self._listing[0] > LISTING_S:
            listed = [model for model in store.list_models(self.config) if model.is_usable]
            known = {model.path for model in listed}
            others = {model.path: model for model in self._admitted.values() if model.path not in known}
            self._listing = now, [*listed, *others.values()]
        return self._listing[1]

    def _default_ref(self) -> str:
        """The model that is meant where none is named."""
        if self._residency.resident:
            return self._residency.resident.model.ref
        if self.config.settings.model:
            return self.config.settings.model
        usable = self._usable()
        if len({model.id for model in usable}) == 1:
            return usable[0].id
        raise ModelNotFoundError(
            "No model was named." if usable else "There is no model on this machine.",
            hint="`nemolocal models list` shows them." if usable else "Run `nemolocal models pull starter`.",
        )

    def _candidates(self, ref: str) -> Candidates:
        """The files that a reference may mean; a plan chooses among several quants."""
        if ref in self._admitted:
            return (self._admitted[ref],)
        usable = self._usable()
        names = _names(usable)
        for model in usable:
            if ref in (names[model.path], model.ref, str(model.path)):
                return (model,)
        parsed = reference.parse(ref)
        if isinstance(parsed, PathRef):
            raise ModelNotFoundError(
                f"'{ref}' is not among the models that are served here.", hint="GET /v1/models lists them."
            )
        return store.find(parsed, self.config) or (store.resolve(parsed, self.config),)

    def _card(self, model: LocalModel, name: str) -> ModelCard:
        resident = self._residency.resident
        is_loaded = resident is not None and resident.model.path == model.path
        listed = catalog.load().get(model.catalog_id)
        owner = model.repo.partition("/")[0]
        return ModelCard(
            id=name,
            name=listed.name if listed else model.name,
            owned_by=listed.maker if listed else owner or "local",
            created=model.changed,
            size_bytes=model.bytes,
            quant=model.quant,
            n_params=model.n_params,
            n_ctx=resident.engine.info.n_ctx if resident and is_loaded else model.n_ctx_train,
            is_loaded=is_loaded,
        )

    def _advice(self, ref: str) -> catalog.Sampling | None:
        listed = catalog.load().get(self._candidates(ref)[0].catalog_id)
        return listed.sampling if listed else None

    # Loading -------------------------------------------------------------------------------------

    def lease(self, candidates: Candidates) -> AbstractAsyncContextManager[Resident]:
        """The loaded model, which stays loaded while the lease is held; for ServedModel."""
        return self._residency.lease(candidates)

    async def generate(
        self, resident: Resident, prompt: Prompt, params: GenerationParams
    ) -> AsyncGenerator[StreamItem, None]:
        """The engine's stream, counted; for ServedModel."""
        is_over = False
        try:
            async with aclosing(resident.engine.generate(prompt, params)) as stream:
                async for item in stream:
                    if isinstance(item, Finish):
                        is_over = True
                        self._totals.finished(resident.name, item)
                    yield item
        except EngineError:
            self._totals.failed(resident.name)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if not is_over:
                self._totals.cancelled(resident.name)
            raise

    def loaded_ctx(self, candidates: Candidates) -> int:
        """The context of the loaded model when it is one of these, else 0."""
        resident = self._residency.serving(candidates)
        return resident.engine.info.n_ctx if resident else 0

    async def _load(self, candidates: Candidates) -> Resident:
        self._status = Status("loading", model=candidates[0].id)
        try:
            return await self._start(candidates)
        except BaseException as error:  # whatever ended it, it is no longer loading
            problem = str(error) or type(error).__name__
            self._status = Status("failed", model=candidates[0].id, problem=problem)
            log.error("loading %s failed: %s", candidates[0].id, problem)
            if isinstance(error, Exception):
                self._totals.load_failed(candidates[0].id)
            raise

    async def _start(self, candidates: Candidates) -> Resident:
        """Look at the hardware, plan, start the engine."""
        began = time.monotonic()
        hardware = await asyncio.to_thread(self._detect)
        plan = await asyncio.to_thread(self.plan, candidates, hardware)
        model = next(model for model in candidates if str(model.path) == plan.candidate.file)
        spec = self._spec(plan, hardware)
        log.info("loading %s: %s", model.ref, " ".join(plan.reasons))

        def on_progress(fraction: float) -> None:
            self._status = replace(self._status, progress=fraction)

        engine = await self._start_engine(spec, self.config.paths.logs / "engine.log", on_progress)
        info = engine.info
        try:
            template = ChatTemplate(
                info.chat_template, bos=info.bos, eos=info.eos, control_tokens=info.control_tokens
            )
        except TemplateError:
            await engine.close()
            raise
        device = _device(plan)
        name = _names(self._usable()).get(model.path, model.ref)
        self._status = Status(
            "ready",
            model=name,
            device=device,
            n_ctx=info.n_ctx,
            n_slots=spec.n_slots,
            progress=1.0,
        )
        log.info("loaded %s on %s, context %d", model.ref, device, info.n_ctx)
        self._totals.loaded(name, seconds=time.monotonic() - began)
        return Resident(model, engine, template, device, name)

    def plan(self, candidates: Candidates, hardware: Hardware) -> sizing.Plan:
        """How one of these files would be loaded on this hardware, with the user's settings.

        Raises DoesNotFitError, UsageError and ModelFileError.
        """
        files = [planning.local_candidate(model) for model in candidates]
        return sizing.plan(candidates[0].id, files, hardware, planning.wish(self.config))

    def _spec(self, plan: sizing.Plan, hardware: Hardware) -> LoadSpec:
        settings = self.config.settings
        return LoadSpec(
            path=plan.candidate.file,
            n_ctx=plan.load.n_ctx,
            n_slots=plan.load.n_slots,
            n_batch=plan.n_batch,
            n_ubatch=plan.load.n_ubatch,
            kv_type=plan.load.kv_type,
            n_gpu_layers=plan.placement.n_gpu_layers,
            split_mode=plan.split_mode,
            tensor_split=plan.placement.tensor_split,
            visible_devices=plan.visible_devices,
            n_threads=settings.threads or hardware.cpu.physical_cores,
            n_queue=settings.queue,
        )

    async def _load_at_start(self, ref: str) -> None:
        with suppress(NemoLocalError):  # kept in the status, and met again by the first request
            await self.load(ref)


class ServedModel:
    """A model of this machine as a TextModel: loaded when it is asked, kept loaded while it answers."""

    def __init__(self, service: Service, ref: str, candidates: Candidates) -> None:
        self._service = service
        self._candidates = candidates
        self.id = ref

    @property
    def n_ctx(self) -> int:
        """The loaded context; before that, the most it can be."""
        return self._service.loaded_ctx(self._candidates) or self._candidates[0].n_ctx_train

    async def chat(
        self, messages: Sequence[Message], params: GenerationParams
    ) -> AsyncGenerator[StreamItem, None]:
        """Answer a conversation through the model's own template. Closing the iterator cancels.

        Raises TemplateError and ContextLengthError before the first item, EngineError at any time.
        """
        async with self._service.lease(self._candidates) as resident:
            template = resident.template
            prompt = await asyncio.to_thread(template.render, messages)
            params = replace(params, stop=(*params.stop, *template.stop))
            async with aclosing(self._service.generate(resident, prompt, params)) as stream:
                async for item in stream:
                    yield item

    async def complete(
        self, prompt: str | Sequence[int], params: GenerationParams
    ) -> AsyncGenerator[StreamItem, None]:
        """Go on from a raw prompt; control tokens in a text are recognised, as completion clients expect."""
        raw: Prompt = (Segment(prompt, is_control=True),) if isinstance(prompt, str) else tuple(prompt)
        async with (
            self._service.lease(self._candidates) as resident,
            aclosing(self._service.generate(resident, raw, params)) as stream,
        ):
            async for item in stream:
                yield item


def _names(models: Sequence[LocalModel]) -> dict[Path, str]:
    """The shortest name of each model: its id where no other file has the same."""
    n_of_id = Counter(model.id for model in models)
    return {model.path: model.id if n_of_id[model.id] == 1 else model.ref for model in models}


def _device(plan: sizing.Plan) -> str:
    """The GPUs of a plan by name, or "CPU"."""
    n_of_name = Counter(gpu.name for gpu in plan.placement.gpus)
    names = [name if n == 1 else f"{n} × {name}" for name, n in n_of_name.items()]
    return " + ".join(names) or "CPU"
