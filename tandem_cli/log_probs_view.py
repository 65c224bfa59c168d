"""Log-probabilities of an output as a table for people."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tandem.v1 import inference_pb2 as pb


def log_probs_table(tokens: Sequence[pb.TokenLogProbability]) -> Table:
    """One row a token: what it stands for, how likely it was, its log-probability, and the likeliest tokens at its place."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("token", no_wrap=True)
    table.add_column("likely", justify="right")
    table.add_column("log", justify="right")
    table.add_column("likeliest there")
    for one in tokens:
        row = (token_words(one.token), _share(one.log_probability), f"{one.log_probability:.3f}", _likeliest(one))
        table.add_row(*(Text(cell) for cell in row))
    return table


def token_words(token: bytes) -> str:
    """A token's bytes in quotes; bytes that are no whole character are written as \\x.."""
    return repr(token.decode("utf-8", "backslashreplace")) if token else "(special)"


def _likeliest(one: pb.TokenLogProbability) -> str:
    pairs = zip(one.top_tokens, one.top_log_probabilities, strict=True)
    return "  ".join(f"{token_words(token)} {_share(value)}" for token, value in pairs)


def _share(log_probability: float) -> str:
    return f"{math.exp(log_probability):.1%}"
