"""Two processes that hand a prompt over: as members do, and by one bare write. Each serves one end over a pipe."""

import multiprocessing
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from engine.landing import LandingRows
from engine.layout import Layout, pages_for
from engine.pages import PagePool
from engine.slab import SlabMemory, allocate_slab
from kv_transfer import nixl
from kv_transfer.grant_writer import GrantWriter, PushesEnded
from kv_transfer.grants import Committed, ReaderBook, WriterBook
from kv_transfer.offer import AttemptKey, Endpoint, Grant, GrantPages, LayoutView, Peer, Slab
from kv_transfer.plan import Computed, HandoverPlan, SourceMemory, plan
from kv_transfer.ports import Range
from kv_transfer.pump import ReceivePump
from kv_transfer.sending import SendingEnd
from rpc.incarnation import new_incarnation

POOL_PAGES = 257
#: Between two looks at a bare write. One that looks all the time is slower: it takes the core and the agent's lock from the
#: thread that moves the bytes.
BARE_POLL_S = 100e-6
ROWS = 4
WAIT_S = 20.0
EXPIRES_AFTER_S = 30.0
PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is handed over: so many tokens of a model of this layout and vocabulary, by this transport ("tcp" or "cma")."""

    layout: Layout
    vocabulary_size: int
    tokens: int
    tls: str

    @property
    def pages(self) -> int:
        """Pages of the prompt."""
        return pages_for(self.tokens, self.layout.groups[0].page_tokens)


class _Memory:
    """A member's pages and rows of logits, with the pages of one prompt taken."""

    def __init__(self, setup: Setup) -> None:
        self._slab = allocate_slab(POOL_PAGES, setup.layout.groups[0].page_bytes)
        self._rows = LandingRows(ROWS, setup.vocabulary_size)
        self.slabs = [_registered(self._slab.memory), _registered(self._rows.slab)]
        self.pool = PagePool(POOL_PAGES)
        self.pages = self.pool.allocate(PROMPT, setup.pages)
        self.fill()

    def fill(self) -> None:
        """Other bytes than before."""
        self._slab.data.random_(0, 256)
        self._rows.row(0).normal_()

    def content(self) -> int:
        """CRC-32 of the prompt's pages, in its order, and of its row."""
        pages = self._slab.data.view(POOL_PAGES, -1)
        crc = zlib.crc32(self._rows.row(0).numpy())
        for page in self.pages:
            crc = zlib.crc32(pages[page].numpy(), crc)
        return crc


class Reader:
    """The decode member's end: a receiving pump and the book that counts parts; and a bare agent beside it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._memory = _Memory(setup)
        self._book = ReaderBook()
        self._committed: queue.SimpleQueue[float] = queue.SimpleQueue()
        name = new_incarnation()
        self._peer = Peer("decode", name, "decode:1")
        self._pump = ReceivePump(lambda: nixl.NixlReceiver(name, self._memory.slabs), self._arrived, _ended_by)
        self._pump.start()
        self._bare = nixl.Agent(f"bare-{name}", self._memory.slabs)

    def offer(self, writer: str) -> Grant:
        """Open a grant for a writer."""
        grant = Grant(
            grant_id=secrets.token_hex(16),
            key=AttemptKey("request", 1),
            decode=self._peer,
            layout_fingerprint=self._setup.layout.fingerprint,
            first_position=0,
            token_count=self._setup.tokens,
            groups=(GrantPages(tuple(self._memory.pages), (1,) * len(self._memory.pages)),),
            landing_row=0,
            endpoint=self._endpoint(writer),
            expires_after_s=EXPIRES_AFTER_S,
        )
        self._book.offer(grant, Peer("prefill", writer, "prefill:1"), time.monotonic())
        self._pump.armed(True)
        return grant

    def committed(self) -> float:
        """When every part of the grant had arrived, in monotonic seconds."""
        at = self._committed.get(timeout=WAIT_S)
        self._pump.armed(False)
        return at

    def content(self) -> int:
        """CRC-32 of what is here of the prompt."""
        return self._memory.content()

    def metadata(self) -> bytes:
        """Of the bare agent."""
        return self._bare.metadata

    def noticed(self) -> float:
        """When a bare write's notice was here, in monotonic seconds."""
        last = time.monotonic() + WAIT_S
        while not self._bare.agent.get_new_notifs():
            assert time.monotonic() < last, f"no notice within {WAIT_S} s"
            time.sleep(BARE_POLL_S)
        return time.monotonic()

    def _endpoint(self, writer: str) -> Endpoint:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pump.request_endpoint(writer, answers.put, lambda displaced: None)
        endpoint: Endpoint = answers.get(timeout=WAIT_S)
        return endpoint

    def _arrived(self, notices: list[tuple[str, bytes]]) -> None:
        for writer, notice in notices:
            if isinstance(self._book.arrived(writer, notice, time.monotonic()), Committed):
                self._committed.put(time.monotonic())


class Writer:
    """The prefill member's end: plan, book and sending pump; and a bare agent beside it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._memory = memory = _Memory(setup)
        self._name = new_incarnation()
        self._ended: queue.SimpleQueue[PushesEnded] = queue.SimpleQueue()
        self._writer = GrantWriter(WriterBook(), (memory.pool,), lambda asker, committed: None)
        view = LayoutView(setup.layout.fingerprint, (setup.layout.groups[0].page_tokens,))
        self._source = SourceMemory(view, tuple(memory.slabs[:-1]), memory.slabs[-1])
        self._sending = SendingEnd(lambda: nixl.NixlSender("prefill", memory.slabs), self._ended.put, _failed, _ended_by)
        self._sending.start()
        self._bare = nixl.Agent(f"bare-{self._name}", memory.slabs)

    def name(self) -> str:
        """The incarnation."""
        return self._name

    def fill(self) -> None:
        """Make another prompt."""
        self._memory.fill()

    def content(self) -> int:
        """CRC-32 of the prompt."""
        return self._memory.content()

    def hand_over(self, grant: Grant) -> float:
        """All of a prompt that was computed before; when it began, in monotonic seconds. It is planned before, as members do."""
        work = plan(grant, self._source)
        began = time.monotonic()
        filling = self._writer.accept(work, began)
        self._writer.begin(filling, (self._memory.pages,))
        self._writer.send(filling, Computed(self._setup.tokens), 0, began)
        self._sending.transfer(self._writer.take_transfers())
        while self._writer.open:
            self._writer.ended(self._ended.get(timeout=WAIT_S))
        return began

    def meet(self, metadata: bytes) -> str:
        """Connect the bare agent; the other's name."""
        name = self._bare.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def write(self, grant: Grant, agent: str) -> float:
        """The ranges of a grant's plan in one transfer; when it began, in monotonic seconds."""
        ranges = _all_ranges(plan(grant, self._source), self._memory.pages)
        began, api = time.monotonic(), self._bare.agent
        local = api.get_xfer_descs([(one.local_address, one.size_bytes, 0) for one in ranges], "DRAM")
        remote = api.get_xfer_descs([(one.remote_address, one.size_bytes, 0) for one in ranges], "DRAM")
        handle = api.initialize_xfer("WRITE", local, remote, agent, b"bare")
        state = api.transfer(handle, b"bare")
        while state != "DONE":
            time.sleep(BARE_POLL_S)
            state = api.check_xfer_state(handle)
        handle.release()
        return began

    def parts(self, grant: Grant) -> tuple[int, int, int]:
        """Parts, ranges and bytes of a hand-over."""
        work = plan(grant, self._source)
        return len(work.parts), len(_all_ranges(work, self._memory.pages)), work.size_bytes


class End:
    """A process that serves a Reader or a Writer. `start` begins a call, `answer` waits for its end."""

    def __init__(self, kind: type[Reader] | type[Writer], setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(kind, setup, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, method: str, *arguments: Any) -> None:
        """Begin a call of a method."""
        self._line.send((method, arguments))

    def answer(self) -> Any:
        """What the call returned. Raises RuntimeError with what it raised."""
        if not self._line.poll(3 * WAIT_S):
            raise RuntimeError("an end of the hand-over does not answer")
        ok, value = self._line.recv()
        if not ok:
            raise RuntimeError(value)
        return value

    def do(self, method: str, *arguments: Any) -> Any:
        """Both."""
        self.start(method, *arguments)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self.process.join(WAIT_S)
        if self.process.is_alive():
            self.process.kill()


@contextmanager
def two_ends(setup: Setup) -> Iterator[tuple[End, End]]:
    """A writer and a reader that are ready."""
    ends = [End(kind, setup) for kind in (Writer, Reader)]
    try:
        for end in ends:
            end.answer()
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def calls(writer: End, reader: End) -> tuple[Callable[[], float], Callable[[], float]]:
    """(a hand-over, a bare write), each as a call that returns its seconds: from its begin until the reader may use the pages."""
    name, agent = writer.do("name"), writer.do("meet", reader.do("metadata"))
    bare_grant = reader.do("offer", name)
    writer.do("hand_over", bare_grant)
    reader.do("committed")

    def hand_over() -> float:
        grant = reader.do("offer", name)
        reader.start("committed")
        began = writer.do("hand_over", grant)
        return float(reader.answer() - began)

    def bare() -> float:
        reader.start("noticed")
        began = writer.do("write", bare_grant, agent)
        return float(reader.answer() - began)

    return hand_over, bare


def _serve(kind: type[Reader] | type[Writer], setup: Setup, line: Connection) -> None:
    nixl.prepare_environment(setup.tls, "lo")
    served = kind(setup)
    line.send((True, None))
    while True:
        try:
            method, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((True, getattr(served, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to who asked
            line.send((False, repr(error)))


def _all_ranges(work: HandoverPlan, pages: Sequence[int]) -> list[Range]:
    return [one for part in range(len(work.parts)) for one in work.ranges(part, (pages,), 0)]


def _registered(slab: SlabMemory) -> Slab:
    return Slab(slab.address, slab.size_bytes, slab.unit_bytes)


def _failed(cause: str) -> None:
    raise AssertionError(f"a write failed: {cause}")


def _ended_by(error: BaseException) -> None:
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))
