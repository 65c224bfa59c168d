"""The state table as a Mermaid diagram; docs/architecture.md carries it and a test compares the two."""

from lifecycle.states import TABLE, TERMINAL, State


def mermaid() -> str:
    """The diagram's source, one line an edge, in the table's order."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.CREATED.name}"]
    lines += [f"    {source.name} --> {target.name}: {event.value}" for (source, event), target in TABLE.items()]
    lines += [f"    {state.name} --> [*]" for state in State if state in TERMINAL]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
