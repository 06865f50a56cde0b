"""How the first start's proposal looks. Pure HTML from values; must not know gradio."""

from __future__ import annotations

from nemolocal import units
from nemolocal.downloads import Download
from nemolocal.models import catalog
from nemolocal.models.proposal import Proposal
from nemolocal.ui.drawing import button, dot, text
from nemolocal.ui.now_view import LIVE, doing, downloading, go_on_label
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
        go_on = button(go_on_label(download), "download-yes", found.ref, kind="main")
        return _box(f"{name}: {downloading(download)}", go_on + button("Others", "models", "") + dismiss)
    licence = f" Its licence: {found.licence}." if found.must_accept else ""
    meanwhile, small = _meanwhile(found, starter)
    label = "Accept and download" if found.must_accept else "Download"
    acts = button(label, "download-yes", found.ref, kind="main") + small + button("Others", "models", "")
    told = f"{dot(found.fit.grade)} {name} {text(f'{_how(found)}.{licence}')} {meanwhile}"
    return _box(told, acts + dismiss)


def _how(found: Proposal) -> str:
    """How well it would run, where and how fast, and which file that is."""
    plan = found.fit.plan
    assert plan is not None
    place = plan.placement
    cards = "GPUs" if len(place.gpus) > 1 else "GPU"
    where = f"the {cards} and the CPU" if place.gpus else "the CPU"
    if place.is_whole:
        where = f"the {cards} alone"
    well = "well here" if found.fit.grade == "green" else "here with limits"
    facts = [
        f"the file {plan.candidate.quant}",
        f"{units.size(found.size_bytes)} to download",
    ]
    if plan.tokens_per_s:
        facts.append(f"about {plan.tokens_per_s:.0f} tokens a second (forecast)")
    return f"would run {well}, on {where}: {', '.join(facts)}"


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
