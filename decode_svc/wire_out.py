"""From what a decode member knows to the messages of decode.proto."""

from collections.abc import Iterable
from typing import Any

from decode_svc.choices_log import ChoicesLog
from decode_svc.messages import PromptReady, SeatEnded, SeatGranted, SeatPaused, SeatPushed, SeatRefused
from decode_svc.replay_log import Replay, Told
from decode_svc.seat_stream import SeatOrigin
from decode_svc.stream_log import PromptPart, Published, StreamLog
from decode_svc.wire_log_probs import Pieces, for_client, for_router
from kv_transfer.offer import grant_to_proto
from lifecycle.finish import FinishReason
from lifecycle.usage import Usage
from tandem.pools.v1 import decode_pb2 as pb
from tandem.v1 import inference_pb2 as v1

FINISH_REASONS = {reason: getattr(v1, f"FINISH_REASON_{reason.name}") for reason in FinishReason}


def granted(event: SeatGranted) -> pb.DecodeResponse:
    """The wire form."""
    grant = grant_to_proto(event.grant) if event.grant is not None else None
    return pb.DecodeResponse(granted=pb.Granted(grant=grant, cached_tokens=event.cached_tokens))


def refused(event: SeatRefused) -> pb.DecodeResponse:
    """The wire form."""
    return pb.DecodeResponse(refused=pb.Refused(reason=event.reason, detail=event.detail, retryable=event.retryable))


def committed(event: PromptReady) -> pb.DecodeResponse:
    """The wire form."""
    times = pb.Committed(handover_s=event.handover_s, compute_s=event.compute_s, queue_s=event.queue_s)
    return pb.DecodeResponse(committed=times)


def open_as_now(origin: SeatOrigin, last_token_at: float | None, now: float) -> pb.Open:
    """The Open of a seat with what is left of its clocks. `last_token_at`: when a token was chosen here."""
    opening = pb.Open.FromString(origin.opening)
    age_s = max(0.0, now - origin.opened_at)
    for name in ("first_token_remaining_s", "overall_remaining_s"):
        if opening.HasField(name):
            setattr(opening, name, max(0.0, getattr(opening, name) - age_s))
    if last_token_at is not None:
        opening.since_last_token_s = max(0.0, now - last_token_at)
    elif opening.HasField("since_last_token_s"):
        opening.since_last_token_s += age_s
    return opening


def adopted(opening: pb.Open, origin: SeatOrigin, replay: Replay, ready: PromptReady | None, pieces: Pieces) -> pb.DecodeResponse:
    """The wire form. `ready`: the commit, when it has happened."""
    message = pb.Adopted(
        open=opening,
        next_sequence_no=replay.next_sequence_no,
        committed=committed(ready).committed if ready is not None else None,
    )
    if origin.choices:
        message.choices.extend(_choice(index, told, replay, pieces) for index, told in sorted(replay.told.items()))
        return pb.DecodeResponse(adopted=message)
    told = replay.told[0]
    message.output_token_ids.extend(told.token_ids)
    message.returned_tokens, message.sent_text_bytes = told.returned_tokens, told.text_bytes
    message.held_log_probabilities.extend(for_router(told.held_log_probs))
    message.returned = _joined(replay.returned, pieces).SerializeToString()
    return pb.DecodeResponse(adopted=message)


def _choice(index: int, told: Told, replay: Replay, pieces: Pieces) -> pb.Choice:
    returned = _joined((part for part in replay.returned if part.choice == index), pieces)
    return pb.Choice(
        index=index,
        output_token_ids=told.token_ids,
        returned_tokens=told.returned_tokens,
        sent_text_bytes=told.text_bytes,
        held_log_probabilities=for_router(told.held_log_probs),
        returned=returned.SerializeToString(),
        ended=_choice_end(told.ended, untold=told.untold) if told.ended is not None else None,
    )


def _choice_end(end: SeatEnded, *, untold: bool) -> pb.ChoiceEnd:
    ending = end.ending
    return pb.ChoiceEnd(
        finish_reason=FINISH_REASONS[ending.reason],
        cause=ending.cause.value,
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        usage=_usage(end.usage),
        untold=untold,
    )


def _usage(usage: Usage) -> v1.Usage:
    return v1.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        selected_tokens=usage.selected_tokens,
        processed_tokens=usage.processed_tokens,
        returned_tokens=usage.returned_tokens,
        billed_tokens=usage.billed_tokens,
    )


def _delta(published: Published, pieces: Pieces) -> v1.Delta:
    told = for_client(published.token_ids, published.log_probs, pieces)
    return v1.Delta(text=published.text, token_ids=published.token_ids, log_probabilities=told, index=published.choice)


def _choice_ended(published: Published, end: SeatEnded, pieces: Pieces) -> v1.ChoiceEnded:
    ending = end.ending
    return v1.ChoiceEnded(
        index=published.choice,
        finish_reason=FINISH_REASONS[ending.reason],
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        text=published.text,
        token_ids=published.token_ids,
        log_probabilities=for_client(published.token_ids, published.log_probs, pieces),
        cause=ending.cause.value,
    )


def _prompt(part: PromptPart, pieces: Pieces) -> v1.Prompt:
    told = for_client(part.token_ids[1:], part.log_probs, pieces)
    return v1.Prompt(text=part.text, token_ids=part.token_ids, log_probabilities=told)


def _joined(parts: Iterable[Published], pieces: Pieces) -> v1.Delta:
    whole, texts = v1.Delta(), []
    for part in parts:
        texts.append(part.text)
        whole.token_ids.extend(part.token_ids)
        whole.log_probabilities.extend(for_client(part.token_ids, part.log_probs, pieces))
    whole.text = "".join(texts)
    return whole


def output_again(data: bytes) -> pb.DecodeResponse:
    """An output as it was sent before."""
    return pb.DecodeResponse(output=pb.Output.FromString(data))


def output(published: Published, pieces: Pieces) -> pb.DecodeResponse:
    """The wire form: the client's event is serialised here, once, and never read again on the way."""
    response = b""
    if published.prompt is not None:
        prompt = _prompt(published.prompt, pieces)
        response = v1.GenerateResponse(sequence_no=published.sequence_no, prompt=prompt).SerializeToString()
    elif published.sequence_no is not None and published.ended is not None:
        last = _choice_ended(published, published.ended, pieces)
        response = v1.GenerateResponse(sequence_no=published.sequence_no, choice_ended=last).SerializeToString()
    elif published.sequence_no is not None:
        delta = _delta(published, pieces)
        response = v1.GenerateResponse(sequence_no=published.sequence_no, delta=delta).SerializeToString()
    ended = None
    if published.ended is not None:
        ended = _choice_end(published.ended, untold=published.sequence_no is None)
    return pb.DecodeResponse(
        output=pb.Output(
            response=response,
            next_sequence_no=published.next_sequence_no,
            selected_token_ids=published.selected_ids,
            text_bytes=published.text_bytes,
            returned_tokens=len(published.token_ids),
            held_log_probabilities=for_router(published.held_log_probs),
            choice=published.choice,
            ended=ended,
        )
    )


def move_news(event: SeatPaused | SeatPushed, log: StreamLog[Any] | ChoicesLog) -> pb.DecodeResponse:
    """The wire form. `log`: knows the tokens chosen that no Output has told."""
    if isinstance(event, SeatPaused):
        assert isinstance(log, StreamLog), "several outputs do not stand still"
        paused = pb.Paused(
            cache_tokens=event.cache_tokens,
            selected_token_ids=log.untold_ids,
            pushable=event.pushable,
            held_log_probabilities=for_router(log.untold_log_probs),
        )
        return pb.DecodeResponse(paused=paused)
    return pb.DecodeResponse(
        pushed=pb.Pushed(ok=not event.cause, cause=event.cause, sent_bytes=event.sent_bytes, handover_s=event.handover_s)
    )


def ended(event: SeatEnded, log: StreamLog[Any] | ChoicesLog, last: pb.Output | None, pieces: Pieces) -> pb.DecodeResponse:
    """The wire form. `log`: has the whole output when nothing was sent before; `last`: the rest of it, if there is any."""
    ending, usage, report = event.ending, event.usage, event.report
    decode_s = (report.last_token_at or 0.0) - (report.ready_at or 0.0) if report.last_token_at and report.ready_at else 0.0
    message = pb.Ended(
        finish_reason=FINISH_REASONS[ending.reason],
        cause=ending.cause.value,
        matched_stop=ending.matched_stop,
        matched_token_id=ending.matched_token_id,
        usage=_usage(usage),
        text=log.whole_text(),
        next_sequence_no=log.next_sequence_no,
        decode_s=max(0.0, decode_s),
        stop_hold_s=report.stop_hold_s,
        held_bytes=report.held_bytes,
        cancel_observed_s=_since(report.cancel_requested_at, report.cancel_observed_at),
        cancel_effective_s=_since(report.cancel_requested_at, report.cancel_effective_at),
        released={**report.released, "streams": 1},
        last=last,
        returned=_returned(log, pieces),
    )
    return pb.DecodeResponse(ended=message)


def _returned(log: StreamLog[Any] | ChoicesLog, pieces: Pieces) -> bytes:
    token_ids, log_probs = log.whole_tokens()
    told = for_client(token_ids, log_probs, pieces)
    return v1.Completed(token_ids=token_ids, log_probabilities=told).SerializeToString()


def _since(start: float | None, end: float | None) -> float | None:
    return max(0.0, end - start) if start is not None and end is not None else None
