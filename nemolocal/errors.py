"""The one error tree. Every error that a user may meet is one line that says what happened and a hint
that says how to mend it. Raised low, translated once per surface: the command line prints `str(error)`
and exits, the API maps the class to a status, the page shows a notice.

This module imports nothing of ours.
"""

from __future__ import annotations

from typing import Literal


class NemoLocalError(Exception):
    """Root of all errors that are the world's fault, not ours.

    `message` says what happened, `hint` how to mend it; both are one line.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        stop = "" if self.message.endswith((".", "!", "?", ":")) else "."  # what a library said may have none
        return f"{self.message}{stop} {self.hint}".strip()


class UsageError(NemoLocalError):
    """The command, flag, setting or reference is wrong (exit code 2)."""


class ConfigError(UsageError):
    """A configuration file, environment variable or profile cannot be used."""


class InvalidRequestError(NemoLocalError):
    """A request that can never succeed as it stands; `param` names the wrong field."""

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the context. Both counts are in tokens."""

    def __init__(self, *, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"The prompt has {n_prompt} tokens, but the context holds {n_ctx}, answer included.",
            hint="Shorten the prompt or load the model with a larger --ctx.",
            param="messages",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class InputLengthError(ContextLengthError):
    """An input to embed or to rank, which `param` names, is longer than the model reads at once. Both counts
    are in tokens; `can_grow` says that another load of the model would read longer ones."""

    def __init__(self, *, param: str, n_prompt: int, n_ctx: int, can_grow: bool = False) -> None:
        super().__init__(n_prompt=n_prompt, n_ctx=n_ctx)
        grow = " or load the model with a larger --ctx" if can_grow else ""
        self.message = f"{param} has {n_prompt} tokens, but the model reads at most {n_ctx} at once."
        self.hint = f"Split it into shorter pieces{grow}."
        self.param = param


class TemplateError(InvalidRequestError):
    """The model's chat template refused these messages, or is itself broken."""


class ModelNotFoundError(NemoLocalError):
    """No model answers to this reference."""


class DatabaseError(NemoLocalError):
    """The database of settings and measurements cannot be read or written."""


class ModelFileError(NemoLocalError):
    """A model file cannot be used: `kind` is one word for the class of fault.

    Kinds: missing, empty, truncated, not_gguf, web_page, lfs_pointer, old_format, corrupt,
    unsupported, projector, missing_part, joined_parts.
    """

    def __init__(self, message: str, *, kind: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


class DoesNotFitError(NemoLocalError):
    """No plan fits the memory. Both figures are bytes."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class DownloadError(NemoLocalError):
    """A transfer failed; what has arrived is kept and a later run goes on from there."""


class DownloadStoppedError(DownloadError):
    """Somebody stopped a transfer: no fault, so surfaces stay quiet about it. What has arrived is kept."""

    def __init__(self) -> None:
        super().__init__("The download was stopped.", hint="A later one goes on from there.")


class BeingFetchedError(DownloadError):
    """Somebody is fetching the file, so that what has arrived of it must stay."""


class HubError(NemoLocalError):
    """The model hub answered with an error (not found, gated, rate limit)."""


class OfflineError(HubError):
    """The hub cannot be reached, or --offline forbids asking."""


class NoSpaceError(DownloadError):
    """The disk is too small. Both figures are bytes."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ChecksumError(DownloadError):
    """The bytes that arrived are not the bytes that were published."""


class EngineError(NemoLocalError):
    """The engine's process could not load the model, or died. `is_out_of_memory` says that it was for want
    of memory, so that a smaller plan may do better."""

    def __init__(self, message: str, *, hint: str = "", is_out_of_memory: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_out_of_memory = is_out_of_memory


class OutOfMemoryError(EngineError):
    """Loading failed because one allocation did: `wanted_bytes` were asked of a device, a GPU's UUID or ""
    for the RAM, where llama.cpp held `held_bytes` for this model already and `free_bytes` were free (None
    where that was not told)."""

    def __init__(
        self,
        message: str,
        *,
        device: str,
        wanted_bytes: int,
        free_bytes: int | None,
        held_bytes: int,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint, is_out_of_memory=True)
        self.device = device
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
        self.held_bytes = held_bytes


class EngineDiedError(EngineError):
    """The engine's process ended while requests were running; it is started again on the next one."""


class EngineGaveUpError(EngineError):
    """A model failed so often in a row that it is not tried for now; try again after `retry_after_s`
    seconds."""

    def __init__(self, message: str, *, retry_after_s: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class BusyError(NemoLocalError):
    """The queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class PortError(NemoLocalError):
    """The address cannot be listened on."""


DocumentFault = Literal["missing", "unsupported", "encrypted", "damaged", "empty", "too_large", "too_slow"]


class DocumentError(NemoLocalError):
    """A document cannot be read: `kind` is one word for the class of fault."""

    def __init__(self, message: str, *, kind: DocumentFault, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
