"""How the Models tab looks: the list, one model with its files and its plan, what the hub has. Pure HTML from
values; must not know gradio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from nemolocal import units
from nemolocal.downloads import Download
from nemolocal.hardware import Hardware
from nemolocal.models import catalog
from nemolocal.models.catalog import CatalogModel
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.overview import ListedFile
from nemolocal.shelf import Entry, Proposal, Repo, best_file
from nemolocal.ui import drawing
from nemolocal.ui.drawing import button, text

COLOURS = {"green": "fits", "amber": "with limits", "red": "does not fit"}
N_QUANTS_SHOWN = 4
NOTHING = '<p class="quiet">Choose a model to see what would run here, and why.</p>'


def entries(found: Sequence[Entry], *, chosen: str, shown: str = "all", words: str = "") -> str:
    """The list of models, those on this machine first. `shown` is "all", "here" or "fits"."""
    kept = [entry for entry in found if _is_shown(entry, shown) and _matches(entry, words)]
    kept.sort(key=lambda entry: not _is_here(entry))
    if not kept:
        return '<p class="quiet">No model of the list is like that. The hub may have one.</p>'
    return f'<div class="rows">{"".join(_entry(entry, chosen) for entry in kept)}</div>'


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


def _entry(entry: Entry, chosen: str) -> str:
    model, fit = entry.model, entry.fit
    grade = fit.grade if fit else "red"
    words = fit.words if fit else "unusable"
    here = "here" if _is_here(entry) else ""
    tags = ", ".join(model.listed.tags) if model.listed else "on this machine"
    return _row(
        model.id, model.name, grade=grade, left=tags, right=words, mark=here, is_chosen=model.id == chosen
    )


def _row(
    ref: str, name: str, *, grade: str, left: str, right: str, mark: str = "", is_chosen: bool = False
) -> str:
    spoken, look = COLOURS.get(grade, ""), "entry chosen" if is_chosen else "entry"
    return (
        f'<button type="button" class="{look}" data-act="open" data-ref="{text(ref)}" '
        f'aria-pressed="{str(is_chosen).lower()}">'
        f'<span class="dot {grade}" role="img" aria-label="{spoken}"></span>'
        f'<span class="entry-name">{text(name)}</span>'
        f'<span class="entry-mark">{text(mark)}</span>'
        f'<span class="entry-line"><span>{text(left)}</span>'
        f'<span class="entry-right">{text(right)}</span></span></button>'
    )


def hits(found: Sequence[SearchHit], words: str) -> str:
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
        )
        for hit in found
    ]
    return f'<p class="quiet">On the hub:</p><div class="rows">{"".join(rows)}</div>'


def _quants(hit: SearchHit) -> str:
    """The first quantizations of a repository, and how many more it has."""
    shown = ", ".join(hit.quants[:N_QUANTS_SHOWN])
    n_more = len(hit.quants) - N_QUANTS_SHOWN
    return f"{shown} and {n_more} more" if n_more > 0 else shown


# One model ----------------------------------------------------------------------------------------


def model(
    entry: Entry,
    fit: Fit | None,
    machine: Hardware,
    *,
    downloads: Mapping[str, Download],
    loaded: Iterable[str],
    asking: str = "",
) -> str:
    """A model of the list. `fit` is that of the settings as they stand in the fields; `asking` is what is to
    be confirmed, as "act ref"."""
    listed, best = entry.model.listed, best_file(entry)
    held = set(loaded)
    rows = [
        _file(file, downloads.get(file.ref), held, asking=asking, is_best=file is best, listed=listed)
        for file in sorted(entry.model.files, key=lambda f: (f is not best, -f.bytes))
    ]
    return "".join(
        [
            f"<h2>{text(entry.model.name)}</h2>",
            _facts(listed, entry.model.id),
            _fit(fit, machine),
            f'<table class="files"><caption>Files</caption><tbody>{"".join(rows)}</tbody></table>',
        ]
    )


def repo(
    found: Repo,
    fit: Fit | None,
    machine: Hardware,
    *,
    downloads: Mapping[str, Download],
    here: Mapping[str, str],
    loaded: Iterable[str] = (),
    asking: str = "",
) -> str:
    """A repository of the hub; `here` are the references of its files that are on this machine."""
    held, best = set(loaded), fit.quant if fit else None
    about = ["a repository of the hub", f"licence: {found.licence or 'not named'}"]
    if found.is_gated:
        about.append("its terms are accepted on its page there, and downloads need HF_TOKEN")
    note = f'<p class="warning">{text(found.note)}</p>' if found.note else ""
    rows = []
    for choice in found.choices:
        state: Literal["local", "remote"] = "local" if choice.ref in here else "remote"
        file = ListedFile(
            quant=choice.quant, ref=here.get(choice.ref, choice.ref), bytes=choice.bytes, state=state
        )
        is_best = choice.quant == best
        rows.append(_file(file, downloads.get(choice.ref), held, asking=asking, is_best=is_best, listed=None))
    return (
        f"<h2>{text(found.id)}</h2>"
        f'<p class="quiet"><code>hf:{text(found.id)}</code> · {text(" · ".join(about))}</p>'
        f"{note}{_fit(fit, machine)}"
        f'<table class="files"><caption>Files</caption><tbody>{"".join(rows)}</tbody></table>'
    )


def _facts(listed: CatalogModel | None, id: str) -> str:
    if listed is None:
        return f'<p class="quiet"><code>{text(id)}</code></p>'
    size = f"{listed.n_params / 1e9:.3g} B parameters"
    if listed.n_active_params < listed.n_params:
        size += f", {listed.n_active_params / 1e9:.2g} B for each token"
    about = [listed.maker, size, f"{listed.n_ctx:,} tokens of context", f"licence: {listed.licence}"]
    notes = f"<p>{text(listed.notes)}</p>" if listed.notes else ""
    return f'<p class="quiet"><code>{text(id)}</code> · {text(" · ".join(about))}</p>{notes}'


def _fit(fit: Fit | None, machine: Hardware) -> str:
    if fit is None:
        return '<p class="pill red">Its files cannot be used.</p>'
    head = f'<p class="pill {fit.grade}"><span class="dot {fit.grade}"></span>{text(fit.words)}</p>'
    if fit.plan is None:
        return f"{head}<p>{text(fit.why)}</p>"
    plan = fit.plan
    reasons = "".join(f"<li>{text(reason)}</li>" for reason in plan.reasons)
    speed = ""
    if plan.measured_tokens_per_s:
        speed = f"<li>Measured here: {plan.measured_tokens_per_s:.0f} tokens a second for one answer.</li>"
    elif plan.tokens_per_s:
        speed = f"<li>Forecast: about {plan.tokens_per_s:.0f} tokens a second for one answer.</li>"
    return f'{head}{drawing.bars(plan.bars(machine))}<ul class="reasons">{reasons}{speed}</ul>'


def _file(
    file: ListedFile,
    download: Download | None,
    loaded: set[str],
    *,
    asking: str,
    is_best: bool,
    listed: CatalogModel | None,
) -> str:
    mark = ' <span class="best">fits best</span>' if is_best else ""
    is_loaded = file.ref in loaded
    acts = _acts(file, download, asking=asking, is_loaded=is_loaded, listed=listed)
    return (
        f'<tr><th scope="row">{text(file.quant or file.ref)}{mark}</th>'
        f'<td class="number">{units.size(file.bytes)}</td>'
        f"<td>{_state(file, download, is_loaded=is_loaded)}</td>"
        f'<td class="acts">{acts}</td></tr>'
    )


def _state(file: ListedFile, download: Download | None, *, is_loaded: bool) -> str:
    if download and download.state in ("running", "waiting", "paused", "failed"):
        return _download(download)
    if file.problem:
        return f'<span class="problem">{text(file.problem)}</span>'
    if file.state == "local":
        return "loaded" if is_loaded else "here"
    if file.state == "partial":
        return f"{file.done_bytes / max(file.bytes, 1):.0%} fetched earlier"
    return ""


def _download(download: Download) -> str:
    share = download.done_bytes / download.total_bytes if download.total_bytes else 0.0
    bar = drawing.progress(share, f"{share:.0%} of {download.ref}")
    if download.state == "failed":
        return f'{bar}<span class="problem">{text(download.problem)}</span>'
    if download.state == "paused":
        return f"{bar} paused at {share:.0%}"
    if download.state == "waiting" or not download.total_bytes:
        return f"{bar} begins soon"
    parts = [f"{units.size(download.done_bytes)} of {units.size(download.total_bytes)}"]
    if download.bytes_per_s:
        parts.append(f"{units.size(download.bytes_per_s)}/s")
    if download.left_s is not None:
        parts.append(f"{units.span_of_time(download.left_s)} left")
    return f"{bar} {text(', '.join(parts))}"


def _acts(
    file: ListedFile,
    download: Download | None,
    *,
    asking: str,
    is_loaded: bool,
    listed: CatalogModel | None,
) -> str:
    ref = file.ref
    if asking == f"delete {ref}":
        return f"Delete it? {button('Delete', 'delete-yes', ref, kind='danger')}{button('Keep', 'no', ref)}"
    if asking == f"download {ref}" and listed:
        accept = button("Accept and download", "download-yes", ref, kind="main")
        return f"Its licence is {text(listed.licence)}. {accept}{button('No', 'no', ref)}"
    if download and download.state in ("running", "waiting"):
        return button("Pause", "pause", ref) + button("Cancel", "cancel", ref)
    if download and download.state in ("paused", "failed"):
        return button("Go on", "download-yes", ref, kind="main") + button("Cancel", "cancel", ref)
    if file.state == "local":
        load = button("Unload", "unload", ref) if is_loaded else button("Load", "load", ref, kind="main")
        return ("" if file.problem else load) + button("Delete", "delete", ref)
    if file.state == "partial":
        return button("Go on", "download", ref, kind="main") + button("Cancel", "cancel", ref)
    return button("Download", "download", ref)


def proposal(found: Proposal | None, download: Download | None, starter: Download | None = None) -> str:
    """What to begin with, above the chat; nothing where there is nothing to propose. The downloads are those
    of the model and of the starter, where there are any."""
    if found is None:
        return ""
    if download and download.state == "done":
        load = button("Load it", "load", found.ref, kind="main")
        return f'<div class="proposal"><span>{text(found.name)} is here.</span> {load}</div>'
    if download:
        again = "" if download.state in ("waiting", "running") else button("Go on", "download-yes", found.ref)
        return f'<div class="proposal"><span>{text(found.name)}: {_download(download)}</span> {again}</div>'
    licence = f" Its licence: {found.licence}." if found.must_accept else ""
    label = "Accept and download" if found.must_accept else "Download"
    how = f"({found.fit.words}, {units.size(found.size_bytes)} to download)"
    meanwhile, small = _meanwhile(found, starter)
    return (
        f'<div class="proposal"><span><b>{text(found.name)}</b> {text(f"would run here {how}.{licence}")} '
        f"{meanwhile}</span> {button(label, 'download-yes', found.ref, kind='main')}{small}"
        f"{button('Others', 'models', '')}{button('Not now', 'dismiss', '')}</div>"
    )


def _meanwhile(found: Proposal, starter: Download | None) -> tuple[str, str]:
    """What is said of the starter, and the button that fetches it."""
    if found.has_starter or (starter and starter.state == "done"):
        return "The small starter model answers meanwhile.", ""
    if starter and starter.state in ("waiting", "running"):
        return f"The small starter model: {_download(starter)}", ""
    trouble = f"The small starter model: {_download(starter)}" if starter else "No model is here yet."
    return trouble, button("A small one first", "download-yes", catalog.STARTER)
