"""Health, reflection, models, records, and a call by a client that knows nothing but reflection."""

import json
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, at_rest, fresh_id, stub_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SERVICE = "tandem.v1.InferenceService"


async def _files(channel: grpc.aio.Channel, symbol: str) -> list[descriptor_pb2.FileDescriptorProto]:
    """Every file that a symbol needs, as reflection tells it."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    wanted = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)]
    while wanted:
        call = stub.ServerReflectionInfo(iter([wanted.pop()]), timeout=10)
        async for answer in call:
            for data in answer.file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(data)
                if file.name not in found:
                    found[file.name] = file
                    wanted += [reflection_pb2.ServerReflectionRequest(file_by_filename=name) for name in file.dependency]
    return list(found.values())


async def test_reflection_alone_is_enough_to_generate(exact_cell: Cell) -> None:
    async with grpc.aio.insecure_channel(exact_cell.address) as channel:
        pool = descriptor_pool.DescriptorPool()
        files = {file.name: file for file in await _files(channel, SERVICE)}

        def add(name: str) -> None:
            file = files.pop(name, None)
            if file is not None:
                for dependency in file.dependency:
                    add(dependency)
                pool.Add(file)

        for name in list(files):
            add(name)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        request_class, response_class = (
            message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
        )
        request = request_class(request_id=fresh_id("reflect"), text="The first letter is", max_output_tokens=5)
        call = channel.unary_stream(f"/{SERVICE}/Generate", request_class.SerializeToString, response_class.FromString)(
            request, timeout=60
        )
        events = [event async for event in call]
    assert events[0].started.prompt_tokens > 0 and events[-1].completed.usage.selected_tokens == 5


def test_buf_curl_can_generate(exact_cell: Cell) -> None:
    body = json.dumps({"request_id": fresh_id("curl"), "text": "Water is", "max_output_tokens": 4})
    buf = Path(sys.executable).with_name("buf")
    command = [
        str(buf),
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        "--reflect-protocol",
        "grpc-v1alpha",
        "-d",
        body,
    ]
    done = subprocess.run(
        [*command, f"http://{exact_cell.address}/{SERVICE}/Generate"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"completed"' in done.stdout and "FINISH_REASON_MAX_OUTPUT_TOKENS" in done.stdout


async def test_health_by_service_name(exact_cell: Cell) -> None:
    names = {
        exact_cell.routers[0].address: ["", SERVICE, "liveness", "readiness"],
        exact_cell.prefill[0].address: ["", "tandem.pools.v1.PrefillService", "liveness", "readiness"],
        exact_cell.decode[0].address: ["", "tandem.pools.v1.DecodeService", "liveness", "readiness"],
    }
    for address, services in names.items():
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in services:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, (address, service)


async def test_models_and_record(exact_cell: Cell) -> None:
    request = pb.GenerateRequest(request_id=fresh_id("record"), text="The colour of grass is", max_output_tokens=6)
    async with stub_of(exact_cell, 0) as stub, stub_of(exact_cell, 1) as other:
        (model,) = (await stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
        assert (model.prefill_members, model.decode_members, model.vocabulary_size) == (1, 1, 49_152)
        answer = await ask(stub, request)
        record = (await other.Get(pb.GetRequest(request_id=request.request_id), timeout=10)).record
    states = [pb.RequestState.Name(step.state).removeprefix("REQUEST_STATE_") for step in record.transitions]
    assert states[-1] == "FINISHED"
    assert states == ["CREATED", "QUEUED", "ADMITTED", "PREFILLING", "DECODING", "DRAINING", "FINISHED"]
    times = [step.at.ToNanoseconds() for step in record.transitions]
    assert times == sorted(times)
    assert record.usage == answer.completed.usage and record.usage.selected_tokens == 6
    assert record.model_snapshot == model.snapshot == answer.started.model_snapshot
    assert record.sent_bytes == len(answer.text.encode()) and record.released
    timings = answer.completed.timings
    assert timings.prefill_s > 0 and timings.handover_s > 0 and 0 < timings.decode_s < timings.total_s
    assert timings.handover_exposed_s <= timings.handover_s and 0 < timings.first_token_s < timings.total_s
    await at_rest(exact_cell)


async def test_final_only_is_the_same_text_in_one_event(exact_cell: Cell) -> None:
    async with stub_of(exact_cell) as stub:
        answers = []
        for mode in (pb.OUTPUT_MODE_DELTA, pb.OUTPUT_MODE_FINAL_ONLY):
            request = pb.GenerateRequest(
                request_id=fresh_id("mode"), text="One, two, three,", max_output_tokens=16, output_mode=mode
            )
            request.sampling.temperature = 0
            answers.append(await ask(stub, request))
    delta, final = answers
    assert delta.text == final.text != "" and len(delta.sequence_nos) > 3 and final.sequence_nos == [0, 1]


async def test_stop_text_is_never_sent(exact_cell: Cell) -> None:
    """B28 through the whole path: stream text is the text before the stop, whatever the tokens are."""
    plain = pb.GenerateRequest(request_id=fresh_id("stop"), text="Count: 1, 2, 3, 4,", max_output_tokens=40)
    plain.sampling.temperature = 0
    async with stub_of(exact_cell) as stub:
        whole = (await ask(stub, plain)).text
        assert len(whole) > 20
        stop = whole[9:14]
        cut = pb.GenerateRequest()
        cut.CopyFrom(plain)
        cut.request_id = fresh_id("stop")
        cut.stop.sequences.append(stop)
        answer = await ask(stub, cut)
        cut.request_id, cut.stop.include_stop = fresh_id("stop"), True
        included = await ask(stub, cut)
    before = whole[: whole.index(stop)]
    assert answer.reason == "stop_sequence" and answer.completed.matched_stop == stop
    assert answer.text == before and included.text == before + stop
