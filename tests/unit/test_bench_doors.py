"""The HTTP door and the two loops, against servers and doors made here."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from bench.doors import HttpDoor
from bench.drive import drive
from bench.peer.servers import ServerOptions, arguments_of, settings_of
from tandem.v1 import inference_pb2 as pb
from tandem_cli.load.door import GrpcDoor
from tandem_cli.load.drive import Run
from tandem_cli.load.measured import Seen
from tandem_cli.load.workload import Beside, Lengths, Level, Loop, Planned, Workload, schedule

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def event(*ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "data: {", "token_ids": ids}]}).encode() + b"\n\n"


@asynccontextmanager
async def server(pieces: Sequence[bytes], asked: list[dict[str, object]]) -> AsyncIterator[HttpDoor]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.split("Content-Length: ")[1].split("\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield HttpDoor(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", "m")


async def asked_once(pieces: Sequence[bytes], wanted: int) -> tuple[Seen, list[dict[str, object]]]:
    asked: list[dict[str, object]] = []
    workload = Workload("w", "", 0, Lengths(3, 3), Lengths(wanted, wanted), None, (), 1, 1, 1.0, None)
    async with server(pieces, asked) as door:
        measured = await drive(door, Run(workload, Level(Loop.CLOSED, 1.0), 0, 2000), [])
    return measured.requests[0], asked


async def test_events_are_counted_however_they_are_cut() -> None:
    stream = event(1) + event() + event(2, 3) + b"data: [DONE]\n\n"
    cut = [HEAD, chunk(stream[:30]), chunk(stream[30:31]) + chunk(stream[31:]), chunk(b"")]
    seen, asked = await asked_once(cut, 3)
    assert (seen.failure, [count for _, count in seen.arrivals]) == ("", [1, 2])
    assert seen.asked_at < seen.arrivals[0][0] <= seen.arrivals[1][0] <= seen.ended_at
    assert asked[0]["max_tokens"] == 3 and asked[0]["ignore_eos"] is True and asked[0]["temperature"] == 0.0
    assert len(asked[0]["prompt"]) == 3  # type: ignore[arg-type]


async def test_a_body_without_chunks_is_read_to_its_end() -> None:
    seen, _ = await asked_once([HEAD.replace(b"Transfer-Encoding: chunked\r\n", b""), event(1), event(2)], 2)
    assert seen.failure == "" and seen.tokens == 2


class Answering:
    """A stub whose answer has so many tokens told and chosen."""

    def __init__(self, told: int, selected: int) -> None:
        self._told, self._selected = told, selected

    async def Generate(self, request: pb.GenerateRequest, timeout: float) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        yield pb.GenerateResponse(started=pb.Started())
        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[7] * self._told))
        usage = pb.Usage(selected_tokens=self._selected, returned_tokens=self._told)
        limit = pb.FINISH_REASON_MAX_OUTPUT_TOKENS
        yield pb.GenerateResponse(completed=pb.Completed(finish_reason=limit, usage=usage))


@pytest.mark.parametrize(("told", "counts"), [(3, [3]), (2, [2, 1])])
async def test_an_answer_that_ends_inside_a_character_has_all_its_tokens(told: int, counts: list[int]) -> None:
    workload = Workload("w", "", 0, Lengths(3, 3), Lengths(3, 3), None, (), 1, 1, 1.0, None)
    measured = await drive(GrpcDoor(Answering(told, 3)), Run(workload, Level(Loop.CLOSED, 1.0), 0, 2000), [])
    seen = measured.requests[0]
    assert (seen.failure, [count for _, count in seen.arrivals]) == ("", counts)


async def test_what_goes_wrong_is_told() -> None:
    refused, _ = await asked_once([b"HTTP/1.1 400 Bad Request\r\n\r\nno such model"], 1)
    assert "HTTP HTTP/1.1 400 Bad Request: no such model" in refused.failure
    broken, _ = await asked_once([HEAD, chunk(b'data: {"error": {"message": "out of memory"}}\n\n')], 1)
    assert "out of memory" in broken.failure
    cut, _ = await asked_once([HEAD, chunk(event(1)), b"ff\r\nda"], 2)
    assert "IncompleteReadError" in cut.failure
    short, _ = await asked_once([HEAD, chunk(event(1)), chunk(b"")], 2)
    assert short.failure == "1 tokens came, 2 were asked for"


class PatientDoor:
    """Answers nobody before so many wait together."""

    def __init__(self, together: int) -> None:
        self._wanted = together
        self._waiting = 0
        self._let = asyncio.Event()

    async def ask(self, planned: Planned, seen: Seen) -> None:
        self._waiting += 1
        if self._waiting == self._wanted:
            self._let.set()
        if len(planned.prompt) == 9:  # it runs beside and never ends
            await asyncio.Event().wait()
        await self._let.wait()
        seen.arrivals.append((seen.asked_at + 1, planned.output_tokens))


async def test_a_closed_loop_keeps_so_many_under_way_and_leaves_what_runs_beside() -> None:
    beside = Beside(Lengths(9, 9), Lengths(1, 1), 200.0)
    workload = Workload("w", "", 0, Lengths(3, 3), Lengths(2, 2), None, (), 2, 1, 1.0, beside)
    async with asyncio.timeout(20):
        # Three clients and one request beside.
        measured = await drive(PatientDoor(4), Run(workload, Level(Loop.CLOSED, 3.0), 0, 2000), [])
    assert len(measured.requests) == len(measured.counted()) == 6


async def test_an_open_loop_waits_for_no_answer() -> None:
    workload = Workload("w", "", 0, Lengths(3, 3), Lengths(2, 2), None, (), 1, 1, 0.02, None)
    run = Run(workload, Level(Loop.OPEN, 1000.0), 0, 2000)
    expected = len(schedule(workload, run.level, run.seed, run.vocabulary_size))
    async with asyncio.timeout(20):
        measured = await drive(PatientDoor(expected), run, [])
    assert len(measured.requests) == expected > 5
    assert not measured.failures()


def test_the_peers_settings_follow_its_cores() -> None:
    pair, both = ServerOptions("p", (1,), 5601), ServerOptions("a", (0, 1), prefix_caching=True)
    assert settings_of(pair)["OMP_NUM_THREADS"] == "1" and settings_of(pair)["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert settings_of(both)["OMP_NUM_THREADS"] == "2" and settings_of(both)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in settings_of(both)
    assert "NixlConnector" in " ".join(arguments_of(pair)) and "NixlConnector" not in " ".join(arguments_of(both))
    assert "--no-enable-prefix-caching" in arguments_of(pair) and "--enable-prefix-caching" in arguments_of(both)
