"""How the Models tab looks: the list, what the hub has, one model with its plan and its files. Pure HTML from
values; must not know gradio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemolocal import units
from nemolocal.downloads import Download
from nemolocal.hardware import Hardware
from nemolocal.models.catalog import CatalogModel
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.overview import ListedFile
from nemolocal.shelf import Entry, Repo
from nemolocal.ui import drawing, now_view
from nemolocal.ui.drawing import button, dot, text
from nemolocal.ui.problems import in_page_words
from nemolocal.ui.works import Work

N_QUANTS_SHOWN = 4
NOTHING = '<p class="quiet">Choose a model to see what would run here, and why.</p>'
ASKING_HUB = '<p class="quiet">Asking the hub…</p>'


# The list -----------------------------------------------------------------------------------------


def entries(
    found: Sequence[Entry], *, chosen: str, shown: str = "all", words: str = "", loaded: Sequence[str] = ()
) -> str:
    """The list of models, those on this machine first. `shown` is "all", "here" or "fits", `loaded` are the
    references of what is in memory."""
    kept = [entry for entry in found if _is_shown(entry, shown) and _matches(entry, words)]
    kept.sort(key=lambda entry: not _is_here(entry))
    if not kept:
        return '<p class="quiet">No model of the list is like that. The hub may have one.</p>'
    return f'<div class="rows">{"".join(_entry(entry, chosen, loaded) for entry in kept)}</div>'


def _is_shown(entry: Entry, shown: str) -> bool:
    if shown == "here":
        return _is_here(entry)
    return shown != "fits" or bool(entry.fit and entry.fit.grade == "green")


def _is_here(entry: Entry) -> bool:
    return any(file.state == "local" for file in entry.model.files)


def _matches(entry: Entry, words: str) -> bool:
    listed = entry.model.listed
    about = f"{entry.model.id} {entry.model.name}"
    if listed:
        about += f" {listed.family} {listed.maker} {' '.join(listed.tags)}"
    return all(word in about.casefold() for word in words.casefold().split())


def _entry(entry: Entry, chosen: str, loaded: Sequence[str]) -> str:
    model, fit = entry.model, entry.fit
    grade = fit.grade if fit else "red"
    words = fit.words if fit else "unusable"
    mark = "here" if _is_here(entry) else ""
    if any(file.ref in loaded for file in model.files):
        mark = "loaded"
    tags = ", ".join(model.listed.tags) if model.listed else "on this machine"
    return _row(
        model.id, model.name, grade=grade, left=tags, right=words, mark=mark, is_chosen=model.id == chosen
    )


def _row(
    ref: str, name: str, *, grade: str, left: str, right: str, mark: str = "", is_chosen: bool = False
) -> str:
    look = "entry chosen" if is_chosen else "entry"
    return (
        f'<button type="button" class="{look}" data-act="open" data-ref="{text(ref)}" '
        f'aria-pressed="{str(is_chosen).lower()}">{dot(grade)}'
        f'<span class="entry-name">{text(name)}</span>'
        f'<span class="entry-mark">{text(mark)}</span>'
        f'<span class="entry-line"><span>{text(left)}</span>'
        f'<span class="entry-right">{text(right)}</span></span></button>'
    )


def hits(found: Sequence[SearchHit], words: str, *, chosen: str = "") -> str:
    """What a search of the hub found."""
    if not found:
        return f'<p class="quiet">The hub has no GGUF models for “{text(words)}”.</p>'
    rows = [
        _row(
            f"hf:{hit.repo}",
            hit.repo,
            grade="",
            left=_quants(hit),
            right=f"{hit.n_downloads:,} downloads",
            mark="terms" if hit.is_gated else "",
            is_chosen=f"hf:{hit.repo}" == chosen,
        )
        for hit in found
    ]
    return f'<p class="quiet">On the hub:</p><div class="rows">{"".join(rows)}</div>'


def _quants(hit: SearchHit) -> str:
    """The first quantizations of a repository, and how many more it has."""
    shown = ", ".join(hit.quants[:N_QUANTS_SHOWN])
    n_more = len(hit.quants) - N_QUANTS_SHOWN
    return f"{shown} and {n_more} more" if n_more > 0 else shown


# One model and its plan ---------------------------------------------------------------------------


def head(name: str, id: str, listed: CatalogModel | None) -> str:
    """What a model of the list is."""
    if listed is None:
        return _head(name, id, [])
    size = f"{units.parameters(listed.n_params)} parameters"
    if listed.n_active_params < listed.n_params:
        size += f", {units.parameters(listed.n_active_params)} for each token"
    terms = ", to be accepted before the download" if listed.must_accept else ""
    about = [
        listed.maker,
        size,
        f"{listed.n_ctx_trained:,} tokens of context",
        f"licence: {listed.licence}{terms}",
    ]
    notes = f"<p>{text(listed.notes)}</p>" if listed.notes else ""
    return _head(name, id, about) + notes


def repo_head(found: Repo) -> str:
    """What a repository of the hub is."""
    about = ["a repository of the hub", f"licence: {found.licence or 'not named'}"]
    if found.is_gated:
        about.append("its terms are accepted on its page there, and downloads need HF_TOKEN")
    note = f'<p class="warning">{text(found.note)}</p>' if found.note else ""
    return _head(found.id, f"hf:{found.id}", about) + note


def _head(name: str, id: str, about: Sequence[str]) -> str:
    told = text(" · ".join(("", *about)))
    return (
        f'<div class="head">{button("‹ All models", "close", "", kind="back")}<h2>{text(name)}</h2></div>'
        f'<p class="quiet"><code>{text(id)}</code> {told}</p>'
    )


def plan(fit: Fit, machine: Hardware) -> str:
    """How a model would run: the colour, a bar for each device, and the reasons."""
    head = (
        f'<p class="pill {fit.grade}"><span class="dot {fit.grade}"></span>'
        f"{drawing.COLOURS[fit.grade]}{f': {text(fit.words)}' if fit.plan else ''}</p>"
    )
    if fit.plan is None:
        return f"{head}<p>{text(in_page_words(fit.why))}</p>"
    reasons = "".join(f"<li>{text(in_page_words(reason))}</li>" for reason in fit.plan.reasons)
    speed = ""
    if fit.plan.measured_tokens_per_s:
        speed = (
            f"<li>Measured here: {fit.plan.measured_tokens_per_s:.0f} tokens a second for one answer.</li>"
        )
    if fit.plan.tokens_per_s:
        speed += f"<li>Forecast: about {fit.plan.tokens_per_s:.0f} tokens a second for one answer.</li>"
    return f'{head}{drawing.bars(fit.plan.bars(machine))}<ul class="reasons">{reasons}{speed}</ul>'


# Its files ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of the files beside themselves: how each would run, the one whose plan is shown and the
    one that fits best, downloads and works by reference, what is loaded, how far loads are by name, and what
    is to be confirmed, as "act ref"."""

    fits: Mapping[str, Fit] = field(default_factory=dict)
    chosen: str = ""
    best: str = ""
    downloads: Mapping[str, Download] = field(default_factory=dict)
    works: Mapping[str, Work] = field(default_factory=dict)
    loaded: Sequence[str] = ()
    progress: Mapping[str, float] = field(default_factory=dict)
    asking: str = ""
    licence: str = ""


def files(
    found: Sequence[ListedFile], shown: Shown, *, repo: str = "", companions: Sequence[str] = ()
) -> str:
    """The files of a model, the best first. `repo` has more of them on the hub; `companions` are others there
    that are no models."""
    ordered = sorted(found, key=lambda file: (file.ref != shown.best, -file.bytes))
    rows = "".join(_file(file, shown) for file in ordered)
    more = ""
    if companions:
        more += f'<p class="quiet">Also there: {text(", ".join(companions[:6]))}.</p>'
    if repo:
        more += button("All its files on the hub", "open", f"hf:{repo}", kind="more")
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("File", "Size", "Here", "State", ""))
    return (
        f'<table class="files"><caption>Files</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}"
    )


def _file(file: ListedFile, shown: Shown) -> str:
    fit, is_chosen = shown.fits.get(file.ref), file.ref == shown.chosen
    mark = '<span class="best">fits best</span>' if file.ref == shown.best else ""
    grade = fit.grade if fit else ""
    pick = (
        f'<button type="button" class="pick" data-act="file" data-ref="{text(file.ref)}" '
        f'aria-pressed="{str(is_chosen).lower()}">{dot(grade)}'
        f"<span>{text(file.quant or file.ref)}</span></button>"
    )
    question = _question(file, shown)
    asked = f'<tr class="asked"><td colspan="5">{question}</td></tr>' if question else ""
    return (
        f'<tr class="{"chosen" if is_chosen else ""}"><th scope="row">{pick} {mark}</th>'
        f'<td class="number">{units.size(file.bytes)}</td>'
        f'<td class="fit">{text(_in_words(file, fit))}</td>'
        f"<td>{_state(file, shown)}</td>"
        f'<td class="acts">{"" if question else _acts(file, shown)}</td></tr>{asked}'
    )


def _in_words(file: ListedFile, fit: Fit | None) -> str:
    """The fit without the quantization, which stands beside it."""
    return fit.words.removeprefix(f"{fit.quant}, ") if fit else ""


def _state(file: ListedFile, shown: Shown) -> str:
    work, download = shown.works.get(file.ref), shown.downloads.get(file.ref)
    if work and work.problem:
        return f'<span class="problem">{text(work.problem)}</span>'
    if work:
        return now_view.doing(work, shown.progress)
    if file.problem:
        return f'<span class="problem">{text(file.problem)}</span>'
    if file.state == "local":
        return "loaded" if file.ref in shown.loaded else "here"
    if download:
        return now_view.downloading(download)
    if file.state == "partial":
        return f"{file.done_bytes / max(file.bytes, 1):.0%} fetched earlier"
    return ""


def _question(file: ListedFile, shown: Shown) -> str:
    """What is to be confirmed for a file, below its row, since it is longer than a button."""
    ref = file.ref
    if shown.asking == f"delete {ref}":
        what, yes = (
            ("Forget it? Its file stays.", "Forget") if _is_elsewhere(file) else ("Delete it?", "Delete")
        )
        return f"{what} {button(yes, 'delete-yes', ref, kind='danger')}{button('Keep', 'no', ref)}"
    if shown.asking == f"download {ref}":
        accept = button("Accept and download", "download-yes", ref, kind="main")
        return f"Its licence: {text(shown.licence)}. {accept}{button('No', 'no', ref)}"
    download = shown.downloads.get(ref)
    if download and shown.asking == f"cancel {download.ref}":
        return now_view.download_acts(download, asking=shown.asking)
    return ""


def _acts(file: ListedFile, shown: Shown) -> str:
    ref, of, download = file.ref, file.quant, shown.downloads.get(file.ref)
    work = shown.works.get(ref)
    if work and not work.problem:
        return ""
    if file.state == "local":
        return _local_acts(file, is_loaded=ref in shown.loaded)
    if download and download.state != "done":
        return now_view.download_acts(download, asking=shown.asking)
    return button("Download", "download", ref, kind="main" if ref == shown.best else "", of=of)


def _local_acts(file: ListedFile, *, is_loaded: bool) -> str:
    ref, of = file.ref, file.quant
    remove = button("Forget" if _is_elsewhere(file) else "Delete", "delete", ref, of=of)
    if file.problem:
        return remove
    if is_loaded:
        return button("Unload", "unload", ref, of=of) + button("Load again", "reload", ref, of=of) + remove
    return button("Load", "load", ref, kind="main", of=of) + remove


def _is_elsewhere(file: ListedFile) -> bool:
    """Whether it was added where it lies."""
    return bool(file.local and file.local.pointer)
