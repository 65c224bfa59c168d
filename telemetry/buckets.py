"""Edges of histograms. Supersets of what vLLM, SGLang and OpenTelemetry use, so that their dashboards port.

Put an objective's bound exactly on an edge: the share below it is then exact.
"""

#: Arrival to first token, seconds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
#: Between two tokens, and per output token, seconds.
INTER_TOKEN_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
#: Whole requests, seconds.
REQUEST_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
#: Phases of a request, seconds: as REQUEST_S with a finer start, for phases can be very short.
PHASE_S = (0.001, 0.0025, 0.005, *REQUEST_S)
#: One step of an engine and its parts, seconds.
STEP_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0),
)
#: Moving KV pages, seconds.
TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0, 30.0)
#: From a cancel's request until it is effective, seconds.
CANCEL_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: A call to the record store, seconds.
STORE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
#: Server calls, seconds: OpenTelemetry's edges with a tail for streams.
RPC_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0, 1800.0)
#: How late the event loop is, seconds.
LOOP_LAG_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
#: Bytes of a hand-over.
BYTES = tuple(float(2**power) for power in (11, *range(13, 35, 2)))
#: Tokens of one request, 1-2-5.
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
#: Tokens or sequences of one step.
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
#: Shares, 0 to 1.
RATIO = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
