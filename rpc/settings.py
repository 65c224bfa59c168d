"""Settings of a process: a msgspec Struct filled from flags, the environment and a TOML file, in that order of strength.

The Struct is the only place where a setting is written down: its name, type, limits, unit, default and help. A flag is
the field's name with dashes, a variable is TANDEM_ and the name in capitals, a TOML key is the name.
"""

import argparse
import difflib
import logging
import os
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

ENVIRONMENT_PREFIX = "TANDEM_"
CHECK_FLAG = "--check-settings"
#: A variable that resembles a setting that much, and is none, is warned about.
_LIKENESS = 0.9

_LOG = logging.getLogger("settings")


class SettingsError(Exception):
    """A setting that is not known, cannot be read or is out of its limits. Names it, its source and its limit."""


def setting(
    text: str, unit: str = "", form: str = "", *, secret: Callable[[str], bool] | None = None, **limits: Any
) -> msgspec.Meta:
    """What a field means, for help and checks. `limits`: ge, gt, le, lt, min_length, max_length, pattern.

    `form` says in words what `pattern` asks for. `secret`: whether a value is one, or holds one; such a value is refused as a
    flag, because everybody on a machine sees those, and told in no error.
    """
    return msgspec.Meta(description=text, extra={"unit": unit, "form": form, "secret": secret}, **limits)


@dataclass(frozen=True, slots=True)
class _Field:
    """One setting as the Struct declares it."""

    name: str
    kind: Any  # the type without None and Annotated
    optional: bool
    metas: tuple[msgspec.Meta, ...]
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def text(self) -> str:
        """What it means."""
        return next((meta.description for meta in self.metas if meta.description), "")

    @property
    def unit(self) -> str:
        """Empty where there is none."""
        return self._extra("unit")

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) in (tuple, list)

    @property
    def hint(self) -> Any:
        """The type to convert to, limits included."""
        limited = Annotated[(self.kind, *self.metas)] if self.metas else self.kind
        return limited | None if self.optional else limited

    def is_secret(self, value: object) -> bool:
        """Whether a value must not be seen."""
        found = next((meta.extra["secret"] for meta in self.metas if meta.extra and meta.extra.get("secret")), None)
        return found is not None and isinstance(value, str) and bool(found(value))

    def help(self) -> str:
        """Meaning, unit, limits, default."""
        notes = [note for note in (self.unit, self._limits(), self.default_words(), self.variable) if note]
        return f"{self.text} [{'; '.join(notes)}]".replace("%", "%%")

    def expected(self) -> str:
        """What the value must be, in words."""
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        unit = f" of {self.unit}" if self.unit else ""
        kind = "" if get_origin(self.kind) is Literal else words.get(self.kind, "a list separated by commas") + unit
        return ", ".join(part for part in (kind, self._limits()) if part)

    def _extra(self, key: str) -> str:
        return next((str(meta.extra[key]) for meta in self.metas if meta.extra and meta.extra.get(key)), "")

    def _limits(self) -> str:
        words = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}
        lengths = {"min_length": "at least {} long", "max_length": "at most {} long"}
        said = [f"{word} {getattr(meta, key)}" for meta in self.metas for key, word in words.items() if _has(meta, key)]
        said += [text.format(getattr(meta, key)) for meta in self.metas for key, text in lengths.items() if _has(meta, key)]
        if self._extra("form"):
            said.append("of the form " + self._extra("form"))
        if get_origin(self.kind) is Literal:
            said.append("one of " + ", ".join(str(choice) for choice in get_args(self.kind)))
        return ", ".join(said)

    def default_words(self) -> str:
        """The default as help tells it."""
        if self.default is msgspec.NODEFAULT:
            return "required"
        if self.default is None or self.default in ("", ()):
            return "unset"
        return f"default {','.join(map(str, self.default)) if isinstance(self.default, tuple) else self.default}"


@dataclass(frozen=True, slots=True)
class Described:
    """One setting in words: `name` is the TOML key too; `unit` and `default` are empty where there is none."""

    name: str
    text: str
    unit: str
    default: str
    is_number: bool


def describe(kind: type[msgspec.Struct]) -> list[Described]:
    """Every setting of a kind of process, in the order in which the Struct declares them."""
    return [
        Described(one.name, one.text, one.unit, one.default_words().removeprefix("default "), one.kind in (int, float))
        for one in _fields(kind).values()
    ]


def load_settings(
    kind: type[S],
    argv: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    prog: str | None = None,
    description: str = "",
) -> S:
    """The settings of a process from its arguments (None: this process's) and environment.

    --help prints every setting and exits with 0. Raises SettingsError.
    """
    fields = _fields(kind)
    env = os.environ if environment is None else environment
    parser = _parser(fields, prog, description)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]  # what follows may be a secret
        parser.error(f"{flag} is not a setting{_did_you_mean(flag, [one.flag for one in fields.values()])}")
    flags = vars(known)
    flags.pop("check_settings")  # load_or_exit's
    for one in fields.values():
        if one.is_secret(flags.get(one.name)):
            raise SettingsError(
                f"flag {one.flag} holds a secret, which everybody on this machine could see: "
                f"give it as the variable {one.variable} or in a settings file"
            )
    config = flags.pop("config", None) or env.get(ENVIRONMENT_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers: Sequence[tuple[Mapping[str, Any], Callable[[_Field], str]]] = (
        (_from_file(config, fields) if config else {}, lambda one: f"{one.name} in {config}"),
        (_from_environment(env, fields), lambda one: f"variable {one.variable}"),
        ({name: value for name, value in flags.items() if value is not None}, lambda one: f"flag {one.flag}"),
    )
    for layer, source in layers:
        for name, value in layer.items():
            values[name], sources[name] = value, source(fields[name])
    return _convert(kind, values, sources, fields)


def load_or_exit(kind: type[S], argv: Sequence[str] | None = None, *, prog: str | None = None, description: str = "") -> S:
    """As `load_settings`, for a process's start: a bad setting is told on stderr and ends the process with 2.

    With --check-settings it ends in any case, with 0 when all are right.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    only_check = CHECK_FLAG in given
    try:
        loaded = load_settings(kind, [one for one in given if one != CHECK_FLAG], prog=prog, description=description)
        if only_check:
            sys.exit(0)
        return loaded
    except SettingsError as bad:
        print(f"{prog or Path(sys.argv[0]).name}: {bad}", file=sys.stderr)
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (--help lists the settings)")


def _parser(fields: Mapping[str, _Field], prog: str | None, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument(CHECK_FLAG, action="store_true", help="only say whether the settings are right, and exit with 0 or 2")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings by name; flags and variables are stronger")
    for one in fields.values():
        if one.kind is bool:
            parser.add_argument(one.flag, dest=one.name, metavar="true|false", nargs="?", const="true", help=one.help())
            contrary = f"--no-{one.flag.removeprefix('--')}"
            parser.add_argument(contrary, dest=one.name, action="store_const", const="false", help=f"as {one.flag}=false")
        else:
            parser.add_argument(one.flag, dest=one.name, metavar="VALUE", default=None, help=one.help())
    return parser


def _fields(kind: type[msgspec.Struct]) -> dict[str, _Field]:
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for info in msgspec.structs.fields(kind):
        default: Any = info.default
        if callable(info.default_factory):
            default = info.default_factory()
        found[info.name] = _Field(info.name, *_taken_apart(hints[info.name]), default)
    return found


def _taken_apart(hint: Any) -> tuple[Any, bool, tuple[msgspec.Meta, ...]]:
    """The bare type, whether it may be None, and what is annotated, of Annotated[X, ...] | None in either order."""
    optional, metas = False, []
    while True:
        if get_origin(hint) is Annotated:
            hint, *rest = get_args(hint)
            metas += [meta for meta in rest if isinstance(meta, msgspec.Meta)]
        elif get_origin(hint) in (Union, types.UnionType):
            optional = True
            (hint,) = (one for one in get_args(hint) if one is not types.NoneType)
        else:
            return hint, optional, tuple(metas)


def _from_file(path: str, fields: Mapping[str, _Field]) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from error
    for name in table:
        if name not in fields:
            raise SettingsError(f"{name} in {path} is not a setting{_did_you_mean(name, fields)}")
    return table


def _from_environment(env: Mapping[str, str], fields: Mapping[str, _Field]) -> dict[str, str]:
    """Set variables; an empty one counts as not set. Those of other processes of the cell are none of our business."""
    known = {one.variable: one.name for one in fields.values()}
    for variable in env:
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, 1, _LIKENESS)
            if near and near[0] not in env:
                _LOG.warning("variable %s is not a setting of this process; did you mean %s?", variable, near[0])
    return {name: env[variable] for variable, name in known.items() if env.get(variable)}


def _convert(kind: type[S], values: dict[str, Any], sources: Mapping[str, str], fields: Mapping[str, _Field]) -> S:
    for name, one in fields.items():
        if name not in values:
            if one.default is msgspec.NODEFAULT:
                raise SettingsError(f"{name} is required: give {one.flag} or {one.variable}")
            continue
        value = values[name]
        if one.is_list and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str) and one.optional and value.lower() == "none":
            value = None
        try:
            values[name] = msgspec.convert(value, one.hint, strict=False)
        except msgspec.ValidationError as error:
            said = "not shown" if one.is_secret(value) else f"{str(value)[:100]!r}"
            raise SettingsError(f"{sources[name]} is {said}; it must be {one.expected()}") from error
    try:
        return kind(**values)
    except ValueError as error:  # from a Struct's own __post_init__
        raise SettingsError(str(error)) from error


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _has(meta: msgspec.Meta, key: str) -> bool:
    return getattr(meta, key) is not None
