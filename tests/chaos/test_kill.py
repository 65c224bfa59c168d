"""Members are killed or asked to stop while requests run. ROUNDS and SEED choose how often and which; each round says its seed.

After each round: every request has had exactly one end, its text is the undisturbed run's or a beginning of it, every process
that lives holds nothing, and a member restarted under its name serves again.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grpc
import pytest

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.cell import Cell
from tandem_cli.supervisor import Child, Supervisor
from tests.e2e.cells import Answer, ask, at_rest, fresh_id, stub_of
from tests.e2e.conftest import cell_of
from tests.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = int(os.environ.get("ROUNDS", "4"))
SEED = int(os.environ.get("SEED", "1"))
REQUESTS = 6
OUTPUT_TOKENS = 24
READY_S = 120.0
#: Ends that a killed decode member may give to what it was serving; a killed prefill member is replaced by another one.
FAILED = "transport_error"


@dataclass(slots=True)
class ChangingCell:
    """A cell whose members are replaced as they end."""

    started: Cell
    pools: dict[str, tuple[Child, ...]]

    @property
    def now(self) -> Cell:
        """The cell with the members of now."""
        return replace(self.started, prefill=self.pools["prefill"], decode=self.pools["decode"])


@pytest.fixture(scope="module")
def cell() -> Iterator[ChangingCell]:
    with cell_of(dtype="float32", prefill_members=2, decode_members=2, extra=(("router", "--retry-share=1"),)) as running:
        yield ChangingCell(running, {"prefill": running.prefill, "decode": running.decode})


def _request(ids: list[int]) -> pb.GenerateRequest:
    request = pb.GenerateRequest(request_id=fresh_id("chaos"), tokens=pb.TokenPrompt(ids=ids), max_output_tokens=OUTPUT_TOKENS)
    request.sampling.temperature = 0
    request.stop.ignore_eos = True
    return request


def _restart(supervisor: Supervisor, child: Child) -> Child:
    """The same member at the same address, with the flags of the process that ended."""
    arguments = [str(argument) for argument in child.process.args]
    module = next(name for name in ("prefill_svc", "decode_svc") if name in arguments)
    flags = arguments[arguments.index(module) + 1 :]
    at = flags.index("--ready-fd")
    del flags[at : at + 2]
    flags[flags.index("--listen") + 1] = child.address
    supervisor.children.remove(child)
    started = supervisor.spawn(f"{child.name}-again", [module, *flags], child.stop_order)
    supervisor.wait_ready([started], READY_S)
    return started


async def _all_members(stub: pb_grpc.InferenceServiceStub) -> None:
    async def there() -> bool:
        models = (await stub.ListModels(pb.ListModelsRequest(), timeout=10)).models
        return bool(models) and (models[0].prefill_members, models[0].decode_members) == (2, 2)

    await until(there, READY_S, "two prefill and two decode members are known")


def _judge(answer: Answer, expected: str, victim: str) -> str:
    """What became of one request; fails unless it is one of the right things."""
    if answer.completed is None:
        assert answer.started is None and answer.status is grpc.StatusCode.UNAVAILABLE, (answer.status, answer.details)
        return "refused"
    if answer.reason == "max_output_tokens":
        assert answer.text == expected and answer.status is grpc.StatusCode.OK
        return "served"
    assert answer.reason == FAILED and answer.status is grpc.StatusCode.UNAVAILABLE, (answer.reason, answer.status)
    assert expected.startswith(answer.text)
    assert victim == "decode", f"a lost prefill member fails nobody: {answer.completed.cause}"
    return "failed"


@pytest.mark.parametrize("round_no", range(ROUNDS))
async def test_kill_a_member(cell: ChangingCell, tokenizer: Tokenizer, round_no: int) -> None:
    rng = random.Random(f"{SEED}-{round_no}")
    prompts = [
        tokenizer.encode(f"Report number {rng.randrange(10**6)}. " + "The wind was strong. " * rng.randrange(1, 40))
        for _ in range(REQUESTS)
    ]
    role = rng.choice(("prefill", "decode"))
    victim = rng.choice(cell.pools[role])
    number, after_s = rng.choice((signal.SIGKILL, signal.SIGTERM)), rng.uniform(0.0, 1.2)
    said = f"SEED={SEED} round {round_no}: {number.name} to {victim.name} after {after_s:.2f} s"
    async with stub_of(cell.started) as stub:
        await _all_members(stub)
        expected = [(await ask(stub, _request(ids))).text for ids in prompts]
        running = [asyncio.create_task(ask(stub, _request(ids))) for ids in prompts]
        await asyncio.wait(running, timeout=after_s)
        victim.process.send_signal(number)
        answers = await asyncio.gather(*running)
        outcomes = Counter(_judge(answer, text, role) for answer, text in zip(answers, expected, strict=True))
        print(f"\n{said}: {dict(outcomes)}")
        await asyncio.to_thread(victim.process.wait, READY_S)
        # In this thread: the kernel ends a child when the thread that started it ends.
        again = _restart(cell.started.supervisor, victim)
        cell.pools[role] = tuple(again if child is victim else child for child in cell.pools[role])
        await _all_members(stub)
    await at_rest(cell.now)
