"""/v1/completions: its body as requests, and its answers. Pure."""

from collections.abc import Sequence
from typing import Any

from router.http.asking import Base, Call, One, base_of, call_of
from router.http.body import decoded
from router.http.fields import CompletionBody
from router.http.log_probs import LegacyLogProbs
from router.http.names import Names
from router.http.reading import Output, Piece
from router.limits import HTTP_PROMPTS
from tandem.v1 import inference_pb2 as pb

OBJECT = "text_completion"
CHUNK_OBJECT = "text_completion"
ID_PREFIX = "cmpl-"


def call(data: bytes, served: str, request_id: str) -> Call:
    """The requests of a body, one for each of its prompts. Raises HttpError (400)."""
    body = decoded(data, CompletionBody)
    base = base_of(body, served, request_id, "max_tokens")
    message = base.message
    if body.best_of is not None:
        message.best_of = body.best_of
    message.echo_prompt = bool(body.echo)
    # JSON's true and false are numbers to some clients.
    top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    if top is not None:
        message.log_probabilities.top = top
        message.log_probabilities.prompt = bool(body.echo)
        base.own["log_probabilities.top"] = "logprobs"
    prompts = _prompts(base, body.prompt)
    base.check()
    several = len(prompts) > 1
    requests = [_one(base, prompt, number if several else None, served) for number, prompt in enumerate(prompts)]
    return call_of(body, requests, served, log_probs=top is not None)


def choice(piece: Piece, legacy: LegacyLogProbs | None) -> dict[str, Any]:
    """A choice of a chunk. `legacy`: what was told of this choice's log-probabilities so far; None when they are not told."""
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": legacy.told(piece) if legacy is not None else None,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }


def whole_choice(output: Output, log_probs: bool) -> dict[str, Any]:
    """A choice of an answer in one piece."""
    legacy = LegacyLogProbs() if log_probs else None
    told = legacy.joined(output.pieces) if legacy is not None else None
    return {
        "index": output.index,
        "text": output.text,
        "logprobs": told,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _one(base: Base, prompt: str | Sequence[int], number: int | None, served: str) -> One:
    message = pb.GenerateRequest()
    message.CopyFrom(base.message)
    name = "prompt"
    if number is not None:
        message.request_id, name = f"{message.request_id}-{number}", f"prompt[{number}]"
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.tokens.ids.extend(prompt)
    return One(message, Names({**base.own, "text": name, "tokens.ids": name, "input": name}, served))


def _prompts(base: Base, prompt: str | list[Any] | None) -> list[str | list[int]]:
    """The prompts of a body: a text, token ids, a list of texts, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        base.add("prompt", "must be a text, a list of token ids, or a list of either", "EMPTY_PROMPT")
        return []
    if all(_is_id(one) for one in prompt):
        return [prompt]
    if len(prompt) > HTTP_PROMPTS:
        base.add("prompt", f"must have at most {HTTP_PROMPTS} prompts; got {len(prompt)}", "TOO_MANY")
        return []
    for number, one in enumerate(prompt):
        if not isinstance(one, str) and not (isinstance(one, list) and all(_is_id(each) for each in one)):
            base.add(f"prompt[{number}]", "must be a text or a list of token ids", "INVALID_REQUEST")
            return []
    return prompt


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32
