"""One member's end of a transport, as the contract suite drives it: in this process, or as a process of its own.

Run as a program it serves a `Node` over the socket whose descriptor is its argument.
"""

import ctypes
import json
import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kv_transfer.grants import ReaderBook, WriterBook
from kv_transfer.offer import Endpoint, Grant, LayoutView, Peer, Slab
from kv_transfer.plan import SourceMemory, plan
from kv_transfer.ports import Push, PushResult, Range, Receiver, Sender, SendFailed
from kv_transfer.pump import ReceivePump, SendPump
from rpc.incarnation import new_incarnation

PAGE_BYTES = 64 * 1024
ROW_BYTES = 12_000
PAGES = 256
ROWS = 4
WAIT_S = 20.0

Pairs = Sequence[tuple[int, int]]


class Memory:
    """Prefaulted memory, cut into units."""

    def __init__(self, units: int, unit_bytes: int) -> None:
        self._map = mmap.mmap(-1, units * unit_bytes)
        self.array = np.frombuffer(self._map, dtype=np.uint8).reshape(units, unit_bytes)
        self.array[:] = 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.slab = Slab(address, units * unit_bytes, unit_bytes)


class Node:
    """Memory, one end of a transport, and the book that goes with it."""

    def __init__(self, make: Callable[..., Any], role: str) -> None:
        self.pages = Memory(PAGES, PAGE_BYTES)
        self.rows = Memory(ROWS, ROW_BYTES)
        self.incarnation = new_incarnation()
        self.make = lambda name, **more: make(name, [self.pages.slab, self.rows.slab], **more)
        self.end: Any = self.make(f"{role}-{self.incarnation}")
        self.sender: Sender = self.end
        self.receiver: Receiver = self.end
        self.results: list[PushResult] = []
        self.agents: set[str] = set()
        self.crashes: list[BaseException] = []
        self.reader_book = ReaderBook()
        self.writer_book = WriterBook()

    # Both sides.

    def name(self) -> str:
        """The incarnation."""
        return self.incarnation

    def slabs(self) -> tuple[Slab, Slab]:
        """Pages, rows."""
        return self.pages.slab, self.rows.slab

    def fill(self, seed: int) -> None:
        """Random bytes in every page and row."""
        random = np.random.default_rng(seed)
        for memory in (self.pages, self.rows):
            memory.array[:] = random.integers(1, 256, memory.array.shape, dtype=np.uint8)

    def clear(self) -> None:
        """Zeros in every page and row."""
        self.pages.array[:] = 0
        self.rows.array[:] = 0

    def page_sums(self) -> list[int]:
        """CRC-32 of each page."""
        return [zlib.crc32(page) for page in self.pages.array]

    def row_sums(self) -> list[int]:
        """CRC-32 of each row."""
        return [zlib.crc32(row) for row in self.rows.array]

    def landed(self) -> int:
        """Bytes of the pages that are not zero."""
        return int(np.count_nonzero(self.pages.array))

    def landed_some(self) -> None:
        """Return as soon as the first page is written."""
        until(lambda: self.pages.array[0, -1])

    def close(self) -> None:
        """Give the end back."""
        self.end.close()

    # The writer.

    def connect(self, endpoint: Endpoint) -> str:
        """The cause of the failure; empty when connected."""
        return self._caught(lambda: self.sender.connect(endpoint))

    def post(self, push: Push) -> str:
        """The cause of the failure; empty when posted."""
        return self._caught(lambda: self.sender.post(push))

    def post_and_poll(self, push: Push) -> str:
        """Post and poll once, so that data moves on every transport."""
        cause = self.post(push)
        self.results += self.sender.poll()
        return cause

    def post_pages(self, push_id: int, endpoint: Endpoint, pairs: Pairs) -> str:
        """Push pages, one range each. The notice says which pages must hold what."""
        return self.post(self.push_of(push_id, endpoint, pairs))

    def push_of(self, push_id: int, endpoint: Endpoint, pairs: Pairs) -> Push:
        """The push for post_pages."""
        ours, theirs = self.pages.slab, endpoint.slabs[0]
        ranges = tuple(Range(ours.address(a), theirs.address(b), PAGE_BYTES) for a, b in pairs)
        claim = [push_id, [[b, zlib.crc32(self.pages.array[a])] for a, b in pairs]]
        return Push(push_id, endpoint.agent, ranges, json.dumps(claim).encode())

    def post_many(self, endpoint: Endpoint, pushes: Sequence[tuple[int, Pairs]], in_flight: int) -> list[PushResult]:
        """Push after push with a bound on those in flight; returns all results."""
        for push_id, pairs in pushes:
            assert not self.post_pages(push_id, endpoint, pairs)
            self._poll_until(lambda: self.sender.in_flight < in_flight)
        return self.finish()

    def finish(self) -> list[PushResult]:
        """Poll until nothing is in flight; the results that were not taken yet."""
        self._poll_until(lambda: self.sender.in_flight == 0)
        return self.take_results()

    def poll_times(self, count: int) -> list[PushResult]:
        """Results of so many polls."""
        return [result for _ in range(count) for result in self.sender.poll()]

    def pump_pages(self, endpoint: Endpoint, pushes: Sequence[tuple[int, Pairs]]) -> tuple[list[PushResult], bool, int]:
        """The same pushes through a transfer thread with a sender of its own: results, whether it closed clean, bytes sent."""
        results: list[PushResult] = []
        pump = SendPump(lambda: self.make("pumped"), results.extend, self.crashes.append)
        pump.start()
        pump.connect(endpoint)
        for push_id, pairs in pushes:
            pump.submit(self.push_of(push_id, endpoint, pairs))
        until(lambda: len(results) >= len(pushes))
        return results, pump.close() and not self.crashes, pump.statistics().sent_bytes

    def take_results(self) -> list[PushResult]:
        """Results since the last call."""
        results, self.results = self.results, []
        return results

    def hand_over(self, grant: Grant, tables: list[list[int]], row: int, stop_after: int | None = None) -> Any:
        """A whole hand-over with the writer's book; with stop_after a Drain comes when so many parts are posted."""
        book = self.writer_book
        source = SourceMemory(LayoutView(grant.layout_fingerprint, (16,)), (self.pages.slab,), self.rows.slab)
        work = plan(grant, source)
        book.accept(grant, time.monotonic())
        book.begin(grant.grant_id, len(work.parts))
        answer: Any = None
        for part in range(len(work.parts)):
            if part == stop_after:
                answer = book.drain(grant.grant_id)
            if book.may_post(grant.grant_id, time.monotonic()):
                book.posted(grant.grant_id, part)
                assert not self.post(work.push(part, part, tables, row))
        outcomes = [book.finished(grant.grant_id, r.push_id, r.cause or None) for r in self.finish()]
        return answer, outcomes, book.check()

    # The reader.

    def endpoint(self, writer: str) -> Endpoint:
        """The endpoint for a writer."""
        endpoint = self.receiver.endpoint(writer)
        self.agents.add(endpoint.agent)
        return endpoint

    def successor(self, name: str, number: int, writer: str) -> Endpoint:
        """The endpoint of the agent with that number of a reader of that name, whose part this node takes from here on."""
        self.end = self.receiver = self.make(name)
        others = [self.receiver.endpoint(f"other {one}") for one in range(1, number)]
        assert len(others) == number - 1
        return self.endpoint(writer)

    def wait(self, count: int) -> list[tuple[str, bytes]]:
        """Notices, once there are so many."""
        notices: list[tuple[str, bytes]] = []
        until(lambda: notices.extend(self.receiver.poll()) or len(notices) >= count)
        return notices

    def wait_checked(self, count: int) -> list[int]:
        """Push ids in order of arrival. When a notice is here, so is its data: compared at once, before anything else."""
        order: list[int] = []

        def take() -> bool:
            order.extend(self.checked(notice) for _, notice in self.receiver.poll())
            return len(order) >= count

        until(take)
        return order

    def checked(self, notice: bytes) -> int:
        """The push id of a notice, whose data must be here."""
        push_id, claims = json.loads(notice)
        for page, crc in claims:
            assert zlib.crc32(self.pages.array[page]) == crc, f"push {push_id}: notice before data"
        return int(push_id)

    def bounded_endpoints(self, writers_max: int, writers: list[str]) -> list[tuple[str, list[str]]]:
        """Agent names that another receiver with such a bound gives to writers in turn, and whom each time displaced."""
        receiver = self.make("bounded", writers_max=writers_max)
        try:
            return [(receiver.endpoint(writer).agent, receiver.take_displaced()) for writer in writers]
        finally:
            receiver.close()

    def bounded_peers(self, peers_max: int, endpoints: list[Endpoint]) -> tuple[int, list[str]]:
        """Agents that another sender with such a bound knows after connecting to all, and why a push to each failed."""
        sender = self.make("bounded", peers_max=peers_max)
        try:
            for endpoint in endpoints:
                sender.connect(endpoint)
            causes = []
            for number, endpoint in enumerate(endpoints):
                try:
                    sender.post(self.push_of(number, endpoint, [(1, 1)]))
                    causes.append("")
                except SendFailed as failure:
                    causes.append(failure.cause)
            until(lambda: sender.poll() is not None and sender.in_flight == 0)
            return sender.peers, causes
        finally:
            sender.close()

    def pump_endpoint(self, writer: str) -> Endpoint:
        """Start a transfer thread with a receiver of its own; the endpoint for a writer."""
        self.pumped: list[int] = []

        def deliver(notices: list[tuple[str, bytes]]) -> None:
            self.pumped += [self.checked(notice) for _, notice in notices]

        self.pump = ReceivePump(lambda: self.make("pumped"), deliver, self.crashes.append)
        self.pump.start()
        self.pump.armed(True)
        answers: list[Any] = []
        self.pump.request_endpoint(writer, answers.append, answers.append)
        until(lambda: answers)
        return answers[0]

    def pump_wait_checked(self, count: int) -> list[int]:
        """Push ids in order of arrival at the transfer thread."""
        until(lambda: len(self.pumped) >= count or self.crashes)
        return self.pumped

    def pump_close(self) -> bool:
        """Whether the transfer thread ended well."""
        return self.pump.close() and not self.crashes

    def offer(self, grant: Grant, writer: str) -> None:
        """Open a grant."""
        self.reader_book.offer(grant, Peer("prefill", writer, "prefill:1"), time.monotonic())

    def count(self, count: int) -> tuple[list[Any], list[str]]:
        """What the book made of so many notices."""
        return [self.reader_book.arrived(w, n, time.monotonic()) for w, n in self.wait(count)], self.reader_book.check()

    def fence(self, writer: str) -> bool:
        """Cut a writer off."""
        return self.receiver.fence(writer)

    def _poll_until(self, done: Callable[[], bool]) -> None:
        until(lambda: self.results.extend(self.sender.poll()) or done())

    def _caught(self, call: Callable[[], None]) -> str:
        try:
            call()
        except SendFailed as failure:
            return failure.cause
        return ""


def until(done: Callable[[], object]) -> None:
    """Poll a condition with a bound."""
    last = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < last, f"not done within {WAIT_S} s"
        time.sleep(50e-6)


def main() -> None:
    """Serve a Node: (method, arguments) in, (ok, value) out, until the other end closes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from kv_transfer import nixl

    tls, role = sys.argv[2], sys.argv[3]
    nixl.prepare_environment(tls, "lo")
    node = Node(nixl.NixlSender if role == "writer" else nixl.NixlReceiver, role)
    line = Connection(int(sys.argv[1]))
    line.send((True, node.name()))
    while True:
        try:
            method, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((True, getattr(node, method)(*arguments)))
        except Exception as error:  # noqa: BLE001 - told to the test
            line.send((False, repr(error)))


if __name__ == "__main__":
    main()
