"""The model hub: what a repository holds, where its files are, which repositories there are.

huggingface_hub knows the addresses, the token and the shape of the answers; here each of its failures
becomes one line, every question has a time limit, and nothing is sent when NemoLocal is offline. What is on
this machine is not known here, and no file is transferred.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx2
from huggingface_hub import HfApi, constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public in its manual
    build_hf_headers,
    parse_ratelimit_headers,
)

import nemolocal
from nemolocal.config import Config
from nemolocal.errors import ConfigError, HubError, OfflineError, UsageError
from nemolocal.models.gguf import is_raw_part
from nemolocal.models.reference import SUFFIX, group_files, is_plain_path, is_repo
from nemolocal.models.repos import HubRepo, RemoteFile, gather
from nemolocal.models.streams import LOOK_S, refuse_stopped

REQUEST_TIMEOUT_S = 10.0
"""For one connection, and for a pause within an answer."""
ANSWER_TIMEOUT_S = 15.0
"""For a whole answer: also looking up the hub's name, which the system may take half a minute over."""

_ERROR_NUMBER = re.compile(r"\[(?:Errno|WinError) -?\d+\] ")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A repository with GGUF files. `updated` is a date like 2026-08-03, or ""; `quants` are the
    quantizations that its files name, in the order of the files."""

    repo: str
    n_downloads: int
    n_likes: int
    is_gated: bool
    updated: str = ""
    quants: tuple[str, ...] = ()


class NotThereError(HubError):
    """The hub has no such repository, or does not show it to everybody."""


class RateLimitError(HubError):
    """The hub answers no more questions for now."""


# Questions ----------------------------------------------------------------------------------------


def fetch_repo(repo: str, config: Config, *, stop: threading.Event | None = None) -> HubRepo:
    """List a repository's GGUF models at its newest commit.

    Raises OfflineError when the hub cannot be asked, HubError when it refuses, DownloadStoppedError once
    `stop` is set.
    """
    if not is_repo(repo):
        raise UsageError(f"'{repo}' is no repository.", hint="Write OWNER/REPO.")

    def ask() -> HubRepo:
        info = _api(config).model_info(repo, files_metadata=True, timeout=REQUEST_TIMEOUT_S)
        return _read_repo(info)

    return _ask(ask, config, what=repo, stop=stop)


def search(query: str, config: Config, *, base: str = "", limit: int = 20) -> tuple[SearchHit, ...]:
    """Repositories with GGUF files that match the words, and whose card names `base` (OWNER/REPO) as what was
    quantized, most downloaded first."""
    wanted: dict[str, str | int | list[str]] = {
        "search": query,
        "filter": ["gguf", f"base_model:quantized:{base}"] if base else ["gguf"],
        "sort": "downloads",
        "limit": limit,
        "full": "true",  # the names of the files too
    }

    def ask() -> tuple[SearchHit, ...]:
        # Not HfApi.list_models: it waits without limit and tries again for half a minute.
        answer = get_session().get(
            f"{endpoint(config)}/api/models",
            params=wanted,
            headers=auth_headers(),
            timeout=REQUEST_TIMEOUT_S,
        )
        hf_raise_for_status(answer)
        return tuple(_read_hit(item) for item in answer.json()[:limit])

    return _ask(ask, config, what=f"a search for '{query or base}'")


def file_url(repo: str, name: str, config: Config, *, revision: str) -> str:
    """Where a file is fetched from; the hub sends the client on to its storage from there."""
    return hf_hub_url(repo, name, revision=revision, endpoint=endpoint(config))


def auth_headers() -> dict[str, str]:
    """Headers for requests to the hub: who asks, and the user's token (HF_TOKEN or a saved one)."""
    constants.HF_HUB_DISABLE_TELEMETRY = True  # else the library fetches a list to tell the hub more of us
    try:
        headers: dict[str, str] = build_hf_headers(
            library_name="nemolocal", library_version=nemolocal.__version__
        )
        for value in headers.values():
            value.encode("ascii")
    except (UnicodeError, OSError) as error:
        raise ConfigError(
            f"The hub's token cannot be used: {type(error).__name__}.", hint="Set HF_TOKEN anew, or unset it."
        ) from None
    return headers


def endpoint(config: Config) -> str:
    """The hub's address without a slash at the end: HF_ENDPOINT, or the public hub."""
    address = config.hub_endpoint or constants.ENDPOINT
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"HF_ENDPOINT is '{address}'.", hint="It must begin with http:// or https://.")
    return address


def refuse_offline(config: Config, *, what: str) -> None:
    """Raises OfflineError when NemoLocal may not use the network."""
    if config.settings.offline:
        raise OfflineError(
            f"{what} would need the network, but NemoLocal is offline.",
            hint="Leave out --offline, and unset NEMOLOCAL_OFFLINE and HF_HUB_OFFLINE.",
        )


def refusal(status: int, headers: Mapping[str, str], *, what: str, page: str = "") -> HubError:
    """The hub's answer `status` (400 or more) to a question about `what`, as one line and its fix.

    `page` is where a person can see the repository. The hub tells the reason in X-Error-Code; for a
    missing repository it answers 401 to whoever is not logged in, since it might be a private one.
    """
    reason = headers.get("x-error-code", "")
    said = headers.get("x-error-message", "")
    if status == 429:
        wait_s = seconds_to_wait(headers)
        hint = f"Wait {wait_s} seconds, then try again." if wait_s else "Wait a few minutes."
        return RateLimitError(
            "The hub answers no more questions for now (rate limit).",
            hint=hint + " A token in HF_TOKEN raises the limit.",
        )
    if status == 401 and "invalid" in said.lower():
        return HubError("The hub refuses the token.", hint="Set HF_TOKEN to a valid one, or unset it.")
    if "disabled" in said.lower():
        return NotThereError(f"The hub has disabled {what}.", hint="Choose another repository.")
    if reason == "GatedRepo" or (status == 403 and reason != "RepoNotFound"):
        return HubError(
            f"{what} is gated: its terms have to be accepted first.",
            hint=f"Accept them on {page or 'its page'}, then set HF_TOKEN to a token of that account.",
        )
    if reason == "EntryNotFound":
        return HubError(f"The hub has no file {what}.", hint="`nemolocal models show` lists what is there.")
    if reason == "RevisionNotFound":
        return HubError(f"The hub no longer has this revision of {what}.", hint="Try again.")
    if status in (401, 404) or reason == "RepoNotFound":
        return NotThereError(
            f"The hub has no {what}, or it is private.",
            hint="Check the spelling; for a private one set HF_TOKEN to a token that may read it.",
        )
    if status >= 500:
        return HubError(f"The hub is in trouble (status {status}).", hint="Try again in a few minutes.")
    return HubError(f"The hub refused {what} (status {status}{': ' + said if said else ''}).")


def seconds_to_wait(headers: Mapping[str, str]) -> int:
    """How long the hub asks a client to wait, 0 where it does not say."""
    wait = headers.get("retry-after", "")
    if wait.isdigit():
        return int(wait)
    limit = parse_ratelimit_headers(headers)
    return limit.reset_in_seconds if limit else 0


def unreachable(config: Config, reason: str) -> OfflineError:
    """The hub did not answer; `reason` is a few words."""
    return OfflineError(
        f"The model hub at {endpoint(config)} cannot be reached: {reason}.",
        hint="Check the network, HTTPS_PROXY and HF_ENDPOINT. Models on this machine work without it.",
    )


# The machinery ------------------------------------------------------------------------------------


def _api(config: Config) -> HfApi:
    auth_headers()  # raises for a token that no header can hold
    return HfApi(endpoint=endpoint(config), library_name="nemolocal", library_version=nemolocal.__version__)


def _ask(question: Callable[[], T], config: Config, *, what: str, stop: threading.Event | None = None) -> T:
    """Run a question with a time limit for the whole, and turn its failures into ours."""
    refuse_offline(config, what=f"Asking the hub for {what}")
    endpoint(config)
    # The library read HF_HUB_OFFLINE when it was imported; `config` has the final word on it.
    constants.HF_HUB_OFFLINE = False
    answers: queue.SimpleQueue[tuple[Literal[True], T] | tuple[Literal[False], BaseException]]
    answers = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((True, question()))
        except BaseException as error:  # noqa: BLE001 - raised again in the asking thread, just below
            answers.put((False, error))

    # A daemon, so that a name server that never answers cannot hold up the end of the program either.
    threading.Thread(target=run, name="hub", daemon=True).start()
    patience_ends = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            answer = answers.get(timeout=LOOK_S)
            break
        except queue.Empty:
            if stop:
                refuse_stopped(stop)
            if time.monotonic() > patience_ends:
                why = f"no answer within {ANSWER_TIMEOUT_S:.0f} seconds"
                raise unreachable(config, why) from None
    if answer[0]:
        return answer[1]
    raise _translate(answer[1], config, what=what) from None


def _translate(error: BaseException, config: Config, *, what: str) -> BaseException:
    """One of our errors for one of the library's; any other error comes back as it is."""
    if isinstance(error, HfHubHTTPError):
        page = f"{endpoint(config)}/{what}"
        return refusal(error.response.status_code, error.response.headers, what=what, page=page)
    if isinstance(error, HFValidationError):
        return UsageError(f"'{what}' is no repository.", hint="Write OWNER/REPO.")
    if isinstance(error, httpx2.TimeoutException):
        return unreachable(config, f"no answer within {REQUEST_TIMEOUT_S:.0f} seconds")
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        return unreachable(config, describe(error))
    if isinstance(error, (ValueError, KeyError, TypeError, AttributeError)):
        return HubError(
            f"{endpoint(config)} does not answer like a model hub.",
            hint="A proxy's log-in page may be in the way; or mend HF_ENDPOINT.",
        )
    return error


def describe(error: Exception) -> str:
    """A network error in a few words, without its number and without a full stop."""
    return _ERROR_NUMBER.sub("", " ".join(str(error).split())).rstrip(".") or type(error).__name__


def _read_repo(info: ModelInfo) -> HubRepo:
    files: dict[str, RemoteFile] = {}
    refused, pieces = [], []
    for sibling in info.siblings or []:
        name = sibling.rfilename
        if is_raw_part(name):
            pieces.append(name)
            continue
        if not name.lower().endswith(SUFFIX):
            continue
        if not is_plain_path(name):
            refused.append(name)
            continue
        sha256 = sibling.lfs.sha256 if sibling.lfs else ""
        size = sibling.lfs.size if sibling.lfs else sibling.size
        files[name] = RemoteFile(name, int(size or 0), sha256 or "")
    if not is_repo(info.id or "") or not info.sha:
        raise ValueError("no id or commit in the answer")
    return HubRepo(
        id=info.id,
        revision=info.sha,
        is_gated=bool(info.gated),
        licence=_licence(info),
        models=gather(files),
        refused=tuple(refused),
        pieces=tuple(sorted(pieces)),
    )


def _licence(info: ModelInfo) -> str:
    tags = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return tags[0] if tags else ""


def _read_hit(item: Mapping[str, Any]) -> SearchHit:
    return SearchHit(
        repo=item["id"],
        n_downloads=item.get("downloads") or 0,
        n_likes=item.get("likes") or 0,
        is_gated=bool(item.get("gated")),
        updated=(item.get("lastModified") or "")[:10],
        quants=_quants([file["rfilename"] for file in item.get("siblings") or []]),
    )


def _quants(names: Sequence[str]) -> tuple[str, ...]:
    plain = (name for name in names if is_plain_path(name))
    models = [group for group in group_files(plain) if group.kind == "model" and group.quant]
    return tuple(dict.fromkeys(group.quant for group in models))
