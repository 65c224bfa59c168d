"""The bodies that clients send, by the names of the OpenAI API and, where it has none, of vLLM. Unknown fields are ignored.

`None` is a field that was not sent, or was sent as null.
"""

from typing import Annotated, Any

import msgspec

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """The schema of response_format."""

    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct):
    """What the whole output must be."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's way to say what the output must be: one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Asked(msgspec.Struct, kw_only=True):
    """What both kinds of bodies have."""

    model: str | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**32 - 1)] | None = None
    min_p: float | None = None
    n: U32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    priority: I32 | None = None
    # vLLM's
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    stop_token_ids: list[U32] | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # refused where they ask for something
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None


class CompletionBody(Asked, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any] | None = None
    best_of: U32 | None = None
    echo: bool | None = None
    logprobs: U32 | bool | None = None
    # refused where they ask for something
    suffix: Any = None
    prompt_embeds: Any = None


class ChatBody(Asked, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[msgspec.Raw] | None = None
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    # refused where they ask for something
    tools: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    best_of: Any = None


class ContentPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class MessageBody(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
