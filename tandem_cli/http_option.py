"""Where the HTTP door of `tandem up` is."""

from typing import Annotated

import typer

from tandem_cli.cell import BadOption, check_listen
from tandem_cli.supervisor import CellFailed

DEFAULT_HTTP = "127.0.0.1:8000"
#: Taken when something listens at the default already.
ANY_FREE = "127.0.0.1:0"

Http = Annotated[
    str | None,
    typer.Option(
        help=f"host:port of the first router's HTTP door, port 0 takes a free one; unset: {DEFAULT_HTTP}, or a free port where "
        "that is taken.",
        show_default=False,
    ),
]
NoHttp = Annotated[bool, typer.Option("--no-http", help="No HTTP door.")]


def http_listen(given: str | None, off: bool) -> str:
    """host:port of the door; empty for none. Raises BadOption."""
    if off and given is not None:
        raise BadOption("--no-http goes not with --http")
    if off:
        return ""
    if given is not None:
        return given
    try:
        check_listen(DEFAULT_HTTP, "--http")
    except CellFailed:
        return ANY_FREE
    return DEFAULT_HTTP


def door_sentence(url: str, asked: str) -> str:
    """A sentence for people about the door at `url`; `asked` is what `http_listen` gave."""
    taken = f" ({DEFAULT_HTTP} is taken)" if asked == ANY_FREE else ""
    return f"HTTP at {url}/v1{taken}, for OpenAI's clients; the live page at {url}/ui/"
