"""Log-probabilities that a decode member tells, over the wire: beside the tokens that are returned, whatever happens (C8)."""

import grpc
import pytest

from rpc.details import details_from
from tandem.pools.v1 import grant_pb2
from tandem.v1 import inference_pb2 as v1
from tests.contract.test_decode_moving import begun, goes_on, leave, members, paused, push
from tests.contract.test_decode_service_hold import until_held
from tests.decode_member import WAIT_S, Member, Seat, decode_member
from tests.waiting import until

PROMPT = tuple(b"prompt")
#: Ids are bytes, so this needs tokens whose bytes are no character yet, held text, and stops before the minimum.
SAID = b"ENDe\xe4\xbd\xa0 EN eEND"
STOP = v1.StopParams(sequences=["END"], min_output_tokens=4)
WANTED = v1.LogProbabilityParams(top=2)
QUIET = v1.OUTPUT_MODE_FINAL_ONLY


def aligned(token_ids: list[int], told: list[v1.TokenLogProbability], member: Member) -> None:
    """Each token has its own: the scripted model is all but sure of what it says."""
    assert len(token_ids) == len(told)
    for token, one in zip(token_ids, told, strict=True):
        assert one.top_token_ids[0] == token and one.log_probability == one.top_log_probabilities[0] > -1e-6, token
        assert one.token == member.tokenizer.piece(token) == one.top_tokens[0]
        assert len(one.top_token_ids) == len(one.top_log_probabilities) == len(one.top_tokens) == 2
        assert one.top_log_probabilities[1] < -90


def told(*seats: Seat) -> tuple[list[int], list[v1.TokenLogProbability]]:
    """What came with the deltas of some seats."""
    deltas = [event.delta for seat in seats for event in seat.deltas]
    return [t for d in deltas for t in d.token_ids], [one for d in deltas for one in d.log_probabilities]


def held(*seats: Seat) -> list[bytes]:
    """What a router keeps of tokens that were not returned."""
    kept: list[bytes] = []
    selected = returned = 0
    for output in (output for seat in seats for output in seat.outputs):
        selected, returned = selected + len(output.selected_token_ids), returned + output.returned_tokens
        kept = [*kept, *output.held_log_probabilities]
        kept = kept[len(kept) - (selected - returned) :]
    return kept


async def test_b28_b30_each_returned_token_has_its_own_and_what_a_stop_took_has_none() -> None:
    """C5, C8: stops before the minimum are text like any other; a character's tokens come with its last byte."""
    async with decode_member({PROMPT: SAID}) as member:
        seat = await (await member.open(PROMPT, max_output_tokens=30, stop=STOP, log_probabilities=WANTED)).finish()
        assert seat.text == "ENDe你 EN e" and seat.ended.finish_reason == v1.FINISH_REASON_STOP_SEQUENCE
        ids, log_probs = told(seat)
        assert ids == list(SAID[:-3])
        aligned(ids, log_probs, member)
        for event in seat.deltas:
            aligned(list(event.delta.token_ids), list(event.delta.log_probabilities), member)
        plain = await (await member.open(PROMPT, max_output_tokens=30, stop=STOP)).finish()
        assert plain.text == seat.text and plain.ended.usage == seat.ended.usage and not told(plain)[1] and not held(plain)
        await member.assert_empty()


async def test_none_beside_a_tokens_own_is_a_number_too() -> None:
    async with decode_member({PROMPT: b"ab"}) as member:
        wanted = v1.LogProbabilityParams(top=0)
        seat = await (await member.open(PROMPT, max_output_tokens=2, log_probabilities=wanted)).finish()
        ids, log_probs = told(seat)
        assert ids == list(b"ab") and [len(one.top_token_ids) for one in log_probs] == [0, 0]
        assert all(-1e-6 < one.log_probability <= 0 for one in log_probs)


@pytest.mark.parametrize("shown", range(3))
async def test_another_member_tells_what_was_recorded_of_tokens_that_were_held(shown: int) -> None:
    """Four tokens were chosen, the last two are held for a stop; the member that goes on computes none of them again."""
    async with decode_member({PROMPT: b"abENx!"}) as member:
        earlier = list(b"abEN")
        recorded = [
            v1.TokenLogProbability(log_probability=-0.5 * n, top_token_ids=[n], top_log_probabilities=[-0.1]) for n in earlier
        ]
        seat = await member.open(
            PROMPT,
            max_output_tokens=6,
            stop=v1.StopParams(sequences=["END"]),
            log_probabilities=WANTED,
            output_token_ids=earlier,
            returned_tokens=shown,
            sent_text_bytes=min(shown, 2),
            held_log_probabilities=[one.SerializeToString() for one in recorded[shown:]],
        )
        await seat.finish()
        ids, log_probs = told(seat)
        assert ids == list(b"abENx!")[shown:]
        assert [(one.log_probability, *one.top_token_ids) for one in log_probs[: 4 - shown]] == [
            (-0.5 * n, n) for n in earlier[shown:]
        ]
        assert [one.token for one in log_probs] == [bytes([n]) for n in ids]
        aligned(ids[4 - shown :], log_probs[4 - shown :], member)
        await member.assert_empty()


@pytest.mark.parametrize("final_only", [False, True])
async def test_an_adopted_seat_tells_the_rest(final_only: bool) -> None:
    """A router that takes the seat over can go on anywhere: it is told what the tokens that nobody has got are told with."""
    said = bytes(97 + index % 26 for index in range(40)) if final_only else b"abcENd\xe4\xbd\xa0e"
    async with decode_member({PROMPT: said}) as member:
        key = grant_pb2.AttemptKey(request_id="held", attempt=2)
        stop = v1.StopParams(sequences=["ENDE"])
        mode = {"output_mode": QUIET} if final_only else {}
        member.runner.gate.hold()  # so that there is a rest to tell, however fast this machine is
        seat = await member.open(
            PROMPT, key=key, hold_s=20.0, max_output_tokens=len(said), log_probabilities=WANTED, stop=stop, **mode
        )
        member.runner.gate.step(20 if final_only else 1)
        await seat.until("output")
        seat.call.cancel()
        await until_held(member)
        member.runner.gate.release()
        again = await (await member.adopt(key, seat.outputs[-1].next_sequence_no)).finish()
        adopted = again.adopted
        unreturned = len(adopted.output_token_ids) - adopted.returned_tokens
        assert len(adopted.held_log_probabilities) == unreturned and adopted.open.log_probabilities == WANTED
        if final_only:
            ended = v1.Completed.FromString(again.ended.returned)
            aligned(list(ended.token_ids), list(ended.log_probabilities), member)
            assert list(ended.token_ids) == list(said) and len(held(again)) >= 16
        else:
            aligned(*told(again), member)
            assert told(again)[0] == list(said)[adopted.returned_tokens :]
        await member.assert_empty()


async def test_a_whole_output_is_known_to_whoever_takes_the_seat_over() -> None:
    """With cumulative output what came before the first event that is kept is told once, with its log-probabilities."""
    async with decode_member({PROMPT: b"abcdefgh"}, replay_bytes=1024) as member:
        key = grant_pb2.AttemptKey(request_id="held", attempt=1)
        member.runner.gate.hold()
        mode = v1.OUTPUT_MODE_CUMULATIVE
        seat = await member.open(PROMPT, key=key, hold_s=20.0, max_output_tokens=8, log_probabilities=WANTED, output_mode=mode)
        for _ in range(6):
            member.runner.gate.step()
            await seat.until("output")
        seat.call.cancel()
        await until_held(member)
        member.runner.gate.release()
        again = await (await member.adopt(key, 1)).finish()
        assert 1 < again.adopted.next_sequence_no < 7, "nothing was dropped, or all"
        before = v1.Delta.FromString(again.adopted.returned)
        aligned(list(before.token_ids), list(before.log_probabilities), member)
        assert before.text + again.text == "abcdefgh" and len(before.text) == again.adopted.sent_text_bytes
        await member.assert_empty()


async def test_a_sequence_moves_with_what_its_held_tokens_were_told_with() -> None:
    async with members() as (source, target):
        said = source.runner.said(tuple(range(40, 71)), 12)
        stop = v1.StopParams(sequences=[bytes(said[2:9]).decode() + "!"])  # held from the third token on, and never hit
        options = {"log_probabilities": WANTED, "stop": stop, "max_output_tokens": 12}
        seat = await begun(source, outputs=2, **options)
        source.runner.gate.step()
        await source.runner.gate.stopped()
        await paused(source, seat)
        untold = list(seat.paused.held_log_probabilities)
        assert len(untold) == len(seat.paused.selected_token_ids) > 0
        there = await goes_on(
            source, target, seat, tuple(range(40, 71)), held_log_probabilities=[*held(seat), *untold], **options
        )
        await push(seat, there)
        await there.until("committed")
        await leave(seat)
        await there.finish()
        ids, log_probs = told(seat, there)
        assert ids == said
        aligned(ids, log_probs, source)


def prompt_of(seat: Seat) -> v1.Prompt:
    """The event with the prompt: before all output, once."""
    kinds = [event.WhichOneof("event") for event in seat.deltas]
    assert kinds[0] == "prompt" and kinds.count("prompt") == 1 and seat.deltas[0].sequence_no == 1
    return seat.deltas[0].prompt


@pytest.mark.parametrize("mode", [v1.OUTPUT_MODE_DELTA, QUIET])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_prompt_is_echoed_before_the_output(mode: int, handed_over: bool) -> None:
    prompt = "né\u4f60".encode()
    async with decode_member({tuple(prompt): b"abc"}) as member:
        writer = {"prefill": member.writer.peer} if handed_over else {}
        seat = await member.open(prompt, max_output_tokens=3, output_mode=mode, echo_prompt=True, **writer)
        granted = await seat.until("granted")
        if handed_over:
            member.writer.fill(granted.grant, prompt)
        await seat.finish()
        event = prompt_of(seat)
        assert (event.text, bytes(event.token_ids), len(event.log_probabilities)) == (prompt.decode(), prompt, 0)
        assert seat.text + seat.ended.text in ("abc", member.tokenizer.decode(member.runner.said(prompt, 3)))
        assert seat.ended.next_sequence_no == 1 + len(seat.deltas)
        again = await (await member.open(prompt, max_output_tokens=3, echo_prompt=True, first_sequence_no=2)).finish()
        assert all(event.HasField("delta") for event in again.deltas), "what was told once is not told again"
        await member.assert_empty()


@pytest.mark.parametrize("length", [1, 2, 4, 64, 65, 66, 150])
async def test_a_prompts_tokens_have_their_own(length: int) -> None:
    """From the second on, whatever the chunks are; the model says the prompt's rest by itself from its fifth token on."""
    prompt = tuple(97 + index % 23 for index in range(length))
    outputs = {prompt[:5]: bytes(prompt[5:]) + b"xyz"}
    wanted = v1.LogProbabilityParams(top=1, prompt=True)
    options = {"context_tokens": 256, "total_pages": 200, "max_step_tokens": 90, "step_sequences": 4}
    async with decode_member(outputs, **options) as member:
        neighbour = await member.open((9, 8, 7), max_output_tokens=60)
        seat = await member.open(prompt, max_output_tokens=3, log_probabilities=wanted, echo_prompt=True)
        await seat.finish()
        event = prompt_of(seat)
        assert event.text == bytes(prompt).decode() and len(event.log_probabilities) == length - 1
        for position, one in enumerate(event.log_probabilities, 1):
            said = member.runner.next_token(prompt[:position])
            assert list(one.top_token_ids) == [said] and one.token == bytes([prompt[position]])
            assert one.log_probability == pytest.approx(0.0 if said == prompt[position] else -100.0, abs=1e-3)
        assert seat.text == (b"xyz" if length > 5 else bytes(member.runner.said(prompt, 3))).decode()
        chunks = [rows for batch in member.runner.batches for rows in batch.rows if rows.all_logits]
        assert sum(len(rows.token_ids) for rows in chunks) == length and max(len(rows.token_ids) for rows in chunks) <= 64
        await neighbour.finish()
        assert neighbour.text == bytes(member.runner.said((9, 8, 7), 60)).decode()
        await member.assert_empty()


async def test_a_prompt_that_was_told_comes_again_as_it_was() -> None:
    async with decode_member({PROMPT: b"abcd"}) as member:
        key = grant_pb2.AttemptKey(request_id="held", attempt=1)
        wanted = v1.LogProbabilityParams(top=2, prompt=True)
        seat = await member.open(PROMPT, key=key, hold_s=20.0, max_output_tokens=4, log_probabilities=wanted)
        await seat.until("output")
        seat.call.cancel()
        await member.until_books(lambda books: books["seats_held"] == 1, "the seat is held")
        again = await (await member.adopt(key, 1)).finish()
        assert prompt_of(again) == prompt_of(seat) and again.text == "abcd"
        assert again.adopted.open.log_probabilities == wanted
        await member.assert_empty()


PEER = grant_pb2.Peer(member="prefill-0", incarnation="writer-1", address="127.0.0.1:1")
BAD: list[tuple[dict[str, object], str]] = [
    ({"output_token_ids": list(b"ab"), "log_probabilities": WANTED}, "open.held_log_probabilities"),
    ({"held_log_probabilities": [b""]}, "open.held_log_probabilities"),
    ({"log_probabilities": v1.LogProbabilityParams(prompt=True), "prefill": PEER}, "open.log_probabilities.prompt"),
    ({"log_probabilities": v1.LogProbabilityParams(top=5000)}, "open.log_probabilities.top"),
    (
        {"output_token_ids": list(b"a"), "log_probabilities": WANTED, "held_log_probabilities": [b"\xff\xff"]},
        "open.held_log_probabilities",
    ),
]


async def test_what_does_not_fit_names_its_field() -> None:
    async with decode_member() as member:
        for changes, field in BAD:
            seat = await member.open(PROMPT, **changes)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await seat.next()
            details = details_from(caught.value)
            assert details.code is grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in details.violations] == [field]
        await member.assert_empty()


async def test_a_reader_that_does_not_read_holds_log_probabilities_up_too() -> None:
    """The window counts them beside the text."""
    async with decode_member({PROMPT: b"x" * 400}, stream_bytes=4096, context_tokens=512, total_pages=200) as member:
        key = grant_pb2.AttemptKey(request_id="slow", attempt=1)
        wanted = v1.LogProbabilityParams(top=20)
        seat = await member.open(PROMPT, key=key, hold_s=20.0, max_output_tokens=400, log_probabilities=wanted)
        await seat.until("output")
        seat.call.cancel()

        async def paused() -> bool:
            return "tandem_decode_paused_sequences 1.0" in member.frame.metrics.text()

        await until(paused, WAIT_S, "the sequence pauses")
        assert member.service.streams.buffer_bytes <= 1 + 4096 // (1 + 16 + 21 * 16), "the window counts log-probabilities"
        again = await member.adopt(key, 1)
        await again.finish()
        assert again.text == "x" * 400 and len(told(again)[1]) == 400
        await member.assert_empty()
