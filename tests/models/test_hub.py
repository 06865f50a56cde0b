"""Asking the hub: what it says, and each way in which it does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nemolocal import config
from nemolocal.errors import (
    ConfigError,
    HubError,
    ModelNotFoundError,
    NemoLocalError,
    OfflineError,
    UsageError,
)
from nemolocal.models import hub as model_hub
from tests.fake_hub import FakeFile, FakeHub

GB = 10**9


def demo(hub: FakeHub) -> None:
    parts = {
        f"Q4_K_M/Demo-0000{i}-of-00003.gguf": FakeFile(bytes([i]), size)
        for i, size in ((3, 4 * GB), (1, 10 * GB), (2, 10 * GB))
    }
    hub.add(
        "acme/Demo-GGUF",
        {
            **parts,
            "Q8_0/Demo-00002-of-00002.gguf": b"x",
            "Demo-Q6_K.gguf": b"six",
            "Demo-Q6_K-v2.gguf": b"six again",
            "mmproj-Demo-F16.gguf": b"eyes",
            "Demo.imatrix.gguf": b"statistics",
            "mtp-Demo-Q4_0.gguf": b"draft",
            "../Demo-Q2_K.gguf": b"hostile",
            "README.md": b"hello",
        },
        licence="apache-2.0",
    )


def test_a_repository_is_listed_as_models(hub: FakeHub) -> None:
    demo(hub)
    repo = model_hub.fetch_repo("acme/Demo-GGUF", config.load())
    assert repo.licence == "apache-2.0"
    assert len(repo.revision) == 40
    assert [(m.quant, m.bytes) for m in repo.chat_models] == [
        ("Q4_K_M", 24 * GB),
        ("Q6_K", 9),
        ("Q6_K", 3),
        ("Q8_0", 1),
    ]
    assert {m.kind for m in repo.models} == {"model", "projector", "imatrix", "draft"}
    assert repo.refused == ("../Demo-Q2_K.gguf",)
    assert {m.first for m in repo.companions} == {
        "mmproj-Demo-F16.gguf",
        "Demo.imatrix.gguf",
        "mtp-Demo-Q4_0.gguf",
    }
    assert [m.n_parts for m in repo.chat_models] == [3, 1, 1, 2]
    assert [repo.ref(m) for m in repo.models] == [
        "hf:acme/Demo-GGUF:Demo-Q6_K-v2.gguf",
        "hf:acme/Demo-GGUF:Demo-Q6_K.gguf",
        "hf:acme/Demo-GGUF:Demo.imatrix.gguf",
        "hf:acme/Demo-GGUF:Q4_K_M",
        "hf:acme/Demo-GGUF:Q8_0",
        "hf:acme/Demo-GGUF:mmproj-Demo-F16.gguf",
        "hf:acme/Demo-GGUF:mtp-Demo-Q4_0.gguf",
    ]


def test_where_all_are_drafts_they_are_the_models(hub: FakeHub) -> None:
    hub.add("acme/Draft-GGUF", {"Demo-DRAFT-0.5B-Q4_0.gguf": b"1", "mmproj-F16.gguf": b"2"})
    repo = model_hub.fetch_repo("acme/Draft-GGUF", config.load())
    assert [m.first for m in repo.chat_models] == ["Demo-DRAFT-0.5B-Q4_0.gguf"]
    assert repo.choose(quant="Q4_0").bytes == 1
    assert [m.first for m in repo.companions] == ["mmproj-F16.gguf"]


def test_a_repository_that_was_renamed_or_is_written_otherwise(hub: FakeHub) -> None:
    demo(hub)
    hub.renamed["old/Demo"] = "acme/Demo-GGUF"
    for name in ("old/Demo", "Acme/demo-gguf"):
        assert model_hub.fetch_repo(name, config.load()).id == "acme/Demo-GGUF"


def test_a_repository_that_was_disabled(hub: FakeHub) -> None:
    hub.add("acme/Gone", {"a-Q4_0.gguf": b"1"}, is_disabled=True)
    with pytest.raises(model_hub.NotThereError, match=r"has disabled acme/Gone\."):
        model_hub.fetch_repo("acme/Gone", config.load())


def test_a_split_model_is_chosen_with_all_its_parts_in_order(hub: FakeHub) -> None:
    demo(hub)
    chosen = model_hub.fetch_repo("acme/Demo-GGUF", config.load()).choose(quant="q4_k_m")
    assert [file.name[-19:-5] for file in chosen.files] == [f"0000{i}-of-00003" for i in (1, 2, 3)]
    assert all(len(file.sha256) == 64 for file in chosen.files)
    assert chosen.first == "Q4_K_M/Demo-00001-of-00003.gguf"


def test_a_missing_part_is_named_before_anything_is_fetched(hub: FakeHub) -> None:
    demo(hub)
    repo = model_hub.fetch_repo("acme/Demo-GGUF", config.load())
    with pytest.raises(HubError, match=r"Demo-00001-of-00002\.gguf"):
        repo.choose(quant="Q8_0")


def test_two_files_of_one_quantization_need_the_file_s_name(hub: FakeHub) -> None:
    demo(hub)
    repo = model_hub.fetch_repo("acme/Demo-GGUF", config.load())
    with pytest.raises(UsageError, match=r"hf:acme/Demo-GGUF:Demo-Q6_K-v2\.gguf"):
        repo.choose(quant="Q6_K")
    assert repo.choose(file="Demo-Q6_K.gguf").bytes == 3
    with pytest.raises(ModelNotFoundError, match=r"Q4_K_M, Q6_K, Q8_0"):
        repo.choose(quant="IQ1_S")


def test_search(hub: FakeHub) -> None:
    demo(hub)
    hub.add("acme/Demo-Torch", {"model.safetensors": b"1"})
    hits = model_hub.search("demo", config.load())
    assert [(hit.repo, hit.updated, hit.n_downloads) for hit in hits] == [("acme/Demo-GGUF", "2026-08-03", 5)]
    assert hits[0].quants == ("Q6_K", "Q4_K_M", "Q8_0")
    assert model_hub.search("a", config.load(), limit=1)[0].repo == "acme/Demo-GGUF"
    assert "filter=gguf" in hub.requests[0].path


def test_the_token_goes_to_the_hub_and_opens_a_private_repository(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/Secret", {"a-Q4_0.gguf": b"x"}, is_private=True)
    with pytest.raises(HubError, match=r"no acme/Secret, or it is private.*HF_TOKEN"):
        model_hub.fetch_repo("acme/Secret", config.load())
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert model_hub.fetch_repo("acme/Secret", config.load()).id == "acme/Secret"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="refuses the token"):
        model_hub.fetch_repo("acme/Secret", config.load())


def test_nothing_else_is_asked_and_nothing_is_told_of_the_user(hub: FakeHub) -> None:
    demo(hub)
    model_hub.fetch_repo("acme/Demo-GGUF", config.load())
    (request,) = hub.requests
    assert request.path.lower() == "/api/models/acme/demo-gguf?blobs=true"
    agent = (
        request.headers["user-agent"] if "user-agent" in request.headers else request.headers["User-Agent"]
    )
    assert agent.startswith("nemolocal/")
    assert "agent/" not in agent
    assert "torch" not in agent


def test_the_hub_s_own_header_says_how_long_to_wait(hub: FakeHub) -> None:
    hub.status, hub.reset_after = 429, 55
    with pytest.raises(model_hub.RateLimitError, match=r"Wait 55 seconds.*HF_TOKEN"):
        model_hub.fetch_repo("acme/Demo-GGUF", config.load())


def test_search_by_what_was_quantized(hub: FakeHub) -> None:
    hub.add("beta/Other-GGUF", {"x-Q4_0.gguf": b"1"}, base="acme/Demo")
    hub.add("beta/Demo-GGUF", {"x-Q4_0.gguf": b"1"})
    assert [hit.repo for hit in model_hub.search("", config.load(), base="acme/Demo")] == ["beta/Other-GGUF"]


@pytest.mark.parametrize(
    ("status", "retry_after", "says"),
    [
        (429, 30, r"rate limit.*Wait 30 seconds"),
        (429, 0, r"rate limit.*Wait a few minutes"),
        (500, 0, r"in trouble \(status 500\)"),
        (404, 0, r"no acme/Demo-GGUF.*spelling"),
        (403, 0, r"gated.*/acme/Demo-GGUF.*HF_TOKEN"),
        (418, 0, r"refused acme/Demo-GGUF \(status 418\)"),
    ],
)
def test_each_refusal_has_its_own_line(hub: FakeHub, status: int, retry_after: int, says: str) -> None:
    hub.status, hub.retry_after = status, retry_after
    with pytest.raises(HubError, match=says) as caught:
        model_hub.fetch_repo("acme/Demo-GGUF", config.load())
    assert "\n" not in str(caught.value)


def test_a_page_in_place_of_an_answer(hub: FakeHub) -> None:
    demo(hub)
    hub.page = "<html>Please log in</html>"
    for ask in (lambda c: model_hub.fetch_repo("acme/Demo-GGUF", c), lambda c: model_hub.search("demo", c)):
        with pytest.raises(HubError, match=r"does not answer like a model hub.*log-in page"):
            ask(config.load())


@pytest.mark.parametrize("answer", ['{"id": "../../etc", "sha": "1"}', '{"id": "acme/Demo-GGUF"}', "[]", "3"])
def test_an_answer_that_no_hub_gives(hub: FakeHub, answer: str) -> None:
    demo(hub)
    hub.page = answer
    with pytest.raises(HubError, match="does not answer like a model hub"):
        model_hub.fetch_repo("acme/Demo-GGUF", config.load())


@pytest.mark.parametrize("address", ["hub.example", "ftp://hub.example"])
def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        model_hub.fetch_repo("acme/Demo", config.load())


def test_a_token_that_no_header_can_hold(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_gefährlich")
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        model_hub.fetch_repo("acme/Demo", config.load())
    assert "gefährlich" not in str(caught.value)
    assert hub.requests == []


def test_offline_means_that_no_connection_is_attempted(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    demo(hub)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("NEMOLOCAL_OFFLINE", "true")):
        monkeypatch.setenv(name, value)
        with pytest.raises(OfflineError, match="offline"):
            model_hub.fetch_repo("acme/Demo-GGUF", config.load())
        with pytest.raises(OfflineError, match="offline"):
            model_hub.search("demo", config.load())
        monkeypatch.delenv(name)
    assert hub.requests == []


def test_the_setting_of_the_moment_counts_not_that_of_the_import(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_hub.fetch_repo("acme/Demo-GGUF", config.load()).id == "acme/Demo-GGUF"


@contextmanager
def dead_ends() -> Iterator[dict[str, str]]:
    """Addresses where no hub is: one that refuses, one that accepts and says nothing, one without a name."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        yield {
            "refuses": f"http://127.0.0.1:{port}",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "nameless": "http://hub.invalid",
        }


@pytest.mark.parametrize("kind", ["refuses", "silent", "nameless"])
def test_a_hub_that_cannot_be_reached_is_one_line_soon(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(model_hub, "REQUEST_TIMEOUT_S", 0.3)
    with dead_ends() as addresses:
        monkeypatch.setenv("HF_ENDPOINT", addresses[kind])
        for ask in (lambda c: model_hub.fetch_repo("acme/Demo", c), lambda c: model_hub.search("demo", c)):
            with pytest.raises(OfflineError, match="cannot be reached") as caught:
                ask(config.load())
            assert addresses[kind] in str(caught.value)
            assert "\n" not in str(caught.value)


def test_a_name_server_that_never_answers_cannot_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_hub, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(20) or [])
    started = time.monotonic()
    with pytest.raises(OfflineError, match="cannot be reached"):
        model_hub.fetch_repo("acme/Demo", config.load())
    assert time.monotonic() - started < 10


def test_the_limits_keep_an_unknown_model_under_twenty_seconds() -> None:
    assert model_hub.REQUEST_TIMEOUT_S <= model_hub.ANSWER_TIMEOUT_S <= 16


def test_every_failure_is_one_of_ours(hub: FakeHub) -> None:
    demo(hub)
    for status in (400, 401, 402, 405, 410, 451, 502):
        hub.status = status
        with pytest.raises(NemoLocalError):
            model_hub.search("demo", config.load())
