"""Adapters between the wire and a member: which one is meant, and whether the member has it."""

from collections.abc import Sequence
from typing import Any

from lifecycle.adapters import NAME_CHARACTERS, Adapter


def adapter_of(message: Any) -> Adapter | None:
    """The adapter of an Open or a PrefillRequest; None: the base model."""
    if not message.HasField("adapter"):
        return None
    return Adapter(message.adapter.name, message.adapter.identity)


def lacks_adapter(loaded: Sequence[Adapter], wanted: Adapter | None) -> str:
    """A sentence when a member has not the adapter that is wanted, with this very content; empty when it has."""
    if wanted is None or wanted in loaded:
        return ""
    name, identity = wanted.name[:NAME_CHARACTERS], wanted.identity[:NAME_CHARACTERS]
    same_name = next((each for each in loaded if each.name == wanted.name), None)
    if same_name is not None:
        return (
            f"adapter {name!r} was meant with the identity {identity!r}, it has {same_name.identity!r} here: the content differs"
        )
    known = ", ".join(repr(each.name) for each in loaded) or "none"
    return f"adapter {name!r} was meant, loaded here: {known}"
