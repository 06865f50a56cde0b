"""What there is to choose from: the catalogue, this machine and the hub, with what fits here, downloads, and
how a model would be loaded. Blocks, so it is called from threads. Knows no engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nemolocal import config as settings
from nemolocal import load_settings, units
from nemolocal.config import Config
from nemolocal.downloads import Downloads
from nemolocal.errors import DoesNotFitError, HubError, ModelFileError, NemoLocalError, UsageError
from nemolocal.hardware import Hardware, Monitor
from nemolocal.models import catalog, fits, hub, offers, overview, planning, reference, upkeep
from nemolocal.models import proposal as proposals
from nemolocal.models.choice import Candidate
from nemolocal.models.download import Choice
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.learned import Learned
from nemolocal.models.overview import ListedModel
from nemolocal.models.plans import Plan
from nemolocal.models.proposal import Proposal
from nemolocal.models.repos import HubRepo

LOOK_EVERY_S: Final = 3.0
"""Looking at the hardware takes a tenth of a second; a page asks for it with each change of a field."""
ASK_EVERY_S: Final = 120.0
"""So long the hub's word on a repository counts, while a page shows it."""
REFUSED_S: Final = 20.0
"""So long a repository that could not be had is not asked for again: a silent hub takes its time."""
N_REPOS_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the list. `fit` is None where its files cannot be used."""

    model: ListedModel
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository of the hub and the models that can be had of it, largest first, each with its own fit as
    far as the header of one of them tells. `companions` are the names of projectors and the like. `note` says
    that this is what it held before, where the hub cannot be asked; `held` is all of it."""

    id: str
    licence: str
    is_gated: bool
    note: str
    choices: tuple[Choice, ...]
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    held: HubRepo | None = None


class Shelf:
    """`detect` looks at the hardware as it is, `bare` makes of that what it would be with nothing of ours
    loaded, `learned` says what earlier loads have shown, and `on_change` is called when a model has come or
    gone."""

    def __init__(
        self,
        config: Config,
        *,
        detect: Callable[[], Hardware],
        bare: Callable[[Hardware], Hardware] = lambda machine: machine,
        learned: Callable[[Hardware], Learned] = lambda hardware: Learned(),
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._detect = detect
        self._bare = bare
        self._learned = learned
        self._on_change = on_change
        self._looking = threading.Lock()
        self._looked: tuple[float, Hardware, Hardware] | None = None
        self._fits: tuple[Hardware, dict[str, Fit]] | None = None
        self._repos: dict[str, tuple[float, Repo]] = {}
        self._refused: tuple[str, float, NemoLocalError] | None = None
        self._hits: tuple[str, float, tuple[SearchHit, ...]] | None = None
        self._proposed: Proposal | None = None
        self.is_proposal_dismissed = False
        self.downloads = Downloads(config, on_done=lambda ref: self._changed())
        self.monitor = Monitor()

    def close(self) -> None:
        self.downloads.close()
        self.monitor.close()

    @property
    def is_described(self) -> bool:
        """Whether the hardware is what a profile says, not this machine's."""
        return bool(self._config.settings.hardware)

    def machine(self, *, newer_than_s: float = LOOK_EVERY_S) -> Hardware:
        """This machine as it was in the last seconds."""
        return self._look(newer_than_s)[0]

    def hardware(self) -> Hardware:
        """The same as it would be with nothing of ours loaded."""
        return self._look(LOOK_EVERY_S)[1]

    def held(self, machine: Hardware) -> dict[str, int]:
        """What our loaded models hold of a machine that was looked at, in bytes by a GPU's UUID and "" for
        the RAM."""
        bare = self._bare(machine)
        held = {
            now.uuid: then.free_bytes - now.free_bytes
            for now, then in zip(machine.gpus, bare.gpus, strict=True)
        }
        return held | {"": bare.ram.available_bytes - machine.ram.available_bytes}

    def _look(self, newer_than_s: float) -> tuple[Hardware, Hardware]:
        with self._looking:  # a driver that hangs is asked once, not by everyone
            now = time.monotonic()
            if self._looked is None or now - self._looked[0] > newer_than_s:
                machine = self._detect()
                self._looked = now, machine, self._bare(machine)
            return self._looked[1:]

    def _changed(self) -> None:
        self._fits = None
        self._on_change()

    def _known(self) -> tuple[Hardware, Learned]:
        machine = self.hardware()
        return machine, self._learned(machine)

    # Looking -------------------------------------------------------------------------------------

    def entries(self) -> tuple[Entry, ...]:
        """The catalogue with what is here of it, then the other models of this machine."""
        models = overview.build(self._config)
        machine, learned = self._known()
        if self._fits is None or self._fits[0] is not machine:  # whoever types looks at all of it each time
            self._fits = machine, fits.all_of(models, self._config, machine, learned)
        found = self._fits[1]
        return tuple(Entry(model, found.get(model.id)) for model in models)

    def model(self, id: str) -> ListedModel | None:
        """One line of the list."""
        return next((model for model in overview.build(self._config) if model.id == id), None)

    def plan(
        self, ref: str, values: Mapping[str, Any] | None = None, *, candidate: Candidate | None = None
    ) -> Plan:
        """How a model would be loaded with these settings (None: with those that are kept for it). Asks the
        hub about repositories of which nothing is known here, but for a `candidate` of one.

        Raises what planning raises, and ConfigError for a value that cannot be meant.
        """
        config, (machine, learned) = self._with(ref, values), self._known()
        parsed = reference.parse(ref)

        def decide(found: Sequence[Candidate]) -> Plan:
            quant = "" if candidate or isinstance(parsed, reference.PathRef) else parsed.quant
            wish = replace(planning.wish(config), quant=quant)
            return planning.decide(ref, found, machine, config, wish, learned=learned)

        if candidate:
            return decide([candidate])
        known = self._repos.get(parsed.repo) if isinstance(parsed, reference.HubRef) else None
        if known and known[1].held and isinstance(parsed, reference.HubRef):
            return offers.plan_in(known[1].held, parsed, config, decide)
        return planning.plan(ref, config, machine, learned)

    def fit(
        self, ref: str, values: Mapping[str, Any] | None = None, *, candidate: Candidate | None = None
    ) -> Fit:
        """The same as a grade; red where it does not fit or is not possible."""
        try:
            return fits.of_plan(self.plan(ref, values, candidate=candidate))
        except (DoesNotFitError, ModelFileError, UsageError) as error:
            return Fit(
                "red", "does not fit" if isinstance(error, DoesNotFitError) else "unusable", str(error)
            )

    def _with(self, ref: str, values: Mapping[str, Any] | None) -> Config:
        if values is None:
            return load_settings.applied(self._config, [ref])
        return settings.with_values(self._config, values, source="page", where="The load settings")

    def search(self, words: str) -> tuple[SearchHit, ...]:
        """Repositories of the hub, as of the last minutes. Raises OfflineError and HubError."""
        now, words = time.monotonic(), " ".join(words.split())
        if self._hits is None or self._hits[0] != words or now - self._hits[1] > ASK_EVERY_S:
            self._hits = words, now, hub.search(words, self._config)
        return self._hits[2]

    def repo(self, ref: str) -> Repo:
        """What a repository of the hub offers, as of the last minutes, or as it was where the hub refuses to
        say it again. Raises UsageError for what names none, ModelNotFoundError where it has no models,
        HubError, and OfflineError where nothing is known of it."""
        parsed = reference.parse(ref)
        if not isinstance(parsed, reference.HubRef):
            raise UsageError(f"'{ref}' names no repository of the hub.", hint="Write hf:OWNER/REPO.")
        now = time.monotonic()
        kept = self._repos.get(parsed.repo)
        if kept and now - kept[0] < ASK_EVERY_S:
            return kept[1]
        refused = self._refused
        if refused and refused[0] == parsed.repo and now - refused[1] < REFUSED_S:
            return _as_before(kept, refused[2])
        try:
            found = self._ask(replace(parsed, quant="", file=""))
        except NemoLocalError as error:
            self._refused = parsed.repo, time.monotonic(), error
            return _as_before(kept, error)
        self._repos[parsed.repo] = now, found
        for name in list(self._repos)[:-N_REPOS_KEPT]:
            self._repos.pop(name, None)  # another thread may have done it
        return found

    def _ask(self, ref: reference.HubRef) -> Repo:
        found, note = offers.look_up(ref.repo, self._config)
        models = sorted(offers.usable(found, ref, self._config), key=lambda model: -model.bytes)
        choices = tuple(
            Choice(quant=m.quant, ref=found.ref(m), bytes=m.bytes, is_approximate=False) for m in models
        )
        candidates = {}
        with suppress(NemoLocalError):  # told where the repository is planned as a whole
            for offer in offers.all_of(found, models, self._config):
                m, shape = offer.model, offer.shape
                candidates[found.ref(m)] = Candidate(m.quant, found.ref(m), m.bytes, shape, is_local=False)
        companions = tuple(model.first for model in found.companions)
        return Repo(
            found.id, found.licence, found.is_gated, note, choices, candidates, companions, held=found
        )

    def proposal(self) -> Proposal | None:
        """What to begin with where at most the starter is here; the same until the program ends, while it is
        fetched and when it has arrived. None where there is something else, or nothing runs well.
        """
        if self.is_proposal_dismissed:
            return None
        models = overview.build(self._config)
        here = {f.ref for m in models for f in m.files if f.state == "local" and not f.problem}
        starters = {ref for ref in here if ref.partition(":")[0] == catalog.STARTER}
        arrived = proposals.arrived(self._proposed, models) if self._proposed else set()
        if here - starters - arrived:
            return None
        if self._proposed is None:
            self._proposed = proposals.find(models, self._config, *self._known())
        found = self._proposed
        return found and replace(found, has_starter=bool(starters), is_here=bool(arrived))

    # Changing ------------------------------------------------------------------------------------

    def import_path(self, path: str) -> str:
        """Add a file where it lies; its reference. Raises ModelFileError, UsageError."""
        model = upkeep.import_path(path, self._config)
        self._changed()
        return model.ref

    def remove(self, ref: str) -> upkeep.Removed:
        """Delete a model's files, or forget an imported one. Raises what upkeep.remove raises."""
        removed = upkeep.remove(ref, self._config)
        self._changed()
        return removed

    def kept_settings(self, ref: str) -> dict[str, Any]:
        return load_settings.get(ref, self._config)

    def keep_settings(self, ref: str, values: Mapping[str, Any]) -> None:
        """Keep load settings for a model; none where nothing is given. Raises ConfigError, DatabaseError."""
        if values:
            load_settings.put(ref, values, self._config)
        else:
            load_settings.forget(ref, self._config)
        self._fits = None


def _as_before(kept: tuple[float, Repo] | None, error: NemoLocalError) -> Repo:
    """What was known of a repository before the hub refused. Raises the refusal where nothing was."""
    if kept is None or not isinstance(error, HubError):
        raise error
    note = f"{error.message} This is what it held {units.span_of_time(time.monotonic() - kept[0])} ago."
    return replace(kept[1], note=note)
