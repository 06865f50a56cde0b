"""The settings: what the model is asked with, what the browser keeps."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import pytest

from nemolocal.errors import InvalidRequestError, ModelNotFoundError
from nemolocal.types import GenerationParams, SamplingParams
from nemolocal.ui import settings
from nemolocal.ui.options import Options, changed, defaults, overlaid, to_params
from tests.fakes import FakeService

ADVISED = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


class AdvisedService(FakeService):
    def sampling_defaults(self, ref: str | None) -> SamplingParams:
        if ref == "gone":
            raise ModelNotFoundError("gone")
        return ADVISED


def test_the_panel_untouched_asks_for_what_the_model_advises() -> None:
    assert to_params(defaults(ADVISED)) == GenerationParams(sampling=ADVISED)
    assert to_params(Options()) == GenerationParams()


def test_numbers_that_no_model_can_use_are_refused_in_one_line() -> None:
    for wrong in (Options(seed=-1), Options(seed=1.5), Options(max_tokens=-2), Options(seed=2**32)):
        with pytest.raises(InvalidRequestError) as caught:
            to_params(wrong)
        assert "\n" not in str(caught.value)
    assert to_params(Options(max_tokens=None)).max_tokens is None
    assert to_params(Options(seed=0)).sampling.seed == 0


def test_the_browser_keeps_only_what_was_changed() -> None:
    base = defaults(ADVISED)
    mine = replace(base, temperature=0.1, system="Be brief.")
    assert changed(mine, base) == {"temperature": 0.1, "system": "Be brief."}
    assert overlaid(base, changed(mine, base)) == mine


@pytest.mark.parametrize(
    "kept", [None, [], "x", {"temperature": "hot"}, {"seed": True}, {"system": 3, "x": 1}]
)
def test_whatever_else_the_browser_has_is_passed_over(kept: object) -> None:
    assert overlaid(Options(), kept) == Options()


def test_the_panel_shows_the_models_own_but_for_what_was_changed() -> None:
    service = AdvisedService()
    kept = settings.to_keep(service, None, *astuple(replace(defaults(ADVISED), top_k=5)))
    assert kept == {"top_k": 5}
    assert Options(*settings.restored(service, "fake", kept)) == replace(defaults(ADVISED), top_k=5)
    assert Options(*settings.restored(service, "gone", {})) == Options()


def test_a_field_without_a_value_is_as_the_model_has_it() -> None:
    """As the page sends one that was emptied, or that is not drawn yet."""
    service = AdvisedService()
    assert settings.given(service, None, *[None] * len(fields(Options))) == settings.base(service, None)
    told = [0.3 if field.name == "temperature" else None for field in fields(Options)]
    assert settings.given(service, None, *told) == replace(settings.base(service, None), temperature=0.3)
