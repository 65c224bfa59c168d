"""LoRA adapters through router, prefill, NIXL and decode: the text is that of merged weights, and pages are never mixed."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from transformers import PreTrainedModel

from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, ask_all, at_rest, greedy_request, stub_of
from tests.e2e.conftest import CONTEXT_TOKENS, STEP_TOKENS, cell_of
from tests.e2e.word_tokenizer import write_tokenizer
from tests.engine import tiny_models
from tests.engine.adapter_files import Tiny, merged, write
from tests.engine.tiny_models import prompt
from tests.reference import greedy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OUTPUT_TOKENS = 12
ADAPTERS = {"first": Tiny(1), "second": Tiny(2, modules=("q_proj", "down_proj"))}


@dataclass(frozen=True)
class Served:
    """A cell, and what each of its adapters should say; the empty one's is the model."""

    cell: Cell
    models: dict[str, PreTrainedModel]

    def expected(self, name: str, ids: list[int]) -> list[int]:
        return greedy(self.models[name], ids, OUTPUT_TOKENS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapted")
    model = tiny_models.build("llama", max_position_embeddings=CONTEXT_TOKENS, eos_token_id=0)
    tiny_models.save(model, folder / "model")
    write_tokenizer(folder / "model")
    options = tuple(f"{name}={write(folder / name, tiny, model)}" for name, tiny in ADAPTERS.items())
    models = {"": model, **{name: merged(model, tiny) for name, tiny in ADAPTERS.items()}}
    with cell_of(model=str(folder / "model"), dtype="float32", adapters=options) as cell:
        yield Served(cell, models)


async def test_each_says_its_own_beside_the_others_and_a_second_time_from_the_cache(served: Served) -> None:
    """One text for all of them: a page of another one would change what is said."""
    prompts = [prompt(length, seed=3) for length in (1, 16, 33, STEP_TOKENS + 9)]
    asked = [(name, ids) for ids in prompts for name in served.models]
    async with stub_of(served.cell) as stub:
        for cached in (False, True):
            requests = [greedy_request(ids, OUTPUT_TOKENS, adapter=name) for name, ids in asked]
            answers = await ask_all(stub, requests, at_once=4)
            for (name, ids), answer in zip(asked, answers, strict=True):
                assert answer.reason == "max_output_tokens", answer.details
                assert answer.token_ids == served.expected(name, ids), (name, len(ids))
                assert answer.completed is not None
                found = answer.completed.usage.cached_prompt_tokens
                assert found == (len(ids) - 1) // 16 * 16 * cached, (name, len(ids))
        record = (await stub.Get(pb.GetRequest(request_id=requests[-1].request_id))).record
        assert record.adapter == "second"
    await at_rest(served.cell)


async def test_several_outputs_of_one_adapted_prompt(served: Served) -> None:
    ids = prompt(20, seed=4)
    request = greedy_request(ids, OUTPUT_TOKENS, adapter="first", choices=2)
    async with stub_of(served.cell) as stub:
        events = [event async for event in stub.Generate(request, timeout=60)]
    for index in range(2):
        told = [
            getattr(event, event.WhichOneof("event"))
            for event in events
            if event.WhichOneof("event") in ("delta", "choice_ended")
        ]
        assert [token for one in told if one.index == index for token in one.token_ids] == served.expected("first", ids)
    await at_rest(served.cell)


async def test_an_unknown_one_is_not_found(served: Served) -> None:
    async with stub_of(served.cell) as stub:
        answer = await ask(stub, greedy_request([1, 2, 3], 4, adapter="third"))
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert answer.status is grpc.StatusCode.NOT_FOUND
    assert answer.details == "no adapter is called 'third'; this cell has 'first', 'second'"
    assert list(model.adapters) == ["first", "second"]


def test_the_command_line_asks_for_one(served: Served) -> None:
    def generate(adapter: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tandem_cli", "generate", "--raw", "ao", "-n", "8", "--temperature", "0", "--ignore-eos"]
        more = ["--adapter", adapter, "--address", served.cell.address, "--quiet"]
        return subprocess.run([*command, *more], check=False, capture_output=True, text=True, timeout=120, cwd=Path.cwd())

    said = {name: generate(name) for name in ("", "first", "second")}
    assert {done.returncode for done in said.values()} == {0}, said
    assert len({done.stdout for done in said.values()}) == 3
    unknown = generate("third")
    assert unknown.returncode != 0 and "no adapter is called 'third'" in unknown.stderr
