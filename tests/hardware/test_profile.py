"""Hardware profiles, and machines of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemolocal import config, hardware
from nemolocal.errors import ConfigError
from nemolocal.hardware import host
from nemolocal.models import catalog, sizing

FOLDER = Path(__file__).parents[1] / "hardware_profiles"
PROFILE = """
[[gpu]]
name = "RTX 4090"
uuid = "GPU-1"
compute_capability = "8.9"
total_bytes = 24_000_000_000
free_bytes = 23_000_000_000

[ram]
total_bytes = 64_000_000_000
available_bytes = 60_000_000_000

[cpu]
name = "Ryzen"
physical_cores = 16
features = ["avx2"]

[disk]
free_bytes = 1_000_000
"""


def test_profile_replaces_detection(tmp_path: Path) -> None:
    file = tmp_path / "desk.toml"
    file.write_text(PROFILE)
    found = hardware.survey(config.load({"hardware": str(file)}))
    assert found == hardware.Hardware(
        mode="gpu",
        reason="Described by desk.toml, not detected.",
        gpus=(hardware.Gpu(0, "GPU-1", "RTX 4090", "8.9", 24_000_000_000, 23_000_000_000),),
        cpu=hardware.Cpu("Ryzen", 16, ("avx2",)),
        ram=hardware.Ram(64_000_000_000, 60_000_000_000),
        disk_free_bytes=1_000_000,
    )


def test_profile_of_gpus_alone_takes_the_rest_from_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    file.write_text('[[gpu]]\nname = "A"\ntotal_bytes = 100\n[[gpu]]\nname = "B"\ntotal_bytes = 200\n')
    found = hardware.load_profile(file, models_dir=tmp_path)
    assert [(g.index, g.uuid, g.free_bytes) for g in found.gpus] == [
        (0, "GPU-profile-0", 100),
        (1, "GPU-profile-1", 200),
    ]
    assert found.cpu == host.read_cpu()
    assert found.ram.total_bytes == host.read_ram().total_bytes
    assert found.disk_free_bytes > 0


def test_profile_without_gpus_is_a_cpu_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text("[ram]\ntotal_bytes = 8\n[cpu]\nphysical_cores = 4\n")
    found = hardware.load_profile(file)
    assert (found.mode, found.gpus) == ("cpu", ())
    assert (found.ram.available_bytes, found.cpu.physical_cores) == (8, 4)


def test_profile_of_a_gpu_that_is_in_use_or_cannot_be_used() -> None:
    (busy,) = hardware.load_profile(FOLDER / "rtx-3090-in-use.toml").gpus
    assert busy.holders[0] == hardware.Holder(4711, "python3 (main.py)", 12 << 30)
    assert (busy.driver, busy.driver_cuda) == ("580.95.05", "13.0")
    found = hardware.load_profile(FOLDER / "rtx-4080-cpu-engine.toml")
    assert (found.mode, found.gpus[0].state, found.gpus[0].free_bytes) == ("cpu", "unused", 16_321_000_000)
    assert found.warnings == (found.gpus[0].problem,)


def test_slices_are_numbered_as_the_gpu_that_they_are_of(tmp_path: Path) -> None:
    file = tmp_path / "slices.toml"
    card, part = (
        '[[gpu]]\nname = "A"\ntotal_bytes = 9\n',
        '[[gpu]]\nname = "B"\ntotal_bytes = 2\nis_slice = true\n',
    )
    file.write_text(card + card + part + part + card)
    found = hardware.load_profile(file).gpus
    assert [gpu.index for gpu in found] == [0, 1, 1, 1, 2]
    assert len({gpu.uuid for gpu in found}) == 5
    file.write_text(part)
    assert hardware.load_profile(file).gpus[0].index == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus = 1", "unknown key 'gpus'"),
        ("gpu = 1", "gpu is not a list"),
        ("gpu = [1]", "gpu 0 is not a table"),
        ("[[gpu]]\ntotal_bytes = 1", "gpu 0 has no name"),
        ('[[gpu]]\nname = "A"', "gpu 0 has no total_bytes"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nvram = 2', "unknown key 'vram'"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = "24 GB"', "total_bytes = '24 GB' is not a whole number"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = -1', "total_bytes = -1"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = true', "total_bytes = True"),
        ("[[gpu]]\nname = 4090\ntotal_bytes = 1", "name = 4090 is not text"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nfree_bytes = 2', "more than total_bytes"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nholders = ["X"]', "is not a list of tables"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\n[[gpu.holders]]\npid = 1', "holder has no name"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\n[[gpu.holders]]\nvram = 1', "unknown key 'vram'"),
        ('[[gpu]]\nname = "A"\ntotal_bytes = 1\nstate = "tired"', "state 'tired' is not one of ok, unused"),
        (
            '[[gpu]]\nname = "A"\ntotal_bytes = 1\nuuid = "GPU-a"\n'
            '[[gpu]]\nname = "B"\ntotal_bytes = 2\nuuid = "gpu-A"',
            "two GPUs of the uuid",
        ),
        ("ram = 1", "ram is not a table"),
        ("[ram]\navailable_bytes = 1", "ram has no total_bytes"),
        ("[ram]\ntotal_bytes = 1\navailable_bytes = 2", "more than total_bytes"),
        ('[cpu]\nname = "A"', "cpu has no physical_cores"),
        ("[cpu]\nphysical_cores = 1\nfeatures = [1]", "a list of texts"),
        ("[[gpu", "TOML"),
        ("x = '\udcff'", "TOML"),
    ],
)
def test_wrong_profiles(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        hardware.load_profile(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hardware profile at"):
        hardware.load_profile(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Cannot read"):
        hardware.load_profile(tmp_path)


PROFILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_machine_gets_a_plan_that_it_can_hold(path: Path) -> None:
    machine = hardware.load_profile(path)
    model = catalog.load().get("nemotron-3-nano-4b")
    assert model
    files = [sizing.Candidate(row.quant, row.quant, row.bytes, model.shape(row)) for row in model.files]
    made = sizing.plan(model.id, files, machine)
    assert {gpu.state for gpu in made.placement.gpus} <= {"ok"}
    assert bool(made.placement.gpus) == (machine.mode == "gpu")
    assert made.placement.ram_bytes <= machine.ram.available_bytes
    for gpu, share in zip(made.placement.gpus, made.placement.shares, strict=True):
        assert share.total_bytes <= gpu.free_bytes
    if any(gpu.is_slice for gpu in machine.gpus):
        assert [gpu.uuid[:4] for gpu in made.placement.gpus] == ["MIG-"]
