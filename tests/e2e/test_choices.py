"""Several choices with real processes: drawn with a seed, cancelled one by one, and gone on with after a crash."""

from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, at_rest, fresh_id, stub_of
from tests.e2e.conftest import cell_of
from tests.exact_dtype import EXACT_DTYPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 48


@dataclass
class Choices:
    """What one stream brought, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    completed: pb.Completed | None = None
    status: grpc.StatusCode = grpc.StatusCode.OK
    next_no: int = 0

    def take(self, event: pb.GenerateResponse) -> None:
        """One event; numbers rise by one, and nothing follows an end."""
        assert event.sequence_no == self.next_no and self.completed is None
        self.next_no += 1
        kind = event.WhichOneof("event")
        if kind == "completed":
            self.completed = event.completed
        elif kind in ("delta", "choice_ended"):
            told = getattr(event, kind)
            assert told.index not in self.ends
            self.texts[told.index] = self.texts.get(told.index, "") + told.text
            self.tokens.setdefault(told.index, []).extend(told.token_ids)
            if kind == "choice_ended":
                self.ends[told.index] = pb.FinishReason.Name(told.finish_reason).removeprefix("FINISH_REASON_").lower()


async def read(call: grpc.aio.UnaryStreamCall, seen: Choices, tokens: int | None = None) -> Choices:
    """A stream to its end, or until every choice has so many tokens."""
    try:
        async for event in call:
            seen.take(event)
            if tokens is not None and len(seen.tokens) == 3 and min(map(len, seen.tokens.values())) >= tokens:
                return seen
    except grpc.aio.AioRpcError as error:
        seen.status = error.code()
    return seen


def drawn(tokenizer: Tokenizer, **changes: object) -> pb.GenerateRequest:
    """The same words each time; end tokens do not end."""
    ids = tokenizer.encode("The captain looked at the map and decided")
    request = pb.GenerateRequest(request_id=fresh_id("choices"), tokens=pb.TokenPrompt(ids=ids), max_output_tokens=TOKENS)
    request.sampling.CopyFrom(pb.SamplingParams(temperature=1.0, top_p=0.95, top_k=200, seed=7))
    request.stop.ignore_eos = True
    request.utf8_policy = pb.UTF8_POLICY_DROP
    for name, value in changes.items():
        setattr(request, name, value)
    return request


async def test_three_choices_drawn_with_a_seed(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    async with stub_of(exact_cell) as stub:
        seen = await read(stub.Generate(drawn(tokenizer, choices=3), timeout=120), Choices())
        again = await read(stub.Generate(drawn(tokenizer, choices=3), timeout=120), Choices())
        single = await ask(stub, drawn(tokenizer))
        assert seen.status is grpc.StatusCode.OK and seen.ends == dict.fromkeys(range(3), "max_output_tokens")
        assert (seen.texts, seen.tokens) == (again.texts, again.tokens) and len(set(seen.texts.values())) == 3
        assert (seen.texts[0], seen.tokens[0]) == (single.text, single.token_ids)
        assert seen.completed is not None and single.completed is not None
        usage, prompt = seen.completed.usage, single.completed.usage.prompt_tokens
        assert (usage.prompt_tokens, usage.selected_tokens) == (prompt, 3 * TOKENS)
        assert usage.processed_tokens == prompt + 3 * (TOKENS - 1)
        best = drawn(tokenizer, choices=1, best_of=3, output_mode=pb.OUTPUT_MODE_FINAL_ONLY)
        told = await read(stub.Generate(best, timeout=120), Choices())
        (index,) = told.texts
        assert told.texts[index] == seen.texts[index]
    await at_rest(exact_cell)


async def test_one_choice_is_cancelled_through_the_other_router(exact_cell: Cell, tokenizer: Tokenizer) -> None:
    async with stub_of(exact_cell) as stub, stub_of(exact_cell, 1) as other:
        whole = await read(stub.Generate(drawn(tokenizer, choices=3, max_output_tokens=200), timeout=120), Choices())
        request = drawn(tokenizer, choices=3, max_output_tokens=200)
        call = stub.Generate(request, timeout=120)
        seen = await read(call, Choices(), tokens=4)
        answer = await other.Cancel(pb.CancelRequest(request_id=request.request_id, choice=1), timeout=10)
        assert answer.outcome == pb.CANCEL_OUTCOME_ACCEPTED
        await read(call, seen)
        assert seen.ends == {0: "max_output_tokens", 1: "cancelled", 2: "max_output_tokens"}
        assert (seen.texts[0], seen.texts[2]) == (whole.texts[0], whole.texts[2])
        assert whole.texts[1].startswith(seen.texts[1]) and len(seen.tokens[1]) < 200
        assert seen.status is grpc.StatusCode.OK and seen.completed is not None
        request = drawn(tokenizer, choices=3, max_output_tokens=200)
        call = stub.Generate(request, timeout=120)
        seen = await read(call, Choices(), tokens=4)
        await other.Cancel(pb.CancelRequest(request_id=request.request_id, wait=True), timeout=10)
        await read(call, seen)
        assert seen.status is grpc.StatusCode.CANCELLED and set(seen.ends.values()) == {"cancelled"}
    await at_rest(exact_cell)


async def test_a_crash_of_their_decode_member_loses_nothing(tokenizer: Tokenizer) -> None:
    with cell_of(dtype=EXACT_DTYPE, decode_members=2, kv_tokens=8192) as cell:
        async with stub_of(cell) as stub:
            whole = await read(stub.Generate(drawn(tokenizer, choices=3, max_output_tokens=160), timeout=120), Choices())
            request = drawn(tokenizer, choices=3, max_output_tokens=160)
            call = stub.Generate(request, timeout=120)
            seen = await read(call, Choices(), tokens=20)
            record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
            killed = next(child for child in cell.decode if child.name == record.decode_member)
            killed.process.kill()
            await read(call, seen)
            assert (seen.texts, seen.tokens, seen.ends) == (whole.texts, whole.tokens, whole.ends)
            assert seen.status is grpc.StatusCode.OK and seen.completed is not None
            assert seen.completed.usage.selected_tokens == 3 * 160
            record = (await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
            assert record.attempt == 2 and record.decode_member != killed.name
