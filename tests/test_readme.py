"""The README's table of what runs where is what the plan says. `python -m tests.test_readme` writes it."""

from __future__ import annotations

from pathlib import Path

from nemolocal import config, hardware
from nemolocal.models import catalog, fits

README = Path(__file__).parent.parent / "README.md"
MARK = "<!-- fit table -->\n"
PROFILES = Path(__file__).parent / "hardware_profiles"
MACHINES = {
    "RTX 3060 12 GB": "rtx-3060-12gb",
    "RTX 4090": "rtx-4090",
    "RTX 5090": "rtx-5090",
    "2 × RTX 3090": "2x-rtx-3090",
    "RTX 4090 + 3060": "rtx-4090-rtx-3060",
    "RTX PRO 6000 96 GB": "rtx-pro-6000",
    "laptop, 16 GB, no GPU": "laptop-16gb",
}
SIGNS = {"green": "**{}**", "amber": "{}", "red": "–"}


def table() -> str:
    settings = config.load(env={"NEMOLOCAL_HOME": "no-such-folder"})
    machines = [hardware.load_profile(PROFILES / f"{name}.toml") for name in MACHINES.values()]
    rows = [["", *MACHINES], ["---"] * (len(MACHINES) + 1)]
    for model in catalog.load().models:
        found = [fits.fit(model.id, settings, machine) for machine in machines]
        rows.append([f"`{model.id}`", *(SIGNS[each.grade].format(each.words) for each in found)])
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
