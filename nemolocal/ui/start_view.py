"""How the first start's proposal looks. Pure HTML from values; must not know gradio."""

from __future__ import annotations

from nemolocal import units
from nemolocal.downloads import Download
from nemolocal.models import catalog
from nemolocal.shelf import Proposal
from nemolocal.ui.drawing import button, text
from nemolocal.ui.now_view import LIVE, doing, downloading
from nemolocal.ui.works import Work


def proposal(
    found: Proposal | None,
    download: Download | None,
    starter: Download | None = None,
    *,
    work: Work | None = None,
    share: float | None = None,
) -> str:
    """What to begin with, above the chat; nothing where there is nothing to propose. The downloads are those
    of the model and of the starter, and `work` what is being done with the model, where there are any;
    `share` is how far its load is."""
    if found is None:
        return ""
    name, dismiss = f"<b>{text(found.name)}</b>", button("Not now", "dismiss", "")
    if work and not work.problem:
        return _box(f"{name}: {doing(work, {} if share is None else {work.name: share})}", "")
    if work:
        return _box(
            f'{name}: <span class="problem">{text(work.problem)}</span>',
            button("Try again", "load", found.ref) + button("Others", "models", "") + dismiss,
        )
    if found.is_here or (download and download.state == "done"):
        return _box(f"{name} is here now.", button("Load it", "load", found.ref, kind="main") + dismiss)
    if download and download.state in LIVE:
        return _box(f"{name}: {downloading(download)}", button("Pause", "pause", found.ref))
    if download:
        go_on = button("Go on", "download-yes", found.ref, kind="main")
        return _box(f"{name}: {downloading(download)}", go_on + button("Others", "models", "") + dismiss)
    licence = f" Its licence: {found.licence}." if found.must_accept else ""
    how = f"({found.fit.words}, {units.size(found.size_bytes)} to download)"
    meanwhile, small = _meanwhile(found, starter)
    label = "Accept and download" if found.must_accept else "Download"
    acts = button(label, "download-yes", found.ref, kind="main") + small + button("Others", "models", "")
    return _box(f"{name} {text(f'would run here {how}.{licence}')} {meanwhile}", acts + dismiss)


def _box(told: str, acts: str) -> str:
    return (
        f'<div class="proposal" role="region" aria-label="A model for this machine"><span>{told}</span>'
        f'<span class="acts">{acts}</span></div>'
    )


def _meanwhile(found: Proposal, starter: Download | None) -> tuple[str, str]:
    """What is said of the starter, and the button that fetches it."""
    if found.has_starter or (starter and starter.state == "done"):
        return "The small starter model answers meanwhile.", ""
    if starter and starter.state in LIVE:
        return f"The small starter model: {downloading(starter)}", ""
    trouble = f"The small starter model: {downloading(starter)}" if starter else "No model is here yet."
    return trouble, button("A small one first", "download-yes", catalog.STARTER)
