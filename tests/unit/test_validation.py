"""Validation as a pure function: every field, its limit named, all violations at once."""

from collections.abc import Callable

import grpc
import pytest

from lifecycle.adapters import NAME_CHARACTERS, Adapter
from lifecycle.deadlines import Limits
from router import budget
from router.adapters import chosen
from router.budget import Capacity
from router.limits import RequestLimits
from router.member_facts import MemberInfo, Role
from router.request import Delivery, Examined, OutputMode, ServedModel, SlowReader, Utf8Policy
from router.validation import check_cancel, check_request_id, check_tenant, complete, examine, fingerprint
from router.wire import parse
from rpc.details import Violation
from rpc.status import StatusError
from tandem.v1 import inference_pb2 as pb

MODEL = ServedModel("small", "snap", 100, 50)
SERVER = RequestLimits(default_max_output_tokens=20)
CAPACITY = Capacity(context_tokens=100, page_tokens=16, member_pages=5, member_tokens=64)


ADAPTED = MemberInfo(
    *("decode-0", "1", "", Role.DECODE, "snap", 16, 5, 100, 8, 0),
    computes_prompts=True,
    adapters=(Adapter("polite", "aa"), Adapter("terse", "bb")),
)


def good(**changes: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"request_id": "r1", "text": "hello", **changes})


def adapter_named(name: str) -> Adapter:
    return chosen(name, [ADAPTED], [])


def checked(message: pb.GenerateRequest) -> Examined:
    return examine(message, "default", MODEL, SERVER, lambda: 42, adapter_named)


def refusal(call: Callable[[], object]) -> StatusError:
    with pytest.raises(StatusError) as refused:
        call()
    return refused.value


def violations(message: pb.GenerateRequest) -> dict[str, Violation]:
    error = refusal(lambda: checked(message))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    return {one.field: one for one in error.details.violations}


def sampling(**values: object) -> pb.GenerateRequest:
    return good(sampling=pb.SamplingParams(**values))


def stop(**values: object) -> pb.GenerateRequest:
    return good(stop=pb.StopParams(**values))


def deadline(seconds: int, nanos: int = 0) -> pb.GenerateRequest:
    message = good()
    message.deadlines.first_token.seconds, message.deadlines.first_token.nanos = seconds, nanos
    return message


def detached(seconds: int, on_disconnect: int = pb.ON_DISCONNECT_DETACH) -> pb.GenerateRequest:
    message = good(on_disconnect=on_disconnect)
    message.detach_timeout.seconds = seconds
    return message


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(request_id="r1", chat=pb.ChatPrompt(messages=turns))


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r1", tokens=pb.TokenPrompt(ids=ids))


NAN, INF = float("nan"), float("inf")
TABLE: list[tuple[pb.GenerateRequest, str, str, str]] = [
    (good(request_id=""), "request_id", "EMPTY", "128"),
    (good(request_id="x" * 129), "request_id", "TOO_LONG", "128"),
    (good(request_id="a\nb"), "request_id", "BAD_CHARACTER", "control"),
    (good(request_id="é"), "request_id", "BAD_CHARACTER", "ASCII"),
    (good(model="m" * 257), "model", "TOO_LONG", "256"),
    (good(model="a\x00"), "model", "BAD_CHARACTER", "control"),
    (good(text=""), "text", "EMPTY_PROMPT", ""),
    (pb.GenerateRequest(request_id="r1"), "input", "EMPTY_PROMPT", "text, tokens and chat"),
    (good(text="x" * (4 * 1024 * 1024 + 1)), "text", "TOO_LONG", "4194304"),
    (tokens(), "tokens.ids", "EMPTY_PROMPT", "1"),
    (tokens(1, 50, 51), "tokens.ids[1]", "UNKNOWN_TOKEN_ID", "49"),
    (chat(), "chat.messages", "EMPTY_PROMPT", "1"),
    (chat(("user", "a"), ("robot", "b")), "chat.messages[1].role", "UNKNOWN_ROLE", "assistant"),
    (chat(*[("user", "x")] * 1025), "chat.messages", "TOO_MANY", "1024"),
    (chat(("user", "x" * 3_000_000), ("user", "x" * 3_000_000)), "chat.messages", "TOO_LONG", "4194304"),
    (sampling(temperature=-1), "sampling.temperature", "OUT_OF_RANGE", "from 0 to 10"),
    (sampling(temperature=10.5), "sampling.temperature", "OUT_OF_RANGE", "from 0 to 10"),
    (sampling(temperature=NAN), "sampling.temperature", "NOT_FINITE", "finite"),
    (sampling(top_p=0), "sampling.top_p", "OUT_OF_RANGE", "over 0 up to 1"),
    (sampling(top_p=INF), "sampling.top_p", "NOT_FINITE", "finite"),
    (sampling(min_p=1.5), "sampling.min_p", "OUT_OF_RANGE", "from 0 to 1"),
    (sampling(min_p=-INF), "sampling.min_p", "NOT_FINITE", "finite"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "OUT_OF_RANGE", "over 0 up to 10"),
    (sampling(presence_penalty=-2.5), "sampling.presence_penalty", "OUT_OF_RANGE", "-2 to 2"),
    (sampling(frequency_penalty=NAN), "sampling.frequency_penalty", "NOT_FINITE", "finite"),
    (sampling(logit_bias={3: NAN}), "sampling.logit_bias[3]", "NOT_FINITE", "finite"),
    (sampling(logit_bias={3: 101.0}), "sampling.logit_bias[3]", "OUT_OF_RANGE", "100"),
    (sampling(logit_bias={50: 1.0}), "sampling.logit_bias[50]", "UNKNOWN_TOKEN_ID", "49"),
    (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "sampling.logit_bias", "TOO_MANY", "300"),
    (stop(sequences=["s"] * 17), "stop.sequences", "TOO_MANY", "16"),
    (stop(sequences=["a", ""]), "stop.sequences[1]", "EMPTY", "1 to 256"),
    (stop(sequences=["é" * 129]), "stop.sequences[0]", "TOO_LONG", "258"),
    (stop(token_ids=[1] * 65), "stop.token_ids", "TOO_MANY", "64"),
    (stop(token_ids=[1, 50]), "stop.token_ids[1]", "UNKNOWN_TOKEN_ID", "49"),
    (good(max_output_tokens=0), "max_output_tokens", "OUT_OF_RANGE", "1 to 100"),
    (good(max_output_tokens=3, stop=pb.StopParams(min_output_tokens=4)), "stop.min_output_tokens", "OUT_OF_RANGE", "3"),
    (good(priority=11), "priority", "OUT_OF_RANGE", "-10 to 10"),
    (good(output_mode=9), "output_mode", "UNKNOWN_VALUE", "9"),
    (good(log_probabilities=pb.LogProbabilityParams(top=21)), "log_probabilities.top", "OUT_OF_RANGE", "20"),
    (good(utf8_policy=9), "utf8_policy", "UNKNOWN_VALUE", "9"),
    (good(slow_reader=9), "slow_reader", "UNKNOWN_VALUE", "9"),
    (good(on_disconnect=9), "on_disconnect", "UNKNOWN_VALUE", "9"),
    (detached(0), "detach_timeout", "OUT_OF_RANGE", "over 0 up to 3600"),
    (detached(3601), "detach_timeout", "OUT_OF_RANGE", "over 0 up to 3600"),
    (detached(5, pb.ON_DISCONNECT_CANCEL), "detach_timeout", "UNEXPECTED", "ON_DISCONNECT_DETACH"),
    (deadline(0), "deadlines.first_token", "OUT_OF_RANGE", "over 0 up to 600"),
    (deadline(-1), "deadlines.first_token", "OUT_OF_RANGE", "600"),
    (deadline(601), "deadlines.first_token", "OUT_OF_RANGE", "600"),
    (deadline(1, -5), "deadlines.first_token", "BAD_DURATION", "nanos"),
    (deadline(1, 1_000_000_000), "deadlines.first_token", "BAD_DURATION", "nanos"),
]


@pytest.mark.parametrize(("message", "path", "reason", "says"), TABLE, ids=[f"{row[1]}-{row[2]}" for row in TABLE])
def test_each_violation_names_field_reason_and_limit(message: pb.GenerateRequest, path: str, reason: str, says: str) -> None:
    found = violations(message)
    assert set(found) == {path}
    assert found[path].reason == reason and says in found[path].description


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (good(), Delivery(OutputMode.DELTA, SlowReader.PAUSE, None)),
        (good(on_disconnect=pb.ON_DISCONNECT_DETACH), Delivery(OutputMode.DELTA, SlowReader.PAUSE, 60.0)),
        (detached(5), Delivery(OutputMode.DELTA, SlowReader.PAUSE, 5.0)),
        (good(slow_reader=pb.SLOW_READER_FAIL), Delivery(OutputMode.DELTA, SlowReader.FAIL, None)),
        (good(slow_reader=pb.SLOW_READER_COALESCE), Delivery(OutputMode.DELTA, SlowReader.COALESCE, None)),
    ],
)
def test_how_output_is_to_be_delivered(message: pb.GenerateRequest, wanted: Delivery) -> None:
    assert checked(message).delivery == wanted


def test_all_violations_come_at_once() -> None:
    message = good(request_id="", priority=-11, max_output_tokens=0)
    message.sampling.temperature, message.sampling.top_p = -1, 0
    message.stop.sequences.append("")
    assert set(violations(message)) == {
        *("request_id", "priority", "max_output_tokens", "sampling.temperature", "sampling.top_p", "stop.sequences[0]")
    }


def test_unknown_model_is_not_found_and_named() -> None:
    error = refusal(lambda: checked(good(model="gpt-99")))
    assert error.code is grpc.StatusCode.NOT_FOUND and error.reason == "UNKNOWN_MODEL"
    assert error.details.resource is not None and error.details.resource.name == "gpt-99" and "small" in error.message


def test_an_adapter_is_named_and_an_unknown_one_is_not_found_with_those_that_there_are() -> None:
    assert checked(good()).adapter is None
    assert checked(good(adapter="polite")).adapter == Adapter("polite", "aa")
    error = refusal(lambda: checked(good(adapter="rude")))
    assert error.code is grpc.StatusCode.NOT_FOUND and error.reason == "UNKNOWN_ADAPTER"
    assert error.message == "no adapter is called 'rude'; this cell has 'polite', 'terse'"
    assert set(violations(good(adapter="x" * (NAME_CHARACTERS + 1)))) == {"adapter"}
    assert fingerprint(good(adapter="polite"), "t") != fingerprint(good(adapter="terse"), "t") != fingerprint(good(), "t")


def test_unset_fields_take_the_documented_defaults() -> None:
    found = checked(good())
    values = found.sampling
    assert (values.temperature, values.top_p, values.repetition_penalty, values.seed) == (1.0, 1.0, 1.0, 42)
    assert (values.top_k, values.min_p, values.logit_bias) == (0, 0.0, ())
    assert (found.delivery.output_mode, found.utf8_policy, found.priority) == (OutputMode.DELTA, Utf8Policy.UNSET, 0)
    assert found.limits == SERVER.clock_defaults and found.max_output_tokens is None


def test_set_fields_are_taken() -> None:
    message = good(model="small", output_mode=pb.OUTPUT_MODE_FINAL_ONLY, utf8_policy=pb.UTF8_POLICY_DROP, priority=-10)
    message.sampling.temperature, message.sampling.seed = 0, 2**64 - 1
    message.deadlines.queue.FromMilliseconds(1500)
    found = checked(message)
    assert (found.sampling.temperature, found.sampling.seed) == (0.0, 2**64 - 1)
    assert found.limits == Limits(1.5, 60.0, 30.0, 600.0)
    assert (found.delivery.output_mode, found.utf8_policy, found.priority) == (OutputMode.FINAL_ONLY, Utf8Policy.DROP, -10)


def completed(message: pb.GenerateRequest, prompt_tokens: int, **budgets: int):
    return complete(checked(message), tuple(range(prompt_tokens)), CAPACITY, SERVER, budget.Limits(**budgets))


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(1, 20), (59, 20), (62, 18)])
def test_the_default_output_is_cut_to_what_there_is_room_for(prompt_tokens: int, output_tokens: int) -> None:
    """The largest decode member has 5 pages of 16 tokens: 80, less than the context of 100."""
    request = completed(good(), prompt_tokens)
    assert (request.prompt_tokens, request.max_output_tokens) == (prompt_tokens, output_tokens)


@pytest.mark.parametrize(
    ("message", "prompt_tokens", "field", "says"),
    [
        (good(max_output_tokens=60), 41, "max_output_tokens", ("41", "60", "100")),
        (good(max_output_tokens=30), 60, "max_output_tokens", ("60", "30", "80", "at most 20")),
        (good(), 64 + 1, "text", ("65", "64")),
        (chat(("user", "x")), 100, "chat.messages", ("100",)),
    ],
)
def test_what_can_never_fit_is_refused_with_the_true_limit(
    message: pb.GenerateRequest, prompt_tokens: int, field: str, says: tuple[str, ...]
) -> None:
    error = refusal(lambda: completed(message, prompt_tokens))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.reason == "PROMPT_TOO_LONG"
    assert error.details.violations[0].field == field
    assert all(part in error.message for part in says), error.message
    assert error.metadata["promptTokens"] == str(prompt_tokens) and error.metadata["maxContextTokens"] == "100"


def test_a_tenant_s_budget_bounds_a_request_too() -> None:
    assert "tenant" in refusal(lambda: completed(good(), 33, tenant_tokens=32)).message


def test_a_prompt_without_tokens_is_refused() -> None:
    assert refusal(lambda: completed(good(), 0)).details.violations[0].field == "text"


def test_b48_fingerprint_is_of_the_body_and_the_tenant() -> None:
    one, same = good(), good(request_id="other")
    assert fingerprint(one, "a") == fingerprint(same, "a")
    assert len({fingerprint(one, "a"), fingerprint(one, "b"), fingerprint(good(text="x"), "a")}) == 3
    biased = [sampling(logit_bias=dict(pairs)) for pairs in ([(1, 2.0), (2, 1.0)], [(2, 1.0), (1, 2.0)])]
    assert fingerprint(biased[0], "a") == fingerprint(biased[1], "a")


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (good(request_id="MARK"), "request_id"),
        (good(text="xxMARKxx"), "text"),
        (chat(("user", "a"), ("user", "MARK")), "chat.messages[1].content"),
        (chat(("MARK", "a")), "chat.messages[0].role"),
        (stop(sequences=["a", "b", "MARK"]), "stop.sequences[2]"),
    ],
)
def test_invalid_utf8_names_its_field(message: pb.GenerateRequest, path: str) -> None:
    raw = message.SerializeToString().replace(b"MARK", b"M\xffRK")
    error = refusal(lambda: parse(pb.GenerateRequest, raw))
    assert (error.details.violations[0].field, error.details.violations[0].reason) == (path, "INVALID_UTF8")


@pytest.mark.parametrize("raw", [b"\xff\xff", b"\x0a\x05ab", b"\x0b"])
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    assert refusal(lambda: parse(pb.GenerateRequest, raw)).details.violations[0].reason == "UNREADABLE_MESSAGE"


def test_other_calls_check_their_fields() -> None:
    check_cancel("r1", "because")
    check_tenant("acme")
    assert refusal(lambda: check_request_id("")).details.violations[0].field == "request_id"
    found = refusal(lambda: check_cancel("", "x" * 257)).details.violations
    assert [one.field for one in found] == ["request_id", "reason"]
    assert refusal(lambda: check_cancel("r1", "a\x07")).details.violations[0].reason == "BAD_CHARACTER"
    assert refusal(lambda: check_tenant("")).details.violations[0].field == "tandem-tenant"
