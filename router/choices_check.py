"""What a client asks to be told of the outputs: how many there are, and how likely their tokens were."""

from router.findings import Findings
from router.limits import RequestLimits
from router.request import Choices, Delivery, OutputMode
from rpc.details import Violation
from rpc.status import invalid_argument
from tandem.v1 import inference_pb2 as pb


def choices_of(findings: Findings, message: pb.GenerateRequest, mode: OutputMode, server: RequestLimits) -> Choices:
    """How many outputs are told, and made."""
    told = message.choices if message.HasField("choices") else 1
    made = message.best_of if message.HasField("best_of") else told
    findings.number("choices", told, 1, server.max_choices)
    if message.HasField("best_of"):
        findings.number("best_of", made, 1, server.max_choices)
    if made < told:
        findings.add("best_of", f"must be at least choices, {told}; got {made}", "OUT_OF_RANGE")
    elif made > told and mode is not OutputMode.FINAL_ONLY:
        words = f"more than choices, {told}, goes only with output_mode OUTPUT_MODE_FINAL_ONLY; got {made}"
        findings.add("best_of", words, "UNEXPECTED")
    return Choices(told, made)


def log_probs_of(findings: Findings, message: pb.GenerateRequest, server: RequestLimits) -> int | None:
    """For how many most likely tokens log-probabilities are told; None tells none."""
    if not message.HasField("log_probabilities"):
        return None
    findings.number("log_probabilities.top", message.log_probabilities.top, 0, server.max_log_probs)
    return message.log_probabilities.top


def check_log_probs(delivery: Delivery, path: str, prompt_tokens: int, most: int, server: RequestLimits) -> None:
    """One event must not hold more than a message can."""
    if delivery.log_probs is None:
        return
    top, limit = delivery.log_probs, server.max_whole_log_probs // (1 + delivery.log_probs)
    found = []
    if delivery.whole and most > limit:
        words = f"with log_probabilities.top {top} and the whole output in one event, must be at most {limit}; it is {most}"
        found.append(Violation("max_output_tokens", words, "OUT_OF_RANGE"))
    if delivery.scores_prompt and prompt_tokens > limit:
        words = f"with log_probabilities.prompt and .top {top}, it may have at most {limit} tokens; it has {prompt_tokens}"
        found.append(Violation(path, words, "OUT_OF_RANGE"))
    if found:
        raise invalid_argument(found)
