"""The Models tab without a browser: what its handlers answer, and that nothing in it is taken for HTML."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemolocal.downloads import Download
from nemolocal.models import catalog, store
from nemolocal.models.download import Choice
from nemolocal.models.fits import Fit
from nemolocal.models.hub import SearchHit
from nemolocal.shelf import Repo, Shelf
from nemolocal.ui import hardware_view, models_view
from nemolocal.ui.models import AS_PLANNED, Desk, Fields, Look, fields_of
from tests import fake_hub, synthetic
from tests.fake_hub import FakeHub
from tests.fakes import FakeService
from tests.profiles import machine

DESK = machine(("NVIDIA GeForce RTX 3060", 12))
NOTHING = [None, None, AS_PLANNED, AS_PLANNED, AS_PLANNED, None, "", "", ""]
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


async def pressed(desk: Desk, act: str, ref: str, look: Look, fields: list[Any] | None = None) -> list[Any]:
    """The last values that a pressed button gives."""
    last: list[Any] = []
    async for values in desk.press(press(act, ref), look, *(fields or NOTHING)):
        last = values
    return last


def test_the_list_shows_what_fits_and_can_be_narrowed(service: FakeService) -> None:
    desk = Desk(service)
    whole = desk.listed(Look())
    assert whole.count('class="entry"') == len(catalog.load().models)
    for grade in ("green", "amber", "red"):
        assert f'class="dot {grade}"' in whole
    fitting = desk.listed(Look(shown="fits"))
    assert 'class="dot red"' not in fitting
    assert "SmolLM2" in fitting
    assert "No model of the list" in desk.listed(Look(shown="here"))
    look, coders = desk.find("nemotron code", "all", Look())
    assert look.words == "nemotron code"
    assert 0 < coders.count('class="entry"') < whole.count('class="entry"')
    assert "\n" not in whole


@pytest.mark.anyio
async def test_a_chosen_model_is_shown_with_its_plan_and_files(service: FakeService) -> None:
    desk = Desk(service)
    look, _, detail, said, *fields = await pressed(desk, "open", "nemotron-3-nano-30b-a3b", Look())
    assert look.ref == "nemotron-3-nano-30b-a3b"
    assert fields == NOTHING
    assert said == ""
    for words in (
        "experts in RAM",
        "weights",
        "margin",
        "tokens a second",
        "fits best",
        'data-act="download"',
    ):
        assert words in detail
    longer = desk.detail(look, 262_144, *NOTHING[1:])
    assert "262,144 tokens, as asked for" in longer
    assert "not a whole number" not in longer
    whole_70b = [131_072, *NOTHING[1:5], 81, *NOTHING[6:]]
    too_much = desk.detail(replace(look, ref="llama-3.1-nemotron-70b"), *whole_70b)
    assert "does not fit" in too_much


@pytest.mark.anyio
async def test_a_licence_is_accepted_before_the_download(service: FakeService) -> None:
    desk, ref = Desk(service), "nemotron-3-nano-4b:Q4_K_M"
    look, *_ = await pressed(desk, "download", ref, Look("nemotron-3-nano-4b"))
    assert look.asking == f"download {ref}"
    assert "Accept and download" in desk.detail(look)
    assert service.shelf.downloads.all() == ()
    look, *_ = await pressed(desk, "no", ref, look)
    assert look.asking == ""
    assert "Accept" not in desk.detail(look)


@pytest.mark.anyio
async def test_a_repository_of_the_hub_from_search_to_delete(hub: FakeHub, service: FakeService) -> None:
    desk = Desk(service)
    look, found = desk.find_on_hub("demo", Look())
    assert 'data-ref="hf:acme/Demo-GGUF"' in found
    assert "Q8_0" in found
    look, _, detail, *_ = await pressed(desk, "open", "hf:acme/Demo-GGUF", look)
    assert "Q8_0" in detail
    assert "licence: mit" in detail
    ref = "hf:acme/Demo-GGUF:Q8_0"
    look, *_ = await pressed(desk, "download", ref, look)
    downloads = service.shelf.downloads
    while (downloads.get(ref) or Download(ref)).state != "done":
        await asyncio.sleep(0.01)
    (model,) = store.list_models(service.config)
    assert model.ref in desk.detail(look)
    assert 'data-act="load"' in desk.detail(look)
    look, *_ = await pressed(desk, "delete", model.ref, look)
    assert "Delete it?" in desk.detail(look)
    assert store.list_models(service.config)
    await pressed(desk, "delete-yes", model.ref, look)
    assert store.list_models(service.config) == ()
    hub.status = 503
    assert "in trouble" in desk.find_on_hub("demo", look)[1]


def test_a_file_is_added_where_it_lies(service: FakeService, tmp_path: Path) -> None:
    desk = Desk(service)
    path = synthetic.write_tiny(tmp_path / "mine.gguf")
    _, look, found, detail, said = desk.import_(str(path), Look())
    assert (look.ref, said) == ("mine", "")
    assert "mine" in found
    assert 'data-act="load"' in detail
    for wrong in ("", str(tmp_path / "none.gguf"), EVIL):
        said = desk.import_(wrong, look)[-1]
        assert "notice-line" in said
        assert "<img" not in said


def test_settings_are_kept_for_a_model_and_shown_again(service: FakeService) -> None:
    desk, look = Desk(service), Look("nemotron-3-nano-4b")
    wished = [4096, 2, "q8_0", "speed", AS_PLANNED, None, "0", "off", ""]
    desk.keep(look, *wished)
    kept = service.shelf.kept_settings(look.ref)
    assert kept["ctx"] == 4096
    assert fields_of(kept) == wished
    assert "4,096 tokens, as asked for" in desk.detail(look)
    desk.forget(look)
    assert service.shelf.kept_settings(look.ref) == {}
    assert "whole number" in desk.keep(look, 1.5, *NOTHING[1:])[1]
    assert "not one of" in desk.detail(look, None, None, "f64", *NOTHING[3:])


def test_fields_left_empty_are_left_to_the_plan() -> None:
    assert Fields(*NOTHING).values() == {}
    assert Fields(gpu=" 0, 1 ,", lora="a.gguf:0.5").values() == {"gpu": ["0", "1"], "lora": ["a.gguf:0.5"]}


def test_nothing_from_elsewhere_is_taken_for_html() -> None:
    hit = SearchHit(repo=EVIL, n_downloads=1, n_likes=1, is_gated=False, quants=(EVIL,) * 6)
    choice = Choice(quant=EVIL, ref=EVIL, bytes=1, is_approximate=False)
    offered = Repo(EVIL, licence=EVIL, is_gated=True, note=EVIL, choices=(choice,))
    failed = Download(EVIL, "failed", problem=EVIL)
    fit = Fit("red", EVIL, EVIL)
    drawn = [
        models_view.hits([hit], EVIL),
        models_view.hits([], EVIL),
        models_view.repo(offered, fit, DESK, downloads={EVIL: failed}, here={}),
        hardware_view.machine(
            replace(
                DESK,
                reason=EVIL,
                warnings=(EVIL,),
                gpus=(replace(DESK.gpus[0], name=EVIL), replace(DESK.gpus[0], state="lost", problem=EVIL)),
                cpu=replace(DESK.cpu, name=EVIL, features=(EVIL,)),
            ),
            (),
        ),
    ]
    for html in drawn:
        assert "<img" not in html
        assert "\n" not in html
        assert "&lt;img" in html


def test_a_first_start_proposes_what_runs_well(service: FakeService, tmp_path: Path) -> None:
    found = service.shelf.proposal()
    assert found
    assert found.fit.grade == "green"
    assert found.ref.startswith("nemotron-3-nano-4b:")
    assert "3.1 GB to download" in models_view.proposal(found, None)
    running = Download(found.ref, "running", 1_000_000_000, 3_000_000_000, 50e6)
    assert "1.0 GB of 3.0 GB, 50 MB/s, 40 s left" in models_view.proposal(found, running)
    assert 'data-act="load"' in models_view.proposal(found, Download(found.ref, "done"))
    assert "No model is here yet" in models_view.proposal(found, None)
    assert 'data-ref="starter"' in models_view.proposal(found, None)
    small = Download("starter", "done")
    assert "starter model answers meanwhile" in models_view.proposal(found, None, small)
    assert 'data-ref="starter"' not in models_view.proposal(found, None, small)
    service.config.models_dir.mkdir(parents=True)
    synthetic.write_tiny(service.config.models_dir / "mine.gguf")
    assert service.shelf.proposal() is None  # there is something else already
