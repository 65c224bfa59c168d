"""Writes the transitions of the grant protocol in Promela, from the code's tables.

`python -m tests.model.tables > tests/model/grant_tables.pml`
"""

from enum import Enum

from kv_transfer.grant_states import READER_TABLE, WRITER_TABLE, ReaderEvent, ReaderState, WriterEvent, WriterState

HEAD = """/* Made from kv_transfer/grant_states.py by `python -m tests.model.tables`; a test compares.
 * An event without an edge is an error. */
c_decl {
  /* Says each edge when it is taken for the first time in a whole search; no part of any state. */
  static void taken(int number, const char *edge) {
    static char seen[256];
    if (!seen[number]) { seen[number] = 1; printf("edge %s\\n", edge); }
  }
}
"""


def names(side: str, edges: dict[tuple[Enum, Enum], Enum]) -> list[str]:
    """Each edge in words: side, state, event, state."""
    return [f"{side} {state.name} {event.name} {after.name}" for (state, event), after in edges.items()]


def every_edge() -> list[str]:
    """The edges of both sides, in words."""
    return [*names("reader", dict(READER_TABLE)), *names("writer", dict(WRITER_TABLE))]


def _step(side: str, edges: dict[tuple[Enum, Enum], Enum], first: int) -> str:
    letter = side[0].upper()
    lines = [f"inline {side}_step(g, event) {{", "  if"]
    for number, ((state, event), after) in enumerate(edges.items(), first):
        say = f'c_code {{ taken({number}, "{names(side, {(state, event): after})[0]}"); }}'
        lines.append(
            f"  :: {side}[g] == {letter}_{state.name} && event == ON_{event.name} -> {side}[g] = {letter}_{after.name}; {say}"
        )
    return "\n".join([*lines, "  :: else -> assert(false)", "  fi", "}\n"])


def promela() -> str:
    """The whole file."""
    reader, writer = dict(READER_TABLE), dict(WRITER_TABLE)
    states = [
        f"mtype:reader_state = {{ {', '.join(['R_NONE', *(f'R_{s.name}' for s in ReaderState)])} }};",
        f"mtype:writer_state = {{ {', '.join(['W_NONE', *(f'W_{s.name}' for s in WriterState)])} }};",
        f"mtype:event = {{ {', '.join(f'ON_{e.name}' for e in (*ReaderEvent, *WriterEvent))} }};\n",
    ]
    return "\n".join([HEAD, *states, _step("reader", reader, 0), _step("writer", writer, len(reader))])


if __name__ == "__main__":
    print(promela(), end="")
