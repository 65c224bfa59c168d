"""How tandem_cli/load/workloads/chat.jsonl was made: whole conversations of a published trace, scaled down to a small machine.

`python -m bench.derive_trace TRACE.jsonl > tandem_cli/load/workloads/chat.jsonl`. TRACE is the conversation trace that was
released with the Mooncake paper (FAST'25, Apache-2.0): a line has `timestamp` (ms), `input_length`, `output_length`, `hash_ids`,
one id for each 512 tokens of the prompt. Every so-manieth conversation is kept with all of its turns, so that as much is
shared as in the whole. Lengths are divided: a block of 512 tokens becomes one of 32, and equal prefixes stay equal. Arrivals
keep their order and their relative distances; a run stretches them to its rate.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK_TOKENS = 512
PROMPT_DIVISOR = 16
OUTPUT_DIVISOR = 4
#: Prompts and answers beyond these are left out: with them a request would not fit a small model's context.
PROMPT_TOKENS_MAX = 2048
OUTPUT_TOKENS_MAX = 512
#: One conversation in so many is kept.
EVERY = 36


def derive(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    """The head, then the requests."""
    yield {"block_tokens": BLOCK_TOKENS // PROMPT_DIVISOR, "source": "Mooncake conversation trace (FAST'25), Apache-2.0, scaled"}
    numbers: dict[int, int] = {}
    conversations: dict[int, int] = {}
    for line in lines:
        request = json.loads(line)
        prompt, output = request["input_length"] // PROMPT_DIVISOR, request["output_length"] // OUTPUT_DIVISOR
        # The first block is a preamble that all share; the second tells conversations apart.
        second = request["hash_ids"][1] if len(request["hash_ids"]) > 1 else request["hash_ids"][0]
        conversation = conversations.setdefault(second, len(conversations))
        if conversation % EVERY or not 1 <= prompt <= PROMPT_TOKENS_MAX or not 1 <= output <= OUTPUT_TOKENS_MAX:
            continue
        blocks = [numbers.setdefault(one, len(numbers)) for one in request["hash_ids"]]
        yield {
            "at_s": round(request["timestamp"] / 1000, 3),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "blocks": blocks,
        }


def main() -> None:
    """Write the derived trace."""
    with Path(sys.argv[1]).open(encoding="utf-8") as trace:
        for one in derive(trace):
            print(json.dumps(one, separators=(",", ":")))


if __name__ == "__main__":
    main()
