"""What goes on with models right now: what is in memory, what is being loaded or deleted, and downloads. Pure
HTML from values; must not know gradio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemolocal import units
from nemolocal.downloads import Download
from nemolocal.errors import NemoLocalError
from nemolocal.models import catalog, reference
from nemolocal.models.reference import NamedRef
from nemolocal.service import LoadedModel
from nemolocal.ui import drawing
from nemolocal.ui.drawing import button, text
from nemolocal.ui.works import Work

LIVE = ("waiting", "running")
DOING = {"load": "loading", "unload": "unloads once its answers have ended", "delete": "is being deleted"}


def now(
    loaded: Sequence[LoadedModel],
    works: Sequence[Work],
    downloads: Sequence[Download],
    *,
    progress: Mapping[str, float],
    asking: str = "",
) -> str:
    """A row for each; nothing where nothing goes on. `progress` has the share of a load by the model's name,
    `asking` is what is to be confirmed, as "act ref"."""
    busy = {work.ref for work in works if not work.problem}
    rows = [_memory(model) for model in loaded if model.ref not in busy]
    rows += [_work(work, progress) for work in works]
    rows += [_download(each, asking=asking) for each in downloads]
    if not rows:
        return ""
    return f'<section class="now" aria-label="Loaded and on their way">{"".join(rows)}</section>'


def called(ref: str) -> str:
    """A reference as a person names the model."""
    try:
        parsed = reference.parse(ref)
    except NemoLocalError:
        return ref
    listed = catalog.load().get(parsed.name) if isinstance(parsed, NamedRef) else None
    if listed and isinstance(parsed, NamedRef):
        return f"{listed.name} {parsed.quant}".strip()
    return ref.removeprefix("hf:")


def _row(name: str, state: str, acts: str) -> str:
    return (
        f'<div class="now-row"><span class="now-name">{text(name)}</span>'
        f'<span class="now-state">{state}</span><span class="acts">{acts}</span></div>'
    )


def _memory(model: LoadedModel) -> str:
    name = called(model.ref or model.id)
    facts = [f"loaded on {model.device}", f"{model.n_ctx:,} tokens"]
    held = model.gpu_bytes or model.ram_bytes
    if held:
        facts.append(units.gib(held))
    if model.n_active:
        facts.append(f"{model.n_active} answer{'s' if model.n_active > 1 else ''} at present")
    unload = button("Unload", "unload", model.ref or model.id, of=name)
    return _row(name, text(" · ".join(facts)), unload)


def _work(work: Work, progress: Mapping[str, float]) -> str:
    name = called(work.ref)
    if work.problem:
        return _row(
            name, f'<span class="problem">{text(work.problem)}</span>', button("Close", "clear", work.ref)
        )
    return _row(name, doing(work, progress), "")


def doing(work: Work, progress: Mapping[str, float]) -> str:
    """How far a load, an unload or a deletion is."""
    share = progress.get(work.name) if work.what == "load" else None
    if share is None:
        return text(DOING[work.what])
    return f"{drawing.progress(share, f'loading {work.name}')} loading {share:.0%}"


def _download(download: Download, *, asking: str) -> str:
    name = called(download.ref)
    acts = download_acts(download, asking=asking)
    if download.state == "done":
        acts = button("Load", "load-kept", download.ref, kind="main", of=name)
        acts += button("Close", "cancel-yes", download.ref, of=name)
    return _row(name, downloading(download), acts)


def downloading(download: Download) -> str:
    """How far a download is."""
    done, total = download.done_bytes, download.total_bytes
    share = min(done / total, 1.0) if total else 0.0
    bar = drawing.progress(share, f"{share:.0%} of {called(download.ref)}") if total else ""
    match download.state:
        case "done":
            return "is here now"
        case "failed":
            return f'{bar}<span class="problem">{text(download.problem)}</span>'
        case "paused" if total:
            return f"{bar} paused at {share:.0%}, {units.size(done)} of {units.size(total)}"
        case "paused":
            return f"paused, {units.size(done)} have arrived" if done else "paused"
        case "waiting":
            return f"{bar} waits for the ones before it"
    if not total:
        return text(download.note or "begins")
    parts = [f"{units.size(done)} of {units.size(total)}"]
    if download.bytes_per_s:
        parts.append(f"{units.size(download.bytes_per_s)}/s")
    if download.left_s is not None:
        parts.append(f"{units.span_of_time(download.left_s)} left")
    elif download.note:
        parts.append(download.note)
    return f"{bar} {text(', '.join(parts))}"


def download_acts(download: Download, *, asking: str) -> str:
    """The buttons of one that is not done."""
    ref, name = download.ref, called(download.ref)
    if asking == f"cancel {ref}":
        gone = f"Throw away {units.size(download.done_bytes)}? "
        yes = button("Throw away", "cancel-yes", ref, kind="danger", of=name)
        return gone + yes + button("Keep", "no", ref)
    cancel = button("Cancel", "cancel" if download.done_bytes else "cancel-yes", ref, of=name)
    if download.state in LIVE:
        return button("Pause", "pause", ref, of=name) + cancel
    return button(go_on_label(download), "download-yes", ref, kind="main", of=name) + cancel


def go_on_label(download: Download) -> str:
    """What the button says that takes one up again."""
    return "Try again" if download.state == "failed" else "Go on"
