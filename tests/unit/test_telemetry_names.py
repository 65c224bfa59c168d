import hashlib

from telemetry import names

#: The names that dashboards and trace queries of others know. A change here is a change of our interface.
PINNED = {
    "OPERATION": "gen_ai.operation.name",
    "PROVIDER": "gen_ai.provider.name",
    "REQUEST_MODEL": "gen_ai.request.model",
    "RESPONSE_MODEL": "gen_ai.response.model",
    "REQUEST_MAX_TOKENS": "gen_ai.request.max_tokens",
    "REQUEST_TEMPERATURE": "gen_ai.request.temperature",
    "REQUEST_TOP_P": "gen_ai.request.top_p",
    "REQUEST_TOP_K": "gen_ai.request.top_k",
    "REQUEST_SEED": "gen_ai.request.seed",
    "REQUEST_CHOICES": "gen_ai.request.choice.count",
    "RESPONSE_ID": "gen_ai.response.id",
    "FINISH_REASONS": "gen_ai.response.finish_reasons",
    "INPUT_TOKENS": "gen_ai.usage.input_tokens",
    "OUTPUT_TOKENS": "gen_ai.usage.output_tokens",
    "CACHED_INPUT_TOKENS": "gen_ai.usage.cache_read.input_tokens",
    "RPC_SYSTEM": "rpc.system.name",
    "RPC_METHOD": "rpc.method",
    "RPC_STATUS_CODE": "rpc.response.status_code",
    "ERROR_TYPE": "error.type",
    "REQUEST_ID": "tandem.request.id",
    "ATTEMPT": "tandem.attempt",
    "GRANT_ID": "tandem.grant.id",
    "SPAN_GENERATE": "Generate",
    "SPAN_QUEUE": "queue",
    "SPAN_PREFILL": "prefill",
    "SPAN_HANDOVER": "handover",
    "SPAN_DECODE": "decode",
    "SPAN_SEND": "send",
    "SPAN_ATTACH": "Attach",
}


def test_names_are_pinned():
    assert {key: getattr(names, key) for key in PINNED} == PINNED


def test_every_name_is_one_name():
    values = [value for key, value in vars(names).items() if key.isupper()]
    assert len(values) == len(set(values))


def test_a_change_of_any_name_is_noticed():
    listed = sorted(f"{key}={value}" for key, value in vars(names).items() if key.isupper())
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]
    assert digest == "0d5bed60abe64249", "a name changed: tell docs and dashboards, then pin the new digest"


def test_nothing_that_users_write_has_a_name():
    values = " ".join(str(value) for value in vars(names).values())
    for forbidden in ("input.messages", "output.messages", "system_instructions", "prompt.text"):
        assert forbidden not in values
