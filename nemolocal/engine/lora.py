"""Which LoRA adapters a request is computed with: from the names it gives to a scale for each adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from nemolocal.engine.backend import Adapters
from nemolocal.errors import InvalidRequestError


def scales(files: Sequence[tuple[str, float]], asked: Sequence[tuple[str, float]] | None) -> Adapters:
    """The scale of each loaded adapter: as loaded where nothing is asked, else 0 for those not named.

    `files` are the adapters of the load, path and scale. One is asked for by the name of its file without the
    suffix, or by its place, from 0. Raises InvalidRequestError for one that is not loaded.
    """
    if asked is None:
        return tuple(scale for _, scale in files)
    places = {
        name: place for place, (path, _) in enumerate(files) for name in (str(place), PurePath(path).stem)
    }
    chosen = [0.0] * len(files)
    for name, scale in asked:
        if name not in places:
            known = ", ".join(PurePath(path).stem for path, _ in files)
            raise InvalidRequestError(
                f"lora: no adapter '{name}' is loaded with this model.",
                param="lora",
                hint=f"Loaded are {known}." if known else "Load adapters with --lora FILE[:SCALE].",
            )
        chosen[places[name]] = scale
    return tuple(chosen)
