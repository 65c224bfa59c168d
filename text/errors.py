"""What can go wrong with text. All are ValueError: the input is at fault, and the message says what to change."""


class UnsupportedModel(ValueError):
    """A model, or a feature of it, that this version cannot run correctly."""


class ChatTemplateError(ValueError):
    """A chat template that does not compile, refuses the messages, or makes too much text."""


class BadUtf8(ValueError):
    """Output bytes that can never become a character. The text keeps only hexadecimal digits of the bytes, no output."""

    def __init__(self, data: bytes, cause: str) -> None:
        self.data = data
        super().__init__(
            f"Output bytes 0x{data.hex()} cannot become text ({cause}). Set utf8_policy to drop to leave such bytes out."
        )


class InvalidStops(ValueError):
    """Stops that break a limit; the message names the stop by its index and the limit."""


class BadGrammar(ValueError):
    """A schema, a regular expression or a grammar that cannot be used. The text names the place, as far as it is known."""
