"""Rendering a conversation with the model's own Jinja template.

The environment offers what templates on the Hugging Face hub rely on (its docs: "Chat templates, advanced"):
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, `{% generation %}` blocks. Templates come with a
model and are not trusted: they run in Jinja's immutable sandbox, and the sizes of template and text are bounded. Time is
bounded only through the text: a template that loops without writing holds its caller up, so render off the event loop.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from text.errors import ChatTemplateError

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_RENDERED_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Which roles exist is the template's business."""

    role: str
    content: str


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products that could fill the memory, such as `'x' * 10**12`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja calls this for the operators above."""
        if operator == "**":
            _refuse(f"a chat template may not use the operator ** (here {left!r:.40} ** {right!r:.40})")
        size, times = (len(left), right) if hasattr(left, "__len__") else (len(right) if hasattr(right, "__len__") else 0, left)
        if size and isinstance(times, int) and size * times > MAX_RENDERED_CHARACTERS:
            _refuse(f"a chat template may not repeat a value to more than {MAX_RENDERED_CHARACTERS} items")
        return left * right


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template. Safe to use from several threads. Raises ChatTemplateError when it does not compile."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`special_tokens` are variables such as bos_token; `now` is the clock behind strftime_now."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"The model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed."
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment(now).from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ArithmeticError) as error:
            raise ChatTemplateError(f"The model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises ChatTemplateError with the template's own words when it refuses the messages."""
        if not messages:
            raise ChatTemplateError("A chat needs at least 1 message.")
        values = {
            **self._special_tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            text = _bounded(self._template.generate(values))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template refuses these messages: {error}") from error
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ValueError) as error:
            raise ChatTemplateError(f"The model's chat template fails on these messages: {error}") from error
        if text is None:
            raise ChatTemplateError(f"The rendered chat is over {MAX_RENDERED_CHARACTERS} characters; send less text.")
        return text


def _bounded(pieces: Iterator[str]) -> str | None:
    """The pieces as one text; None as soon as they are too many."""
    kept: list[str] = []
    room = MAX_RENDERED_CHARACTERS
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            return None
        kept.append(piece)
    return "".join(kept)
