"""Bodies of HTTP calls as requests of the router, and the names that their errors have."""

import json

import pytest
from starlette.datastructures import Headers

from router.http import chat, completion
from router.http.body import decoded
from router.http.context import due_at
from router.http.errors import HttpError, from_status
from router.http.fields import CompletionBody
from router.http.names import Names
from rpc.status import (
    Quota,
    Resource,
    Violation,
    already_exists,
    invalid_argument,
    not_found,
    resource_exhausted,
    unauthenticated,
)
from tandem.v1 import inference_pb2 as pb


def asked(body: dict[str, object], path: str = "completion") -> pb.GenerateRequest:
    """The one request of a body."""
    (one,) = {"completion": completion, "chat": chat}[path].call(json.dumps(body).encode(), "served", "id").requests
    return one.message


def refused(body: dict[str, object], path: str = "completion") -> HttpError:
    """The error of a body."""
    with pytest.raises(HttpError) as found:
        asked(body, path)
    return found.value


def test_every_field_goes_to_its_place() -> None:
    made = asked(
        {
            "prompt": "p", "model": "served", "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125,
            "n": 2, "best_of": 3, "stop": "s", "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 2,
            "logit_bias": {"5": -100}, "seed": 2**64 - 1, "priority": -3, "ignore_eos": True, "min_tokens": 2,
            "stop_token_ids": [9], "include_stop_str_in_output": True, "logprobs": 2, "echo": True, "user": "u", "unknown": 1,
            "stream_options": None,
        }
    )  # fmt: skip
    sampling = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, presence_penalty=1, frequency_penalty=-1, repetition_penalty=2,
        logit_bias={5: -100}, seed=2**64 - 1,
    )  # fmt: skip
    stop = pb.StopParams(sequences=["s"], token_ids=[9], include_stop=True, ignore_eos=True, min_output_tokens=2)
    assert made == pb.GenerateRequest(
        request_id="id", text="p", max_output_tokens=7, sampling=sampling, stop=stop, choices=2, best_of=3, priority=-3,
        output_mode=pb.OUTPUT_MODE_FINAL_ONLY, utf8_policy=pb.UTF8_POLICY_DROP, echo_prompt=True,
        log_probabilities=pb.LogProbabilityParams(top=2, prompt=True),
    )  # fmt: skip


def test_what_is_not_sent_is_not_set() -> None:
    made = asked({"prompt": [1, 2], "top_k": -1, "temperature": None, "stream": True})
    plain = pb.GenerateRequest(request_id="id", output_mode=pb.OUTPUT_MODE_DELTA, utf8_policy=pb.UTF8_POLICY_DROP)
    plain.tokens.ids.extend([1, 2])
    made.ClearField("sampling")
    made.ClearField("stop")
    assert made == plain


@pytest.mark.parametrize(
    ("prompt", "ids", "texts"),
    [
        ("a", ["id"], ["a"]),
        (["a"], ["id"], ["a"]),
        (["a", "b"], ["id-0", "id-1"], ["a", "b"]),
        ([[1], [2]], ["id-0", "id-1"], ["", ""]),
    ],
)
def test_each_prompt_is_a_request(prompt: object, ids: list[str], texts: list[str]) -> None:
    call = completion.call(json.dumps({"prompt": prompt}).encode(), "served", "id")
    assert [one.message.request_id for one in call.requests] == ids
    assert [one.message.text for one in call.requests] == texts


@pytest.mark.parametrize("prompt", [None, [], ["a", 1], [[1], "a", [-1]], [[True]], [1.5]])
def test_a_prompt_that_is_none(prompt: object) -> None:
    assert refused({"prompt": prompt}).param in ("prompt", "prompt[1]", "prompt[0]", "prompt[2]")


def test_another_name_is_an_adapters() -> None:
    assert asked({"prompt": "a", "model": "other"}).adapter == "other"
    assert asked({"prompt": "a", "model": ""}).adapter == ""


def test_messages_are_turns() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = asked({"messages": [{"role": "developer", "content": "s", "name": "n"}, {"role": "user", "content": parts}]}, "chat")
    assert [(turn.role, turn.content) for turn in made.chat.messages] == [("system", "s"), ("user", "ab")]
    assert asked({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "max_completion_tokens": 4}, "chat") == asked(
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 4}, "chat"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [{"role": "user", "content": "a"}], "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "a"}], "seed": -1}, "seed"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}, "temperature"),
        ({"messages": [{"role": "user", "content": "a"}], "stop": ["a", 1]}, "stop[1]"),
        ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_a_chat_that_is_wrong_names_the_field(body: dict[str, object], param: str) -> None:
    error = refused(body, "chat")
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(param)


def test_what_asks_for_nothing_is_not_refused() -> None:
    asked({"messages": [{"role": "user", "content": "a"}], "tools": [], "modalities": ["text"], "best_of": 1}, "chat")


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.Grammar(json_object=pb.JsonObject())),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            pb.Grammar(json_schema='{"type": "null"}'),
        ),
        ({"guided_json": '{"type":"null"}'}, pb.Grammar(json_schema='{"type":"null"}')),
        ({"guided_regex": "a|b"}, pb.Grammar(regex="a|b")),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, pb.Grammar(ebnf='root ::= "a"')),
        ({"structured_outputs": {"choice": ['a "b"', "é\n"]}}, pb.Grammar(ebnf='root ::= "a \\"b\\"" | "é\\n"')),
        ({"structured_outputs": {"json_object": True}}, pb.Grammar(json_object=pb.JsonObject())),
    ],
)
def test_rules(fields: dict[str, object], grammar: pb.Grammar | None) -> None:
    made = asked({"prompt": "a", **fields})
    assert (made.grammar if made.HasField("grammar") else None) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)
def test_rules_that_are_wrong(fields: dict[str, object], param: str) -> None:
    assert refused({"prompt": "a", **fields}).param == param


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 100_000])
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(HttpError) as found:
        decoded(data, CompletionBody)
    assert found.value.status == 400


def test_names_of_fields() -> None:
    names = Names({"max_output_tokens": "max_tokens", "choices": "n", "chat.messages": "messages", "text": "prompt"}, "served")
    expected = {
        "sampling.top_p": "top_p",
        "sampling.logit_bias[5]": "logit_bias[5]",
        "stop.sequences[3]": "stop[3]",
        "chat.messages[2].role": "messages[2].role",
        "max_output_tokens": "max_tokens",
        "text": "prompt",
        "textual": "textual",
        "priority": "priority",
    }
    assert {path: names.of(path) for path in expected} == expected
    assert names.in_words("so max_output_tokens may have 5 bytes of text") == "so max_tokens may have 5 bytes of text"


def test_statuses() -> None:
    names = Names({"choices": "n"}, "served")
    full = names.error(resource_exhausted("full", "QUEUE_FULL", retry_after_s=1.2, quotas=[Quota("cell", "d")]))
    assert (full.status, full.headers) == (429, {"retry-after": "2"})
    reused = names.error(already_exists(Resource("request", "r"), "IDEMPOTENCY_KEY_REUSED", "request_id 'r' was used"))
    assert (reused.status, reused.param, reused.message) == (422, "X-Request-Id", "X-Request-Id 'r' was used")
    unknown = names.error(not_found(Resource("adapter", "x", "this cell has 'a'"), "UNKNOWN_ADAPTER", "no adapter"))
    assert (unknown.code, unknown.message) == (
        "UNKNOWN_MODEL",
        "no model is called 'x'; this cell serves 'served' (adapters: 'a')",
    )
    two = names.error(invalid_argument([Violation("choices", "wrong"), Violation("sampling.seed", "odd")]))
    assert (two.param, two.message, two.headers) == ("n", "n: wrong; seed: odd", {"x-should-retry": "false"})
    assert from_status(unauthenticated("who?")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(text: str) -> None:
    with pytest.raises(HttpError, match="X-Request-Timeout"):
        due_at(Headers({"X-Request-Timeout": text}))
