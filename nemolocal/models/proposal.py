"""Which Nemotron to begin with on a machine that has none yet. Knows no pages, and begins no downloads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from nemolocal.config import Config
from nemolocal.hardware import Hardware
from nemolocal.models import choice, fits
from nemolocal.models.fits import Fit
from nemolocal.models.learned import Learned
from nemolocal.models.overview import ListedFile, ListedModel
from nemolocal.models.plans import Plan

FAMILIES: Final = ("nemotron-3", "nemotron-nano-v2", "llama-nemotron")
"""The newest first."""
FLUENT_TOKENS_PER_S: Final = 8.0
"""Slower than this nobody wants to read along."""
RAM_SHARE_MOST: Final = 0.5
"""Of the free RAM, what a model may take that only the CPU runs; the rest is for all else that is done."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model to begin with: its reference, name, size in bytes, and how it would run. `has_starter` says
    that the small starter model, which could answer meanwhile, is here, `is_here` that the model is."""

    ref: str
    name: str
    size_bytes: int
    fit: Fit
    must_accept: bool
    licence: str
    has_starter: bool = False
    is_here: bool = False


def find(
    models: Iterable[ListedModel], config: Config, machine: Hardware, learned: Learned
) -> Proposal | None:
    """The largest model of the newest family of which one runs well here and has room on the disk; before
    that, one whose download has begun and that runs at all. None where there is neither."""
    chatting = [model for model in models if model.listed and "chat" in model.listed.tags]
    by_age = [
        sorted((m for m in chatting if _family(m) == family), key=lambda m: -_n_params(m))
        for family in FAMILIES
    ]
    ordered = [model for same in by_age for model in same]
    for model in ordered:
        for file in model.files:
            if file.state == "partial":
                fit = fits.fit(file.ref, config, machine, learned)
                if fit.plan and _has_room(file, fit.plan.candidate.size_bytes, machine):
                    return _proposal(model, fit)
    for model in ordered:
        fit = fits.fit(model.id, config, machine, learned)
        if fit.plan and _runs_well(fit, fit.plan, machine):
            taken = next((file for file in model.files if file.quant == fit.quant), None)
            if _has_room(taken, fit.plan.candidate.size_bytes, machine):
                return _proposal(model, fit)
    return None


def arrived(proposal: Proposal, models: Iterable[ListedModel]) -> set[str]:
    """References of the local files that are what was proposed, whichever repository they came from."""
    id, _, quant = proposal.ref.partition(":")
    same: Sequence[ListedFile] = next((model.files for model in models if model.id == id), ())
    return {file.ref for file in same if file.state == "local" and file.quant == quant and not file.problem}


def _family(model: ListedModel) -> str:
    return model.listed.family if model.listed else ""


def _n_params(model: ListedModel) -> int:
    return model.listed.n_params if model.listed else 0


def _runs_well(fit: Fit, plan: Plan, machine: Hardware) -> bool:
    """Green and fluent; without a GPU that can be used, where nothing is ever green, fluent with nothing but
    the CPU amiss, and not on a machine that has little RAM beside it."""
    speed = plan.measured_tokens_per_s or plan.tokens_per_s
    if speed is not None and speed < FLUENT_TOKENS_PER_S:
        return False
    if machine.mode == "gpu":
        return fit.grade == "green"
    is_long = plan.load.n_ctx >= min(fits.N_CTX_GOOD, plan.candidate.shape.n_ctx_train)
    is_small = plan.placement.ram_bytes <= RAM_SHARE_MOST * machine.ram.available_bytes
    return plan.candidate.rank >= choice.GOOD and is_long and is_small


def _has_room(file: ListedFile | None, size_bytes: int, machine: Hardware) -> bool:
    """What has arrived of it needs no room any more."""
    free_bytes = machine.disk_free_bytes
    return not free_bytes or size_bytes - (file.done_bytes if file else 0) < free_bytes


def _proposal(model: ListedModel, fit: Fit) -> Proposal:
    assert model.listed is not None
    assert fit.plan is not None
    return Proposal(
        ref=f"{model.id}:{fit.plan.candidate.quant}",
        name=model.name,
        size_bytes=fit.plan.candidate.size_bytes,
        fit=fit,
        must_accept=model.listed.must_accept,
        licence=model.listed.licence,
    )
