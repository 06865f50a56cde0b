"""`/v1/chat/completions`: the wire shapes, and the way from them to a TextModel's chat and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nemolocal import types
from nemolocal.api import body, sse
from nemolocal.api.body import Schema
from nemolocal.api.choices import Answer, Choices
from nemolocal.api.connection import while_connected
from nemolocal.api.errors import NotServedError
from nemolocal.api.openai import logprobs
from nemolocal.api.openai.fields import N_LOGPROBS, GenerationFields, Head, head
from nemolocal.api.openai.figures import timings, usage
from nemolocal.api.openai.files import FilePart, read_in
from nemolocal.errors import InvalidRequestError
from nemolocal.service import Service
from nemolocal.types import Delta, Finish

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    asked = await body.read(request, ChatRequest)
    asked.check_served()
    service: Service = request.app.state.service
    model = service.find_model(asked.model or None, keep_alive_s=asked.keep_alive)
    messages = [await read_in(service, message) for message in asked.messages]
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    default = service.sampling_defaults(asked.model or None)
    params = asked.generation(default, max_tokens=max_tokens, n_ctx=model.n_ctx)
    choices = Choices([model.chat(messages, each) for each in params])
    answer = head("chatcmpl", model.id)
    if asked.stream:
        script = ChatScript(answer, asked, n=choices.n)
        return await sse.stream(request, choices, script)
    answers = await while_connected(request, choices.collect())
    return JSONResponse(whole(answer, asked, answers))


# What comes in ----------------------------------------------------------------------------------


class Function(Schema):
    name: str
    arguments: str


class CalledTool(Schema):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: Function


def _as_text(value: Any, info: ValidationInfo) -> Any:
    """Content as one text. A line break goes between two parts that would run together otherwise."""
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a string or a list of parts")
    text = ""
    for index, part in enumerate(value):
        if isinstance(part, dict) and part.get("type") == "file":
            continue  # a file has a field of its own
        piece = _text_of(part, index)
        glues = text and piece and not text[-1].isspace() and not piece[0].isspace()
        text += "\n" + piece if glues else piece
    return text


def _text_of(part: Any, index: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PydanticCustomError("content", f"part {index} must be an object with a type")
    if part["type"] not in {"text", "refusal"}:
        raise PydanticCustomError("content", f"part {index} is not text, and the model reads text only")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise PydanticCustomError("content", f"part {index} must hold its text as a string")
    return text


class ChatMessage(Schema):
    """One turn. `content` stands last, since whether it may be missing hangs on the fields before it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    files: tuple[FilePart, ...] = ()
    content: Annotated[str | None, BeforeValidator(_as_text), Field(validate_default=True)] = None

    @model_validator(mode="before")
    @classmethod
    def _take_files_out(cls, value: Any) -> Any:
        """Content parts that are files, as a field of their own; what came under that name does not count."""
        if not isinstance(value, dict):
            return value
        parts = value.get("content")
        found = (
            [part.get("file") for part in parts if isinstance(part, dict) and part.get("type") == "file"]
            if isinstance(parts, list)
            else []
        )
        return {**value, "files": tuple(found)}

    @field_validator("files")
    @classmethod
    def _are_the_users(cls, value: tuple[FilePart, ...], info: ValidationInfo) -> Any:
        if value and info.data.get("role") != "user":
            raise PydanticCustomError("files", "only a user's message may hold files")
        return value

    @field_validator("function_call")
    @classmethod
    def _has_no_old_call(cls, value: Any) -> Any:
        if value is not None:
            raise PydanticCustomError("function_call", "is not served; use tool_calls")
        return value

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: str | None, info: ValidationInfo) -> str | None:
        said = info.data
        is_optional = said.get("role") == "assistant" and (
            said.get("tool_calls") or said.get("reasoning_content") is not None
        )
        if value is None and "role" in said and not is_optional:
            raise PydanticCustomError("content", "is required")
        return value

    def unwrap(self) -> types.Message:
        return types.Message(
            role="system" if self.role == "developer" else self.role,
            content=self.content or "",
            name=self.name,
            reasoning=self.reasoning_content,
            tool_calls=tuple(
                types.ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
        )


class ChatRequest(GenerationFields):
    UNSERVED: ClassVar[dict[str, str]] = GenerationFields.UNSERVED | {
        "functions": "This version does not call functions.",
        "reasoning_effort": "This version has no switch for how long the model thinks.",
        "audio": "The model writes text only.",
        "web_search_options": "Nothing is searched on the web.",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=N_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Any = None
    audio: Any = None
    web_search_options: Any = None

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_served(self) -> None:
        super().check_served()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs: It is for requests with logprobs true.", param="top_logprobs"
            )
        self._check_tools()
        if self.function_call not in (None, "none", "auto"):
            raise NotServedError(
                "function_call: This version does not call functions.", param="function_call"
            )
        kind = "text" if self.response_format is None else self.response_format.get("type")
        if kind in ("json_object", "json_schema"):
            raise NotServedError(
                f"response_format: This version does not serve '{kind}'.",
                param="response_format",
                hint="Ask for JSON in the prompt, and check what comes.",
            )
        if kind != "text":
            raise InvalidRequestError("response_format: its type must be 'text'.", param="response_format")

    def _check_tools(self) -> None:
        """The form of `tool_choice` first, so that a wrong one is told as such."""
        choice = self.tool_choice
        names = {_name_of(tool) for tool in self.tools or ()} - {None}
        if isinstance(choice, dict):
            is_form = choice.get("type") == "function" and _name_of(choice) in names
        else:
            is_form = choice in (None, "none", "auto") or (choice == "required" and bool(names))
        if not is_form:
            raise InvalidRequestError(
                "tool_choice: must be 'none', 'auto', 'required', or a function among the tools.",
                param="tool_choice",
            )
        if self.tools and choice != "none":
            raise NotServedError(
                "tools: This version does not call tools.",
                param="tools",
                hint="Leave them out, or send tool_choice 'none'.",
            )


def _name_of(tool: dict[str, Any]) -> Any:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


# What goes out ----------------------------------------------------------------------------------


def whole(answer: Head, asked: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answer in one piece."""
    finishes = [each.finish for each in answers]
    return {
        **answer.fields("chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": each.text, "refusal": None},
                "logprobs": logprobs.chat(each.logprobs) if asked.logprobs else None,
                "finish_reason": each.finish.reason,
            }
            for index, each in enumerate(answers)
        ],
        "usage": usage(finishes, n_per_prompt=len(finishes)),
        "timings": timings(finishes),
    }


@dataclasses.dataclass
class ChatScript:
    """The chunks of a streamed answer."""

    answer: Head
    asked: ChatRequest
    n: int
    finishes: dict[int, Finish] = dataclasses.field(default_factory=dict)

    def begin(self) -> Iterable[dict[str, Any]]:
        for index in range(self.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def item(self, index: int, item: Delta | Finish) -> Iterable[dict[str, Any]]:
        if isinstance(item, Delta):
            probabilities = logprobs.chat(item.logprobs) if self.asked.logprobs else None
            yield self._chunk(index, {"content": item.text}, logprobs=probabilities)
        else:
            self.finishes[index] = item
            yield self._chunk(index, {}, finish_reason=item.reason)

    def end(self) -> Iterable[dict[str, Any]]:
        if self.asked.wants_usage:
            finishes = [self.finishes[index] for index in range(self.n)]
            yield {
                **self.answer.fields("chat.completion.chunk"),
                "choices": [],
                "usage": usage(finishes, n_per_prompt=self.n),
                "timings": timings(finishes),
            }

    def _chunk(self, index: int, delta: dict[str, str], **rest: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | rest
        chunk = {**self.answer.fields("chat.completion.chunk"), "choices": [choice]}
        return chunk | {"usage": None} if self.asked.wants_usage else chunk
