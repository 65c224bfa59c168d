"""What `tandem top` shows of a cell: tables for a terminal, made from one CellView."""

from collections.abc import Iterable
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.v1 import cell_pb2 as cell
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import label

#: States of pages in the order in which a bar shows them, each with its letter where there is no colour, and its style.
PAGE_STATES = (
    ("owned", "#", "green"),
    ("granted", "+", "yellow"),
    ("pinned", "^", "magenta"),
    ("quarantined", "!", "red"),
    ("cached", "~", "blue"),
    ("free", ".", "bright_black"),
)
_MEMBER_STYLES = {
    cell.MEMBER_STATE_READY: "green",
    cell.MEMBER_STATE_DRAINING: "yellow",
    cell.MEMBER_STATE_STALE: "yellow",
}
_BAR_CELLS = 30
#: Lines that are there whatever runs: heads, titles, the line of the queue, the key, those between.
_FIXED_LINES = 12
_LEAST_ROWS = 3


def plain(text: str) -> str:
    """Text of others for a terminal: what is no printable character, such as the begin of an escape sequence, becomes a ?."""
    return "".join(one if one.isprintable() else "?" for one in text)


def whole(view: cell.CellView, rows: int | None = None, note: str = "") -> RenderableType:
    """Everything; `rows`: lines of the terminal, None for as many as it takes. `note`: what is to be said about the view."""
    members = sum(len(pool.members) for pool in view.pools)
    left = None if rows is None else max(_LEAST_ROWS, rows - _FIXED_LINES - members - len(view.budgets))
    live = list(view.requests)[:left]
    ended = list(view.ended)[: None if left is None else max(0, left - len(live))]
    parts: list[RenderableType] = [head(view, note), pools(view), key(), "", queue(view), budgets(view)]
    parts += ["", requests(live, view.running_requests)]
    if ended:
        parts += ["", endings(ended, view.ended_requests)]
    return Group(*parts)


def head(view: cell.CellView, note: str = "") -> Text:
    """Who tells, of what, when."""
    at = datetime.fromtimestamp(view.at.ToNanoseconds() / 1e9).strftime("%H:%M:%S")
    line = Text.assemble(("tandem top", "bold"), f"  {at}  {plain(view.model)}  told by {plain(view.router)}")
    line.append(f"  {len(view.routers)} router{'s' * (len(view.routers) != 1)}")
    if view.draining:
        line.append("  draining", "yellow")
    if not view.store_available:
        line.append("  the request store does not answer", "red")
    if note:
        line.append(f"  {note}", "bold red")
    return line


def pools(view: cell.CellView) -> Table:
    """Members, pool by pool."""
    table = _table("member", "state", "runs>", "waits>", "tokens/s>", "steps/s>", "pages in use>", "pages")
    for pool in view.pools:
        for one in pool.members:
            table.add_row(*_member(pool.role, one))
    return table


def _member(role: str, one: cell.MemberView) -> tuple[Text, ...]:
    state = Text(label(cell.MemberState, one.state), _MEMBER_STYLES.get(one.state, "red"))
    if one.reason:
        state.append(f" ({plain(one.reason)})")
    name = Text(plain(one.name or one.address))
    if not one.name:
        name.append(f" {role}", "bright_black")
        return name, state, *(Text("-"),) * 6
    waits = f"{one.waiting_sequences}" + (f" ({one.waiting_tokens:,} tokens)" if one.waiting_tokens else "")
    total = sum(getattr(one.pages, state_name) for state_name, _, _ in PAGE_STATES)
    used = total - one.pages.free - one.pages.cached
    return (
        name,
        state,
        Text(f"{one.running_sequences}/{one.max_sequences}"),
        Text(waits),
        Text(f"{one.tokens_per_s:,.1f}"),
        Text(f"{one.steps_per_s:,.1f}"),
        Text(f"{used:,}/{total:,}"),
        page_bar(one.pages),
    )


def page_bar(pages: cell.PageStates, cells: int = _BAR_CELLS) -> Text:
    """A bar of pages by state. A state that has any page has at least one cell."""
    counts = [getattr(pages, name) for name, _, _ in PAGE_STATES]
    bar = Text()
    for (_, letter, style), width in zip(PAGE_STATES, shares(counts, cells), strict=True):
        bar.append(letter * width, style)
    return bar


def shares(counts: list[int], cells: int) -> list[int]:
    """How many of so many cells each count gets: at least one for each that is not 0, the rest in proportion."""
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    widths = [max(1, round(count * cells / total)) if count else 0 for count in counts]
    while sum(widths) != cells:
        step = 1 if sum(widths) < cells else -1
        widest = max(range(len(widths)), key=lambda place: (widths[place], counts[place]))
        widths[widest] += step
    return widths


def key() -> Text:
    """What the letters and colours of a bar mean."""
    line = Text("pages: ", "bright_black")
    for name, letter, style in PAGE_STATES:
        line.append(f"{letter} {name}  ", style)
    return line


def queue(view: cell.CellView) -> Text:
    """What waits, in one line."""
    waiting = view.queue
    line = Text.assemble(
        ("queue ", "bold"), f"{waiting.requests:,} of {waiting.max_requests:,} requests, {waiting.tokens:,} tokens"
    )
    for lane in waiting.lanes:
        line.append(f"  priority {lane.priority}: {lane.requests} (oldest {lane.oldest_s:,.1f} s)")
    return line


def budgets(view: cell.CellView) -> Table:
    """What is held of each budget."""
    table = _table("budget", "held>", "of>", "")
    for one in view.budgets:
        share = one.used / one.limit if one.limit else 0.0
        name = f"{one.resource} of {plain(one.name) if one.name else 'the cell'}"
        style = "red" if share >= 0.95 else "yellow" if share >= 0.75 else "green"
        table.add_row(Text(name), Text(f"{one.used:,}"), Text(f"{one.limit:,}"), Text("=" * round(min(1.0, share) * 20), style))
    return table


def requests(live: Iterable[cell.LiveRequest], total: int) -> Table:
    """Requests that run."""
    table = _table("request", "tenant", "stage", "age>", "prompt>", "tokens>", "prefill", "decode", "attempt>")
    shown = 0
    for shown, one in enumerate(live, 1):  # noqa: B007  (how many there were is said below)
        prompt = f"{one.computed_prompt_tokens:,}/{one.prompt_tokens:,}"
        table.add_row(
            Text(plain(one.request_id)),
            Text(plain(one.tenant)),
            Text(label(cell.RequestStage, one.stage).replace("_", " ")),
            Text(f"{one.age_s:,.1f} s"),
            Text(prompt),
            Text(f"{one.output_tokens:,}/{one.max_output_tokens * max(1, one.choices):,}"),
            Text(plain(one.prefill_member) or "-"),
            Text(plain(one.decode_member) or "-"),
            Text(str(one.attempt)),
        )
    table.title = f"{total:,} running" + (f", {shown} shown" if shown < total else "")
    return table


def endings(ended: Iterable[cell.EndedRequest], total: int) -> Table:
    """Requests that have ended, newest first."""
    table = _table("request", "tenant", "ended", "tokens>", "first token>", "in all>", "decode", "attempts>")
    for one in ended:
        reason = label(pb.FinishReason, one.finish_reason)
        style = {pb.REQUEST_STATE_FINISHED: "", pb.REQUEST_STATE_CANCELLED: "yellow"}.get(one.state, "red")
        cause = f" ({plain(one.cause)})" if one.cause and one.cause != reason else ""
        table.add_row(
            Text(plain(one.request_id)),
            Text(plain(one.tenant)),
            Text(f"{reason}{cause}", style),
            Text(f"{one.usage.returned_tokens:,}" if one.HasField("usage") else "-"),
            Text(f"{one.timings.first_token_s * 1000:,.0f} ms" if one.timings.first_token_s else "-"),
            Text(f"{one.timings.total_s:,.2f} s"),
            Text(plain(one.decode_member) or "-"),
            Text(str(one.attempts)),
        )
    table.title = f"{total:,} ended"
    return table


def _table(*columns: str) -> Table:
    """A table without lines; a > at the end of a column's name sets it to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    return table
