"""The status line and the notice: what they say, and that nothing in them is markup but our own."""

from __future__ import annotations

import re

from nemolocal.service import Status
from nemolocal.ui.status import Meter, figures, line, notice, waiting_for

READY = Status("ready", model="nemo", device="RTX 4090", n_ctx=4096, n_slots=4, progress=1.0)


def plain(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_a_loaded_model_at_rest() -> None:
    assert plain(line(READY, Meter())) == "Ready nemo RTX 4090 0 of 4,096 tokens"
    assert plain(line(Status("idle"), Meter())) == "No model loaded"
    assert plain(line(Status("failed", model="nemo", problem="x"), Meter())) == "Not loaded nemo"


def test_an_answer_in_progress() -> None:
    meter = Meter("writing", prompt_tokens=1000, new_tokens=24, n_ctx=2048, tokens_per_s=12.34)
    html = line(READY, meter)
    assert plain(html) == "Writing nemo RTX 4090 1,024 of 2,048 tokens 12.3 tokens/s"
    assert 'aria-valuenow="50"' in html


def test_a_load_shows_how_far_it_is() -> None:
    html = line(Status("loading", model="nemo", progress=0.426), Meter())
    assert plain(html) == "Loading 43% nemo"
    assert "width:43%" in html


def test_a_nearly_full_context_stands_out() -> None:
    assert "full" in line(READY, Meter(prompt_tokens=3900, n_ctx=4096))
    assert "full" not in line(READY, Meter(prompt_tokens=3000, n_ctx=4096))


def test_what_goes_on_before_the_first_word() -> None:
    assert waiting_for(Status("loading", progress=0.5), Meter("waiting"), 3) == "Loading the model, 50%"
    assert waiting_for(READY, Meter("waiting"), 0.1) == "Waiting"
    assert waiting_for(READY, Meter("reading", prompt_tokens=5000), 0.2) == "Reading"
    assert waiting_for(READY, Meter("reading", prompt_tokens=5000), 2.2) == "Reading 5,000 tokens, 2 s"


def test_what_an_answer_took() -> None:
    assert figures(Meter(prompt_tokens=5)) == ""
    assert figures(Meter(new_tokens=1)) == "1 token"
    whole = Meter(prompt_tokens=2000, new_tokens=1234, tokens_per_s=45.26, cached_tokens=1500)
    assert figures(whole) == "1,234 tokens · 45.3 tokens/s · 1,500 of 2,000 prompt tokens cached"


def test_names_and_problems_are_text_on_one_line() -> None:
    bad = '<img src=x onerror="1">\n\n`x` &'
    html = line(Status("ready", model=bad, device=bad), Meter()) + notice(bad)
    assert "<img" not in html
    assert "\n" not in notice(bad)
    assert "&lt;img src=x onerror=&quot;1&quot;&gt;" in html
    assert notice("") == ""
