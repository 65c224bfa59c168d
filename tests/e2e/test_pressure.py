"""A decode member with too few pages for what it took in: everything is served, and says what it would have said alone."""

import random

import pytest

from tandem_cli.cell import Cell
from tests.e2e.cells import Answer, ask_all, at_rest, greedy_request, stub_of
from tests.e2e.conftest import cell_of
from tests.e2e.test_metrics import scrape
from tests.exact_dtype import EXACT_DTYPE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS = 24
OUTPUT_TOKENS = 40
#: 32 pages of 16 tokens; each request needs 4 or 5 and is promised 1 or 2, after short outputs.
KV_TOKENS = 512
SHORT_OUTPUTS = 8


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(31)
    return [tuple(rng.randrange(1000, 49_000) for _ in range(rng.randrange(9, 25))) for _ in range(REQUESTS)]


async def outputs(cell: Cell) -> list[Answer]:
    """All requests at once."""
    async with stub_of(cell) as stub:
        return await ask_all(stub, [greedy_request(ids, OUTPUT_TOKENS) for ids in prompts()], REQUESTS)


@pytest.mark.parametrize("kind", ["recompute", "swap"])
async def test_preempted_outputs_are_the_undisturbed_ones(exact_cell: Cell, kind: str) -> None:
    undisturbed = await outputs(exact_cell)
    flags = ("--reservation=expected", f"--preemption={kind}", "--swap-pages=64")
    with cell_of(dtype=EXACT_DTYPE, kv_tokens=KV_TOKENS, extra=tuple(("decode", flag) for flag in flags)) as cell:
        async with stub_of(cell) as stub:
            short = [greedy_request(ids, 2) for ids in prompts()[:SHORT_OUTPUTS]]
            assert all(answer.reason == "max_output_tokens" for answer in await ask_all(stub, short, SHORT_OUTPUTS))
        answers = await outputs(cell)
        await at_rest(cell)
        metrics = await scrape(cell.decode[0])
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.reason == expected.reason == "max_output_tokens"
        assert answer.text == expected.text and answer.token_ids == expected.token_ids
    assert metrics[f"decode_preemptions_total{{kind={kind}}}"] >= 3
    out, back = (metrics[f"decode_swapped_bytes_total{{direction={way}}}"] for way in ("out", "back"))
    assert out == back and (out > 0) == (kind == "swap")
    assert (metrics["decode_dropped_tokens_total"] > 0) == (kind == "recompute")
