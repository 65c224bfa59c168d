"""Compiles grammars in a process of its own: `python -m engine.grammar_child COMPILE_S MEMORY_BYTES COMPILED_BYTES`.

Grammars come from clients. What one costs to compile cannot be told before, the library cannot be interrupted, and a fault in
it would end the member with all that it runs. So the member kills this process when it takes too long, and the kernel bounds its
memory.

Frames on standard input and output: four bytes of length, big-endian, then as many bytes. The first one in is a saved vocabulary,
answered with an empty one. Then for each rule in, as `pack_rule` writes it, one answer: a letter of `ANSWERS` and what it says.
"""

import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from text.errors import BadGrammar
from text.grammar_rule import GrammarKind, GrammarRule

LENGTH = struct.Struct(">I")
#: What the first byte of an answer means: compiled, cannot be used, costs too much.
COMPILED, BAD, COSTLY = b"+", b"-", b"!"
#: So long after the time that a compile may take the process ends by itself, when nobody is left to kill it.
_ORPHAN_S = 2.0


def pack_rule(rule: GrammarRule) -> bytes:
    """A rule as it is sent."""
    return f"{rule.kind.value}\n{rule.text}".encode()


def _unpack_rule(data: bytes) -> GrammarRule:
    kind, _, text = data.decode().partition("\n")
    return GrammarRule(GrammarKind(kind), text)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    return stream.read(size)


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """One frame."""
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def serve(requests: BinaryIO, answers: BinaryIO, compile_s: float, compiled_bytes: int) -> None:
    """Until the requests end."""
    from engine import grammar_library  # after torch was left out

    saved = read_frame(requests)
    if saved is None:
        return
    vocabulary = grammar_library.SavedVocabulary(saved.decode())
    write_frame(answers, b"")
    while (request := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, compile_s + _ORPHAN_S)
        try:
            compiled = grammar_library.compile_rule(_unpack_rule(request), vocabulary)
            size = int(compiled.memory_size_bytes())
            if size <= compiled_bytes:
                answer = COMPILED + grammar_library.save(compiled).encode()
            else:
                answer = COSTLY + f"takes {size} bytes when compiled; at most {compiled_bytes} are allowed".encode()
        except BadGrammar as bad:
            answer = BAD + str(bad).encode()
        except MemoryError:
            answer = COSTLY + b"takes too much memory to compile"
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answers, answer)


def main() -> None:
    """See the module."""
    compile_s, memory_bytes, compiled_bytes = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C at a terminal reaches the whole group; the member decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The library's loader imports torch where it is installed: seconds and hundreds of megabytes that nothing here uses.
    sys.modules["torch"] = None  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    serve(sys.stdin.buffer, answers, compile_s, compiled_bytes)
    os._exit(0)


if __name__ == "__main__":
    main()
