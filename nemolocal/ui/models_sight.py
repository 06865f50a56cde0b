"""What the Models tab shows, put together from what the service knows. Blocks, so it is called from threads;
must not know gradio. How it looks is in models_view.py and now_view.py."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nemolocal.errors import NemoLocalError
from nemolocal.models import catalog, reference
from nemolocal.models.catalog import CatalogModel
from nemolocal.models.choice import Candidate
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.overview import ListedFile
from nemolocal.service import Service
from nemolocal.shelf import Shelf
from nemolocal.ui import models_view, now_view
from nemolocal.ui.problems import as_problem
from nemolocal.ui.status import notice
from nemolocal.ui.works import Works

GRADES_S: Final = 20.0
"""So long the colours of a model's files count while a download is watched."""
_REPO = re.compile(r"(?:hf:|https?://[^/\s]+/)?([^/\s]+/[^/\s:]+)(?:[/:]\S*)?")

Values = Mapping[str, Any] | None
"""Load settings; None for those that are kept for the model."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one page looks at: the chosen model or repository and, where a person chose it, one of its files;
    what the list shows, the words looked for, what is to be confirmed ("act ref"), and whether what the hub
    found is shown in place of the list."""

    ref: str = ""
    file: str = ""
    shown: str = "all"
    words: str = ""
    asking: str = ""
    is_hub: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at: its head as HTML and its files. `licence` is set where it has to be accepted, `repo`
    where the hub has more files; `candidates` are the files of a repository that are not here."""

    head: str
    files: tuple[ListedFile, ...]
    licence: str = ""
    repo: str = ""
    companions: tuple[str, ...] = ()
    candidates: Mapping[str, Candidate] | None = None


@dataclass(frozen=True, slots=True)
class Grades:
    """How each file would run, by its reference, and the one that the plan would take; as of `at_s`."""

    fits: Mapping[str, Fit]
    best: str
    at_s: float


class Sight:
    """`service` is asked, `works` are what is being done beside the page."""

    def __init__(self, service: Service, works: Works) -> None:
        self.service = service
        self.works = works
        self._grades: dict[str, Grades] = {}

    @property
    def shelf(self) -> Shelf:
        return self.service.shelf

    def listed(self, look: Look) -> str:
        """The list, or what the hub has for the words; both where the hub has no answer."""
        try:
            refusal = ""
            if look.is_hub:
                try:
                    return models_view.hits(self._hits(look.words), look.words, chosen=look.ref)
                except NemoLocalError as error:
                    refusal = notice(as_problem(error))
            return refusal + models_view.entries(
                self.shelf.entries(),
                chosen=look.ref,
                shown=look.shown,
                words=look.words,
                loaded=self.loaded(),
            )
        except Exception as error:  # the page's border
            return notice(as_problem(error))

    def _hits(self, words: str) -> list[SearchHit]:
        """What the hub finds for the words, after the repository that they name."""
        named = _REPO.fullmatch(words.strip())
        found = list(self.shelf.search(named[1].partition("/")[2] if named else words))
        if named and reference.is_repo(named[1]):
            same = [hit for hit in found if hit.repo.casefold() == named[1].casefold()]
            first = same or [SearchHit(named[1], n_downloads=0, n_likes=0, is_gated=False)]
            found = [*first, *(hit for hit in found if hit not in same)]
        return found

    def now(self, look: Look) -> str:
        """What is loaded, and what is on its way."""
        return now_view.now(
            self.service.loaded(),
            self.works.all(),
            self.shelf.downloads.all(),
            progress=self.progress(),
            asking=look.asking,
        )

    def chosen(self, look: Look, values: Values) -> tuple[str, str]:
        """The chosen model or repository: what it is with its plan, and its files."""
        try:
            subject = self._subject(look.ref)
        except Exception as error:  # the page's border
            return notice(as_problem(error)), ""
        if subject is None:
            return models_view.NOTHING, ""
        try:
            fit = self.shelf.fit(look.file or look.ref, values)
            plan = models_view.plan(fit, self.shelf.hardware())
            grades = self._grade(look, subject, values)
        except Exception as error:  # the page's border
            plan, grades = notice(as_problem(error)), Grades({}, "", 0.0)
        self._grades = {_key(look, values): grades}
        return subject.head + plan, self._drawn_files(look, subject, grades)

    def files(self, look: Look, values: Values) -> str:
        """The chosen model's files, with colours that may be some seconds old."""
        subject = self._subject(look.ref)
        if subject is None:
            return ""
        key = _key(look, values)
        grades = self._grades.get(key)
        if grades is None or time.monotonic() - grades.at_s > GRADES_S:
            grades = self._grade(look, subject, values)
            self._grades = {key: grades}
        return self._drawn_files(look, subject, grades)

    def _subject(self, ref: str) -> Subject | None:
        """None where there is no such model any more. Raises what asking the hub raises."""
        if ref.startswith("hf:"):
            return self._repo(ref)
        model = self.shelf.model(ref) if ref else None
        if model is None:
            return None
        listed = model.listed
        repo = listed.repo if listed else next((f.local.repo for f in model.files if f.local), "")
        return Subject(
            models_view.head(model.name, model.id, listed),
            model.files,
            licence=listed.licence if listed and listed.must_accept else "",
            repo=repo if reference.is_repo(repo) else "",
        )

    def _repo(self, ref: str) -> Subject:
        """A repository of the hub with what is here of it; only that where the hub cannot be asked."""
        listed = self.shelf.model(ref)
        try:
            found = self.shelf.repo(ref)
        except NemoLocalError as error:
            if listed is None:
                raise
            head = models_view.head(listed.name, listed.id, None)
            return Subject(f"{head}{notice(as_problem(error))}", listed.files)
        local = [f for entry in self.shelf.entries() for f in entry.model.files if f.local]
        here = {(f.local.repo, f.quant): f for f in local if f.local} | {(found.id, f.ref): f for f in local}
        files = [
            here.get((found.id, choice.ref))
            or here.get((found.id, choice.quant))
            or ListedFile(quant=choice.quant, ref=choice.ref, bytes=choice.bytes, state="remote")
            for choice in found.choices
        ]
        if listed:  # what the hub has no more
            files += [file for file in listed.files if file not in files]
        return Subject(
            models_view.repo_head(found),
            tuple(files),
            licence=must_accept(ref),
            companions=found.companions,
            candidates=found.candidates,
        )

    def _grade(self, look: Look, subject: Subject, values: Values) -> Grades:
        known = subject.candidates or {}
        if values is None:
            values = self.shelf.kept_settings(listed_id(look.ref))
        fits = {
            file.ref: self.shelf.fit(file.ref, values, candidate=known.get(file.ref))
            for file in subject.files
            if not (file.problem or (subject.candidates is not None and file.state == "remote" and not known))
        }
        whole = self.shelf.fit(look.ref, values)
        return Grades(fits, best_of(subject.files, whole), time.monotonic())

    def _drawn_files(self, look: Look, subject: Subject, grades: Grades) -> str:
        shown = models_view.Shown(
            fits=grades.fits,
            chosen=look.file,
            best=grades.best,
            downloads={f.ref: found for f in subject.files if (found := self.shelf.downloads.get(f.ref))},
            works={work.ref: work for work in self.works.all()},
            loaded=self.loaded(),
            progress=self.progress(),
            asking=look.asking,
            licence=subject.licence,
        )
        return models_view.files(subject.files, shown, repo=subject.repo, companions=subject.companions)

    def here(self, ref: str) -> list[str]:
        """References of the files of a model of the list that are on this machine."""
        model = self.shelf.model(ref)
        return [file.ref for file in model.files if file.local] if model else []

    def listed_as(self, ref: str) -> str:
        """The line of the list that has this file."""
        models = [entry.model for entry in self.shelf.entries()]
        return next((m.id for m in models if ref in [file.ref for file in m.files]), ref)

    def loaded(self) -> list[str]:
        """References of what is in memory, however it is named."""
        return [name for model in self.service.loaded() for name in (model.id, model.ref)]

    def progress(self) -> dict[str, float]:
        """How far the load is that goes on, by the model's name."""
        status = self.service.status()
        return {status.model: status.progress} if status.state == "loading" else {}

    def state(self) -> tuple[object, ...]:
        """What changes when anything but a figure does."""
        return (
            tuple((each.ref, each.state) for each in self.shelf.downloads.all()),
            self.works.all(),
            tuple(self.loaded()),
        )

    def is_moving(self) -> bool:
        """Whether figures change by themselves."""
        is_fetching = any(each.state == "running" for each in self.shelf.downloads.all())
        return is_fetching or any(not work.problem for work in self.works.all())


def best_of(files: Sequence[ListedFile], fit: Fit) -> str:
    """The reference of the file that a plan took, "" where it took none."""
    return next((file.ref for file in files if fit.quant and file.quant == fit.quant), "")


def must_accept(ref: str) -> str:
    """The licence that has to be accepted before a download, "" where none has to be."""
    model = _of_catalog(ref)
    return model.licence if model and model.must_accept else ""


def listed_id(ref: str) -> str:
    """The line of the list that a model or repository belongs to, by which its load settings are kept."""
    model = _of_catalog(ref)
    return model.id if model else ref


def _of_catalog(ref: str) -> CatalogModel | None:
    return catalog.load().of_ref(reference.parse(ref))


def _key(look: Look, values: Values) -> str:
    return f"{look.ref} {sorted(values.items()) if values is not None else None}"
