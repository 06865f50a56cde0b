"""`/v1/completions`: raw prompts, as texts or as token ids, one or several.

Control tokens in a text prompt are recognised: whoever sends a raw prompt writes the template themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nemolocal.api import body, sse
from nemolocal.api.choices import Answer, Choices
from nemolocal.api.connection import while_connected
from nemolocal.api.errors import NotServedError
from nemolocal.api.openai.fields import N_CHOICES, N_LOGPROBS, GenerationFields, Head, head
from nemolocal.api.openai.figures import timings, usage
from nemolocal.api.openai.logprobs import Legacy
from nemolocal.api.openai.prompts import as_prompts
from nemolocal.errors import ContextLengthError, InvalidRequestError
from nemolocal.service import Service
from nemolocal.types import Delta, Finish

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    asked = await body.read(request, CompletionRequest)
    asked.check_served()
    service: Service = request.app.state.service
    model = service.find_model(asked.model or None, keep_alive_s=asked.keep_alive)
    default = service.sampling_defaults(asked.model or None)
    params = asked.generation(default, max_tokens=asked.max_tokens, n_ctx=model.n_ctx)
    choices = Choices([model.complete(prompt, each) for prompt in asked.prompt for each in params])
    answer = head("cmpl", model.id)
    try:
        if asked.stream:
            script = CompletionScript(answer, asked, n=choices.n)
            return await sse.stream(request, choices, script)
        answers = await while_connected(request, choices.collect())
    except ContextLengthError as error:
        error.param = "prompt"
        raise
    return JSONResponse(whole(answer, asked, answers))


# What comes in ----------------------------------------------------------------------------------


def _as_n_logprobs(value: Any) -> Any:
    return None if value is False else value  # some clients send the field as chat has it


class CompletionRequest(GenerationFields):
    UNSERVED: ClassVar[dict[str, str]] = GenerationFields.UNSERVED | {
        "suffix": "This model has no fill-in-the-middle support here.",
        "echo": "This version does not repeat the prompt.",
    }

    prompt: Annotated[list[str | tuple[int, ...]], BeforeValidator(as_prompts)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=N_LOGPROBS)] | None, BeforeValidator(_as_n_logprobs)
    ] = None

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    def check_served(self) -> None:
        super().check_served()
        if self.best_of not in (None, self.n_choices):
            raise NotServedError(
                "best_of: This version does not choose among answers.",
                param="best_of",
                hint="Leave it out, or set it to n.",
            )
        if len(self.prompt) * self.n_choices > N_CHOICES:
            raise InvalidRequestError(
                f"prompt: At most {N_CHOICES} answers in one request, n counted for each prompt.",
                param="prompt",
            )


# What goes out ----------------------------------------------------------------------------------


def whole(answer: Head, asked: CompletionRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answer in one piece; choices of the first prompt come first."""
    finishes = [each.finish for each in answers]
    return {
        **answer.fields("text_completion"),
        "choices": [
            {
                "index": index,
                "text": each.text,
                "logprobs": None if asked.logprobs is None else Legacy().take(each.logprobs),
                "finish_reason": each.finish.reason,
            }
            for index, each in enumerate(answers)
        ],
        "usage": usage(finishes, n_per_prompt=asked.n_choices),
        "timings": timings(finishes),
    }


@dataclasses.dataclass
class CompletionScript:
    """The chunks of a streamed answer."""

    answer: Head
    asked: CompletionRequest
    n: int
    finishes: dict[int, Finish] = dataclasses.field(default_factory=dict)
    probabilities: dict[int, Legacy] = dataclasses.field(default_factory=dict)

    def begin(self) -> Iterable[dict[str, Any]]:
        return ()

    def item(self, index: int, item: Delta | Finish) -> Iterable[dict[str, Any]]:
        if isinstance(item, Delta):
            yield self._chunk(index, item.text, logprobs=self._probabilities(index, item))
        else:
            self.finishes[index] = item
            yield self._chunk(index, "", finish_reason=item.reason)

    def end(self) -> Iterable[dict[str, Any]]:
        if self.asked.wants_usage:
            finishes = [self.finishes[index] for index in range(self.n)]
            yield {
                **self.answer.fields("text_completion"),
                "choices": [],
                "usage": usage(finishes, n_per_prompt=self.asked.n_choices),
                "timings": timings(finishes),
            }

    def _probabilities(self, index: int, item: Delta) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        return self.probabilities.setdefault(index, Legacy()).take(item.logprobs)

    def _chunk(self, index: int, text: str, **rest: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None} | rest
        chunk = {**self.answer.fields("text_completion"), "choices": [choice]}
        return chunk | {"usage": None} if self.asked.wants_usage else chunk
