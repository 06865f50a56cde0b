"""The status line: which model, on what, how full its context is, how fast it writes. Pure; must not know
gradio. Everything that is not ours (names, problems) is escaped, since the line is HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Literal

from nemolocal.service import Status

Phase = Literal["idle", "waiting", "reading", "writing"]


@dataclass(frozen=True, slots=True)
class Meter:
    """Figures of the answer that is being written, or of the last one. Counts are tokens; `n_ctx` 0 means
    that nothing was asked yet."""

    phase: Phase = "idle"
    prompt_tokens: int = 0
    new_tokens: int = 0
    n_ctx: int = 0
    tokens_per_s: float = 0.0
    cached_tokens: int = 0


def waiting_for(status: Status, meter: Meter, elapsed_s: float) -> str:
    """What is going on before the first word, for the place where the answer will be."""
    if status.state == "loading":
        return f"Loading the model, {status.progress:.0%}"
    if meter.phase == "reading" and elapsed_s >= 1:
        return f"Reading {meter.prompt_tokens:,} tokens, {elapsed_s:.0f} s"
    return "Reading" if meter.phase == "reading" else "Waiting"


def line(status: Status, meter: Meter) -> str:
    """One line of HTML without a line break."""
    parts = [f'<span class="state {_look(status, meter)}">{_state(status, meter)}</span>']
    if status.model:
        parts.append(f'<span class="model" title="{escape(status.model)}">{escape(status.model)}</span>')
    if status.state == "ready" and status.device:
        parts.append(f'<span class="device">{escape(status.device)}</span>')
    if status.state == "loading":
        parts.append(_bar("progress", status.progress, "Share of the model that is loaded"))
    elif n_ctx := meter.n_ctx or status.n_ctx:
        used = meter.prompt_tokens + meter.new_tokens
        bar = _bar("context", used / n_ctx, "Share of the context that is used")
        parts.append(f"<span>{bar} {used:,} of {n_ctx:,} tokens</span>")
    if meter.tokens_per_s and status.state != "loading":
        parts.append(f"<span>{meter.tokens_per_s:.1f} tokens/s</span>")
    return f'<div class="status-line">{"".join(parts)}</div>'


def figures(meter: Meter) -> str:
    """What an answer took, in a few words; "" where nothing was written. One line without a tag."""
    if not meter.new_tokens:
        return ""
    parts = [f"{meter.new_tokens:,} token{'s' if meter.new_tokens > 1 else ''}"]
    if meter.tokens_per_s:
        parts.append(f"{meter.tokens_per_s:.1f} tokens/s")
    if meter.cached_tokens:
        parts.append(f"{meter.cached_tokens:,} of {meter.prompt_tokens:,} prompt tokens cached")
    return " · ".join(parts)


def notice(problem: str) -> str:
    """A problem as one line of HTML, or nothing."""
    if not problem:
        return ""
    return f'<div class="notice-line">{escape(" ".join(problem.split()))}</div>'


def _state(status: Status, meter: Meter) -> str:
    if status.state == "loading":
        return f"Loading {status.progress:.0%}"
    if meter.phase != "idle":
        return {"waiting": "Waiting", "reading": "Reading", "writing": "Writing"}[meter.phase]
    return {"idle": "No model loaded", "ready": "Ready", "failed": "Not loaded"}[status.state]


def _look(status: Status, meter: Meter) -> str:
    return "busy" if status.state == "loading" or meter.phase != "idle" else status.state


def _bar(name: str, share: float, label: str) -> str:
    percent = round(100 * min(max(share, 0.0), 1.0))
    fullness = " full" if name == "context" and percent >= 90 else ""
    return (
        f'<span class="bar {name}{fullness}" role="meter" aria-label="{label}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{percent}"><i style="width:{percent}%"></i></span>'
    )
