"""The service over real model files and an engine that only pretends."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nemolocal import config
from nemolocal.engine.client import EngineClient
from nemolocal.engine.messages import LoadSpec
from nemolocal.errors import (
    DoesNotFitError,
    EngineDiedError,
    EngineError,
    ModelFileError,
    ModelNotFoundError,
    TemplateError,
)
from nemolocal.models import catalog
from nemolocal.service import Service
from nemolocal.types import (
    Delta,
    Finish,
    GenerationParams,
    Message,
    Prompt,
    Started,
    StreamItem,
    Timings,
    Usage,
)
from tests import synthetic
from tests.profiles import machine

pytestmark = pytest.mark.anyio

HI = [Message("user", "Hi")]


class FakeEngine:
    """Loads at once and answers "yes". Keeps what it was started with and asked."""

    def __init__(self) -> None:
        self.specs: list[LoadSpec] = []
        self.prompts: list[Prompt] = []
        self.error: Exception | None = None  # of a load
        self.fault: Exception | None = None  # of a request
        self.template = synthetic.CHATML
        self.is_alive = True
        self.death: EngineDiedError | None = None
        self.pid: int | None = None

    async def start(
        self, spec: LoadSpec, log_path: Path, on_progress: Callable[[float], None]
    ) -> EngineClient:
        self.specs.append(spec)
        self.spec = spec
        on_progress(0.5)
        if self.error:
            raise self.error
        self.is_alive = True
        self.info = SimpleNamespace(
            chat_template=self.template,
            bos="",
            eos="<|im_end|>",
            control_tokens=("<|im_start|>", "<|im_end|>"),
            n_ctx=spec.n_ctx,
            held=(),
        )
        return cast(EngineClient, self)

    async def generate(self, prompt: Prompt, params: GenerationParams) -> AsyncGenerator[StreamItem, None]:
        self.prompts.append(prompt)
        yield Started(3)
        yield Delta("yes")
        if self.fault:
            raise self.fault
        yield Finish("stop", Usage(3, 1, cached_tokens=2), Timings(0.5, 1.0, 2.0))

    async def close(self) -> None:
        self.is_alive = False


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def put(tiny: Path, *names: str) -> None:
    """Copies of the tiny model in the models folder."""
    folder = config.load().models_dir
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny, folder / name)


def service(engine: FakeEngine, **flags: Any) -> Service:
    return Service(config.load(flags), detect=machine, start_engine=engine.start)


async def text_of(made: Service, ref: str | None) -> str:
    items = [item async for item in made.find_model(ref).chat(HI, GenerationParams())]
    assert isinstance(items[-1], Finish)
    return "".join(item.text for item in items if isinstance(item, Delta))


async def test_model_is_loaded_by_the_first_request_that_names_it(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf", "two.gguf")
    made = service(engine, ctx=512, slots=3, threads=5, queue=7)
    assert made.status().state == "idle"
    assert [card.id for card in made.list_models()] == ["one", "two"]
    assert await text_of(made, "two") == await text_of(made, "two") == await text_of(made, None) == "yes"
    [spec] = engine.specs
    assert Path(spec.path).name == "two.gguf"
    assert (spec.n_ctx, spec.n_slots, spec.n_threads, spec.n_queue) == (512, 3, 5, 7)
    status = made.status()
    assert (status.state, status.model, status.device, status.n_ctx) == ("ready", "two", "CPU", 512)
    assert [(card.id, card.is_loaded) for card in made.list_models()] == [("two", True), ("one", False)]
    assert await text_of(made, "one") == "yes"
    assert made.status().model == "one"
    await made.close()
    assert made.status().state == "idle"


async def test_prompt_goes_through_the_models_template(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    await text_of(made, "one")
    assert "".join(segment.text for segment in engine.prompts[0]) == (  # type: ignore[union-attr]
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    async for _ in made.find_model("one").complete([1, 2], GenerationParams()):
        pass
    assert engine.prompts[1] == (1, 2)


async def test_models_that_are_not_named_or_not_there(engine: FakeEngine, tiny: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model on this machine"):
        service(engine).find_model(None)
    put(tiny, "one.gguf", "two.gguf")
    with pytest.raises(ModelNotFoundError, match="named, and several are here: one, two"):
        service(engine).find_model(None)
    assert service(engine, model="one").find_model(None).id == "one"
    with pytest.raises(ModelNotFoundError):
        service(engine).find_model("three")


async def test_files_by_path_are_for_whoever_runs_the_program(engine: FakeEngine, tiny: Path) -> None:
    made = service(engine)
    with pytest.raises(ModelNotFoundError):
        made.find_model(str(tiny))
    with pytest.raises(ModelFileError):
        made.admit(str(tiny.with_name("missing.gguf")))
    assert made.admit(str(tiny)).id == "tiny"
    assert [card.id for card in made.list_models()] == ["tiny"]
    assert await text_of(made, "tiny") == await text_of(made, str(tiny)) == "yes"


async def test_start_loads_in_the_background(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    await made.start(["one"])
    assert made.status().state == "loading"
    assert await text_of(made, "one") == "yes"
    assert len(engine.specs) == 1
    await made.close()
    with pytest.raises(ModelNotFoundError):
        await service(engine).start(["nope"])


async def test_load_that_fails_is_said_and_tried_again(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    engine.error = EngineError("The file is odd.")
    with pytest.raises(EngineError):
        await text_of(made, "one")
    assert (made.status().state, made.status().problem) == ("failed", "The file is odd.")
    engine.error = None
    assert await text_of(made, "one") == "yes"
    assert made.status().state == "ready"


async def test_broken_template_leaves_no_engine_behind(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    engine.template = "{% for %}"
    with pytest.raises(TemplateError):
        await text_of(made, "one")
    assert not engine.is_alive
    assert made.status().state == "failed"


async def test_dead_engine_is_started_again(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    await text_of(made, "one")
    engine.is_alive = False
    assert made.status().state != "ready"
    assert await text_of(made, "one") == "yes"
    assert len(engine.specs) == 2


async def test_nothing_is_loaded_on_a_failed_plan(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = Service(config.load(), detect=lambda: machine(ram_gib=0.1), start_engine=engine.start)
    with pytest.raises(DoesNotFitError):
        await text_of(made, "one")
    assert engine.specs == []


async def test_what_does_not_fit_names_a_smaller_model_of_its_family(engine: FakeEngine) -> None:
    listed = catalog.load().get("nemotron-3-nano-30b-a3b")
    assert listed is not None
    assert listed.dimensions is not None
    name = "unsloth/Nemotron-3-Nano-30B-A3B-GGUF/Nemotron-3-Nano-30B-A3B-Q8_0.gguf"
    path = config.load().models_dir / name
    path.parent.mkdir(parents=True)
    synthetic.write(path, listed.dimensions, weights="none", type_name="Q8_0", has_vocab=False)
    made = Service(config.load(), detect=lambda: machine(ram_gib=8), start_engine=engine.start)
    with pytest.raises(DoesNotFitError) as caught:
        await text_of(made, "nemotron-3-nano-30b-a3b")
    assert "nemotron-3-nano-4b is smaller, of the same family, and fits." in caught.value.hint


async def test_sampling_defaults(engine: FakeEngine, tiny: Path) -> None:
    """The makers' advice counts where the user has said nothing."""
    put(tiny, "unsloth/Nemotron-3-Nano-30B-A3B-GGUF/Nemotron-3-Nano-30B-A3B-Q4_K_M.gguf", "one.gguf")
    made = service(engine)
    assert made.sampling_defaults("one").temperature == 0.8
    advised = made.sampling_defaults("nemotron-3-nano-30b-a3b")
    assert (advised.temperature, advised.top_p) == (1.0, 1.0)
    chosen = service(engine, temperature=0.3).sampling_defaults("nemotron-3-nano-30b-a3b")
    assert (chosen.temperature, chosen.top_p) == (0.3, 1.0)


async def test_relative_path_at_start_and_in_the_settings(
    engine: FakeEngine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    made = service(engine)
    await made.start(["./tiny.gguf"])
    for _ in range(200):
        if made.status().state != "loading":
            break
        await asyncio.sleep(0.02)
    assert made.status().state == "ready"
    await made.close()
    made = service(engine, model="./tiny.gguf")
    await made.start()
    assert await text_of(made, None) == "yes"
    await made.close()


async def test_load_that_ends_unforeseen_is_no_longer_loading(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf")
    made = service(engine)
    engine.error = OSError("no more files")
    with pytest.raises(OSError, match="no more files"):
        await text_of(made, "one")
    assert (made.status().state, made.status().problem) == ("failed", "no more files")


async def test_totals(engine: FakeEngine, tiny: Path) -> None:
    put(tiny, "one.gguf", "two.gguf")
    made = service(engine)
    assert made.totals() == {}
    await text_of(made, "one")
    await text_of(made, "one")
    one = made.totals()["one"]
    assert (one.n_requests, one.n_loads, one.n_failures) == (2, 1, 0)
    assert (one.prompt_tokens, one.completion_tokens, one.cached_tokens) == (6, 2, 4)
    assert (one.queue_s, one.prompt_s, one.decode_s) == (1.0, 2.0, 4.0)
    stream = made.find_model("one").chat(HI, GenerationParams())
    await anext(stream)
    await stream.aclose()
    engine.fault = EngineError("no")
    with pytest.raises(EngineError):
        await text_of(made, "one")
    engine.error = EngineError("no")
    with pytest.raises(EngineError):
        await text_of(made, "two")
    totals = made.totals()
    assert (totals["one"].n_cancelled, totals["one"].n_failures, totals["one"].n_requests) == (1, 1, 2)
    assert (totals["two"].n_failed_loads, totals["two"].n_loads) == (1, 0)
    assert one.n_cancelled == 0  # what was handed out does not change
