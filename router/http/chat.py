"""/v1/chat/completions: its body as a request, and its answers. Pure."""

from typing import Any

from router.http.asking import Base, Call, One, base_of, call_of
from router.http.body import decoded
from router.http.fields import ChatBody, ContentPart, MessageBody
from router.http.log_probs import content_of
from router.http.names import Names
from router.http.reading import Output, Piece
from router.limits import CHAT_MESSAGES

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"
ID_PREFIX = "chatcmpl-"
ROLE = "assistant"

#: What newer clients call a role that chat templates know by another name.
_ROLES = {"developer": "system"}


def call(data: bytes, served: str, request_id: str) -> Call:
    """The request of a body. Raises HttpError (400)."""
    body = decoded(data, ChatBody)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    base = base_of(body, served, request_id, limit)
    if body.echo:
        base.add("echo", "is not supported", "UNSUPPORTED")
    if body.best_of not in (None, 1):
        base.add("best_of", "is not supported", "UNSUPPORTED")
    if body.top_logprobs is not None and not body.logprobs:
        base.add("top_logprobs", "goes only with logprobs true", "UNEXPECTED")
    if body.logprobs:
        base.message.log_probabilities.top = body.top_logprobs or 0
        base.own["log_probabilities.top"] = "top_logprobs"
    _messages(base, body)
    base.check()
    names = Names({**base.own, "chat.messages": "messages", "chat": "messages", "input": "messages"}, served)
    return call_of(body, [One(base.message, names)], served, log_probs=bool(body.logprobs))


def choice(piece: Piece, *, first: bool, log_probs: bool) -> dict[str, Any]:
    """A choice of a chunk. The role goes with the first output: a chunk of its own would be taken for the first token."""
    delta: dict[str, Any] = {"role": ROLE, "content": piece.text} if first else {}
    if piece.text:
        delta["content"] = piece.text
    return {
        "index": piece.index,
        "delta": delta,
        "logprobs": {"content": content_of(piece), "refusal": None} if log_probs and piece.log_probs else None,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }


def whole_choice(output: Output, log_probs: bool) -> dict[str, Any]:
    """A choice of an answer in one piece."""
    told = [one for piece in output.pieces for one in content_of(piece)]
    return {
        "index": output.index,
        "message": {"role": ROLE, "content": output.text, "refusal": None},
        "logprobs": {"content": told, "refusal": None} if log_probs else None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _messages(base: Base, body: ChatBody) -> None:
    if not body.messages:
        base.add("messages", "must have at least 1 message", "EMPTY_PROMPT")
        return
    # One more than may be: the router then says how many may be.
    for number, raw in enumerate(body.messages[: CHAT_MESSAGES + 1]):
        path = f"messages[{number}]"
        one = decoded(bytes(raw), MessageBody, path)
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(one, name):
                base.add(f"{path}.{name}", "is not supported", "UNSUPPORTED")
        content = _content(base, f"{path}.content", one.content)
        base.message.chat.messages.add(role=_ROLES.get(one.role, one.role), content=content)


def _content(base: Base, path: str, content: str | list[ContentPart] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        base.add(path, "must be a text or a list of parts of the type text", "EMPTY")
        return ""
    for number, part in enumerate(content):
        if part.type not in ("text", "input_text"):
            base.add(f"{path}[{number}].type", f"must be text; {part.type[:64]!r} is not supported", "UNSUPPORTED")
        elif part.text is None:
            base.add(f"{path}[{number}].text", "must be there", "EMPTY")
    return "".join(part.text or "" for part in content)
