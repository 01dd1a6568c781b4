"""The fields that a client may send, as models of the bodies.

They are those of OpenAI's completions and chat completions, and the usual extensions of open servers (top_k, min_p,
repetition_penalty, min_tokens, ignore_eos, stop_token_ids, include_stop_str_in_output). A field

- has its effect;
- or has none by its definition: who asks (`user`, `metadata`, …), or how an operator keeps, prices and caches requests
  (`store`, `service_tier`, `prompt_cache_key`, …);
- or takes only the values that ask for nothing (`tools: []`, `tool_choice: "none"`, `refusal: null`), because clients
  send these, and send back the messages that they got;
- or is refused by its name, as is every field that is not listed. A field of null is a field left out.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from apps.serve.request import MAX_LOGPROBS

MAX_STOP = 16
MAX_STOP_CHARACTERS = 256

Int = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Bias = Annotated[float, Field(strict=True, ge=-100, le=100)]


class Only:
    """A field that takes these values, which ask for nothing, and is refused by any other."""

    def __init__(self, *allowed: Any, because: str):
        self.allowed, self.because = allowed, because

    def check(self, value: Any) -> Any:
        if value not in self.allowed:
            raise PydanticCustomError("unsupported", "{because}; leave it out", {"because": self.because})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


NoTools = Annotated[Any, Only(None, [], because="this server calls no tools")]
NoToolChoice = Annotated[Any, Only(None, "none", "auto", because="this server calls no tools")]
NoFunctionCall = Annotated[Any, Only(None, because="this server calls no tools")]
NoAudio = Annotated[Any, Only(None, because="this server reads and writes text only")]
NoAnnotations = Annotated[Any, Only(None, [], because="this server reads text only")]
NoSuffix = Annotated[Any, Only(None, because="this server writes behind a prompt, not between two texts")]
NoFunctionChoice = Annotated[Any, Only(None, "none", "auto", because="this server calls no tools")]
PlainText = Annotated[Any, Only(None, {"type": "text"}, because="this server writes text as it comes")]
TextOnly = Annotated[Any, Only(None, ["text"], because="this server writes text only")]
NoPrediction = Annotated[Any, Only(None, because="this server takes no predicted text")]
NoReasoning = Annotated[Any, Only(None, "none", because="this server does not steer how a model reasons")]
AnyLength = Annotated[Any, Only(None, "medium", because="this server does not steer a model's length")]
NoSearch = Annotated[Any, Only(None, because="this server searches nothing")]
NoModeration = Annotated[Any, Only(None, because="this server moderates nothing")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {name: value for name, value in data.items() if value is not None or name in cls.model_fields}


class StreamOptions(Body):
    """Options of what a stream sends beside its text.

    continuous_usage_stats  each piece tells the usage until then, as vLLM's does; together with include_usage
    include_obfuscation     pieces of a stream are padded, so that their sizes do not tell what they say
    """

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None
    include_obfuscation: Bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class Message(Body):
    """A message of a conversation. The fields of the server's own messages are among them.

    name     for templates that tell it
    refusal  what an assistant said in the place of an answer
    provider_specific_fields  litellm's, in the messages that it keeps: all null in those that it got from here
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[Part] | None, Field(validate_default=True)] = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: NoTools = None
    function_call: NoFunctionCall = None
    audio: NoAudio = None
    annotations: NoAnnotations = None
    provider_specific_fields: dict[str, Any] | None = None

    @field_validator("content")
    @classmethod
    def _said(cls, content: str | Sequence[Part] | None, info: ValidationInfo) -> str | Sequence[Part] | None:
        role = info.data.get("role", "assistant")
        if role == "assistant":
            return content
        if content is None:
            raise PydanticCustomError("missing", "required; only an assistant's message may be without")
        if not isinstance(content, str) and any(isinstance(part, RefusalPart) for part in content):
            raise PydanticCustomError("unsupported", "only an assistant's message has parts of type refusal")
        return content

    @field_validator("provider_specific_fields")
    @classmethod
    def _says_nothing(cls, fields: dict[str, Any] | None) -> None:
        if any(value is not None for value in (fields or {}).values()):
            raise PydanticCustomError("unsupported", "this server reads none of them; leave it out")

    @field_validator("refusal")
    @classmethod
    def _refused(cls, refusal: str | None, info: ValidationInfo) -> str | None:
        if refusal is not None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("unsupported", "only an assistant refuses; leave it out")
        return refusal

    def as_text(self) -> dict[str, str]:
        """The message as a template gets it."""
        if isinstance(self.content, str):
            said = self.content
        else:
            parts = self.content or ()
            said = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": said + (self.refusal or "")} | named


class Options(Body):
    """The fields of both endpoints."""

    model: str | None = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP)] | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    seed: Int | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    # Without an effect on the answer. OpenAI's completions know `user` alone; clients send the others there, too.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    # Extensions.
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    ignore_eos: Bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: Bool | None = None


class CompletionBody(Options):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    best_of: Annotated[Int, Field(ge=1, le=128)] | None = None
    echo: Bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: NoSuffix = None


class ChatBody(Options):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    parallel_tool_calls: Bool | None = None  # without an effect where no tools are called
    # Only what asks for nothing.
    tools: NoTools = None
    tool_choice: NoToolChoice = None
    functions: NoTools = None
    function_call: NoFunctionChoice = None
    response_format: PlainText = None
    modalities: TextOnly = None
    audio: NoAudio = None
    prediction: NoPrediction = None
    reasoning_effort: NoReasoning = None
    verbosity: AnyLength = None
    web_search_options: NoSearch = None
    moderation: NoModeration = None
