"""How well each model would run on a machine: a colour and a few words, from the plan that it would get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from nemolocal import load_settings
from nemolocal.config import Config
from nemolocal.errors import DoesNotFitError, ModelFileError, UsageError
from nemolocal.hardware import Hardware
from nemolocal.models import choice, measured, planning
from nemolocal.models.learned import Learned
from nemolocal.models.overview import ListedModel
from nemolocal.models.plans import Plan

Grade = Literal["green", "amber", "red"]

N_CTX_GOOD: Final = 8_192


@dataclass(frozen=True, slots=True)
class Fit:
    """`grade` is green with every layer on GPUs, a good quantization and a context of 8,192 tokens (or all
    that the model knows); amber where less than that, or the CPU, has to do; red where nothing fits. `words`
    say it in a few words, `why` in one line. `plan` is None for red."""

    grade: Grade
    words: str
    why: str
    plan: Plan | None = None

    @property
    def quant(self) -> str | None:
        return self.plan.candidate.quant if self.plan else None


def fit(ref: str, config: Config, hardware: Hardware, learned: Learned | None = None) -> Fit:
    """How a model that is here or in the catalogue would run. Raises what finding the model raises."""
    try:
        plan = planning.plan(ref, config, hardware, learned)
    except (DoesNotFitError, ModelFileError, UsageError) as error:
        return Fit("red", "does not fit" if isinstance(error, DoesNotFitError) else "unusable", str(error))
    return of_plan(plan)


def of_plan(plan: Plan) -> Fit:
    return Fit("green" if _is_good(plan) else "amber", _words(plan), _why(plan), plan)


def all_of(
    models: Iterable[ListedModel], config: Config, hardware: Hardware, learned: Learned | None = None
) -> dict[str, Fit]:
    """The fit of each model by its id, with the settings that are kept for it; models whose files cannot be
    used are left out."""
    learned = measured.learned(config, hardware) if learned is None else learned
    kept = load_settings.kept(config)
    return {
        model.id: fit(model.id, load_settings.applied(config, [model.id], kept), hardware, learned)
        for model in models
        if any(file.local is None or file.local.is_usable for file in model.files)
    }


def _is_good(plan: Plan) -> bool:
    shape, load = plan.candidate.shape, plan.load
    is_long = shape.pooling or load.n_ctx >= min(N_CTX_GOOD, shape.n_ctx_train)
    return plan.placement.is_whole and bool(is_long) and plan.candidate.rank >= choice.GOOD


def _words(plan: Plan) -> str:
    place, n_layer = plan.placement, plan.candidate.shape.n_layer
    size = plan.load.n_ctx
    text = f"{plan.candidate.quant}, {size // 1024}k" if size >= 1024 else f"{plan.candidate.quant}, {size}"
    if place.is_whole:
        return text
    if not place.gpus:
        return f"{text}, CPU"
    if plan.candidate.shape.is_assumed and place.host.n_layers:
        return f"{text}, CPU helps"  # how many layers it has is not known yet
    if not place.host.n_layers:
        return f"{text}, experts in RAM"
    return f"{text}, {n_layer - place.host.n_layers} of {n_layer} layers"


def _why(plan: Plan) -> str:
    speed = plan.measured_tokens_per_s or plan.tokens_per_s
    if speed is None:
        return plan.reasons[0]
    how = "Measured" if plan.measured_tokens_per_s else "Forecast"
    return f"{plan.reasons[0]} {how}: {speed:.0f} tokens a second."
