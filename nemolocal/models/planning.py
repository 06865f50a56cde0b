"""From a reference to a plan: gathers the files that it may mean, here, in the catalogue and on the hub, and
the wishes that the settings hold. Asks the network about repositories of which nothing is known here."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

from nemolocal.config import Config
from nemolocal.errors import DoesNotFitError, NemoLocalError, UsageError
from nemolocal.hardware import Hardware
from nemolocal.models import adapters, catalog, measured, memory, offers, placement, reference, sizing, store
from nemolocal.models.choice import Aim, Candidate
from nemolocal.models.learned import Learned
from nemolocal.models.memory import KvType
from nemolocal.models.reference import HubRef, NamedRef, PathRef, Reference
from nemolocal.models.shape import ModelShape
from nemolocal.models.store import LocalModel


def plan(ref: str, config: Config, hardware: Hardware, learned: Learned | None = None) -> sizing.Plan:
    """How the model that `ref` names would be loaded, whether it is on this machine or only in the catalogue.
    `learned` is None for what earlier loads on this machine have shown.

    Raises what reading the reference, finding the model and planning raise.
    """
    parsed = reference.parse(ref)
    learned = measured.learned(config, hardware) if learned is None else learned
    wished = replace(wish(config), quant="" if isinstance(parsed, PathRef) else parsed.quant)

    def decide_among(files: Sequence[Candidate]) -> sizing.Plan:
        return decide(str(parsed), files, hardware, config, wished, learned=learned)

    try:
        if isinstance(parsed, HubRef) and not (_listed(parsed) or store.find(parsed, config)):
            return offers.plan(parsed, config, decide_among)
        return decide_among(candidates(parsed, config))
    except DoesNotFitError as error:
        name_smaller(error, parsed, config, hardware)
        raise


def name_smaller(error: DoesNotFitError, ref: Reference, config: Config, hardware: Hardware) -> None:
    """Add to a refusal the largest smaller model of the same family that fits, where there is one."""
    smaller = smaller_that_fits(ref, config, hardware)
    if smaller:
        error.hint = f"{error.hint} {smaller.model} is smaller, of the same family, and fits."


def smaller_that_fits(ref: Reference, config: Config, hardware: Hardware) -> sizing.Plan | None:
    """The plan of the largest smaller model of the same family that fits as it is; None where there is none,
    or the catalogue does not know the model."""
    model = _listed(ref)
    for other in catalog.load().smaller_ones(model) if model else ():
        with contextlib.suppress(DoesNotFitError, UsageError):
            return decide(other.id, _rows(other), hardware, config, wish(config))
    return None


def decide(
    name: str,
    files: Sequence[Candidate],
    hardware: Hardware,
    config: Config,
    wished: sizing.Wish,
    *,
    learned: Learned | None = None,
) -> sizing.Plan:
    """Choose among the files of one model, with room for the draft model and adapters that the settings name.

    Raises what sizing.plan raises, and ModelNotFoundError for a draft model that is not on this machine.
    """
    draft, beside = draft_model(config), 0
    while True:  # a shorter context for the model is one for its draft model too
        try:
            found = sizing.plan(name, files, hardware, replace(wished, beside_bytes=beside), learned)
        except DoesNotFitError as error:
            if beside:
                error.hint = "It would fit without --draft and --lora."
            raise
        needed = _beside_bytes(found, draft, config)
        if needed <= beside or not found.placement.gpus:  # in RAM they are mapped; the margin is for them
            break
        beside = needed
    if draft and not found.candidate.shape.pooling and not can_guess(found.candidate.shape):
        why = f"{draft.id} does not guess for this model, which cannot take a guess back."
        return replace(found, reasons=(*found.reasons, why))
    return found


def _beside_bytes(plan: sizing.Plan, draft: LocalModel | None, config: Config) -> int:
    """What the adapters and the draft model take on a GPU beside the model, in the process that it has."""
    shape = plan.candidate.shape
    if shape.pooling:
        return 0
    n_bytes = sum(adapters.parse(text).size_bytes for text in config.settings.lora)
    if draft and can_guess(shape):
        own = placement.needed_bytes(placement.Job(draft.info.shape, plan.load))
        n_bytes += own - memory.CUDA_CONTEXT_BYTES
    return n_bytes


def can_guess(shape: ModelShape) -> bool:
    """Whether tokens may be guessed ahead: recurrent state and sliding windows cannot be rolled back."""
    return not shape.state_bytes and not any(layer.n_swa for layer in shape.layers)


def draft_model(config: Config) -> LocalModel | None:
    """The small model that guesses for others, None where the text itself does, or nothing.

    Raises ModelNotFoundError when it is not on this machine, and UsageError when it writes no text.
    """
    named = config.settings.draft
    if named in ("ngram", "off"):
        return None
    try:
        model = store.resolve(reference.parse(named), config)
    except NemoLocalError as error:
        error.message = f"--draft: {error.message}"
        raise
    if model.info.shape.pooling:
        raise UsageError(
            f"--draft: {model.id} embeds or ranks texts, and guesses none.",
            hint="A draft model is a smaller one of the model's family.",
        )
    return model


def wish(config: Config) -> sizing.Wish:
    """What the settings ask of a plan."""
    settings = config.settings
    return sizing.Wish(
        n_ctx=settings.ctx,
        n_slots=settings.slots,
        kv_type=cast(KvType, settings.kv) if config.sources["kv"] != "default" else "",
        gpus=settings.gpu,
        split=cast(Literal["auto", "layer", "tensor"], settings.split),
        n_gpu_layers=settings.gpu_layers,
        n_ubatch=settings.ubatch,
        kv_layout=cast(Literal["auto", "shared", "split"], settings.kv_layout),
        margin_bytes=settings.margin_mib << 20,
        aim=cast(Aim, settings.aim),
    )


def local_candidate(model: LocalModel) -> Candidate:
    """A file that is here. Raises ModelFileError when it cannot be used."""
    return Candidate(model.quant, str(model.path), model.bytes, model.info.shape)


def candidates(ref: Reference, config: Config) -> list[Candidate]:
    """The files that a reference may mean: those that are here, and the catalogue's others.

    Raises ModelNotFoundError for a model that is neither, ModelFileError for a file that cannot be used.
    """
    local = list(store.find(ref, config))
    here = [local_candidate(model) for model in local]
    listed = _listed(ref)
    if listed is None:
        return here or [local_candidate(store.resolve(ref, config))]
    quants = {candidate.quant for candidate in here}
    return here + [candidate for candidate in _rows(listed) if candidate.quant not in quants]


def _rows(model: catalog.CatalogModel) -> list[Candidate]:
    """The files of a model of the catalogue, as if none were here."""
    return [
        Candidate(row.quant, f"{model.id}:{row.quant}", row.bytes, model.shape(row), is_local=False)
        for row in model.files
    ]


def _listed(ref: Reference) -> catalog.CatalogModel | None:
    """The catalogue's model that a reference means."""
    known = catalog.load()
    if isinstance(ref, NamedRef):
        return known.get(ref.name)
    if isinstance(ref, HubRef) and not ref.file:
        return known.of_repo(ref.repo)
    return None
