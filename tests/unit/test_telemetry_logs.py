import asyncio
import io
import json
import logging
import threading

import pytest

from telemetry import logs
from telemetry.logs import bind, bound, setup_logging

TRACED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Output:
    """Logging into a string; `lines` closes it and reads."""

    def __init__(self, **options):
        self.stream = io.StringIO()
        self.before = logging.getLogger().level
        self.logs = setup_logging("tandem-test", stream=self.stream, **options)

    def text(self):
        self.logs.close()
        logging.getLogger().setLevel(self.before)
        return self.stream.getvalue()

    def lines(self):
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def output():
    made = Output()
    yield made
    made.text()


LOG = logging.getLogger("some.place")


def test_a_line_has_its_fields(output):
    LOG.info("sent %d pages", 3, extra={"pages": 3, "ratio": 0.5, "member": "d1", "color_message": "as a terminal has it"})
    (line,) = output.lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "some.place",
        "service": "tandem-test",
        "message": "sent 3 pages",
        "pages": 3,
        "ratio": 0.5,
        "member": "d1",
    }


def test_a_line_carries_the_request_of_its_task(output):
    with bound(request_id="r1", attempt=2, traceparent=TRACED):
        LOG.info("inside")
        with bound(attempt=3):
            LOG.info("deeper")
    LOG.info("outside")
    inside, deeper, outside = output.lines()
    assert (inside["request_id"], inside["attempt"], inside["trace_id"]) == ("r1", 2, "0af7651916cd43dd8448eb211c80319c")
    assert (deeper["request_id"], deeper["attempt"]) == ("r1", 3)
    assert "request_id" not in outside and "attempt" not in outside


async def test_what_one_task_binds_another_does_not_see(output):
    both = asyncio.Barrier(2)

    async def serve(request_id):
        bind(request_id=request_id)
        await both.wait()
        LOG.info("served")

    await asyncio.gather(asyncio.create_task(serve("a")), asyncio.create_task(serve("b")))
    assert sorted(line["request_id"] for line in output.lines()) == ["a", "b"]
    assert logs.current().request_id == ""


def test_a_thread_without_a_task_names_its_request_itself(output):
    with bound(request_id="not this"):
        thread = threading.Thread(target=lambda: LOG.info("step", extra={"request_id": "r9", "attempt": 1}))
        thread.start()
        thread.join()
        LOG.info("explicit", extra={"request_id": "r10"})
    step, explicit = output.lines()
    assert (step["request_id"], explicit["request_id"]) == ("r9", "r10")


def test_an_exception_is_one_line(output):
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        LOG.exception("failed")
    (line,) = output.lines()
    assert "Traceback" in line["exception"] and "ValueError: bad\nthing" in line["exception"]


def test_what_users_wrote_is_not_logged(output):
    LOG.info("got it", extra={"prompt": "my secret", "text": "my secret", "messages": ["my secret"]})
    assert "my secret" not in output.text()


def test_long_values_are_cut(output):
    LOG.info("x" * 100_000, extra={"value": "y" * 100_000})
    assert len(output.text()) < 5000


def test_a_level_that_does_not_exist():
    with pytest.raises(ValueError, match="log level is 'loud'; it must be DEBUG"):
        setup_logging("x", "loud")


def test_text_for_people():
    output = Output(json=False, level="debug")
    LOG.debug("hello", extra={"pages": 3})
    assert output.text().endswith("DEBUG   hello  [pages=3]\n")


def test_a_library_that_repeats_itself_is_heard_once(output):
    for _ in range(100):
        logging.getLogger("opentelemetry.sdk.x").warning("Queue full, dropping %s.", "Span")
        LOG.warning("ours")
    assert [line["message"] for line in output.lines()].count("Queue full, dropping Span.") == 1
    assert len(output.lines()) == 101


class Blocked(io.StringIO):
    """A pipe that nobody reads, until `go`."""

    def __init__(self):
        super().__init__()
        self.inside = threading.Event()
        self.go = threading.Event()

    def write(self, text):
        self.inside.set()
        self.go.wait(10)
        return super().write(text)


def test_a_full_pipe_delays_nobody_and_losses_are_told():
    stream = Blocked()
    before = logging.getLogger().level
    made = setup_logging("x", stream=stream, queue_lines=4)
    LOG.info("first")
    assert stream.inside.wait(10)
    for _ in range(50):
        LOG.info("more")
    assert made.dropped == 46
    stream.go.set()
    made.close()
    made.close()
    logging.getLogger().setLevel(before)
    assert any("46 log lines were lost" in line for line in stream.getvalue().splitlines())
