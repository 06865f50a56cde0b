"""The table of `models list`: the catalogue by family, with what of it is here and how it would run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nemolocal import units
from nemolocal.cli import output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from nemolocal.models.catalog import CatalogModel
    from nemolocal.models.fits import Fit
    from nemolocal.models.overview import ListedFile, ListedModel

_N_COLUMNS_WITH_TAGS = 122  # in a narrower window the ids, which people copy, would break
_N_COLUMNS_WITH_NAMES = 156
_N_COLUMNS_WITH_SIZES = 66
_COLOURS = {"green": "green", "amber": "yellow", "red": "red"}


def chosen(models: Sequence[ListedModel], *, tag: str | None, family: str | None) -> tuple[ListedModel, ...]:
    """The models with this tag and of this family. Raises UsageError for those that no model has."""
    from nemolocal.errors import UsageError

    listed = [(model, model.listed) for model in models if model.listed]
    tags = sorted({name for _, known in listed for name in known.tags})
    families = sorted({known.family for _, known in listed})
    if tag and tag not in tags:
        raise UsageError(f"No model is tagged '{tag}'.", hint=f"Tags are {', '.join(tags)}.")
    if family and family not in families:
        raise UsageError(f"No family is called '{family}'.", hint=f"There are {', '.join(families)}.")
    if not (tag or family):
        return tuple(models)
    return tuple(
        model
        for model, known in listed
        if (not tag or tag in known.tags) and (not family or family == known.family)
    )


def show(models: Sequence[ListedModel], fits: Mapping[str, Fit] | None, console: Console) -> None:
    """Print the files that are here, then the catalogue; `fits` as they are by the models' ids, None where
    nobody asked."""
    here = [file for model in models for file in model.files if file.state != "remote"]
    if here:
        rows = output.table("On this machine", "Quant", "Size", "State", right=["Size"])
        for file in here:
            rows.add_row(file.ref, file.quant, units.size(file.bytes), _state(file))
        console.print(rows)
    has_tags = console.width >= _N_COLUMNS_WITH_TAGS
    names = ["Name"] if console.width >= _N_COLUMNS_WITH_NAMES else []
    tags = ["For"] if has_tags else []
    size = "Parameters" if has_tags else "Size"
    last = "Files" if fits is None else "Fit, quantization and context"
    sizes = [size] if console.width >= _N_COLUMNS_WITH_SIZES else []
    rows = output.table("Catalogue", *names, *sizes, *tags, last, right=[size], whole=["Catalogue", size])
    listed = [(model, model.listed) for model in models if model.listed]
    for _, family in itertools.groupby(listed, key=lambda pair: pair[1].family):
        for model, known in family:
            name = [model.name] if names else []
            for_ = [", ".join(known.tags)] if tags else []
            end = _range(model.files) if fits is None else _fit(fits.get(model.id))
            parameters = [_parameters(known, is_wide=has_tags)] if sizes else []
            rows.add_row(model.id, *name, *parameters, *for_, end)
        rows.add_row()
    if listed:
        console.print(rows)
    if fits is not None:
        output.note(
            "green: all on GPUs, a good quantization, 8k of context or more. amber: less, or with the CPU. "
            "`nemolocal plan ID` says why."
        )
    if not here:
        output.note("No model is on this machine yet: `nemolocal models pull starter` fetches a small one.")


def _fit(fit: Fit | None) -> Text:
    from rich.text import Text

    if fit is None:
        return Text("unusable", "red")
    return Text.assemble((f"{fit.grade:5}", _COLOURS[fit.grade]), " ", fit.words)


def _state(file: ListedFile) -> str:
    if file.problem:
        return f"unusable: {file.problem}"
    if file.state == "partial":
        return f"{file.done_bytes / file.bytes:.0%} fetched"
    return "ready"


def _range(files: Sequence[ListedFile]) -> str:
    """The smallest and the largest file; `models show` has them all."""
    ends = sorted({(file.bytes, file.quant) for file in files})
    shown = [f"{units.size(n_bytes)} {quant}" for n_bytes, quant in (ends[0], ends[-1])]
    return " … ".join(shown if len(ends) > 1 else shown[:1])


def _parameters(model: CatalogModel, *, is_wide: bool) -> str:
    is_mixture = model.n_active_params < model.n_params
    total = units.parameters(model.n_params)
    return f"{total}, {units.parameters(model.n_active_params)} active" if is_mixture and is_wide else total
