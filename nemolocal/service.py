"""Service: the one object that the command line, the port and the page hold.

It knows which models are here, finds the one that a request names, has it loaded beside or in place of
others, and streams answers. Knows nothing of HTTP or pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from nemolocal import hardware as hardware_module
from nemolocal.config import Config
from nemolocal.embedders import Access, ServedEmbedder, ServedReranker, check_purpose
from nemolocal.errors import EngineError, ModelNotFoundError, NemoLocalError
from nemolocal.hardware import Hardware
from nemolocal.loading import EngineStart, Loader
from nemolocal.models import catalog, measured, reference, room, store
from nemolocal.models.reference import PathRef
from nemolocal.models.store import LocalModel, Purpose
from nemolocal.papers import Finders, Papers
from nemolocal.residency import Candidates, Residency, Resident
from nemolocal.shelf import Shelf
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
from nemolocal.vectors import Embedder, Reranker

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
    purpose: Purpose = "chat"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, called `id` here; `ref` is its reference as the models folder has it. `gpu_bytes`
    are measured where the driver tells, else the plan's, as `ram_bytes` are. `n_active` requests use it, of
    which `n_waiting` wait for a slot. Of the `n_cells` of its KV cache `n_taken_cells` hold something; both
    are 0 for a model that has none. `expires_in_s` is the time until it is unloaded where nobody asks for it,
    None while it is in use or where it stays. `note` says in one line what is unusual about its plan, ""
    where nothing is."""

    id: str
    device: str
    n_ctx: int
    n_slots: int
    gpu_bytes: int
    ram_bytes: int
    n_active: int
    expires_in_s: float | None
    note: str = ""
    n_waiting: int = 0
    n_cells: int = 0
    n_taken_cells: int = 0
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """What the service is doing, and about which model: the one that is being loaded, failed, or was used
    last. `progress` is the share of the load, 0 to 1. `device` reads like "RTX 4090" or "CPU"; `problem` is
    one line when the last load failed or a model's process ended; `note` is the model's. `loaded` are the
    ids of all models in memory, the last used first: they can be served whatever the state."""

    state: Literal["idle", "loading", "ready", "failed"]
    model: str = ""
    device: str = ""
    n_ctx: int = 0
    n_slots: int = 0
    progress: float = 0.0
    problem: str = ""
    note: str = ""
    loaded: tuple[str, ...] = ()


class Service:
    """`detect` looks at the hardware and `start_engine` starts a model; both are asked anew for each load."""

    def __init__(
        self,
        config: Config,
        *,
        detect: Callable[[], Hardware] | None = None,
        start_engine: EngineStart | None = None,
    ) -> None:
        self.config = config
        self._totals = Totals()
        self._loader = Loader(
            config,
            detect=detect or (lambda: hardware_module.survey(config)),
            start_engine=start_engine,
            name_of=lambda model: _names(self._usable()).get(model.path, model.ref),
            totals=self._totals,
        )
        self._residency = Residency(
            self._loader.decide,
            keep_alive_s=config.settings.keep_alive_s,
            on_death=self._loader.bury,
        )
        self._start_up: asyncio.Task[None] | None = None
        self._start_ref = ""
        self._last_used: LocalModel | None = None
        self._admitted: dict[str, LocalModel] = {}  # by the reference as it was written
        self._listing: tuple[float, list[LocalModel]] | None = None
        look = detect or (lambda: hardware_module.survey(config))
        self.shelf = Shelf(
            config,
            detect=look,
            bare=self._bare,
            learned=partial(measured.learned, config),
            on_change=self._forget_listing,
        )
        self.papers = Papers(config, Finders(self.find_model, self.find_embedder, self.find_reranker))

    def _bare(self, machine: Hardware) -> Hardware:
        """The machine as it would be with nothing of ours loaded."""
        if self.config.settings.hardware:  # a profile tells of it so
            return machine
        return room.given_back(machine, [resident.footprint for resident in self._residency.residents])

    def _forget_listing(self) -> None:
        self._listing = None

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
            self._start_ref = refs[0]
            self._start_up = asyncio.create_task(self._load_at_start(refs[0]))

    async def close(self) -> None:
        """Unload everything; waits for the engine's process to end."""
        if self._start_up:
            self._start_up.cancel()
            await asyncio.gather(self._start_up, return_exceptions=True)
        await self._residency.close()
        await asyncio.to_thread(self._loader.close)
        await asyncio.to_thread(self.shelf.close)
        await self.papers.close()
        self._loader.problem = None

    def status(self) -> Status:
        residents, loader = self._residency.residents, self._loader
        loaded = tuple(resident.name for resident in residents)
        if loader.loading:
            return Status("loading", model=loader.loading, progress=loader.progress, loaded=loaded)
        if self._start_up and not self._start_up.done():
            return Status("loading", model=self._start_ref, loaded=loaded)
        if loader.problem:
            return Status("failed", model=loader.problem.name, problem=loader.problem.text, loaded=loaded)
        if residents:
            return _status_of(residents[0], "ready", loaded=loaded)
        for resident in self._residency.fallen:
            death = resident.engine.death
            return replace(_status_of(resident, "idle"), problem=str(death or "The engine's process ended."))
        return Status("idle")

    def loaded(self) -> list[LoadedModel]:
        """The models in memory, the last used first."""
        return [_loaded(resident) for resident in self._residency.residents]

    def totals(self) -> dict[str, ModelTotals]:
        """What each model has done since the program started, by its id."""
        return self._totals.snapshot()

    # Models --------------------------------------------------------------------------------------

    def list_models(self) -> list[ModelCard]:
        """The models on this machine, the loaded ones first."""
        usable = self._usable()
        names = _names(usable)
        cards = [self._card(model, names[model.path]) for model in usable]
        return sorted(cards, key=lambda card: (not card.is_loaded, card.id))

    def find_model(self, ref: str | None, *, keep_alive_s: float | None = None) -> TextModel:
        """The model that answers to `ref` (None: the loaded or configured or only one).

        It is loaded on its first use, and stays for `keep_alive_s` seconds after its last (0: it goes at
        once, negative: never by itself, None: as it was told before). Raises ModelNotFoundError at once when
        no model on this machine answers to the reference, ModelFileError when its file cannot be used.
        """
        candidates = self._candidates(ref or self._default_ref())
        return ServedModel(self, self._name(candidates, ref), candidates, keep_alive_s=keep_alive_s)

    def find_embedder(self, ref: str | None, *, keep_alive_s: float | None = None) -> Embedder:
        """The model that embeds and answers to `ref` (None: the loaded or the only one); the rest as with
        `find_model`. Raises InvalidRequestError for a model that chats or ranks."""
        candidates = self._candidates(ref or self._default_ref("embed"))
        name = self._name(candidates, ref)
        check_purpose(name, candidates[0], "embed")
        return ServedEmbedder(name, candidates, self._access(candidates, keep_alive_s))

    def find_reranker(self, ref: str | None, *, keep_alive_s: float | None = None) -> Reranker:
        """The same for a model that ranks."""
        candidates = self._candidates(ref or self._default_ref("rank"))
        name = self._name(candidates, ref)
        check_purpose(name, candidates[0], "rank")
        return ServedReranker(name, self._access(candidates, keep_alive_s))

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

    async def load(self, ref: str, *, keep_alive_s: float | None = None) -> None:
        """Load a model, also one that failed too often to be tried for a request.

        Others stay where there is room for all; else those that were not used for longest go, once their
        requests have ended. Raises DoesNotFitError, EngineError or another NemoLocalError when it cannot be
        loaded.
        """
        candidates = self._candidates(ref)
        self._loader.failures.forget(model.path for model in candidates)
        async with self.lease(candidates, keep_alive_s=keep_alive_s):
            pass

    async def unload(self, ref: str) -> None:
        """Unload a model once its requests have ended; nothing happens where it is not loaded.

        Raises ModelNotFoundError.
        """
        await self._residency.unload(self._candidates(ref))

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

    def _name(self, candidates: Candidates, ref: str | None) -> str:
        """What a found model is called here."""
        name = _names(self._usable()).get(candidates[0].path) if len(candidates) == 1 else None
        return name or ref or candidates[0].id

    def _default_ref(self, purpose: Purpose = "chat") -> str:
        """The model of this purpose that is meant where none is named."""
        settings = self.config.settings
        usable = [model for model in self._usable() if model.purpose == purpose]
        loaded = [x.model.ref for x in self._residency.residents if x.model.purpose == purpose]
        if settings.model and loaded:
            with suppress(NemoLocalError):
                resident = self._residency.serving(self._candidates(settings.model))
                if resident and resident.model.purpose == purpose:
                    return settings.model
        if loaded:
            return loaded[0]
        if self._last_used and any(model.path == self._last_used.path for model in usable):
            return self._last_used.ref  # it was idle and is loaded again
        if settings.model and purpose == "chat":
            return settings.model
        if len({model.id for model in usable}) == 1:
            return usable[0].id
        raise store.nothing_named(purpose, sorted({model.id for model in usable}))

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
        resident = next((x for x in self._residency.residents if x.model.path == model.path), None)
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
            n_ctx=resident.engine.info.n_ctx if resident else model.n_ctx_train,
            is_loaded=resident is not None,
            purpose=model.purpose,
        )

    def _advice(self, ref: str) -> catalog.Sampling | None:
        listed = catalog.load().get(self._candidates(ref)[0].catalog_id)
        return listed.sampling if listed else None

    # Loading -------------------------------------------------------------------------------------

    def lease(
        self, candidates: Candidates, *, keep_alive_s: float | None = None
    ) -> AbstractAsyncContextManager[Resident]:
        """The loaded model, which stays loaded while the lease is held; for ServedModel."""
        return self._residency.lease(candidates, keep_alive_s=keep_alive_s)

    async def generate(
        self, resident: Resident, prompt: Prompt, params: GenerationParams
    ) -> AsyncGenerator[StreamItem, None]:
        """The engine's stream, counted; for ServedModel."""
        is_over = False
        self._last_used = resident.model
        alone_since = resident.last_used if self._residency.is_alone(resident) else None
        try:
            async with aclosing(resident.engine.generate(prompt, params)) as stream:
                async for item in stream:
                    if isinstance(item, Finish):
                        is_over = True
                        self._totals.finished(resident.name, item)
                        self._loader.answered(resident)
                        if alone_since == resident.last_used and self._residency.is_alone(resident):
                            self._loader.wrote(resident, item)
                    yield item
        except EngineError:
            self._totals.failed(resident.name)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if not is_over:
                self._totals.cancelled(resident.name)
            raise

    def _access(self, candidates: Candidates, keep_alive_s: float | None) -> Access:
        return Access(
            lease=lambda: self.lease(candidates, keep_alive_s=keep_alive_s),
            totals=self._totals,
            answered=self._loader.answered,
        )

    def loaded_ctx(self, candidates: Candidates) -> int:
        """The context of the loaded one of these, else 0."""
        resident = self._residency.serving(candidates)
        return resident.engine.info.n_ctx if resident else 0

    async def _load_at_start(self, ref: str) -> None:
        with suppress(NemoLocalError):  # kept in the status, and met again by the first request
            await self.load(ref)


class ServedModel:
    """A model of this machine as a TextModel: loaded when it is asked, kept loaded while it answers."""

    def __init__(
        self, service: Service, ref: str, candidates: Candidates, *, keep_alive_s: float | None = None
    ) -> None:
        self._service = service
        self._candidates = candidates
        self._keep_alive_s = keep_alive_s
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
        async with self._lease() as resident:
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
            self._lease() as resident,
            aclosing(self._service.generate(resident, raw, params)) as stream,
        ):
            async for item in stream:
                yield item

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text, with no control tokens in it. Raises EngineError."""
        async with self._lease() as resident:
            return await resident.engine.count(texts)

    def _lease(self) -> AbstractAsyncContextManager[Resident]:
        """Raises InvalidRequestError for a model that writes no text."""
        check_purpose(self.id, self._candidates[0], "chat")
        return self._service.lease(self._candidates, keep_alive_s=self._keep_alive_s)


def _status_of(
    resident: Resident, state: Literal["idle", "ready"], *, loaded: tuple[str, ...] = ()
) -> Status:
    return Status(
        state,
        model=resident.name,
        device=resident.device,
        n_ctx=resident.engine.info.n_ctx,
        n_slots=resident.engine.spec.n_slots,
        progress=1.0,
        note=resident.note,
        loaded=loaded,
    )


def _loaded(resident: Resident) -> LoadedModel:
    engine = resident.engine
    return LoadedModel(
        id=resident.name,
        device=resident.device,
        n_ctx=engine.info.n_ctx,
        n_slots=engine.spec.n_slots,
        gpu_bytes=sum(n_bytes for _, n_bytes in resident.footprint.gpu_bytes),
        ram_bytes=resident.footprint.ram_bytes,
        n_active=resident.n_leases,
        expires_in_s=resident.expires_in_s,
        note=resident.note,
        n_waiting=min(engine.occupancy.n_waiting, resident.n_leases),
        n_cells=engine.occupancy.n_cells,
        n_taken_cells=engine.occupancy.n_taken_cells,
        ref=resident.model.ref,
    )


def _names(models: Sequence[LocalModel]) -> dict[Path, str]:
    """The shortest name of each model: its id where no other file has the same."""
    n_of_id = Counter(model.id for model in models)
    return {model.path: model.id if n_of_id[model.id] == 1 else model.ref for model in models}
