"""Writes docs/limits.md: `python -m tools.limits > docs/limits.md`. A test compares.

Names, units and defaults come from the settings and the constants themselves; what happens when a limit is met stands in
tools/limits.toml, beside this file.
"""

import dataclasses
import importlib
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from decode_svc.config import DecodeSettings
from member.config import MemberSettings
from prefill_svc.config import PrefillSettings
from router.config import RouterSettings
from router.store_process import StoreSettings
from rpc.server_settings import ServerSettings
from rpc.settings import describe
from telemetry.decode_metrics import DecodeMetrics
from telemetry.prefill_metrics import PrefillMetrics
from telemetry.process_metrics import RpcMetrics
from telemetry.registry import MAX_CHILDREN, Counter, Histogram, MetricsRegistry
from telemetry.router_metrics import RouterMetrics

WORDS = Path(__file__).with_suffix(".toml")
#: Title, key in limits.toml, the Struct, and Structs whose settings stand under a title of their own.
PROCESSES: tuple[tuple[str, str, type[msgspec.Struct], tuple[type[msgspec.Struct], ...]], ...] = (
    ("Every process with a server", "server", ServerSettings, ()),
    ("Router", "router", RouterSettings, (ServerSettings,)),
    ("Prefill and decode members", "member", MemberSettings, (ServerSettings,)),
    ("Prefill members", "prefill", PrefillSettings, (MemberSettings,)),
    ("Decode members", "decode", DecodeSettings, (MemberSettings,)),
    ("The embedded store", "store", StoreSettings, ()),
)

HEAD = """# Limits

Everything that could grow has a limit, with a unit. Made by `python -m tools.limits`; a test compares.

A setting `queue_requests` is the flag `--queue-requests`, the variable `TANDEM_QUEUE_REQUESTS` and the TOML key `queue_requests`,
in that order of strength. A constant is set where its name says.
"""


class Unexplained(Exception):
    """A limit about which tools/limits.toml says nothing, or words about something that is not there."""


def words() -> dict[str, Any]:
    """What limits.toml says."""
    return tomllib.loads(WORDS.read_text(encoding="utf-8"))


def page() -> str:
    """The whole page. Raises Unexplained."""
    said = words()
    parts = [HEAD, "## Settings\n"]
    for title, key, kind, elsewhere in PROCESSES:
        parts += [
            f"### {title}\n",
            _table(("setting", "default", "unit", "when it is met"), _settings(key, kind, elsewhere, said)),
        ]
    parts.append("## Constants\n")
    for title, constants in said["constants"].items():
        rows = [(f"`{name}`", _value(name), text[0], text[1]) for name, text in constants.items()]
        parts += [f"### {title}\n", _table(("constant", "value", "unit", "when it is met"), rows)]
    held = [(f"`{name}`", text) for name, text in said["held"].items()]
    for name in said["held"]:
        _owner(name)
    parts += [
        "## Tables, queues and sets that live long\n",
        _table(("where", "what bounds it"), held),
        said["also"]["text"].lstrip(),
    ]
    parts += [
        "## Labels of metrics\n",
        said["labels"]["text"].lstrip().format(MAX_CHILDREN=MAX_CHILDREN),
        _table(("metric", "label", "values"), _labels()),
    ]
    return "\n".join(parts)


def _settings(
    key: str, kind: type[msgspec.Struct], elsewhere: Iterable[type[msgspec.Struct]], said: Any
) -> list[tuple[str, ...]]:
    """The numbers among the settings of one kind of process that bound something."""
    texts, free = said["settings"].get(key, {}), set(said["no_limit"]["settings"])
    others = {one.name: one for other in elsewhere for one in describe(other)}
    mine = [one for one in describe(kind) if one.is_number and others.get(one.name) != one and one.name not in free]
    silent = [one.name for one in mine if one.name not in texts]
    if silent:
        raise Unexplained(f"[settings.{key}] of {WORDS.name} must say what happens when {', '.join(silent)} is met (or no_limit)")
    idle = [name for name in texts if name not in {one.name for one in mine}]
    if idle:
        raise Unexplained(f"[settings.{key}] of {WORDS.name} speaks of {', '.join(idle)}, which is no such setting")
    return [(f"`{one.name}`", one.default or "none", one.unit, f"{one.text} {texts[one.name]}") for one in mine]


def _value(name: str) -> str:
    """The value of `module:NAME`, the default of `module:Class.field`, or what `module:Class.property` derives from the defaults.

    Raises Unexplained when there is none.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        owner, _, field = path.rpartition(".")
        if owner:
            kind = getattr(found, owner)
            defaults = {one.name: one.default for one in dataclasses.fields(kind)}
            derived = vars(kind).get(field)
            found = derived.fget(SimpleNamespace(**defaults)) if isinstance(derived, property) else defaults[field]
        else:
            found = getattr(found, path)
    except (ImportError, AttributeError, KeyError) as gone:
        raise Unexplained(f"[constants] of {WORDS.name} names {name}, which is not there") from gone
    return f"{found:,}" if isinstance(found, int) and found >= 10_000 else str(found)


def _owner(name: str) -> None:
    """Raises Unexplained unless `module:Class.attribute` is written in that module."""
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    source = Path(module.replace(".", "/")).with_suffix(".py")
    text = (WORDS.parent.parent / source).read_text(encoding="utf-8") if (WORDS.parent.parent / source).exists() else ""
    if f"class {owner}" not in text or (f"self.{attribute}" not in text and f"    {attribute}:" not in text):
        raise Unexplained(f"[held] of {WORDS.name} names {name}, which is not there")


def _labels() -> list[tuple[str, ...]]:
    """Each label of each metric and how many values it can have."""
    rows = []
    for kind, make in (("router", RouterMetrics), ("prefill", PrefillMetrics), ("decode", DecodeMetrics), ("any", RpcMetrics)):
        for metric in vars(make(MetricsRegistry(kind, "0"))).values():
            if not isinstance(metric, Counter | Histogram):
                continue
            for label, values in metric.declared_labels.items():
                rows.append((f"`{metric.name}`", label, "open" if values is None else f"{len(values)}, closed"))
    return rows


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, ""])


def main() -> int:
    """0, or 1 when something is not explained."""
    try:
        print(page(), end="")
    except Unexplained as missing:
        print(missing, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
