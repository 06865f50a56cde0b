"""The README's table of what runs where is what the plan says. `python -m tests.test_readme` writes it."""

from __future__ import annotations

from pathlib import Path

from nemolocal import config
from nemolocal.errors import DoesNotFitError
from nemolocal.hardware import Hardware
from nemolocal.models import planning
from tests.profiles import machine

README = Path(__file__).parent.parent / "README.md"
MARK = "<!-- fit table -->\n"
MACHINES = {
    "RTX 3060 12 GB": machine(("NVIDIA GeForce RTX 3060", 12)),
    "RTX 4060 Ti 16 GB": machine(("NVIDIA GeForce RTX 4060 Ti", 16)),
    "RTX 4090 24 GB": machine(("NVIDIA GeForce RTX 4090", 24), ram_gib=64),
    "RTX 5090 32 GB": machine(("NVIDIA GeForce RTX 5090", 32), ram_gib=64),
    "2 × RTX 3090 24 GB": machine(*[("NVIDIA GeForce RTX 3090", 24)] * 2, ram_gib=64),
    "RTX PRO 6000 96 GB": machine(("NVIDIA RTX PRO 6000 Blackwell", 96), ram_gib=128),
}
MODELS = (
    "nemotron-3-nano-4b",
    "llama-3.1-nemotron-nano-8b",
    "nemotron-nano-9b-v2",
    "nemotron-nano-12b-v2",
    "nemotron-3-nano-30b-a3b",
    "nemotron-3.5-lightning-30b-a3b",
    "llama-3.3-nemotron-super-49b",
    "llama-3.1-nemotron-70b",
    "nemotron-3-super-120b-a12b",
)


def cell(model: str, hardware: Hardware) -> str:
    try:
        plan = planning.plan(model, config.load(env={"NEMOLOCAL_HOME": "no-such-folder"}), hardware)
    except DoesNotFitError:
        return "–"
    text = f"{plan.candidate.quant}, {plan.load.n_ctx // 1024}k"
    if plan.placement.is_whole:
        return text
    on_gpu = sum(share.n_layers for share in plan.placement.shares)
    return f"{text}, {on_gpu} of {on_gpu + plan.placement.host.n_layers} layers" if on_gpu else f"{text}, CPU"


def table() -> str:
    rows = [["", *MACHINES], ["---"] * (len(MACHINES) + 1)]
    rows += [[f"`{model}`", *(cell(model, hardware) for hardware in MACHINES.values())] for model in MODELS]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(text: str) -> str:
    before, _, after = text.partition(MARK)
    rest = after.lstrip("\n")
    while rest.startswith("|"):
        rest = rest.partition("\n")[2]
    return f"{before}{MARK}\n{table()}{rest if rest.startswith(chr(10)) else chr(10) + rest}"


def test_fit_table_is_what_the_plan_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "run `python -m tests.test_readme`"


def test_picture_and_links_are_there() -> None:
    for name in ("assets/screenshot.png", "nemolocal/README.md", "benchmarks", "installer/run.py"):
        assert (README.parent / name).exists()


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
