"""Names of attributes and spans. The GenAI conventions still rename things: they are written here and nowhere else.

Source: OpenTelemetry semantic conventions v1.41.1 (gen_ai), v1.44.0 (rpc). A test pins the values.
"""

# GenAI
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_CHOICES = "gen_ai.request.choice.count"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

#: Value of PROVIDER.
PROVIDER_TANDEM = "tandem"
#: Values of OPERATION.
OPERATION_CHAT = "chat"
OPERATION_TEXT_COMPLETION = "text_completion"

# Remote procedure calls and errors
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.response.status_code"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Our own
REQUEST_ID = "tandem.request.id"
ATTEMPT = "tandem.attempt"
TENANT = "tandem.tenant"
PRIORITY = "tandem.priority"
STATE = "tandem.state"
CAUSE = "tandem.cause"
MODEL_SNAPSHOT = "tandem.model.snapshot"
PREFILL_MEMBER = "tandem.prefill.member"
DECODE_MEMBER = "tandem.decode.member"
MEMBER = "tandem.member"
INCARNATION = "tandem.incarnation"
GRANT_ID = "tandem.grant.id"
CHUNK_TOKENS = "tandem.chunk.tokens"
COMPUTED_TOKENS = "tandem.prefill.computed_tokens"
PREFILL_QUEUE_SECONDS = "tandem.prefill.queue_s"
SENT_BYTES = "tandem.handover.bytes"
EXPOSED_SECONDS = "tandem.handover.exposed_s"
POST_SECONDS = "tandem.handover.post_s"
PAGES = "tandem.pages"
PREEMPTIONS = "tandem.preemptions"
SEQUENCE_NO = "tandem.sequence_no"
SELECTED_TOKENS = "tandem.usage.selected_tokens"
RETURNED_TOKENS = "tandem.usage.returned_tokens"
BILLED_TOKENS = "tandem.usage.billed_tokens"
HELD_BYTES = "tandem.stop.held_bytes"
CANCEL_REASON = "tandem.cancel.reason"

# Spans, in the order in which a request meets them
SPAN_GENERATE = "Generate"
SPAN_QUEUE = "queue"
SPAN_PREFILL_QUEUE = "prefill_queue"
SPAN_PREFILL = "prefill"
SPAN_HANDOVER = "handover"
SPAN_DECODE = "decode"
SPAN_SEND = "send"
#: A stream that is taken up again; it links to the request's Generate.
SPAN_ATTACH = "Attach"

# Events of spans
EVENT_CHUNK = "chunk"
EVENT_COMMITTED = "committed"
EVENT_FIRST_TOKEN = "first_token"
EVENT_REFUSED = "refused"
EVENT_RETRY = "retry"
EVENT_CANCEL_REQUESTED = "cancel_requested"
EVENT_CANCEL_OBSERVED = "cancel_observed"
EVENT_CANCEL_EFFECTIVE = "cancel_effective"
