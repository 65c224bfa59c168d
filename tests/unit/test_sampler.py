"""The sampler against its definition: filters, penalties, ties, extremes, distribution, and rows that share a batch."""

import numpy as np
import pytest
import torch

from engine.sample_row import SampleRow, TokenHistory
from engine.sampler import SAMPLER_ORDER_VERSION, Sampler, SamplerError
from engine.sampler_filters import FIRST_FRONT, GROUP_DEPTH, SECOND_FRONT
from engine.sampling_params import SamplingParams
from tests.unit import sampler_reference as reference

SMALL = 50
MIDDLE = 2_000  # no groups: goes to the second attempt
LARGE = GROUP_DEPTH * FIRST_FRONT * 2 + 7  # groups, and a last one that is not full


def logits(vocabulary: int, seed: int, spread: float = 3.0, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def row(params: SamplingParams, position: int = 0, **more) -> SampleRow:
    return SampleRow(params, more.pop("sequence_index", 0), position, **more)


def one(values: torch.Tensor, params: SamplingParams, position: int = 0, **more) -> int | SamplerError:
    (chosen,) = Sampler(values.shape[-1]).choose(values.reshape(1, -1), [row(params, position, **more)])
    return chosen


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 130, "top_p": 0.999, "temperature": 5.0},
    {"top_k": 1_500, "top_p": 0.99, "temperature": 8.0},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 3.0},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1e-6, "temperature": 2.0},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 10**9, "temperature": 0.7},
]


@pytest.mark.parametrize("vocabulary", [1, 2, 31, SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_every_filter_equals_the_dumb_sampler(fields: dict[str, float], vocabulary: int) -> None:
    values = logits(vocabulary, seed=len(str(fields)), rows=4)
    params = [SamplingParams(**fields, seed=seed) for seed in range(4)]  # type: ignore[arg-type]
    chosen = Sampler(vocabulary).choose(values, [row(p, position) for position, p in enumerate(params)])
    expected = [reference.choose(v, p, n) for n, (v, p) in enumerate(zip(values.numpy(), params, strict=True))]
    assert chosen == expected


def test_no_filter_equals_the_dumb_sampler() -> None:
    for vocabulary in (1, 2, 33, SMALL, LARGE):
        values = logits(vocabulary, seed=vocabulary)
        for seed in range(8):
            params = SamplingParams(temperature=1.3, seed=seed)
            assert one(values, params, 3) == reference.choose(values[0].numpy(), params, 3)


def test_greedy_takes_the_largest_and_at_equal_logits_the_smallest_id() -> None:
    values = logits(LARGE, seed=1)
    assert one(values, SamplingParams(temperature=0)) == int(values.argmax())
    values[0, [77, 1_000, LARGE - 1]] = 50.0
    assert one(values, SamplingParams(temperature=0)) == 77
    assert one(values, SamplingParams(temperature=9e-6)) == 77


@pytest.mark.parametrize("equal", [FIRST_FRONT - 1, FIRST_FRONT, FIRST_FRONT + 1, SECOND_FRONT, LARGE])
def test_ties_at_the_edge_of_top_k_go_by_id(equal: int) -> None:
    """More equal logits than fit: the kept ones are those with the smallest ids, wherever the groups lie."""
    values = torch.full((1, LARGE), -5.0)
    tied = torch.randperm(LARGE, generator=torch.Generator().manual_seed(equal))[:equal]
    values[0, tied] = 2.0
    allowed = set(sorted(tied.tolist())[:100])
    sampler = Sampler(LARGE)
    for seed in range(20):
        params = SamplingParams(top_k=100, seed=seed)
        (chosen,) = sampler.choose(values, [row(params)])
        assert chosen in allowed
        if seed < 3:
            assert chosen == reference.choose(values[0].numpy(), params, 0)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Four equal logits have a quarter each: half of the mass is exactly the first two."""
    values = torch.full((1, SMALL), -200.0)
    values[0, [3, 11, 20, 44]] = 1.0
    assert {one(values, SamplingParams(top_p=0.5, seed=seed)) for seed in range(40)} == {3, 11}
    assert {one(values, SamplingParams(top_p=0.5000001, seed=seed)) for seed in range(40)} == {3, 11, 20}
    assert {one(values, SamplingParams(top_p=0.5, top_k=2, seed=seed)) for seed in range(40)} == {3}


def test_min_p_one_draws_among_all_that_tie_for_the_first_place() -> None:
    values = logits(SMALL, seed=3)
    values[0, [4, 9, 30]] = 20.0
    assert {one(values, SamplingParams(min_p=1.0, seed=seed)) for seed in range(60)} == {4, 9, 30}


def test_a_tiny_temperature_is_the_largest_logit_and_overflows_nothing() -> None:
    values = logits(LARGE, seed=4)
    values[0, 5] = 3e38
    values[0, 6] = -3e38
    for fields in ({}, {"top_p": 0.99}, {"top_k": 7}, {"min_p": 1e-9}):
        assert one(values, SamplingParams(temperature=1e-5, **fields)) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.99999}, {"top_k": 40}], ids=str)
def test_with_all_but_one_banned_the_one_is_chosen(temperature: float, fields: dict[str, float]) -> None:
    for vocabulary in (SMALL, LARGE):
        banned = tuple(token for token in range(vocabulary) if token != 17)
        values = logits(vocabulary, seed=5)
        assert one(values, SamplingParams(temperature=temperature, **fields), banned_ids=banned) == 17  # type: ignore[arg-type]


def test_b30_banned_ids_are_never_chosen_and_no_other_id_is_hit() -> None:
    """The last id of the vocabulary stays possible, ids outside it do no harm."""
    values = torch.zeros(1, SMALL)
    banned = (0, 3, SMALL, SMALL + 5)
    rows = [row(SamplingParams(seed=seed), banned_ids=banned) for seed in range(1_000)]
    assert set(Sampler(SMALL).choose(values.expand(1_000, SMALL), rows)) == set(range(SMALL)) - {0, 3}
    values[0, SMALL - 1] = 1.0
    assert one(values, SamplingParams(temperature=0), banned_ids=banned) == SMALL - 1


def test_penalties_follow_their_definition() -> None:
    prompt, output = [1, 2, 2, 3], [3, 4, 4, 4]
    fields = [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -2.0, "presence_penalty": -1.0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": ((3, 4.0), (8, -100.0))},
    ]
    for seed, some in enumerate(fields):
        values = logits(12, seed=seed, spread=1.0)
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=seed, **some)  # type: ignore[arg-type]
            chosen = one(values, params, 4, history=TokenHistory(prompt, output), banned_ids=(2,))
            assert chosen == reference.choose(values[0].numpy(), params, 4, prompt=prompt, output=output, banned=(2,))


def test_repetition_counts_prompt_and_output_presence_and_frequency_the_output_only() -> None:
    history = TokenHistory([0], [1, 1])
    values = torch.tensor([[2.0, 2.0, 1.5, -9.0]])
    assert one(values, SamplingParams(temperature=0, repetition_penalty=2.0), history=history) == 2
    assert one(values, SamplingParams(temperature=0, presence_penalty=1.0), history=history) == 0
    assert one(values, SamplingParams(temperature=0, frequency_penalty=0.5), history=history) == 0
    values = torch.tensor([[-1.0, -9.0, -1.5, -9.0]])
    assert one(values, SamplingParams(temperature=0, repetition_penalty=2.0), history=history) == 2


def test_logit_bias_comes_before_the_ban_and_can_decide() -> None:
    values = torch.zeros(1, SMALL)
    assert one(values, SamplingParams(temperature=0, logit_bias=((7, 100.0),))) == 7
    assert one(values, SamplingParams(temperature=0, logit_bias=((7, 100.0), (9, 50.0))), banned_ids=(7,)) == 9


def test_the_logits_are_left_alone() -> None:
    values = logits(SMALL, seed=6, rows=3)
    before = values.clone()
    history = TokenHistory([1], [2])
    rows = [
        row(SamplingParams(temperature=0), banned_ids=(1,)),
        row(SamplingParams(repetition_penalty=1.5), history=history),
        row(SamplingParams(top_p=0.5, logit_bias=((3, 9.0),))),
    ]
    Sampler(SMALL).choose(values, rows)
    assert torch.equal(values, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all banned"])
def test_a_bad_row_is_named_and_the_others_go_on(bad: float | str) -> None:
    values = logits(LARGE, seed=7, rows=6)
    good = values.clone()
    if bad == "all banned":
        values[[1, 3, 4]] = -torch.inf
    else:
        values[[1, 3, 4], 900] = bad
    kinds = [{"temperature": 0}, {"temperature": 0}, {}, {}, {"top_p": 0.9}, {"top_p": 0.9}]
    rows = [row(SamplingParams(seed=n, **kind)) for n, kind in enumerate(kinds)]
    sampler = Sampler(LARGE)
    chosen, expected = sampler.choose(values, rows), sampler.choose(good, rows)
    for index, token in enumerate(chosen):
        if index in (1, 3, 4):
            assert isinstance(token, SamplerError) and token.row == index and f"row {index}" in str(token)
        else:
            assert token == expected[index]


def test_ids_outside_the_vocabulary_cost_only_their_own_row() -> None:
    values = logits(SMALL, seed=8, rows=3)
    rows = [
        row(SamplingParams(temperature=0, logit_bias=((SMALL, 1.0),))),
        row(SamplingParams(presence_penalty=1.0), history=TokenHistory([SMALL + 1])),
        row(SamplingParams(temperature=0)),
    ]
    first, second, third = Sampler(SMALL).choose(values, rows)
    assert isinstance(first, SamplerError) and f"id {SMALL}, the vocabulary has {SMALL}" in str(first)
    assert isinstance(second, SamplerError) and second.row == 1
    assert third == int(values[2].argmax())


def test_a_tensor_that_does_not_fit_the_rows_is_refused() -> None:
    sampler = Sampler(SMALL)
    for values in (torch.zeros(2, SMALL), torch.zeros(1, SMALL + 1), torch.zeros(1, SMALL, dtype=torch.float64)):
        with pytest.raises(ValueError, match="must be float32"):
            sampler.choose(values, [row(SamplingParams())])
    assert sampler.choose(torch.zeros(0, SMALL), []) == []


def mixed_rows(seed: int, vocabulary: int) -> list[SampleRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(16):
        kind = index % 4
        fields: dict[str, float] = {"seed": int(rng.integers(2**63)), "temperature": float(rng.choice([0.3, 1.0, 4.0]))}
        if kind == 0:
            fields["temperature"] = 0.0
        if kind >= 2:
            fields["top_k"] = int(rng.choice([0, 1, 40, 129, 3_000]))
            fields["top_p"] = float(rng.choice([0.2, 0.95, 0.9999, 1.0]))
            fields["min_p"] = float(rng.choice([0.0, 0.02]))
        history = None
        if kind == 3:
            fields["repetition_penalty"], fields["frequency_penalty"] = 1.3, 0.2
            history = TokenHistory(rng.integers(vocabulary, size=30).tolist(), rng.integers(vocabulary, size=9).tolist())
        banned = tuple(rng.integers(vocabulary, size=3).tolist()) if rng.random() < 0.3 else ()
        rows.append(SampleRow(SamplingParams(**fields), index % 2, int(rng.integers(500)), history, banned))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize("threads", [1, 2])
def test_b45_each_row_alone_is_the_same_row_in_a_batch_of_sixteen_mixed_ones(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(6):
            rows = mixed_rows(seed, LARGE)
            values = logits(LARGE, seed, spread=(1.0, 3.0, 6.0)[seed % 3], rows=16)
            sampler = Sampler(LARGE)
            together = sampler.choose(values, rows)
            alone = [sampler.choose(values[n : n + 1], rows[n : n + 1])[0] for n in range(16)]
            backwards = sampler.choose(values.flip(0), rows[::-1])[::-1]
            assert together == alone == backwards
    finally:
        torch.set_num_threads(before)


def test_different_seeds_positions_and_sequences_draw_differently() -> None:
    values = torch.zeros(1, LARGE)
    draws = {one(values, SamplingParams(seed=seed)) for seed in range(50)}
    draws |= {one(values, SamplingParams(seed=0), position) for position in range(1, 50)}
    draws |= {one(values, SamplingParams(seed=0), sequence_index=index) for index in range(1, 50)}
    assert len(draws) > 140


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 2.0}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9}], ids=str
)
def test_draws_are_distributed_as_the_definition_says(fields: dict[str, float]) -> None:
    """Chi-square over 2000 positions of one seed; the bound is the 0.999 quantile (Wilson-Hilferty)."""
    values, count = logits(20, seed=12, spread=1.0), 2_000
    params = SamplingParams(seed=99, **fields)  # type: ignore[arg-type]
    kept, weights = reference.kept_ids(values[0].numpy(), params)
    share = np.array([float(weights[token]) for token in kept])
    expected = share / share.sum() * count
    sampler = Sampler(20)
    chosen = sampler.choose(values.expand(count, 20), [row(params, position) for position in range(count)])
    counts = np.array([chosen.count(token) for token in kept])
    assert counts.sum() == count
    degrees = len(kept) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert float(((counts - expected) ** 2 / expected).sum()) < bound


def test_history_grows_and_counts() -> None:
    history = TokenHistory([5, 5, 7])
    for token in range(200):
        history.add(token % 100)
    counted = dict(zip(history.ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counted == dict.fromkeys(range(100), 2)
    assert dict(zip(*(x.tolist() for x in (TokenHistory([3]).ids, TokenHistory([3]).output_counts)), strict=True)) == {3: 0}


def test_history_after_drafts_is_what_it_would_be_and_changes_nothing() -> None:
    history = TokenHistory([5, 5, 7], [7, 9])
    before = (history.ids.tolist(), history.output_counts.tolist())
    for drafts in ((), (5,), (9, 9, 1), (1, 2, 1, 1, 7)):
        grown = TokenHistory([5, 5, 7], [7, 9, *drafts])
        after = history.after(drafts)
        assert (after.ids.tolist(), after.output_counts.tolist()) == (grown.ids.tolist(), grown.output_counts.tolist())
    assert (history.ids.tolist(), history.output_counts.tolist()) == before


def test_a_row_with_penalties_needs_the_tokens_so_far() -> None:
    with pytest.raises(ValueError, match="history is missing"):
        row(SamplingParams(presence_penalty=1.0))


def test_the_order_has_a_version() -> None:
    assert SAMPLER_ORDER_VERSION == 1
