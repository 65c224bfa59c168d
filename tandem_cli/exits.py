"""Exit statuses of the tandem command, and failures that end it with one."""

from enum import IntEnum


class Exit(IntEnum):
    """What a script can tell from the exit status."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    REFUSED = 3
    NOT_FOUND = 4
    DEADLINE = 5
    UNREACHABLE = 6
    CANCELLED = 130
    PIPE_CLOSED = 141


MEANINGS = {
    Exit.OK: "done",
    Exit.FAILED: "something broke: the model, a process of the cell, a download",
    Exit.BAD_INPUT: "a bad option, a wrong value in a request (the message names the field and its limit), or no right to ask",
    Exit.REFUSED: "the cell is full or shutting down; the message says when to try again",
    Exit.NOT_FOUND: "no such request or model, or its output is not kept any more",
    Exit.DEADLINE: "a time limit ran out",
    Exit.UNREACHABLE: "no router answers, or the connection broke",
    Exit.CANCELLED: "the request was cancelled, by Ctrl-C or by anybody else, or left with Ctrl-C",
    Exit.PIPE_CLOSED: "whoever read the output stopped reading; the request was cancelled",
}


def exit_table() -> str:
    """The table for --help, one status a line."""
    return "\n".join(f"  {code.value:>3}  {words}" for code, words in MEANINGS.items())


class Failure(Exception):
    """Ends the command with an exit status. The message says what to do; `details` are for scripts, as JSON."""

    def __init__(self, code: Exit, message: str, **details: object) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    def as_dict(self) -> dict[str, object]:
        """The failure as the last JSON line of a command: {"error": {"message", "exit_code", …}}."""
        return {"error": {"message": str(self), "exit_code": self.code.value, **self.details}}
