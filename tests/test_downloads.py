"""Downloads beside everything else: what each is at, and what becomes of it when it is paused or fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.config import Config
from nemolocal.downloads import N_AT_ONCE, Downloads
from nemolocal.errors import BeingFetchedError
from nemolocal.models import begun, store, transfer, upkeep
from tests import fake_hub, synthetic
from tests.fake_hub import FakeHub

REPO = "acme/Demo-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    data = synthetic.write_tiny(tmp_path / "tiny.gguf").read_bytes()
    with fake_hub.serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        served.add(REPO, {f"Demo-{quant}.gguf": data for quant in ("Q4_0", "Q5_0", "Q8_0", "F16")})
        yield served


@pytest.fixture
def arrived() -> list[str]:
    return []


@pytest.fixture
def downloads(hub: FakeHub, arrived: list[str]) -> Iterator[Downloads]:
    made = Downloads(config.load(), on_done=arrived.append)
    yield made
    hub.release.set()
    made.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def state(downloads: Downloads, quant: str) -> str:
    found = downloads.get(ref(quant))
    return found.state if found else "none"


def ref(quant: str) -> str:
    return f"hf:{REPO}:{quant}"


def partials() -> list[Path]:
    return store.partials(config.load().models_dir, REPO)


def test_one_arrives_and_is_told_of(downloads: Downloads, arrived: list[str]) -> None:
    downloads.start(ref("Q4_0"))
    until(lambda: state(downloads, "Q4_0") == "done")
    until(lambda: arrived == [ref("Q4_0")])
    found = downloads.get(ref("Q4_0"))
    assert found
    assert found.done_bytes == found.total_bytes > 0
    assert found.left_s is None
    assert [model.quant for model in store.list_models(config.load())] == ["Q4_0"]


def test_paused_ones_keep_what_came_and_go_on_from_there(hub: FakeHub, downloads: Downloads) -> None:
    hub.stall_after = 70_000
    downloads.start(ref("Q4_0"))
    until(lambda: (downloads.get(ref("Q4_0")) or downloads.all()[0]).done_bytes > 0)
    downloads.pause(ref("Q4_0"))
    assert state(downloads, "Q4_0") == "paused"
    (partial,) = partials()
    n_before = partial.stat().st_size
    assert n_before > 0
    hub.stall_after = None
    hub.release.set()
    downloads.start(ref("Q4_0"))
    until(lambda: state(downloads, "Q4_0") == "done")
    assert any(r.headers.get("Range", "").startswith("bytes=") for r in hub.transfers()[1:])


def test_a_cancelled_one_leaves_nothing(hub: FakeHub, downloads: Downloads) -> None:
    hub.stall_after = 70_000
    downloads.start(ref("Q4_0"))
    until(lambda: bool(partials()))
    downloads.cancel(ref("Q4_0"))
    assert downloads.all() == ()
    assert partials() == []
    downloads.cancel(ref("Q8_0"))  # of which nothing was ever here


def test_a_failed_one_says_why_and_can_be_tried_again(hub: FakeHub, downloads: Downloads) -> None:
    hub.repos[REPO].is_gated = True
    downloads.start(ref("Q4_0"))
    until(lambda: state(downloads, "Q4_0") == "failed")
    found = downloads.get(ref("Q4_0"))
    assert found
    assert "terms" in found.problem
    assert "\n" not in found.problem
    hub.repos[REPO].is_gated = False
    downloads.start(ref("Q4_0"))
    until(lambda: state(downloads, "Q4_0") == "done")


def test_a_few_at_a_time_in_their_order(hub: FakeHub, downloads: Downloads) -> None:
    hub.stall_after = 70_000
    quants = ("Q4_0", "Q5_0", "Q8_0", "F16")
    for quant in quants:
        downloads.start(ref(quant))
        downloads.start(ref(quant))  # once is enough
    until(lambda: [each.state for each in downloads.all()].count("running") == N_AT_ONCE)
    assert [each.state for each in downloads.all()] == ["running", "running", "waiting", "waiting"]
    downloads.pause(ref("Q4_0"))
    until(lambda: state(downloads, "Q8_0") == "running")
    hub.stall_after = None
    hub.release.set()
    downloads.start(ref("Q4_0"))
    until(lambda: all(each.state == "done" for each in downloads.all()))


def test_two_references_to_one_file_are_one_download(hub: FakeHub, downloads: Downloads) -> None:
    by_file = f"hf:{REPO}:Demo-Q4_0.gguf"
    hub.stall_after = 70_000
    downloads.start(ref("Q4_0"))
    downloads.start(by_file)
    assert [each.ref for each in downloads.all()] == [ref("Q4_0")]
    assert downloads.get(by_file) == downloads.get(ref("Q4_0"))
    downloads.start(f"hf:{REPO}:Demo-Q5_0.gguf")
    assert len(downloads.all()) == 2
    downloads.pause(by_file)
    assert state(downloads, "Q4_0") == "paused"
    downloads.cancel(by_file)
    assert [each.ref for each in downloads.all()] == [f"hf:{REPO}:Demo-Q5_0.gguf"]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("hf:a/B:Q4_0", "hf:A/b:q4_0", True),
        ("hf:a/B:Q4_0", "hf:a/B:Q4_1", False),
        ("hf:a/B:x-00002-of-00003.gguf", "hf:a/B:x-00001-of-00003.gguf", True),
        ("hf:a/B:x-Q4_0.gguf", "hf:a/B:y-Q4_0.gguf", False),
        ("hf:a/B:mmproj-F16.gguf", "hf:a/B:F16", False),
        ("hf:a/B", "hf:a/B", True),
        ("hf:a/B", "hf:a/B:Q4_0", False),
        ("nemotron-3-nano-4b:Q4_K_M", "hf:unsloth/NVIDIA-Nemotron-3-Nano-4B-GGUF:Q4_K_M", True),
        ("nemotron-3-nano-4b:Q4_K_M", "nemotron-3-nano-4b:Q8_0", False),
        ("http://a/b", "http://a/b", False),
        ("/a/b.gguf", "hf:a/B:Q4_0", False),
    ],
)
def test_which_references_mean_one_file(one: str, other: str, is_same: bool) -> None:
    assert begun.is_same(one, other) is is_same
    assert begun.is_same(other, one) is is_same


def test_to_cancel_one_leaves_the_others_of_its_repository(hub: FakeHub, downloads: Downloads) -> None:
    hub.stall_after = 70_000
    downloads.start(ref("Q5_0"))
    until(lambda: len(partials()) == 1)
    downloads.start(f"hf:{REPO}")  # whichever of its files is the usual one
    downloads.pause(ref("Q5_0"))
    until(lambda: len(partials()) == 2)
    downloads.cancel(f"hf:{REPO}")
    assert [path.name[:9] for path in partials()] == ["Demo-Q5_0"]
    assert state(downloads, "Q5_0") == "paused"


def test_what_another_program_fetches_is_left_alone(downloads: Downloads) -> None:
    root = config.load().models_dir
    target = store.target_path(root, REPO, "Demo-Q4_0.gguf")
    target.parent.mkdir(parents=True)
    partial = target.with_name(f"{target.name}.0123abcd.partial")
    partial.write_bytes(b"x")
    downloads.find_begun()
    with transfer.locked(target, root, note=print, stop=threading.Event()):
        with pytest.raises(BeingFetchedError, match="is being fetched"):
            downloads.cancel(downloads.all()[0].ref)
        assert partial.exists()
        downloads.start(ref("Q4_0"))  # waits for the other
        until(lambda: "being fetched" in (downloads.get(ref("Q4_0")) or downloads.all()[0]).note)
        downloads.cancel(ref("Q4_0"))  # nothing of what is there is its own
        assert partial.exists()


def test_one_that_is_asked_for_while_it_is_cancelled_begins_anew(
    hub: FakeHub, downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stall_after = 70_000
    downloads.start(ref("Q4_0"))
    until(lambda: bool(partials()))
    hub.stall_after = None
    removed = upkeep.remove_begun

    def remove(ref: str, config: Config) -> upkeep.Removed:
        downloads.start(ref)
        assert downloads.all() == ()
        return removed(ref, config)

    monkeypatch.setattr(upkeep, "remove_begun", remove)
    downloads.cancel(ref("Q4_0"))
    until(lambda: state(downloads, "Q4_0") == "done")


def test_an_error_in_what_follows_keeps_nobody_waiting(hub: FakeHub) -> None:
    def follow(ref: str) -> None:
        raise OSError("the disk is gone")

    downloads = Downloads(config.load(), on_done=follow)
    for quant in ("Q4_0", "Q5_0", "Q8_0", "F16"):
        downloads.start(ref(quant))
    until(lambda: all(each.state == "done" for each in downloads.all()))
    downloads.close()


def test_odd_names_of_others_are_passed_over(downloads: Downloads) -> None:
    folder = config.load().models_dir / "acme" / "Demo-GGUF"
    folder.mkdir(parents=True)
    for name in ("con.gguf", " x.gguf", "a:b.gguf", "x.gguf", "plain"):
        (folder / f"{name}.0123abcd.partial").write_bytes(b"x")
    (folder / ".gguf.partial").mkdir()
    downloads.start("no\nreference")
    until(lambda: downloads.all()[0].state == "failed")
    downloads.find_begun()
    assert [each.ref for each in downloads.all()[1:]] == [f"hf:{REPO}:x.gguf"]


def test_the_speed_is_that_of_the_last_seconds(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, arrived: list[str]
) -> None:
    now = 0.0
    gate = threading.Event()
    seen = []

    def pull(ref: str, config: object, *, progress: Callable[[int, int], None], **_: object) -> None:
        nonlocal now
        for done in (0, 100, 200, 1200):
            progress(done, 2200)
            seen.append(downloads.get(ref))
            now += 1.0 if done < 200 else 10.0
        gate.set()

    monkeypatch.setattr("nemolocal.downloads.download.pull", pull)
    downloads = Downloads(config.load(), clock=lambda: now)
    downloads.start("m")
    assert gate.wait(10)
    assert [each.bytes_per_s for each in seen if each] == [0.0, 100.0, 100.0, 0.0]
    assert seen[2]
    assert seen[2].left_s == 20.0
    downloads.close()
