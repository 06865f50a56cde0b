"""What there is to choose from: the catalogue, this machine and the hub, with what fits here, downloads, and
how a model would be loaded. Blocks, so it is called from threads. Knows no engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nemolocal import config as settings
from nemolocal import load_settings
from nemolocal.config import Config
from nemolocal.downloads import Downloads
from nemolocal.errors import DoesNotFitError, ModelFileError, UsageError
from nemolocal.hardware import Hardware, Monitor
from nemolocal.models import catalog, fits, hub, offers, overview, planning, reference, upkeep
from nemolocal.models.catalog import CatalogModel
from nemolocal.models.download import Choice
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.learned import Learned
from nemolocal.models.overview import ListedFile, ListedModel
from nemolocal.models.plans import Plan

LOOK_EVERY_S: Final = 3.0
"""Looking at the hardware takes a tenth of a second; a page asks for it with each change of a field."""

PROPOSED_FAMILIES: Final = ("nemotron-3", "nemotron-nano-v2", "llama-nemotron")
FLUENT_TOKENS_PER_S: Final = 8.0
"""Slower than this nobody wants to read along."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the list. `fit` is None where its files cannot be used."""

    model: ListedModel
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model to begin with: its reference, name, size in bytes, and how it would run. `has_starter` says
    that the small starter model, which could answer meanwhile, is here."""

    ref: str
    name: str
    size_bytes: int
    fit: Fit
    must_accept: bool
    licence: str
    has_starter: bool


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository of the hub and the models that can be had of it, largest first. `note` says that this is
    what it held before, where the hub cannot be asked."""

    id: str
    licence: str
    is_gated: bool
    note: str
    choices: tuple[Choice, ...]


class Shelf:
    """`detect` looks at the hardware as it would be with nothing of ours loaded, `learned` says what earlier
    loads have shown, and `on_change` is called when a model has come or gone."""

    def __init__(
        self,
        config: Config,
        *,
        detect: Callable[[], Hardware],
        learned: Callable[[Hardware], Learned] = lambda hardware: Learned(),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._detect = detect
        self._learned = learned
        self._on_change = on_change
        self._looked: tuple[float, Hardware] | None = None
        self.downloads = Downloads(config, on_done=lambda ref: on_change())
        self.monitor = Monitor()

    def close(self) -> None:
        self.downloads.close()
        self.monitor.close()

    def hardware(self) -> Hardware:
        """This machine, as of the last seconds."""
        now = time.monotonic()
        if self._looked is None or now - self._looked[0] > LOOK_EVERY_S:
            self._looked = now, self._detect()
        return self._looked[1]

    def _known(self) -> tuple[Hardware, Learned]:
        machine = self.hardware()
        return machine, self._learned(machine)

    # Looking -------------------------------------------------------------------------------------

    def entries(self) -> tuple[Entry, ...]:
        """The catalogue with what is here of it, then the other models of this machine."""
        models = overview.build(self._config)
        found = fits.all_of(models, self._config, *self._known())
        return tuple(Entry(model, found.get(model.id)) for model in models)

    def entry(self, id: str) -> Entry | None:
        for model in overview.build(self._config):
            if model.id == id:
                found = fits.all_of([model], self._config, *self._known())
                return Entry(model, found.get(id))
        return None

    def plan(self, ref: str, values: Mapping[str, Any] | None = None) -> Plan:
        """How a model would be loaded with these settings (None: with those that are kept for it). Asks the
        hub about repositories of which nothing is known here.

        Raises what planning raises, and ConfigError for a value that cannot be meant.
        """
        return planning.plan(ref, self._with(ref, values), *self._known())

    def fit(self, ref: str, values: Mapping[str, Any] | None = None) -> Fit:
        """The same as a grade; red where it does not fit or is not possible."""
        try:
            return fits.of_plan(self.plan(ref, values))
        except (DoesNotFitError, ModelFileError, UsageError) as error:
            return Fit(
                "red", "does not fit" if isinstance(error, DoesNotFitError) else "unusable", str(error)
            )

    def _with(self, ref: str, values: Mapping[str, Any] | None) -> Config:
        if values is None:
            return load_settings.applied(self._config, [ref])
        return settings.with_values(self._config, values, source="page", where="The load settings")

    def search(self, words: str) -> tuple[SearchHit, ...]:
        """Repositories of the hub. Raises OfflineError and HubError."""
        return hub.search(words, self._config)

    def repo(self, ref: str) -> Repo:
        """What a repository of the hub offers. Raises UsageError for what names none, ModelNotFoundError
        where it has no models, HubError, and OfflineError where nothing is known of it."""
        parsed = reference.parse(ref)
        if not isinstance(parsed, reference.HubRef):
            raise UsageError(f"'{ref}' names no repository of the hub.", hint="Write hf:OWNER/REPO.")
        found, note = offers.look_up(parsed.repo, self._config)
        models = sorted(offers.usable(found, parsed, self._config), key=lambda model: -model.bytes)
        choices = tuple(
            Choice(quant=m.quant, ref=found.ref(m), bytes=m.bytes, is_approximate=False) for m in models
        )
        return Repo(found.id, found.licence, found.is_gated, note, choices)

    def proposal(self) -> Proposal | None:
        """What to begin with where at most the starter is here: the largest model of the proposed families,
        the newest family first, that runs well. None where there is something else, or nothing runs well.
        """
        models = overview.build(self._config)
        here = [m for m in models if any(f.state == "local" and not f.problem for f in m.files)]
        if any(model.id != catalog.STARTER for model in here):
            return None
        machine, learned = self._known()
        for family in PROPOSED_FAMILIES:
            same = [
                m.listed for m in models if m.listed and m.listed.family == family and "chat" in m.listed.tags
            ]
            for listed in sorted(same, key=lambda m: -m.n_params):
                fit = fits.fit(listed.id, self._config, machine, learned)
                if _runs_well(fit, machine):
                    return _proposal(listed, fit, has_starter=bool(here))
        return None

    # Changing ------------------------------------------------------------------------------------

    def import_path(self, path: str) -> str:
        """Add a file where it lies; its reference. Raises ModelFileError, UsageError."""
        model = upkeep.import_path(path, self._config)
        self._on_change()
        return model.ref

    def remove(self, ref: str) -> upkeep.Removed:
        """Delete a model's files, or forget an imported one. Raises what upkeep.remove raises."""
        removed = upkeep.remove(ref, self._config)
        self._on_change()
        return removed

    def kept_settings(self, ref: str) -> dict[str, Any]:
        return load_settings.get(ref, self._config)

    def keep_settings(self, ref: str, values: Mapping[str, Any]) -> None:
        """Keep load settings for a model; none where nothing is given. Raises ConfigError, DatabaseError."""
        if values:
            load_settings.put(ref, values, self._config)
        else:
            load_settings.forget(ref, self._config)


def best_file(entry: Entry) -> ListedFile | None:
    """The file of a model that the plan chose, or the first."""
    if entry.fit and entry.fit.quant:
        for file in entry.model.files:
            if file.quant == entry.fit.quant:
                return file
    return entry.model.files[0] if entry.model.files else None


def _runs_well(fit: Fit, machine: Hardware) -> bool:
    if fit.plan is None:
        return False
    speed = fit.plan.tokens_per_s
    is_fluent = speed is None or speed >= FLUENT_TOKENS_PER_S
    return is_fluent and (fit.grade == "green" if machine.mode == "gpu" else True)


def _proposal(listed: CatalogModel, fit: Fit, *, has_starter: bool) -> Proposal:
    assert fit.plan is not None
    return Proposal(
        ref=f"{listed.id}:{fit.plan.candidate.quant}",
        name=listed.name,
        size_bytes=fit.plan.candidate.size_bytes,
        fit=fit,
        must_accept=listed.must_accept,
        licence=listed.licence,
        has_starter=has_starter,
    )
