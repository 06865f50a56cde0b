"""How fast a model runs on this machine: the first text, reading and writing with one stream and with many,
and the memory that it takes, beside what was planned.

Measures through a Service of its own, without HTTP. Knows neither tables nor where results are kept.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from nemolocal import __version__, hardware, units
from nemolocal.config import Config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import DoesNotFitError, UsageError
from nemolocal.hardware import Hardware
from nemolocal.models import planning, reference, sizing, store
from nemolocal.models.store import LocalModel
from nemolocal.service import Service
from nemolocal.types import Delta, Finish, GenerationParams, SamplingParams, TextModel

N_ROUNDS_ALONE = 3  # one stream's figures come from so many answers
N_CTX_STEP = 256  # cells are given out in steps of this
LIBRARY = "llama-cpp-python"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: for each number of `streams`, so many answers at once to prompts of `n_prompt`
    tokens that share nothing, each `n_new` tokens long. Raises UsageError for what makes no sense."""

    streams: tuple[int, ...]
    n_prompt: int
    n_new: int

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1 or max(self.streams) > sizing.N_SLOTS_MOST:
            raise UsageError(f"The numbers of streams must be from 1 to {sizing.N_SLOTS_MOST}.")
        if self.n_prompt < 1:
            raise UsageError("A prompt has at least 1 token.")
        if self.n_new < 2:
            raise UsageError("An answer must have at least 2 tokens, else it has no speed.")

    @property
    def n_per_stream(self) -> int:
        return self.n_prompt + self.n_new

    def n_ctx(self, *, is_shared: bool) -> int:
        """A context that holds the most streams where they share it, else one that holds each."""
        n_each = -(-self.n_per_stream // N_CTX_STEP) * N_CTX_STEP
        return max(self.streams) * n_each if is_shared else n_each


@dataclass(frozen=True, slots=True)
class Run:
    """What so many streams at once came to. Times are seconds, speeds tokens per second.

    `ttft_p50` and `ttft_max` are from asking to the first text. `prompt_tokens_per_s` counts all prompts
    over the time until the last of them had its first text. `tokens_per_s_stream` is the median of each
    answer's own speed, from its first text to its last; `tokens_per_s_decode` adds those up, and
    `tokens_per_s_total` counts all answers over the whole time, with the reading. `n_short` answers did not
    have `new_tokens` tokens.
    """

    streams: int
    prompt_tokens: int
    new_tokens: int
    ttft_p50: float
    ttft_max: float
    prompt_tokens_per_s: float
    tokens_per_s_stream: float
    tokens_per_s_decode: float
    tokens_per_s_total: float
    n_short: int = 0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A number of streams that was not measured, and why, in one line."""

    streams: int
    why: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the plan foresaw for a device, and what was taken at most after any run: of a GPU the memory
    that was free before the load and no more, of the RAM what the engine's process held. None where it
    cannot be known."""

    id: str
    name: str
    forecast_bytes: int
    taken_bytes: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that one bench found, with what it was found on."""

    date: str
    model: str
    plan: sizing.Plan
    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]
    memory: tuple[DeviceMemory, ...]
    library: str
    nemolocal: str
    hardware: Hardware

    def to_dict(self) -> dict[str, Any]:
        """As JSON; sizes in bytes, times in seconds."""
        return {
            "date": self.date,
            "model": self.model,
            "plan": self.plan.to_dict(),
            "runs": [asdict(run) for run in self.runs],
            "left_out": [asdict(entry) for entry in self.left_out],
            "memory": [asdict(entry) for entry in self.memory],
            "library": self.library,
            "nemolocal": self.nemolocal,
            "hardware": asdict(self.hardware),
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench that is ready to run: which file is loaded how, and which numbers of streams that allows."""

    config: Config
    load: Load
    model: LocalModel
    plan: sizing.Plan
    left_out: tuple[LeftOut, ...]
    hardware: Hardware


def prepare(ref: str, config: Config, load: Load) -> Bench:
    """Choose the file and the plan. Where the settings leave them open, there are as many slots as the most
    streams and a context that holds them. Blocks while the hardware is looked at.

    Raises UsageError where not one of the numbers of streams can be measured, and what finding the model
    and planning raise.
    """
    config = _with_room(config, load)
    machine = hardware.survey(config)
    parsed = reference.parse(ref)
    found = store.find(parsed, config) or (store.resolve(parsed, config),)
    files = [planning.local_candidate(model) for model in found]
    if files[0].shape.pooling:
        raise UsageError(
            f"{found[0].ref} embeds or ranks texts; it writes no answers that could be measured."
        )
    try:
        plan = planning.decide(found[0].id, files, machine, config, planning.wish(config))
    except DoesNotFitError as error:
        error.hint = f"{error.hint} Fewer streams (--concurrency) or shorter prompts need less.".strip()
        raise
    left_out = tuple(_left_out(load, plan))
    if len(left_out) == len(load.streams):
        raise UsageError(f"Nothing can be measured: {left_out[0].why}")
    model = next(model for model in found if str(model.path) == plan.candidate.file)
    return Bench(config, load, model, plan, left_out, machine)


def _with_room(config: Config, load: Load) -> Config:
    settings = config.settings
    n_slots = settings.slots or max(load.streams)
    n_ctx = settings.ctx or load.n_ctx(is_shared=settings.kv_layout != "split")
    return replace(config, settings=replace(settings, slots=n_slots, ctx=n_ctx))


def _left_out(load: Load, plan: sizing.Plan) -> Iterator[LeftOut]:
    """The streams that would wait for each other, or be set back, in place of running at once."""
    for n in load.streams:
        n_tokens = n * load.n_per_stream if plan.load.kv_layout == "shared" else load.n_per_stream
        if n > plan.load.n_slots:
            yield LeftOut(n, f"{n} streams need {n} slots, and the settings ask for {plan.load.n_slots}.")
        elif n_tokens > plan.load.n_ctx:
            who = "1 stream needs" if n == 1 else f"{n} streams need"
            asked = f"and the settings ask for {plan.load.n_ctx:,}"
            yield LeftOut(n, f"{who} a context of {n_tokens:,} tokens, {asked}.")


async def run(bench: Bench, note: Note = lambda text: None) -> Report:
    """Load the model, warm up, measure, unload. `note` gets a line for each step, and one with its result, so
    that who breaks off has what was measured until then.

    Raises EngineError and what else loading and answering raise.
    """
    left_out = {entry.streams for entry in bench.left_out}
    streams = [n for n in bench.load.streams if n not in left_out]
    runs: list[Run] = []
    async with _loaded(bench) as (model, memory):
        note(f"Loading {bench.model.ref}")
        prompts = Prompts(bench.plan.candidate.shape.n_vocab)
        await measure(model, prompts, _warm_up(bench.load), max(streams))
        await memory.look()
        begun, n_done = time.monotonic(), 0
        for index, n in enumerate(streams):
            n_left = sum(map(_n_answers, streams[index:]))
            rest = time_left(time.monotonic() - begun, n_done=n_done, n_left=n_left)
            note(f"Measuring {n} stream{'s' if n > 1 else ''}{rest}")
            made = await measure(model, prompts, bench.load, n)
            runs.append(made)
            n_done += _n_answers(n)
            first = f"first text after {made.ttft_p50 * 1000:,.0f} ms"
            note(f"{made.tokens_per_s_total:,.1f} tokens a second in all, {first}")
            await memory.look()
    return Report(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=bench.model.ref,
        plan=bench.plan,
        runs=tuple(runs),
        left_out=bench.left_out,
        memory=tuple(memory.entries()),
        library=library_version(),
        nemolocal=__version__,
        hardware=bench.hardware,
    )


def time_left(seconds: float, *, n_done: int, n_left: int) -> str:
    """How long the answers that are left may take, by those that are done in so many seconds; "" below a
    minute. Many at a time take less than one after another, so it is the most."""
    left_s = seconds / n_done * n_left if n_done else 0.0
    return f", at most about {units.span_of_time(left_s)} for the rest" if left_s >= 60 else ""


def _warm_up(load: Load) -> Load:
    """A short load, so that no measured answer waits for what is made on first use."""
    return replace(load, n_prompt=min(load.n_prompt, 64), n_new=min(load.n_new, 8))


def library_version() -> str:
    """The name and version of what runs the models."""
    try:
        return f"{LIBRARY} {metadata.version(LIBRARY)}"
    except metadata.PackageNotFoundError:  # unpacked by hand somewhere
        return f"{LIBRARY} of an unknown version"


# Measuring ---------------------------------------------------------------------------------------


class Prompts:
    """Prompts of random tokens, none of which begins like another. From the middle of the vocabulary, since
    control tokens stand at its ends."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = range(n_vocab // 8, max(n_vocab // 2, n_vocab // 8 + 1))
        self._rng = random.Random(0)
        self._n_made = 0

    def next(self, n_tokens: int) -> list[int]:
        ids = self._rng.choices(self._ids, k=n_tokens)
        ids[0] = self._ids[self._n_made % len(self._ids)]
        self._n_made += 1
        return ids


@dataclass(frozen=True, slots=True)
class _Answer:
    """When things came, in seconds of `time.perf_counter`."""

    asked: float
    first: float
    last: float
    n_prompt: int
    n_new: int

    @property
    def speed(self) -> float:
        """Tokens per second after the first text; 0 where all came at once."""
        return (self.n_new - 1) / (self.last - self.first) if self.last > self.first else 0.0


def _n_answers(n_streams: int) -> int:
    """A single stream is measured several times over."""
    return N_ROUNDS_ALONE if n_streams == 1 else n_streams


async def measure(model: TextModel, prompts: Prompts, load: Load, n_streams: int) -> Run:
    """One number of streams: all ask at the same moment."""
    rounds = []
    for _ in range(_n_answers(n_streams) // n_streams):
        asked = [prompts.next(load.n_prompt) for _ in range(n_streams)]
        rounds.append(await _all_at_once(_answer(model, prompt, load.n_new) for prompt in asked))
    answers = [answer for of_round in rounds for answer in of_round]
    waits = [answer.first - answer.asked for answer in answers]
    return Run(
        streams=n_streams,
        prompt_tokens=load.n_prompt,
        new_tokens=load.n_new,
        ttft_p50=statistics.median(waits),
        ttft_max=max(waits),
        prompt_tokens_per_s=statistics.median(map(_reading_speed, rounds)),
        tokens_per_s_stream=statistics.median(answer.speed for answer in answers),
        tokens_per_s_decode=statistics.median(sum(a.speed for a in of_round) for of_round in rounds),
        tokens_per_s_total=statistics.median(map(_total_speed, rounds)),
        n_short=sum(answer.n_new != load.n_new for answer in answers),
    )


async def _all_at_once(answers: Iterable[Coroutine[Any, Any, _Answer]]) -> list[_Answer]:
    """Every answer, or what the first one that fails raises, with the others ended."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(model: TextModel, prompt: list[int], n_new: int) -> _Answer:
    sampling = SamplingParams(ignore_eos=True)
    params = GenerationParams(sampling, max_tokens=n_new, reuse_cache=False)
    asked = time.perf_counter()
    first = last = 0.0
    async with aclosing(model.complete(prompt, params)) as stream:
        async for item in stream:
            if isinstance(item, Delta):
                last = time.perf_counter()
                first = first or last
            elif isinstance(item, Finish):
                now = time.perf_counter()  # stands in where nothing that was said is text
                usage = item.usage
                return _Answer(asked, first or now, last or now, usage.prompt_tokens, usage.completion_tokens)
    raise AssertionError("a stream ended without its last item")


def _reading_speed(answers: list[_Answer]) -> float:
    seconds = max(a.first for a in answers) - min(a.asked for a in answers)
    return sum(a.n_prompt for a in answers) / max(seconds, 1e-9)


def _total_speed(answers: list[_Answer]) -> float:
    seconds = max(a.last for a in answers) - min(a.asked for a in answers)
    return sum(a.n_new for a in answers) / max(seconds, 1e-9)


# The loaded model and its memory -----------------------------------------------------------------


class Memory:
    """Watches what the engine's process takes. `look` is called between the runs."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._engine: EngineClient | None = None
        self._taken: dict[str, int] = {}

    async def start_engine(
        self, spec: LoadSpec, log_path: Path, on_progress: Callable[[float], None]
    ) -> EngineClient:
        """Starts the engine as the service would, and keeps hold of it."""
        self._engine = await EngineClient.start(spec, log_path, on_progress)
        return self._engine

    async def look(self) -> None:
        if self._engine and self._engine.pid:
            self._note("ram", psutil.Process(self._engine.pid).memory_info().rss)
        if self._bench.plan.placement.gpus and not self._bench.config.settings.hardware:
            now = await asyncio.to_thread(hardware.survey, self._bench.config)
            free_bytes = {gpu.uuid: gpu.free_bytes for gpu in now.gpus if gpu.state == "ok"}
            for gpu in self._bench.plan.placement.gpus:
                if gpu.uuid in free_bytes:
                    self._note(gpu.uuid, gpu.free_bytes - free_bytes[gpu.uuid])

    def _note(self, id: str, n_bytes: int) -> None:
        self._taken[id] = max(n_bytes, self._taken.get(id, 0))

    def entries(self) -> Iterator[DeviceMemory]:
        """Each GPU of the plan, then the RAM."""
        placement = self._bench.plan.placement
        for gpu, share in zip(placement.gpus, placement.shares, strict=True):
            yield DeviceMemory(gpu.uuid, gpu.name, share.total_bytes, self._taken.get(gpu.uuid))
        yield DeviceMemory("ram", "RAM", placement.host.total_bytes, self._taken.get("ram"))


@asynccontextmanager
async def _loaded(bench: Bench) -> AsyncIterator[tuple[TextModel, Memory]]:
    """The model, to be loaded by its first request just as it was planned, and unloaded in the end."""
    memory = Memory(bench)
    service = Service(bench.config, detect=lambda: bench.hardware, start_engine=memory.start_engine)
    try:
        yield service.admit(str(bench.model.path)), memory
    finally:
        await service.close()
