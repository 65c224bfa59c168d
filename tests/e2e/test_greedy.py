"""Greedy tokens through router, prefill, NIXL and decode are the reference's, alone and among others."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from models import Tokenizer
from tandem_cli.cell import Cell
from tests.e2e.cells import ask, ask_all, at_rest, greedy_request, stub_of
from tests.e2e.conftest import CONTEXT_TOKENS, STEP_TOKENS
from tests.reference import default_model, greedy, load_reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE_TOKENS = 16
OUTPUT_TOKENS = 12
#: Longer prompts are asked for among others only: they take seconds each.
ALONE_TOKENS = 2 * STEP_TOKENS + 1
#: Share of greedy tokens that bfloat16 must have in common with float32, position by position.
BF16_SHARE_MIN = 0.6

TEXTS = (
    "The kitchen was quiet before the first guests came, and",
    "In 2019 the bridge carried 48,213 cars a day; by 2024 it was",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Das Orchester stimmte die Instrumente, während draußen",
    "El mercado abre a las siete y los puestos de fruta",
    "La bibliothèque ferme à dix-huit heures, mais",
    "Η θάλασσα ήταν ήρεμη το πρωί και",
    "Поезд отправился в шесть часов утра, и",
    "図書館は静かで、窓の外には",
    "今天的天气很好,我们决定去",
    "오늘 아침에 우리는 기차를 타고",
    "السماء صافية اليوم و",
    "आज सुबह बाज़ार में",
    "🙂🙃 emoji and text mixed: the answer is 🌍",
    '{"name": "pump", "litres": 12.5, "parts": [1, 2, 3], "note": "',
    "A B C D E F G",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    ids: tuple[int, ...]
    output_tokens: int = OUTPUT_TOKENS


def _random(length: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000, 49_000) for _ in range(length))


@cache
def prompts(tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Lengths round every border (page, chunk, context) and real text in many scripts."""
    page, step = PAGE_TOKENS, STEP_TOKENS
    lengths = [1, 2, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 5 * page, 5 * page + 3]
    lengths += [step - 1, step, step + 1, 2 * step - 1, 2 * step, 2 * step + 1, 3 * step + page, 500, 777]
    lengths += [3, 7, 29, 100, 200]
    found = [Prompt(f"{length} random tokens", _random(length, length)) for length in lengths]
    found.append(Prompt("context limit - 1", _random(CONTEXT_TOKENS - 1, 5), 1))
    found += [Prompt(text[:24], tuple(tokenizer.encode(text))) for text in TEXTS]
    assert len(found) >= 40
    return tuple(found)


@cache
def expected(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The reference's greedy tokens in float32."""
    model = load_reference(default_model())
    return tuple(tuple(greedy(model, prompt.ids, prompt.output_tokens)) for prompt in prompts(tokenizer))


def _requests(asked: Sequence[Prompt]) -> list:
    return [greedy_request(prompt.ids, prompt.output_tokens) for prompt in asked]


def _shown(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that can show: an answer lists a token once its last byte is in the text."""
    return tuple(i for i in ids if i not in tokenizer.special_ids)


@pytest.mark.parametrize("at_once", [1, 16])
async def test_f32_tokens_are_the_references(f32_cell: Cell, tokenizer: Tokenizer, at_once: int) -> None:
    pairs = list(zip(prompts(tokenizer), expected(tokenizer), strict=True))
    if at_once == 1:
        pairs = [pair for pair in pairs if len(pair[0].ids) <= ALONE_TOKENS]
    async with stub_of(f32_cell) as stub:
        answers = await ask_all(stub, _requests([prompt for prompt, _ in pairs]), at_once)
    wrong = []
    for (prompt, want), got in zip(pairs, answers, strict=True):
        assert got.completed is not None and got.completed.usage.selected_tokens == prompt.output_tokens, prompt.name
        text = b"".join(tokenizer.token_bytes[i] for i in want).decode("utf-8", "ignore")
        if got.text != text or tuple(got.token_ids) != _shown(tokenizer, want)[: len(got.token_ids)]:
            wrong.append(f"{prompt.name}: {got.token_ids} instead of {want}")
    assert not wrong, "\n".join(wrong)
    await at_rest(f32_cell)


async def test_bf16_share_of_equal_tokens(bf16_cell: Cell, tokenizer: Tokenizer, record_property: object) -> None:
    async with stub_of(bf16_cell) as stub:
        answers = await ask_all(stub, _requests(prompts(tokenizer)), 16)
    pairs = [
        (want, got)
        for target, answer in zip(expected(tokenizer), answers, strict=True)
        for want, got in zip(_shown(tokenizer, target), answer.token_ids, strict=False)
    ]
    share = sum(want == got for want, got in pairs) / len(pairs)
    first = sum(
        _shown(tokenizer, target)[:1] == tuple(answer.token_ids[:1])
        for target, answer in zip(expected(tokenizer), answers, strict=True)
    )
    print(f"\nbf16 against f32 reference: {share:.1%} of {len(pairs)} greedy tokens equal,", end=" ")
    print(f"first token of {first}/{len(answers)} prompts")
    assert share >= BF16_SHARE_MIN
    await at_rest(bf16_cell)


async def test_one_output_token_works(f32_cell: Cell, tokenizer: Tokenizer) -> None:
    async with stub_of(f32_cell) as stub:
        answer = await ask(stub, greedy_request(tokenizer.encode(TEXTS[0]), 1))
    assert answer.reason == "max_output_tokens" and answer.completed.usage.selected_tokens == 1
