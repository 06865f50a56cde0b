"""The Models tab without a browser: what its handlers answer, and that nothing in it is taken for HTML."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from nemolocal import shelf
from nemolocal.downloads import Download
from nemolocal.errors import EngineError
from nemolocal.hardware import Hardware, Holder, Sample
from nemolocal.models import begun, catalog, store
from nemolocal.models.download import Choice
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.models.overview import ListedFile
from nemolocal.models.proposal import Proposal
from nemolocal.service import LoadedModel, Status
from nemolocal.shelf import Repo, Shelf
from nemolocal.ui import (
    app,
    hardware_view,
    load_fields,
    models_view,
    now_view,
    problems,
    start,
    start_view,
)
from nemolocal.ui.load_fields import AS_PLANNED, Fields, fields_of
from nemolocal.ui.models import Desk
from nemolocal.ui.models_sight import Look
from nemolocal.ui.works import Work, Works
from tests import fake_hub, synthetic
from tests.fake_hub import FakeHub
from tests.fakes import FakeService
from tests.profiles import machine

DESK = machine(("NVIDIA GeForce RTX 3060", 12))
NOTHING = [None, None, AS_PLANNED, AS_PLANNED, AS_PLANNED, None, "", "", "", None]
EVIL = '<img src=x onerror="window.__x=1">'


@pytest.fixture
def service() -> Iterator[FakeService]:
    made = FakeService()
    made.shelf = Shelf(made.config, detect=lambda: DESK)
    yield made
    made.shelf.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    with fake_hub.serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        data = synthetic.write_tiny(tmp_path / "tiny.gguf").read_bytes()
        served.add("acme/Demo-GGUF", {"Demo-Q8_0.gguf": data, "Demo-Q4_0.gguf": data})
        yield served


def press(act: str, ref: str) -> str:
    return json.dumps({"act": act, "ref": ref, "at": 1})


PAGE: Any = SimpleNamespace(session_hash="page")


async def pressed(
    desk: Desk, act: str, ref: str, look: Look, fields: list[Any] | None = None
) -> tuple[Look, list[Any]]:
    """The look after a button was pressed, and the other values that it gives last: list, detail, files, now,
    notice, picker and fields."""
    last: list[Any] = []
    async for values in desk.press(PAGE, press(act, ref), look, *(fields or NOTHING)):
        last = values
    return last[0], last[1:]


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_the_list_shows_what_fits_and_can_be_narrowed(service: FakeService) -> None:
    desk = Desk(service, Works())
    whole = desk.sight.listed(Look())
    assert whole.count('class="entry"') == len(catalog.load().models)
    for grade in ("green", "amber", "red"):
        assert f'class="dot {grade}"' in whole
    fitting = desk.sight.listed(Look(shown="fits"))
    assert 'class="dot red"' not in fitting
    assert "SmolLM2" in fitting
    assert "No model of the list" in desk.sight.listed(Look(shown="here"))
    look, coders = desk.find("nemotron code", "all", Look())
    assert look.words == "nemotron code"
    assert 0 < coders.count('class="entry"') < whole.count('class="entry"')
    assert "\n" not in whole


@pytest.mark.anyio
async def test_a_chosen_model_is_shown_with_its_plan_and_files(service: FakeService) -> None:
    desk = Desk(service, Works())
    look, (_, detail, files, _, said, _, *fields) = await pressed(
        desk, "open", "nemotron-3-nano-30b-a3b", Look()
    )
    assert look.ref == "nemotron-3-nano-30b-a3b"
    assert fields == NOTHING
    assert said == ""
    for words in ("With limits", "experts in RAM", "weights", "margin", "tokens a second"):
        assert words in detail
    for words in ("fits best", 'data-act="download"', 'class="dot amber"'):
        assert words in files
    longer, _, _ = desk.redraw(look, 262_144, *NOTHING[1:])
    assert "262,144 tokens, as asked for" in longer
    look, (_, smaller, *_) = await pressed(desk, "file", "nemotron-3-nano-30b-a3b:IQ4_XS", look)
    assert "IQ4_XS, " in smaller
    look, (_, again, *_) = await pressed(desk, "file", "nemotron-3-nano-30b-a3b:IQ4_XS", look)
    assert again == detail
    whole_70b = [131_072, *NOTHING[1:5], 81, *NOTHING[6:]]
    too_much, of_70b, _ = desk.redraw(replace(look, ref="llama-3.1-nemotron-70b"), *whole_70b)
    assert "Does not fit" in too_much
    assert 'class="dot red"' in of_70b


@pytest.mark.anyio
async def test_a_licence_is_accepted_before_the_download(service: FakeService) -> None:
    desk, ref = Desk(service, Works()), "nemotron-3-nano-4b:Q4_K_M"
    look, (_, _, files, *_) = await pressed(desk, "download", ref, Look("nemotron-3-nano-4b"))
    assert look.asking == f"download {ref}"
    assert "Accept and download" in files
    assert service.shelf.downloads.all() == ()
    look, (_, _, files, *_) = await pressed(desk, "no", ref, look)
    assert look.asking == ""
    assert "Accept" not in files
    same = "hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q8_0"  # the same model by its repository
    look, _ = await pressed(desk, "download", same, Look())
    assert look.asking == f"download {same}"


@pytest.mark.anyio
async def test_a_repository_of_the_hub_from_search_to_delete(hub: FakeHub, service: FakeService) -> None:
    desk = Desk(service, Works())
    waiting, (look, found) = desk.find_on_hub("demo", Look())
    assert "Asking the hub" in waiting[1]
    assert 'data-ref="hf:acme/Demo-GGUF"' in found
    assert "Q8_0" in found
    look, (_, detail, files, *_) = await pressed(desk, "open", "hf:acme/Demo-GGUF", look)
    assert "licence: mit" in detail
    assert "Q8_0" in files
    assert files.count('class="dot ') == 2
    n_asked = len(hub.requests)
    detail, *_ = desk.redraw(look, 96, *NOTHING[1:])
    assert "as asked for" in detail
    assert len(hub.requests) == n_asked  # whoever changes a field asks nobody anew
    ref = "hf:acme/Demo-GGUF:Q8_0"
    look, _ = await pressed(desk, "download", ref, look)
    await until(lambda: (service.shelf.downloads.get(ref) or Download(ref)).state == "done")
    (model,) = store.list_models(service.config)
    assert 'data-act="load"' in desk.redraw(look, *NOTHING)[1]
    assert "is here now" in desk.sight.now(look)
    look, (_, _, files, *_) = await pressed(desk, "delete", model.ref, look)
    assert "Delete it?" in files
    assert store.list_models(service.config)
    await pressed(desk, "delete-yes", model.ref, look)
    await until(lambda: desk.works.all() == ())
    assert store.list_models(service.config) == ()
    hub.status = 503
    (*_, (_, found)) = desk.find_on_hub("nemotron 4b", look)
    assert "in trouble" in found
    assert 'data-ref="nemotron-3-nano-4b"' in found  # what the catalogue has for the words stays


@pytest.mark.anyio
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_hub_that_refuses_stops_nothing_that_is_shown(
    hub: FakeHub, service: FakeService, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    desk, ref = Desk(service, Works()), "hf:acme/Demo-GGUF:Q8_0"
    look, (_, detail, files, *_) = await pressed(desk, "open", "hf:acme/Demo-GGUF", Look())
    hub.stall_after = 70_000
    await pressed(desk, "download", ref, look)
    await until(lambda: (service.shelf.downloads.get(ref) or Download(ref)).done_bytes > 0)
    hub.status = status
    monkeypatch.setattr(shelf, "ASK_EVERY_S", 0.0)
    seen, _, detail, files, now = await desk.refresh(PAGE, look, (), *NOTHING)
    assert "licence: mit" in detail  # as it was before
    assert "This is what it held" in detail
    assert "Q4_0" in files
    assert "70 kB" in now
    *_, files, now = await desk.refresh(PAGE, look, seen, *NOTHING)
    assert "Q4_0" in files
    assert "70 kB" in now
    unknown = Look("hf:acme/Unknown-GGUF")
    seen, _, detail, _, now = await desk.refresh(PAGE, unknown, (), *NOTHING)
    assert "notice-line" in detail
    for values in (NOTHING, [1.5, *NOTHING[1:]]):
        *_, now = await desk.refresh(PAGE, unknown, seen, *values)
        assert "70 kB" in now
    look, (_, _, _, now, said, *_) = await pressed(desk, "pause", ref, unknown)
    assert "paused" in now
    assert said == ""  # it was paused; that the hub says nothing of the other is no news
    hub.release.set()


def test_repositories_that_other_threads_forget(
    hub: FakeHub, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shared(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            return iter(["acme/Gone-GGUF", *super().__iter__()])

    monkeypatch.setattr(service.shelf, "_repos", Shared())
    monkeypatch.setattr(shelf, "N_REPOS_KEPT", 1)
    assert service.shelf.repo("hf:acme/Demo-GGUF").id == "acme/Demo-GGUF"


@pytest.mark.anyio
async def test_one_page_never_waits_for_another(service: FakeService) -> None:
    waiting = [fn for fn in app.build(service).fns.values() if fn.queue]
    assert len(waiting) > 10
    for fn in waiting:
        assert isinstance(fn.concurrency_limit, int), fn.name
        assert fn.concurrency_limit > 1, fn.name


def test_the_tab_opens_whatever_lies_in_the_folder(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(config: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(begun, "all_of", look)
    found, *_, said = Desk(service, Works()).open(Look(), *NOTHING)
    assert 'class="entry"' in found
    assert said == ""


def test_a_repository_can_be_named_outright(hub: FakeHub, service: FakeService) -> None:
    desk = Desk(service, Works())
    for words in ("acme/Other", "hf:acme/Other:Q8_0", "https://hub.example/acme/Other/tree/main"):
        (*_, (_, found)) = desk.find_on_hub(words, Look())
        assert 'data-ref="hf:acme/Other"' in found


def test_a_file_is_added_where_it_lies(service: FakeService, tmp_path: Path) -> None:
    desk = Desk(service, Works())
    path = synthetic.write_tiny(tmp_path / "mine.gguf")
    _, _, look, found, _, files, said = desk.import_(f'"{path}"', Look())
    assert (look.ref, said) == ("mine", "")
    assert "mine" in found
    assert 'data-act="load"' in files
    assert "Forget" in files  # its file is not ours to delete
    for wrong in ("", str(tmp_path / "none.gguf"), EVIL):
        said = desk.import_(wrong, look)[1]  # beside the button
        assert "notice-line" in said
        assert "<img" not in said


def test_settings_are_kept_for_a_model_and_shown_again(service: FakeService) -> None:
    desk, look = Desk(service, Works()), Look("nemotron-3-nano-4b")
    wished = [4096, 2, "q8_0", "speed", AS_PLANNED, None, "0", "off", "", 300]
    detail, _, said = desk.keep(look, *wished)
    assert "Kept" in said
    assert "4,096 tokens, as asked for" in detail
    kept = service.shelf.kept_settings(look.ref)
    assert (kept["ctx"], kept["margin_mib"]) == (4096, 300)
    assert "0.3 GiB stay free" in detail
    assert fields_of(kept) == wished
    assert "4,096 tokens, as asked for" in desk.sight.chosen(look, None)[0]
    desk.forget(look)
    assert service.shelf.kept_settings(look.ref) == {}
    assert "whole number" in desk.keep(look, 1.5, *NOTHING[1:])[2]
    assert "not one of" in desk.redraw(look, None, None, "f64", *NOTHING[3:])[0]
    assert "No model is chosen" in desk.keep(Look(), *NOTHING)[2]


@pytest.mark.anyio
async def test_settings_are_kept_by_the_line_of_the_list(hub: FakeHub, service: FakeService) -> None:
    desk, shelf = Desk(service, Works()), service.shelf
    desk.keep(Look("hf:acme/Demo-GGUF"), 96, *NOTHING[1:])
    assert shelf.kept_settings("hf:acme/Demo-GGUF") == {"ctx": 96}
    desk.keep(Look("hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF"), 512, *NOTHING[1:])
    assert shelf.kept_settings("nemotron-3-nano-4b") == {"ctx": 512}
    shelf.downloads.start("hf:acme/Demo-GGUF:Q4_0")
    await until(lambda: shelf.downloads.all()[0].state == "done")
    shelf.keep_settings("hf:acme/Demo-GGUF:Q4_0", {"ctx": 64})  # by the command line, for one file
    _, values = await pressed(desk, "open", "hf:acme/Demo-GGUF", Look())
    assert values[6] == 64
    desk.forget(Look("hf:acme/Demo-GGUF"))
    assert shelf.kept_settings("hf:acme/Demo-GGUF:Q4_0") == {}


@pytest.mark.anyio
async def test_what_is_here_needs_no_hub(hub: FakeHub, service: FakeService) -> None:
    desk, ref = Desk(service, Works()), "hf:acme/Demo-GGUF"
    service.shelf.downloads.start(f"{ref}:Q4_0")
    await until(lambda: service.shelf.downloads.all()[0].state == "done")
    hub.status = 503
    look, (_, detail, files, *_) = await pressed(desk, "open", ref, Look())
    assert "in trouble" in detail
    assert "weights" in detail
    assert 'data-act="load"' in files
    n_asked = len(hub.requests)
    assert "as asked for" in desk.redraw(look, 96, *NOTHING[1:])[0]
    assert len(hub.requests) == n_asked  # a hub that is not there is not asked at each stroke


@pytest.mark.anyio
async def test_loads_go_on_beside_the_page_and_say_how_they_ended(service: FakeService) -> None:
    desk, ref, began = Desk(service, Works()), service.model.id, asyncio.Event()
    held = asyncio.Event()

    async def load(ref: str) -> None:
        began.set()
        await held.wait()
        raise EngineError(f"{EVIL} does not fit.")

    service.load = load  # type: ignore[method-assign, assignment]
    look, (_, _, _, now, said, chosen, *_) = await pressed(desk, "load", ref, Look())
    await asyncio.wait_for(began.wait(), 5)
    assert said == ""
    assert chosen.value == ref  # the chat's picker shows it too
    assert "loading" in now
    service.current = Status("loading", model=ref, progress=0.4)
    assert "loading 40%" in desk.sight.now(look)
    seen, *_ = await desk.refresh(PAGE, look, (), *NOTHING)
    assert (await desk.refresh(PAGE, look, seen, *NOTHING))[0] != seen  # nothing new but figures
    held.set()
    await until(lambda: bool(desk.works.all()[0].problem))
    new, *_, now = await desk.refresh(PAGE, look, seen, *NOTHING)
    assert new != seen
    assert "does not fit" in now
    assert "<img" not in now
    await pressed(desk, "clear", ref, look)
    assert desk.sight.now(look) == ""


@pytest.mark.anyio
async def test_what_is_loaded_can_be_unloaded(service: FakeService) -> None:
    desk = Desk(service, Works())
    service.in_memory = [LoadedModel("m", "RTX 4090", 8192, 4, 3 << 30, 0, 1, None, ref="m")]
    now = desk.sight.now(Look())
    assert "loaded on RTX 4090 · 8,192 tokens · 3.0 GiB · 1 answer at present" in now
    await pressed(desk, "unload", "m", Look())
    await until(lambda: service.in_memory == [])


@pytest.mark.anyio
async def test_an_older_press_does_not_undo_a_newer_one(hub: FakeHub, service: FakeService) -> None:
    desk = Desk(service, Works())
    older = desk.press(PAGE, press("open", "hf:acme/Demo-GGUF"), Look(), *NOTHING)
    look, *_ = await anext(older)  # it asks the hub
    look, _ = await pressed(desk, "open", "nemotron-3-nano-4b", look)
    assert look.ref == "nemotron-3-nano-4b"
    assert [values async for values in older] == []


@pytest.mark.anyio
async def test_what_earlier_runs_began_is_offered(hub: FakeHub, service: FakeService) -> None:
    folder = service.config.models_dir / "acme" / "Demo-GGUF"
    folder.mkdir(parents=True)
    (folder / "Demo-Q8_0.gguf.0123456789abcdef.partial").write_bytes(b"x" * 2_000_000)
    listed = service.config.models_dir / "unsloth" / "NVIDIA-Nemotron-3-Nano-4B-GGUF"
    listed.mkdir(parents=True)
    (listed / "NVIDIA-Nemotron-3-Nano-4B-Q4_K_M.gguf.0123.partial").write_bytes(b"x" * 1_000_000)
    assert [found.ref for found in begun.all_of(service.config)] == [
        "hf:acme/Demo-GGUF:Demo-Q8_0.gguf",
        "nemotron-3-nano-4b:Q4_K_M",
    ]
    desk = Desk(service, Works())
    *_, now, _ = desk.open(Look(), *NOTHING)
    assert "paused, 2 MB have arrived" in now
    assert "NVIDIA Nemotron 3 Nano 4B Q4_K_M" in now
    assert "paused at 0%, 1 MB of" in now
    ref = "hf:acme/Demo-GGUF:Demo-Q8_0.gguf"
    look, (_, _, _, now, *_) = await pressed(desk, "cancel", ref, Look())
    assert "Throw away 2 MB?" in now
    await pressed(desk, "cancel-yes", ref, look)
    assert not folder.exists()
    assert [each.ref for each in service.shelf.downloads.all()] == ["nemotron-3-nano-4b:Q4_K_M"]
    next(listed.iterdir()).unlink()  # taken away by someone else
    *_, now, _ = desk.open(Look(), *NOTHING)
    assert now == ""


@pytest.mark.anyio
async def test_a_cancelled_download_never_takes_a_whole_model(hub: FakeHub, service: FakeService) -> None:
    ref = "hf:acme/Demo-GGUF:Q8_0"
    service.shelf.downloads.start(ref)
    await until(lambda: service.shelf.downloads.all()[0].state == "done")
    desk = Desk(service, Works())
    await pressed(desk, "cancel-yes", ref, Look())  # the row is closed
    await pressed(desk, "cancel-yes", ref, Look())
    assert service.shelf.downloads.all() == ()
    assert [model.ref for model in store.list_models(service.config)] == [ref]


def test_fields_left_empty_are_left_to_the_plan() -> None:
    assert Fields(*NOTHING).values() == {}
    assert Fields(gpu=" 0, 1 ,", lora="a.gguf:0.5").values() == {"gpu": ["0", "1"], "lora": ["a.gguf:0.5"]}


def test_nothing_from_elsewhere_is_taken_for_html() -> None:
    hit = SearchHit(repo=EVIL, n_downloads=1, n_likes=1, is_gated=False, quants=(EVIL,) * 6)
    choice = Choice(quant=EVIL, ref=EVIL, bytes=1, is_approximate=False)
    offered = Repo(EVIL, licence=EVIL, is_gated=True, note=EVIL, choices=(choice,))
    failed = Download(EVIL, "failed", problem=EVIL)
    fit = Fit("red", EVIL, EVIL)
    listed = ListedFile(quant=EVIL, ref=EVIL, bytes=1, state="remote")
    shown = models_view.Shown(
        fits={EVIL: fit}, downloads={EVIL: failed}, asking=f"download {EVIL}", licence=EVIL
    )
    loaded = LoadedModel(EVIL, EVIL, 1, 1, 0, 0, 0, None, ref=EVIL)
    work = Work("load", EVIL, EVIL, EVIL)
    hostile = replace(
        DESK,
        reason=EVIL,
        warnings=(EVIL,),
        gpus=(
            replace(DESK.gpus[0], name=EVIL, holders=(Holder(1, EVIL, 1),)),
            replace(DESK.gpus[0], state="lost", problem=EVIL),
        ),
        cpu=replace(DESK.cpu, name=EVIL, features=(EVIL,)),
    )
    drawn = [
        models_view.hits([hit], EVIL),
        models_view.hits([], EVIL),
        models_view.repo_head(offered),
        models_view.plan(fit, DESK),
        models_view.files([listed], shown, repo=EVIL, companions=(EVIL,)),
        models_view.files([listed], replace(shown, asking="", works={EVIL: work})),
        now_view.now([loaded], [work], [failed], progress={EVIL: 0.5}),
        hardware_view.machine(hostile, (), now_s=0.0),
    ]
    for html in drawn:
        assert "<img" not in html
        assert "\n" not in html
        assert "&lt;img" in html


def test_a_first_start_proposes_what_runs_well(service: FakeService) -> None:
    found = service.shelf.proposal()
    assert found
    assert found.fit.grade == "green"
    assert found.ref.startswith("nemotron-3-nano-4b:")
    told = start_view.proposal(found, None)
    assert "would run well here, on the GPU alone: the file Q5_K_M, 3.1 GB to download, about" in told
    assert "tokens a second (forecast)" in told
    assert 'class="dot green"' in told
    running = Download(found.ref, "running", 1_000_000_000, 3_000_000_000, 50e6)
    assert "1.0 GB of 3.0 GB, 50 MB/s, 40 s left" in start_view.proposal(found, running)
    assert 'data-act="load"' in start_view.proposal(found, Download(found.ref, "done"))
    assert "No model is here yet" in start_view.proposal(found, None)
    assert 'data-ref="starter"' in start_view.proposal(found, None)
    small = Download("starter", "done")
    assert "starter model answers meanwhile" in start_view.proposal(found, None, small)
    assert 'data-ref="starter"' not in start_view.proposal(found, None, small)
    service.config.models_dir.mkdir(parents=True)
    synthetic.write_tiny(service.config.models_dir / "mine.gguf")
    assert service.shelf.proposal() is None  # there is something else already


def proposed(service: FakeService, machine: Hardware) -> Proposal | None:
    """By a program that has just begun."""
    shelf = Shelf(service.config, detect=lambda: machine)
    try:
        return shelf.proposal()
    finally:
        shelf.close()


def begin(service: FakeService, found: Proposal, n_bytes: int) -> None:
    """Let so many bytes of what is proposed have arrived; the file is sparse."""
    listed = catalog.load().get(found.ref.partition(":")[0])
    assert listed
    row = listed.file(found.ref.partition(":")[2])
    target = store.target_path(service.config.models_dir, row.repo, row.names[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.0123abcd.partial").open("wb") as stream:
        stream.truncate(n_bytes)


def test_what_has_no_room_on_the_disk_is_not_proposed(service: FakeService) -> None:
    assert proposed(service, replace(DESK, disk_free_bytes=1_000_000_000)) is None


def test_what_is_proposed_stays_while_it_is_fetched(service: FakeService) -> None:
    """Its bytes take the room on the disk that it needs."""
    free_bytes = 4_000_000_000
    service.shelf = Shelf(
        service.config, detect=lambda: replace(DESK, disk_free_bytes=free_bytes, warnings=(str(free_bytes),))
    )
    found = service.shelf.proposal()
    assert found
    begin(service, found, 2_500_000_000)
    free_bytes -= 2_500_000_000
    service.shelf._looked = None
    assert service.shelf.proposal() == found
    again = proposed(service, replace(DESK, disk_free_bytes=free_bytes))  # after a restart
    assert again
    assert again.ref == found.ref
    assert proposed(service, replace(DESK, disk_free_bytes=500_000_000)) is None
    service.shelf.close()


def test_what_has_begun_is_proposed_before_what_would_be_chosen_now(service: FakeService) -> None:
    found = proposed(service, DESK)
    assert found
    begin(service, found, 1_000)
    larger = machine(("NVIDIA GeForce RTX 5090", 32))
    assert (proposed(service, larger) or found).ref == found.ref
    (service.config.models_dir / "x").mkdir()
    for path in service.config.models_dir.rglob("*.partial"):
        path.unlink()
    assert (proposed(service, larger) or found).ref != found.ref


def test_without_a_gpu_only_what_leaves_room_is_proposed(service: FakeService) -> None:
    bare = machine()
    for available_gib, is_proposed in ((24, True), (10, True), (5, False), (3, False)):
        ram = replace(bare.ram, total_bytes=32 << 30, available_bytes=available_gib << 30)
        found = proposed(service, replace(bare, ram=ram))
        assert bool(found) is is_proposed, available_gib
        if found and found.fit.plan:
            assert found.fit.plan.placement.ram_bytes <= ram.available_bytes / 2
            told = start_view.proposal(found, None)
            assert 'class="dot amber"' in told
            assert "would run here with limits, on the CPU: the file" in told


def test_a_failed_download_is_tried_again_and_a_paused_one_gone_on_with(service: FakeService) -> None:
    found = service.shelf.proposal()
    assert found
    failed, paused = Download(found.ref, "failed", problem="Gone."), Download(found.ref, "paused")
    for drawn in (start_view.proposal(found, failed), now_view.download_acts(failed, asking="")):
        assert "Try again" in drawn
        assert "Go on" not in drawn
    assert "Go on" in start_view.proposal(found, paused)


@pytest.mark.anyio
async def test_what_was_proposed_is_offered_once_it_has_arrived(service: FakeService) -> None:
    desk = start.Desk(service, Works())
    found, html, timer = desk.open()
    assert timer.active
    assert "would run well here" in html
    repo = service.config.models_dir / "unsloth" / "NVIDIA-Nemotron-3-Nano-4B-GGUF"
    repo.mkdir(parents=True)
    synthetic.write_tiny(repo / f"NVIDIA-Nemotron-3-Nano-4B-{found.fit.quant}.gguf")
    found, html, _ = desk.open()  # a reloaded page
    assert "is here now" in html
    await desk.load(press("load", found.ref), found)
    assert "loading" in desk.press(press("load", found.ref), found)[1]
    await until(lambda: desk.works.all() == ())
    service.in_memory = [LoadedModel("m", "GPU", 1, 1, 0, 0, 0, None, ref=found.ref)]
    assert desk.refresh(found, html) == [None, ""]
    assert desk.open()[0] is None
    service.in_memory = []
    assert desk.open()[0] is not None
    assert desk.press(press("dismiss", ""), found)[0] is None
    assert desk.open()[0] is None


def test_the_same_memory_is_called_and_coloured_alike_on_both_tabs(service: FakeService) -> None:
    """Where no driver tells who holds it, too."""
    gpu = replace(DESK.gpus[0], free_bytes=DESK.gpus[0].total_bytes - (5 << 30), holders=())
    ram = replace(DESK.ram, available_bytes=DESK.ram.total_bytes - (9 << 30))
    host = replace(DESK, gpus=(gpu,), ram=ram)
    ours = (replace(gpu, free_bytes=gpu.free_bytes + (3 << 30)),)
    bare = replace(host, gpus=ours, ram=replace(ram, available_bytes=ram.available_bytes + (1 << 30)))
    made = Shelf(service.config, detect=lambda: host, bare=lambda machine: bare)
    drawn = hardware_view.machine(host, (), now_s=0.0, ours=made.held(host))
    planned = models_view.plan(made.fit("nemotron-3-nano-4b"), made.hardware())
    made.close()
    for each in (drawn, planned):
        for n_gib in (2, 8):
            assert f'<i class="others"></i>other programs <b>{n_gib}.0 GiB</b>' in each
    assert '<i class="weights"></i>NemoLocal <b>3.0 GiB</b>' in drawn
    assert '<i class="weights"></i>NemoLocal <b>1.0 GiB</b>' in drawn
    for word in ("used", "system"):
        assert word not in drawn


def test_figures_have_one_unit_each(service: FakeService) -> None:
    host = hardware_view.machine(replace(DESK, disk_free_bytes=68_600_000_000), (), now_s=0.0)
    assert "68.6 GB free on the disk" in host
    for id, size in (
        ("starter", "135 M parameters"),
        ("nemotron-3-nano-30b-a3b", "31.6 B parameters, 3.6 B"),
    ):
        shown, files = Desk(service, Works()).sight.chosen(Look(id), None)
        assert size in shown
        assert "GiB" in shown
        assert "MiB" not in shown + files
        assert " GB" not in shown
        assert "GiB" not in files


def test_what_is_to_be_confirmed_has_a_row_of_its_own() -> None:
    file = ListedFile(quant="Q8_0", ref="m:Q8_0", bytes=1, state="remote")
    paused = Download("m:Q8_0", "paused", 2_000_000, 3_000_000)
    for asking in ("download m:Q8_0", "cancel m:Q8_0", "delete m:Q8_0"):
        shown = models_view.Shown(asking=asking, licence="X", downloads={"m:Q8_0": paused})
        drawn = models_view.files([file], shown)
        row, _, question = drawn.partition('<td colspan="5">')
        assert row.endswith('<td class="acts"></td></tr><tr class="asked">')
        assert question.count("<button") == 2
        assert f'data-act="{asking.split()[0]}-yes"' in question


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("8 tokens; --ctx takes more, up to 9.", "8 tokens; “Context” takes more, up to 9."),
        ("Reboot, or plan with --gpu-layers 0.", "Reboot, or plan with “Layers on the GPUs” 0."),
        (
            "It would fit without --ctx, --kv and --gpu.",
            "It would fit without “Context”, “KV cache” and “GPUs”.",
        ),
        ("Without --kv-layout split.", "Without --kv-layout split."),  # of which the page has no field
        ("See `nemolocal hardware` for the fix.", "See the Hardware tab for the fix."),
        ("mine.gguf: damaged.", "mine.gguf: damaged."),
    ],
)
def test_the_page_says_things_in_its_own_words(line: str, told: str) -> None:
    assert problems.in_page_words(line) == told
    shown = problems.as_problem(EngineError(line))
    assert shown.startswith(told)
    assert ("under “How it is loaded”" in shown) == ("“" in told)
    red = models_view.plan(Fit("red", "does not fit", line), DESK)
    assert told in red


@pytest.mark.anyio  # gradio wants a loop while it draws
async def test_every_field_of_the_page_is_named_like_its_flag() -> None:
    with gr.Blocks():
        labels = {field.label for field in load_fields.draw()}
    assert labels == set(problems.FIELDS.values())
    assert {name.replace("-", "_") for name in problems.FIELDS} == {each.name for each in fields(Fields)}


def test_hardware_shows_who_holds_memory_and_nothing_stale() -> None:
    held = (Holder(7, "NemoLocal", 6 << 30), Holder(8, "game", 2 << 30))
    gpu = replace(DESK.gpus[0], free_bytes=3 << 30, holders=held, load=0.5, temperature_c=61)
    host = replace(DESK, gpus=(gpu,))
    drawn = hardware_view.machine(host, (), now_s=1000.0)
    assert "NemoLocal <b>6.0 GiB" in drawn
    assert "other programs <b>3.0 GiB" in drawn  # with what the driver and the screen take, as in plans
    assert "61 °C" in drawn
    assert "<svg" not in drawn
    seen = replace(gpu, free_bytes=10 << 30, load=0.9)
    samples = [Sample(at_s, (seen,), 0.25, 1 << 30, 4 << 30) for at_s in (960.0, 962.0, 990.0, 998.0)]
    fresh = hardware_view.machine(host, samples, now_s=1000.0)
    assert "90%" in fresh
    assert "free <b>10.0 GiB" in fresh
    assert fresh.count("<polyline") == 4 * 2  # four plots, each with a gap
    old = hardware_view.machine(host, samples, now_s=1100.0)
    assert "free <b>3.0 GiB" in old
    assert "not known" in old
    assert "90%" not in old
    gone = replace(gpu, state="lost", problem="It has fallen off the bus.", free_bytes=0, total_bytes=0)
    lost = hardware_view.machine(replace(DESK, gpus=(gone,)), (), now_s=1000.0)
    assert "fallen off the bus" in lost
    assert "GiB used" not in lost
