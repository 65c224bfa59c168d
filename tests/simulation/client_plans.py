"""One request of a world and what its client does."""

from dataclasses import dataclass
from enum import Enum

from engine.sampling_params import SamplingParams
from engine.sequence import SequenceSpec, StopSpec
from lifecycle.record import AttemptKey
from tandem.v1 import inference_pb2 as pb
from tests.simulation.model import CONTEXT_TOKENS, TOKENIZER, Reference
from text.stop_matcher import StopRules

#: The overall clock of requests that name none, in seconds: nothing may last longer.
OVERALL_S = 60.0


class Behaviour(Enum):
    """What a client does with its stream."""

    READ = "read"
    SLOW = "slow"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel through some router, `after_s` the request was sent (it may come before it)."""

    after_s: float
    router: int
    wait: bool


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One request and its client. Times in seconds; `pause_s` between two reads of a slow one.

    back_after_s: it comes back so long after it left, or lost its stream, by Attach or by the same Generate, through the next
    router; None: it does not. replays: after the end it reads everything once more.
    gives_up_after_s: it leaves its first call when no event has come by then. log_probs: for so many likeliest tokens.
    choices, best_of: as in the request, 1 without them; choice_cancels: of one choice each, with its index. tenant: empty, it
    says nothing of it.
    """

    request_id: str
    at_s: float
    router: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_output_tokens: int
    stops: tuple[str, ...] = ()
    final_only: bool = False
    priority: int = 0
    behaviour: Behaviour = Behaviour.READ
    leave_after_events: int = 0
    pause_s: float = 0.0
    cancels: tuple[Cancel, ...] = ()
    overall_s: float | None = None
    timeout_s: float | None = None
    detach: bool = False
    back_after_s: float | None = None
    back_by_generate: bool = False
    replays: bool = False
    gives_up_after_s: float | None = None
    slow_reader: int = pb.SLOW_READER_UNSPECIFIED
    log_probs: int | None = None
    cumulative: bool = False
    scores_prompt: bool = False
    echo: bool = False
    choices: int = 1
    best_of: int = 1
    choice_cancels: tuple[tuple[int, Cancel], ...] = ()
    tenant: str = ""

    def request(self) -> pb.GenerateRequest:
        """As it is sent."""
        message = pb.GenerateRequest(
            request_id=self.request_id,
            tokens=pb.TokenPrompt(ids=self.prompt),
            max_output_tokens=self.max_output_tokens,
            priority=self.priority,
            output_mode=pb.OUTPUT_MODE_CUMULATIVE if self.cumulative else pb.OUTPUT_MODE_DELTA,
        )
        if self.final_only:
            message.output_mode = pb.OUTPUT_MODE_FINAL_ONLY
        if self.log_probs is not None:
            message.log_probabilities.top = self.log_probs
            message.log_probabilities.prompt = self.scores_prompt
        message.echo_prompt = self.echo
        if self.best_of > 1:
            message.choices, message.best_of = self.choices, self.best_of
        message.sampling.temperature = self.sampling.temperature
        message.sampling.seed = self.sampling.seed
        message.sampling.repetition_penalty = self.sampling.repetition_penalty
        message.stop.sequences.extend(self.stops)
        message.slow_reader = self.slow_reader
        message.on_disconnect = pb.ON_DISCONNECT_DETACH if self.detach else pb.ON_DISCONNECT_UNSPECIFIED
        message.deadlines.overall.FromNanoseconds(round((self.overall_s or OVERALL_S) * 1e9))
        for clock in ("queue", "first_token", "inter_token"):
            getattr(message.deadlines, clock).FromNanoseconds(round(OVERALL_S * 1e9))
        return message

    def reference(self, index: int = 0) -> Reference:
        """What it must say, as one of its choices."""
        # Whether they are told or not, the likeliest are chosen by them.
        log_probs = 0 if self.choices < self.best_of and self.log_probs is None else self.log_probs
        rules = StopRules(tuple(stop.encode() for stop in self.stops))
        return Reference(
            SequenceSpec(
                key=AttemptKey(self.request_id, 1),
                index=index,
                prompt_token_ids=self.prompt,
                sampling=self.sampling,
                stop=StopSpec(rules, eos_ids=TOKENIZER.eos_ids),
                max_output_tokens=self.max_output_tokens,
                context_tokens=CONTEXT_TOKENS,
                log_probs=log_probs,
            )
        )
