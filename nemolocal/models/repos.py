"""What a repository of the hub holds, as values: its model files at one commit, and which one is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemolocal.errors import HubError, ModelNotFoundError, UsageError
from nemolocal.models.reference import FileKind, group_files, quant_of

N_NAMED = 4
"""Of a longer list, so many names are enough in a message."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository. `sha256` is "" where the hub does not tell it (files outside Git LFS)."""

    name: str
    bytes: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of a repository: one file or the parts of a split one, in order. `missing` names the parts
    that the repository should have and has not."""

    quant: str
    kind: FileKind
    files: tuple[RemoteFile, ...]
    missing: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files)

    @property
    def first(self) -> str:
        """The name of the single file or of part 1."""
        return min((*(file.name for file in self.files), *self.missing))

    @property
    def n_parts(self) -> int:
        return len(self.files) + len(self.missing)


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository at one commit (`revision`). `models` holds all its .gguf files, projectors and the
    like included; files whose names could not be kept on every system are in `refused`, and those that were
    cut by bytes (model.gguf.part1of2) in `pieces`."""

    id: str
    revision: str
    is_gated: bool
    licence: str
    models: tuple[RemoteModel, ...]
    refused: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()

    @property
    def chat_models(self) -> tuple[RemoteModel, ...]:
        """Without what only accompanies a model, largest first. Where there is nothing else, drafts and
        adapters are what the repository is for, and one may be a model after all."""
        found = [model for model in self.models if model.kind == "model"]
        found = found or [model for model in self.models if model.kind in ("draft", "adapter")]
        return tuple(sorted(found, key=lambda model: (-model.bytes, model.first)))

    @property
    def companions(self) -> tuple[RemoteModel, ...]:
        """What is no model that could be run by itself."""
        models = self.chat_models
        return tuple(model for model in self.models if model not in models)

    def ref(self, model: RemoteModel) -> str:
        """The shortest reference that means this model and no other."""
        models = self.chat_models
        is_clear = model in models and sum(m.quant == model.quant for m in models) == 1
        return f"hf:{self.id}:{model.quant if model.quant and is_clear else model.first}"

    def choose(self, *, quant: str = "", file: str = "") -> RemoteModel:
        """The one model of this quantization or with this file (any part of it).

        Raises ModelNotFoundError when there is none, UsageError when several match, and HubError when
        the repository lacks a part of it or holds it in pieces.
        """
        if file:
            found = [m for m in self.models if file in (*(f.name for f in m.files), *m.missing)]
        else:
            found = [m for m in self.chat_models if m.quant.casefold() == quant.casefold()]
        if not found:
            self._refuse_pieces(quant)
            quants = sorted({m.quant or m.first for m in self.chat_models})
            has = f"It has {', '.join(quants)}." if quants else "It has no GGUF models at all."
            raise ModelNotFoundError(f"{self.id} has no {file or quant}.", hint=has)
        if len(found) > 1:
            names = " or ".join(f"hf:{self.id}:{m.first}" for m in found[:N_NAMED])
            raise UsageError(
                f"{self.id} has {len(found)} models of {quant}.", hint=f"Name one file: {names}."
            )
        if found[0].missing:
            raise HubError(
                f"{self.id} lacks a part of this model: {found[0].missing[0]}.",
                hint="Choose another quantization or repository.",
            )
        return found[0]

    def _refuse_pieces(self, wanted: str) -> None:
        for name in self.pieces:
            if wanted in (name, quant_of(name)):
                raise HubError(
                    f"{self.id} holds this model in pieces that were cut by bytes ({name}).",
                    hint="Choose another quantization, or fetch them yourself and join them into one .gguf.",
                )


def gather(files: Mapping[str, RemoteFile]) -> tuple[RemoteModel, ...]:
    """The models that .gguf files, given by their names, make up."""
    return tuple(
        RemoteModel(group.quant, group.kind, tuple(files[name] for name in group.names), group.missing)
        for group in group_files(files)
    )


def named(models: Sequence[RemoteModel]) -> str:
    """The files' names for a message, shortened."""
    more = f" and {len(models) - N_NAMED} more" if len(models) > N_NAMED else ""
    return ", ".join(model.first for model in models[:N_NAMED]) + more
