"""What names mean: the references that people write for a model, and the file names that repositories use.

Pure text: knows neither the catalogue, nor the folder, nor the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from nemolocal.config import expand
from nemolocal.errors import UsageError

FileKind = Literal["model", "projector", "imatrix", "draft", "adapter", "other"]
"""What a .gguf file is for: a model; the eyes or ears of one; quantization statistics; a draft that guesses
for a model (MTP heads too); a LoRA adapter; a vocabulary, image decoder or voice that belongs to something
else."""

SUFFIX = ".gguf"


# References ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedRef:
    """`NAME` or `NAME:QUANT`: a row of the catalogue, or a file in the models folder by its id."""

    name: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.quant}" if self.quant else self.name


@dataclass(frozen=True, slots=True)
class HubRef:
    """`hf:OWNER/REPO`, with `:QUANT` or `:FILE` after it. At most one of `quant` and `file` is set."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        chosen = self.quant or self.file
        return f"hf:{self.repo}:{chosen}" if chosen else f"hf:{self.repo}"


@dataclass(frozen=True, slots=True)
class PathRef:
    """A .gguf file on this machine, as written (`~` expanded)."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Reference = NamedRef | HubRef | PathRef

_REPO_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_JOINED_PART = re.compile(r"\.gguf\.part\d+of\d+$", re.IGNORECASE)
_LOOKS_LIKE_PATH = re.compile(r"^(?:[.~]|/|[A-Za-z]:[\\/])|\\")


def parse(text: str) -> Reference:
    """Read a model reference.

    Raises UsageError where no model could ever be meant by it. Whether the model exists is not asked.
    """
    text = text.strip()
    if not text or any(ord(c) < 32 for c in text):
        raise UsageError(f"{text!r} is no model reference.", hint="`nemolocal models list` shows the models.")
    if text.lower().startswith(("http://", "https://")):
        raise UsageError(
            f"'{text}' is a web address.", hint="Write hf:OWNER/REPO, or hf:OWNER/REPO:FILE for one file."
        )
    if text.lower().startswith("hf:"):
        return _parse_hub(text)
    if text.lower().endswith(SUFFIX) or _JOINED_PART.search(text):
        return PathRef(expand(text))
    if _LOOKS_LIKE_PATH.search(text):
        raise UsageError(
            f"'{text}' is not a model file: its name does not end in {SUFFIX}.",
            hint="Name the .gguf file itself; of a split model the first part.",
        )
    name, _, quant = text.partition(":")
    if not name:
        raise UsageError(f"'{text}' names no model before the colon.", hint="Write NAME or NAME:QUANT.")
    return NamedRef(name, quant)


def _parse_hub(text: str) -> HubRef:
    repo, _, chosen = text[3:].strip("/").partition(":")
    if not is_repo(repo):
        raise UsageError(
            f"'{text}' names no repository.",
            hint="Write hf:OWNER/REPO, hf:OWNER/REPO:QUANT or hf:OWNER/REPO:FILE.",
        )
    if not chosen.lower().endswith(SUFFIX):
        usual = quant_of(chosen)
        return HubRef(repo, quant=usual if usual and usual.casefold() != chosen.casefold() else chosen)
    if not is_plain_path(chosen):
        raise UsageError(
            f"'{chosen}' cannot be a file of a repository.", hint="Give its path as the hub shows it."
        )
    return HubRef(repo, file=chosen)


def is_repo(text: str) -> bool:
    """Whether the text has the form OWNER/REPO, as the hub allows it."""
    parts = text.split("/")
    return len(parts) == 2 and all(
        _REPO_PART.fullmatch(part) and ".." not in part and "--" not in part and is_plain_path(part)
        for part in parts
    )


# File names ---------------------------------------------------------------------------------------

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<n_parts>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD[-_.])?(?:"
    r"Q\d(?:[-_.]?K|[-_.]\d(?:_\d_\d)?)?(?:[-_.]?(?:XXS|XS|S|M|L|XL))?"
    r"|IQ\d(?:[-_.]?(?:NL|XXS|XS|S|M|L|KSS|KS|KT|KL|K))?(?:[-_.](?:L|XL))?"
    r"|TQ\d[-_.]\d|BF16|FP?16|FP?32|MXFP4(?:[-_.]?MOE)?|NVFP4"
    r")(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_DRAFTS = {"draft", "drafter", "eagle", "eagle2", "eagle3", "dflash", "dspark", "medusa", "speculator"}
_OTHERS = {"vocab", "vae", "wavtokenizer", "vocoder", "codec"}
_UNSQUEEZED = {"F16", "BF16", "F32", "Q8_0", ""}  # what adapters are published in
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"|?*\\\u0080-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]')
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)
_N_NAME_BYTES_MAX = 200


def is_plain_path(name: str) -> bool:
    """Whether a repository's file name may become a path below a folder of ours, on every system.

    Refused: absolute paths, `..`, hidden names, control and direction characters, what Windows cannot
    hold (reserved characters and device names, a dot or space at the end) and names over 200 bytes.
    """
    parts = name.split("/")
    return bool(name) and all(
        part
        and not part.startswith((".", " "))
        and not part.endswith((".", " "))
        and not _FORBIDDEN.search(part)
        and not _DEVICES.fullmatch(part)
        and len(part.encode("utf-8", "surrogatepass")) <= _N_NAME_BYTES_MAX
        for part in parts
    )


def quant_of(name: str) -> str:
    """The quantization that a file's path names, as it is usually written ("Q4_K_M", "UD-Q4_K_XL" also for
    "ud.q4-k-xl"), or "".

    The last label of the file name counts, then that of its folder (`Q8_0/Model-00001-of-00002.gguf`).
    """
    path = PurePosixPath(name.replace("\\", "/"))
    for text in (path.name, path.parent.name):
        found = _QUANT.findall(text)
        if found:
            return _usual_label(found[-1])
    return ""


def _usual_label(text: str) -> str:
    label = text.upper().replace("-", "_").replace(".", "_").replace("FP16", "F16").replace("FP32", "F32")
    label, dynamic = label.removeprefix("UD_"), "UD-" if label.startswith("UD_") else ""
    label = re.sub(r"^(I?Q\d)(?=[KNXSML])", r"\1_", label)
    label = re.sub(r"^(Q\d_K)(?=[XSML])", r"\1_", label)
    return dynamic + label.replace("MXFP4MOE", "MXFP4_MOE")


def name_of(name: str) -> str:
    """What remains of a model file's name without its folder, part and quantization, in small letters: the
    same for all quantizations of one model."""
    plain = _QUANT.sub("", PurePosixPath(stem_of(name)).name)
    return re.sub(r"[-_.\s]+", "-", plain.lower()).strip("-")


def kind_of(name: str) -> FileKind:
    """What a .gguf file is for, as far as its name and folders tell."""
    path = PurePosixPath(name.replace("\\", "/").lower())
    base = path.name
    words = set(re.split(r"[-_.\s]+", base))
    folders = set(path.parts[:-1])
    if "imatrix" in base:
        return "imatrix"
    if "mmproj" in base or "mmproj" in folders:
        return "projector"
    if base.startswith(("mtp-", "mtp_", "mtp.")) or words & _DRAFTS or folders & (_DRAFTS | {"mtp"}):
        return "draft"
    if words & {"lora", "adapter"} and "merged" not in words and quant_of(name) in _UNSQUEEZED:
        return "adapter"
    return "other" if words & _OTHERS else "model"


@dataclass(frozen=True, slots=True)
class FileGroup:
    """One model's files: a single file, or the parts of a split one in order.

    `missing` holds the names of the parts that are not there; then `names` has gaps.
    """

    names: tuple[str, ...]
    quant: str
    kind: FileKind
    missing: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The name to open: that of part 1, whether it is there or not."""
        return min((*self.names, *self.missing))


def group_files(names: Iterable[str]) -> list[FileGroup]:
    """Gather .gguf paths (with forward slashes) into models; other files are left out. Sorted by name."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for name in names:
        if not name.lower().endswith(SUFFIX):
            continue
        split = _SPLIT.fullmatch(name)
        if split is None or not 1 <= int(split["part"]) <= int(split["n_parts"]):
            groups[name, 0] = {1: name}
        else:
            parts = groups.setdefault((split["stem"], int(split["n_parts"])), {})
            parts[int(split["part"])] = name
    found = []
    for (stem, n_parts), parts in groups.items():
        missing = [f"{stem}-{i:05}-of-{n_parts:05}{SUFFIX}" for i in range(1, n_parts + 1) if i not in parts]
        ordered = tuple(parts[i] for i in sorted(parts))
        found.append(FileGroup(ordered, quant_of(ordered[0]), kind_of(ordered[0]), tuple(missing)))
    return sorted(found, key=lambda group: group.first)


def part_names(first: str) -> list[str]:
    """The names of all parts of a model, given that of any one; the name itself when it is not split."""
    split = _SPLIT.fullmatch(first)
    if split is None:
        return [first]
    n_parts = int(split["n_parts"])
    return [f"{split['stem']}-{i:05}-of-{n_parts:05}{SUFFIX}" for i in range(1, n_parts + 1)]


def stem_of(name: str) -> str:
    """A model file's path without the suffix and without the number of its part."""
    split = _SPLIT.fullmatch(name)
    return split["stem"] if split else name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name


_UNREADABLE = re.compile(r"^[.~/\s]+|[:\\\x00-\x1f]|\s+$")


def id_of(name: str) -> str:
    """A model file's path as an id: without its suffix and part, and such that `parse` reads it as a name."""
    return _UNREADABLE.sub("_", stem_of(name))
