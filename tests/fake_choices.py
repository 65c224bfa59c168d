"""Several outputs of a fake decode member. Token i of choice c has the id 100 c + i and the text "c.i ".

Choice c has c tokens more than the script says. The last token comes with the choice's end.
"""

from collections.abc import Iterable
from typing import Any

from tandem.pools.v1 import decode_pb2
from tandem.v1 import inference_pb2 as pb


def text(index: int, tokens: Iterable[int]) -> str:
    """Of some tokens of a choice, by number."""
    return "".join(f"{index}.{token} " for token in tokens)


def ids(index: int, tokens: Iterable[int]) -> list[int]:
    """The same tokens' ids."""
    return [100 * index + token for token in tokens]


async def outputs(script: Any, seat: Any) -> int:
    """Says the outputs of a seat in turn until all have ended. Returns how many Outputs that were."""
    opening, number, said = seat.opening, seat.opening.first_sequence_no, 0
    live = {one.index: _begun(opening, one) for one in opening.choices if not one.HasField("ended")}
    untold = {index for index in live if opening.told_choices and index >= opening.told_choices}
    while live:
        for index in sorted(live):
            if said == script.cut_after:
                return said
            await script.output.passed(seat.stopped)
            if seat.stopped.is_set():
                return said
            place = live[index]
            last = place + 1 >= script.tokens + index or index in seat.cancelled
            output = _output(opening, number, index, place)
            if last:
                del live[index]
                _end(opening, output, number, index, place + 1, seat, told=index not in untold)
            else:
                live[index] += 1
            number += bool(output.response)
            output.next_sequence_no = number
            await seat.say(decode_pb2.DecodeResponse(output=output))
            said += 1
    return said


def _begun(opening: decode_pb2.Open, choice: decode_pb2.Choice) -> int:
    """What an Open tells of earlier attempts is what was told."""
    count, sent = len(choice.output_token_ids), choice.returned_tokens
    assert list(choice.output_token_ids) == ids(choice.index, range(count))
    assert choice.sent_text_bytes == len(text(choice.index, range(sent)))
    if opening.output_mode == pb.OUTPUT_MODE_CUMULATIVE:
        assert pb.Delta.FromString(choice.returned).text == text(choice.index, range(sent))
    return count


def _output(opening: decode_pb2.Open, number: int, index: int, place: int) -> decode_pb2.Output:
    output = decode_pb2.Output(choice=index, selected_token_ids=ids(index, [place]))
    if opening.output_mode != pb.OUTPUT_MODE_FINAL_ONLY:
        delta = pb.Delta(text=text(index, [place]), token_ids=ids(index, [place]), index=index)
        output.response = pb.GenerateResponse(sequence_no=number, delta=delta).SerializeToString()
        output.text_bytes, output.returned_tokens = len(delta.text), 1
    return output


def _end(
    opening: decode_pb2.Open, output: decode_pb2.Output, number: int, index: int, chosen: int, seat: Any, *, told: bool
) -> None:
    """Makes an Output the last one of its choice."""
    reason = pb.FINISH_REASON_CANCELLED if index in seat.cancelled else pb.FINISH_REASON_MAX_OUTPUT_TOKENS
    first = 0 if opening.output_mode == pb.OUTPUT_MODE_FINAL_ONLY else chosen - 1
    rest = range(first, chosen)
    returned = chosen if told else 0
    prompt = len(opening.prompt_token_ids)
    usage = pb.Usage(
        prompt_tokens=prompt,
        selected_tokens=chosen,
        processed_tokens=prompt + chosen - 1,
        returned_tokens=returned,
        billed_tokens=returned,
    )
    output.ended.CopyFrom(decode_pb2.ChoiceEnd(finish_reason=reason, usage=usage, untold=not told))
    output.response, output.text_bytes, output.returned_tokens = b"", 0, 0
    if told:
        end = pb.ChoiceEnded(index=index, finish_reason=reason, text=text(index, rest), token_ids=ids(index, rest))
        output.response = pb.GenerateResponse(sequence_no=number, choice_ended=end).SerializeToString()
        output.text_bytes, output.returned_tokens = len(end.text), len(rest)


def adopted(opening: decode_pb2.Open, said: Iterable[decode_pb2.DecodeResponse]) -> list[decode_pb2.Choice]:
    """Each choice of this seat as it was after some of what was said."""
    choices = {}
    for one in opening.choices:
        if not one.HasField("ended"):
            choices[one.index] = decode_pb2.Choice()
            choices[one.index].CopyFrom(one)
            choices[one.index].returned = b""
    for response in said:
        if response.WhichOneof("event") != "output":
            continue
        output = response.output
        choice = choices[output.choice]
        choice.output_token_ids.extend(output.selected_token_ids)
        choice.returned_tokens += output.returned_tokens
        choice.sent_text_bytes += output.text_bytes
        if opening.output_mode == pb.OUTPUT_MODE_CUMULATIVE:
            event = pb.GenerateResponse.FromString(output.response)
            whole = pb.Delta.FromString(choice.returned)
            told = getattr(event, event.WhichOneof("event"))
            whole.text += told.text
            whole.token_ids.extend(told.token_ids)
            choice.returned = whole.SerializeToString()
        if output.HasField("ended"):
            choice.ended.CopyFrom(output.ended)
    return [choices[index] for index in sorted(choices)]
