"""Bad input over the wire: the right code, the field and the limit named, the server alive, nothing left behind."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from rpc.status import details_from
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, at_rest, check, fresh_id, stub_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    spoil: Callable[[pb.GenerateRequest], object]
    field: str
    limit: str
    code: grpc.StatusCode = INVALID


def _set(path: str, value: object) -> Callable[[pb.GenerateRequest], object]:
    *parents, name = path.split(".")

    def spoil(request: pb.GenerateRequest) -> None:
        target = request
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return spoil


CASES = (
    Case("empty prompt", _set("text", ""), "text", ""),
    Case("no prompt", lambda r: r.ClearField("input"), "input", ""),
    Case("empty id", _set("request_id", ""), "request_id", "128"),
    Case("long id", _set("request_id", "x" * 129), "request_id", "128"),
    Case("unknown model", _set("model", "gpt-99"), "gpt-99", "", grpc.StatusCode.NOT_FOUND),
    Case("temperature -1", _set("sampling.temperature", -1.0), "sampling.temperature", "0"),
    Case("temperature NaN", _set("sampling.temperature", float("nan")), "sampling.temperature", ""),
    Case("min_p NaN", _set("sampling.min_p", float("nan")), "sampling.min_p", ""),
    Case("top_p 0", _set("sampling.top_p", 0.0), "sampling.top_p", "0"),
    Case("top_p infinite", _set("sampling.top_p", float("inf")), "sampling.top_p", "1"),
    Case("17 stops", lambda r: r.stop.sequences.extend(f"s{n}" for n in range(17)), "stop.sequences", "16"),
    Case("empty stop", lambda r: r.stop.sequences.append(""), "stop.sequences[0]", ""),
    Case("long stop", lambda r: r.stop.sequences.append("x" * 257), "stop.sequences[0]", "256"),
    Case("no output", _set("max_output_tokens", 0), "max_output_tokens", "1"),
    Case("over the context", _set("max_output_tokens", 1_000_000), "max_output_tokens", "1024"),
    Case("20 MiB", _set("text", "x" * (20 << 20)), "text", "4"),
    Case("token outside", lambda r: r.tokens.ids.append(49_152), "tokens.ids", "49151"),
    Case("bad priority", _set("priority", 11), "priority", "10"),
    Case("negative deadline", lambda r: r.deadlines.overall.FromMilliseconds(-5), "deadlines.overall", ""),
)


def good() -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=fresh_id("bad"), text="hello", max_output_tokens=4)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_bad_input_names_field_and_limit(exact_cell: Cell, case: Case) -> None:
    request = good()
    case.spoil(request)
    async with stub_of(exact_cell) as stub:
        answer = await ask(stub, request, timeout_s=20)
        assert answer.status is case.code, f"{answer.status} {answer.details}"
        assert case.field in answer.details and case.limit in answer.details and answer.completed is None
        with pytest.raises(grpc.aio.AioRpcError) as unseen:
            await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=10)
        assert unseen.value.code() in (grpc.StatusCode.NOT_FOUND, INVALID)
        assert (await ask(stub, good())).completed is not None


async def test_violations_are_collected_and_named_in_the_details(exact_cell: Cell) -> None:
    request = good()
    request.sampling.temperature, request.sampling.top_p, request.max_output_tokens = -1, 0, 0
    async with stub_of(exact_cell) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(request, timeout=20):
                pass
    fields = {violation.field for violation in details_from(refused.value).violations}
    assert fields == {"sampling.temperature", "sampling.top_p", "max_output_tokens"}


@pytest.mark.parametrize(("field_number", "name"), [(3, "text"), (1, "request_id")])
async def test_invalid_utf8_names_the_field(exact_cell: Cell, field_number: int, name: str) -> None:
    bad = bytes([field_number << 3 | 2, 2, 0xFF, 0xFE])
    async with grpc.aio.insecure_channel(exact_cell.address) as channel:
        call = channel.unary_stream("/tandem.v1.InferenceService/Generate")(good().SerializeToString() + bad, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
    assert (
        refused.value.code() is INVALID and name in (refused.value.details() or "") and "UTF-8" in (refused.value.details() or "")
    )


async def test_same_id_other_body_and_same_body_again(exact_cell: Cell) -> None:
    """B18."""
    first = good()
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        whole = await ask(stub, first)
        assert whole.completed is not None
        changed = pb.GenerateRequest(request_id=first.request_id, text="other", max_output_tokens=4)
        answer = await ask(other, changed)
        assert answer.status is grpc.StatusCode.ALREADY_EXISTS and first.request_id in answer.details
        again = await ask(other, first)
        assert again.status is grpc.StatusCode.OK and again.completed == whole.completed


async def test_nothing_is_left_behind(exact_cell: Cell) -> None:
    await at_rest(exact_cell)
    for child in (*exact_cell.routers, *exact_cell.prefill, *exact_cell.decode):
        assert not (await check(child.address)).faults
