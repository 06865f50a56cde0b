"""The client of peers.py and what it measures: streamed answers over HTTP, many at once.

Knows nothing of how servers are started. As little Python runs for each token as can be, and no HTTP library:
the client's time is part of every figure.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

# Common words, which most vocabularies hold as one token each with the space before them.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system question work number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head "
    "house friend father power hour game line end member law car city team minute idea body back parent "
    "face level office door health person art war history party result change morning reason research "
    "girl guy moment air"
)
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
N_BESIDE = 8  # streams that a long prompt meets

Row = dict[str, Any]


@dataclass
class Answer:
    """One streamed answer; times are those of `time.perf_counter`. Filled in while it comes."""

    begin: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    problem: str = "the stream ended early"

    @property
    def n_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", len(self.arrivals)))

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.begin if self.arrivals else float("nan")

    @property
    def decode_speed(self) -> float:
        """Tokens per second from the first text to the last."""
        seconds = self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0
        return (self.n_tokens - 1) / seconds if seconds else float("nan")


@dataclass
class Target:
    """A server that is up. `slope` and `overhead` turn words into tokens: measured, so that prompts have
    the wanted length whatever the vocabulary and the template."""

    port: int
    served_as: str
    banned: tuple[str, ...] = ()
    slope: float = 1.0
    overhead: float = 0.0
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1_000_000))

    def prompt(self, n_tokens: int) -> str:
        """A prompt that no other one begins like: its number comes first."""
        seed = next(self.seeds)
        n_words = max(round((n_tokens - self.overhead) / self.slope), 1)
        return " ".join([str(seed), *random.Random(seed).choices(WORDS.split(), k=n_words)])

    def body(self, prompt: str, n_new: int) -> dict[str, Any]:
        body = {
            "model": self.served_as,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": n_new,
            "stream": True,
            "stream_options": {"include_usage": True},
            **SAMPLING,
        }
        if self.banned:
            return {**body, "logit_bias": dict.fromkeys(self.banned, -100)}
        return {**body, "ignore_eos": True}


async def ask(target: Target, prompt: str, n_new: int, answer: Answer | None = None) -> Answer:
    """Stream one answer. `answer` is filled in while it comes, for who looks on or breaks it off."""
    answer = answer or Answer()
    content = json.dumps(target.body(prompt, n_new)).encode()
    answer.begin = time.perf_counter()
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 20)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (target.port, len(content))
        )
        writer.write(content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        blocks = _blocks(reader, is_chunked="transfer-encoding: chunked" in head)
        if head.split()[1] != "200":
            text = b"".join([block async for block in blocks]).decode(errors="replace")
            answer.problem = f"{head.split()[1]}: {text[:200]}"
            return answer
        await _read_events(blocks, answer)
    except (OSError, asyncio.IncompleteReadError) as error:
        answer.problem = type(error).__name__
    finally:
        if writer:
            writer.close()
    if not answer.problem and answer.n_tokens != n_new:
        answer.problem = f"{answer.n_tokens} tokens in place of {n_new}"
    return answer


async def _blocks(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while block := await reader.read(1 << 16):
            yield block
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _read_events(blocks: AsyncIterator[bytes], answer: Answer) -> None:
    rest = b""
    async for block in blocks:
        now = time.perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line.rstrip() == b"data: [DONE]":
                answer.problem = ""
                return
            event = json.loads(line[6:])
            answer.usage = event.get("usage") or answer.usage
            if "error" in event:
                answer.problem = str(event["error"])[:200]
                return
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                if delta.get("content") or delta.get("reasoning_content"):
                    answer.arrivals.append(now)


async def warm_up(target: Target, n_slots: int) -> None:
    """Measure words into tokens, and let every kernel of one stream and of many run once."""
    n_tokens = {}
    for n_words in (32, 160):
        target.slope, target.overhead = 1.0, 0.0
        answer = await ask(target, target.prompt(n_words), 8)
        if answer.problem:
            raise RuntimeError(answer.problem)
        n_tokens[n_words] = answer.usage["prompt_tokens"]
    target.slope = (n_tokens[160] - n_tokens[32]) / 128
    target.overhead = n_tokens[32] - 32 * target.slope
    await asyncio.gather(*(ask(target, target.prompt(24), 16) for _ in range(n_slots)))


async def streams(target: Target, n_streams: int, n_prompt: int, n_new: int) -> Row:
    """All at once, each with a prompt of its own."""
    prompts = [target.prompt(n_prompt) for _ in range(n_streams)]
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(target, prompt, n_new) for prompt in prompts))
    seconds = time.perf_counter() - begin
    return {
        "tokens_per_s_total": sum(a.n_tokens for a in answers) / seconds,
        "ttft_p50": statistics.median(a.first_s for a in answers),
        "ttft_max": max(a.first_s for a in answers),
        "tokens_per_s_stream": statistics.median(a.decode_speed for a in answers),
        "tokens_per_s_decode": sum(a.decode_speed for a in answers),
        "n_prompt": statistics.median(a.usage.get("prompt_tokens", 0) for a in answers),
        "n_full": sum(not a.problem for a in answers),
        "problem": next((a.problem for a in answers if a.problem), ""),
    }


async def twice(target: Target, n_prompt: int) -> Row:
    """The same prompt again, once the first answer is through."""
    prompt = target.prompt(n_prompt)
    first = await ask(target, prompt, 16)
    again = await ask(target, prompt, 16)
    details = again.usage.get("prompt_tokens_details") or {}
    return {
        "ttft_first": first.first_s,
        "ttft_again": again.first_s,
        "n_prompt": again.usage.get("prompt_tokens", 0),
        "n_cached": details.get("cached_tokens", 0),
        "problem": first.problem or again.problem,
    }


async def arrival(target: Target, n_prompt: int, n_new: int) -> Row:
    """A long prompt alone, then one that arrives while others' answers are being written."""
    alone = await ask(target, target.prompt(n_prompt), 16)
    beside = [Answer() for _ in range(N_BESIDE)]
    tasks = [asyncio.create_task(ask(target, target.prompt(16), n_new, answer)) for answer in beside]
    try:
        while any(len(a.arrivals) < 8 for a in beside) and not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        settled = time.perf_counter()
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        under = await ask(target, target.prompt(n_prompt), 16)
        end = begin + under.first_s
        n_ended = sum(bool(a.usage) or task.done() for a, task in zip(beside, tasks, strict=True))
        await asyncio.sleep(0.3)  # so that the gaps over the end are seen whole
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    now = time.perf_counter()
    before = sorted(gap for a in beside for gap in gaps(a.arrivals, settled, begin, now=begin))
    during = sorted(gap for a in beside for gap in gaps(a.arrivals, begin, end, now=now))
    return {
        "ttft_alone": alone.first_s,
        "ttft_under": under.first_s,
        "n_prompt": under.usage.get("prompt_tokens", 0),
        "gap_before_p50": quantile(before, 0.5),
        "gap_p50": quantile(during, 0.5),
        "gap_p99": quantile(during, 0.99),
        "gap_max": quantile(during, 1.0),
        "n_streams_ended": n_ended,
        "problem": alone.problem or under.problem or (f"{n_ended} streams had ended" if n_ended else ""),
    }


def gaps(arrivals: list[float], begin: float, end: float, *, now: float) -> Iterator[float]:
    """The times between two texts of one stream that touch [begin, end]; a stream that has been still
    since before `end` counts until now."""
    marks = arrivals if arrivals and arrivals[-1] >= end else [*arrivals, now]
    for earlier, later in itertools.pairwise(marks):
        if later > begin and earlier < end:
            yield later - earlier


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
