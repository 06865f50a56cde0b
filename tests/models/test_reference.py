"""What people write for a model, and what the file names of repositories say."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemolocal.errors import UsageError
from nemolocal.models import reference
from nemolocal.models.reference import HubRef, NamedRef, PathRef


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("starter", NamedRef("starter")),
        (" nemotron-3-nano-4b:Q4_K_M ", NamedRef("nemotron-3-nano-4b", "Q4_K_M")),
        ("nemotron-3.5-lightning-30b-a3b", NamedRef("nemotron-3.5-lightning-30b-a3b")),
        ("hf:acme/Demo-GGUF", HubRef("acme/Demo-GGUF")),
        ("HF:acme/Demo-GGUF:q8_0", HubRef("acme/Demo-GGUF", quant="q8_0")),
        ("hf:acme/Demo-GGUF:ud.q4-k-xl", HubRef("acme/Demo-GGUF", quant="UD-Q4_K_XL")),
        ("hf:acme/Demo-GGUF:Q8_0/Demo-1.gguf", HubRef("acme/Demo-GGUF", file="Q8_0/Demo-1.gguf")),
        ("models/a.gguf", PathRef(Path("models/a.gguf"))),
        ("/tmp/A.GGUF", PathRef(Path("/tmp/A.GGUF"))),
        ("C:\\models\\a.gguf", PathRef(Path("C:\\models\\a.gguf"))),
        ("big.gguf.part1of2", PathRef(Path("big.gguf.part1of2"))),
    ],
)
def test_parse(text: str, meant: object) -> None:
    assert reference.parse(text) == meant


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert reference.parse("~/a.gguf") == PathRef(tmp_path / "a.gguf")


@pytest.mark.parametrize("text", ["starter:Q4_1", "hf:a/b", "hf:a/b:Q4_0", "hf:a/b:x/c.gguf"])
def test_a_reference_prints_as_it_is_written(text: str) -> None:
    assert str(reference.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "models list"),
        ("a\nb", "models list"),
        (":Q4_0", "NAME:QUANT"),
        ("https://hub.example/acme/Demo", "hf:OWNER/REPO"),
        ("hf:acme", "hf:OWNER/REPO"),
        ("hf:../etc", "hf:OWNER/REPO"),
        ("hf:a/../b", "hf:OWNER/REPO"),
        ("hf:acme/..", "hf:OWNER/REPO"),
        ("hf:acme/con", "hf:OWNER/REPO"),
        ("hf:acme/Demo:../../x.gguf", "as the hub shows"),
        ("hf:acme/Demo:/etc/x.gguf", "as the hub shows"),
        ("./model.bin", ".gguf"),
        ("~/models", ".gguf"),
        ("~no-such-user/x.gguf", "whole path"),
        ("C:\\models\\a.bin", ".gguf"),
    ],
)
def test_what_can_never_be_a_model_is_refused_with_the_right_form(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        reference.parse(text)
    assert hint in str(caught.value)
    assert type(caught.value) is UsageError  # a fault of the reference, not of the settings
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Demo-Q4_K_M.gguf", "Q4_K_M"),
        ("nemotron-nano-9b-v2-q4_k_m.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Demo-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Demo-IQ2_XXS.gguf", "IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Demo-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("Demo-NVFP4.gguf", "NVFP4"),
        ("Demo-fp16.gguf", "F16"),
        ("BF16/Demo-00001-of-00003.gguf", "BF16"),
        ("Q8_0/Demo-Q4_0-00001-of-00002.gguf", "Q4_0"),
        ("Demo.q8-0.gguf", "Q8_0"),
        ("Demo-Q4KM.gguf", "Q4_K_M"),
        ("demo.ud.q4-k-xl.gguf", "UD-Q4_K_XL"),
        ("Demo-UD-IQ2_M.gguf", "UD-IQ2_M"),
        ("Demo-Q6_K_L.gguf", "Q6_K_L"),
        ("Demo-Q3_K_XL.gguf", "Q3_K_XL"),
        ("Demo.i1-IQ3_XS.gguf", "IQ3_XS"),
        ("demo-iq4-nl.gguf", "IQ4_NL"),
        ("Demo-IQ4_KSS.gguf", "IQ4_KSS"),
        ("Demo-mxfp4-moe.gguf", "MXFP4_MOE"),
        ("Demo-TQ1_0.gguf", "TQ1_0"),
        ("Demo-Q4_0_4_8.gguf", "Q4_0_4_8"),
        ("Demo-BF16-Q4_K_M.gguf", "Q4_K_M"),
        ("Demo-Q4_K_M-2.gguf", "Q4_K_M"),
        ("Demo-Q5-00001-of-00002.gguf", "Q5"),
        ("Demo.Q6_K.gguf.part1of2", "Q6_K"),
        ("Qwen3-Nemotron-32B.gguf", ""),
        ("best-of-breed.gguf", ""),
    ],
)
def test_quantization_from_a_file_name(name: str, quant: str) -> None:
    assert reference.quant_of(name) == quant


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mmproj-Demo-F16.gguf", "projector"),
        ("Demo.MMPROJ-f16.gguf", "projector"),
        ("mmproj/F16.gguf", "projector"),
        ("Demo.imatrix.gguf", "imatrix"),
        ("imatrix_unsloth.gguf", "imatrix"),
        ("mtp-Demo-Q4_0.gguf", "draft"),
        ("MTP/Demo-Q8_0.gguf", "draft"),
        ("Demo-draft-Q8_0.gguf", "draft"),
        ("Demo-EAGLE3-BF16.gguf", "draft"),
        ("Demo-DFlash-Q4_K_M.gguf", "draft"),
        ("Demo-lora-f16.gguf", "adapter"),
        ("Demo-lora.Q4_K_M.gguf", "model"),
        ("Demo-lora-merged-F16.gguf", "model"),
        ("ggml-vocab-llama-bpe.gguf", "other"),
        ("Demo-MTP-Q4_K_M.gguf", "model"),
        ("Demo-Q4_0.gguf", "model"),
        ("Draftsman-7B-Q4_0.gguf", "model"),
    ],
)
def test_files_that_are_no_models_are_told_apart(name: str, kind: str) -> None:
    assert reference.kind_of(name) == kind


def test_quantizations_of_one_model_have_one_name() -> None:
    names = ["UD-Q4_K_XL/Demo-7B-UD-Q4_K_XL-00001-of-00002.gguf", "demo_7B.Q8_0.gguf", "Demo-7b-iq4-nl.gguf"]
    assert {reference.name_of(name) for name in names} == {"demo-7b"}
    assert reference.name_of("Demo-8B.Q8_0.gguf") != "demo-7b"


def test_parts_become_one_model_whatever_their_order() -> None:
    names = [f"Q4_K_M/Demo-0000{i}-of-00003.gguf" for i in (3, 1, 2)]
    groups = reference.group_files(
        [*names, "Q8_0/Demo-00002-of-00002.gguf", "best-of-breed.gguf", "README.md"]
    )
    assert [group.first for group in groups] == [
        "Q4_K_M/Demo-00001-of-00003.gguf",
        "Q8_0/Demo-00001-of-00002.gguf",
        "best-of-breed.gguf",
    ]
    whole, broken, single = groups
    assert whole.names == tuple(sorted(names))
    assert whole.missing == ()
    assert broken.missing == ("Q8_0/Demo-00001-of-00002.gguf",)
    assert single.names == ("best-of-breed.gguf",)
    assert single.missing == ()


def test_a_part_number_beyond_the_count_is_a_plain_name() -> None:
    (group,) = reference.group_files(["Demo-00003-of-00002.gguf"])
    assert group.missing == ()


@pytest.mark.parametrize(
    "name",
    [
        "../x.gguf",
        "a/../../x.gguf",
        "/etc/x.gguf",
        "a//x.gguf",
        "a\\..\\x.gguf",
        "C:x.gguf",
        "a/.git/x.gguf",
        "a/nul.gguf",
        "COM1",
        "x.gguf.",
        "x.gguf ",
        "a\x00b.gguf",
        "a\u202ebgguf.exe",
        "x" * 201,
        "",
    ],
)
def test_file_names_that_could_leave_their_folder_or_hide(name: str) -> None:
    assert not reference.is_plain_path(name)


@pytest.mark.parametrize("name", ["Demo-Q4_0.gguf", "Q4_K_M/Demo (v2) ü+.gguf", "a/b/c@1,2=3.gguf"])
def test_file_names_that_are_fine(name: str) -> None:
    assert reference.is_plain_path(name)
