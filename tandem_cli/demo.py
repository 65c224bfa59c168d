"""`tandem demo`: one answer from a whole cell, with where the time went."""

import asyncio
import secrets
import time
from pathlib import Path
from typing import Annotated

import grpc.aio
import typer

from models import DEFAULT_MODEL
from tandem.v1 import inference_pb2 as pb
from tandem_cli.cell import BadOption, Cell, CellOptions, check_adapters
from tandem_cli.client import connect, failure_of
from tandem_cli.completion import model_names
from tandem_cli.exits import Exit, Failure
from tandem_cli.generate import generate
from tandem_cli.local_cell import Teller, describe, teller, with_local_cell
from tandem_cli.printer import Printer
from tandem_cli.record_view import as_dict, timeline
from tandem_cli.up import Adapters

PROMPT = "Explain in three sentences why a chef prepares ingredients before cooking."
OUTPUT_TOKENS = 96
#: The answer takes seconds; a machine that needs longer than this is stuck.
ANSWER_S = 300.0
GET_S = 10.0


def demo(
    model: Annotated[str, typer.Option(help="As for `tandem up`.", autocompletion=model_names)] = DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    adapter: Adapters = None,
    ask_adapter: Annotated[str, typer.Option(help="Name of the adapter that is asked; empty: the model as it is.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines: ready, the request's events, record, stopped.")] = False,
) -> None:
    """Start a cell, stream the answer to one chat prompt, show timings and record, stop everything."""
    try:
        adapters = check_adapters(adapter or ())
    except BadOption as error:
        raise Failure(Exit.BAD_INPUT, str(error)) from None
    tell = teller(as_json)
    started = time.monotonic()
    tell.say("starting a store, one prefill member, one decode member and a router, each a process of its own", "bold")

    def use(cell: Cell, folder: Path) -> Exit:
        tell.event("ready", address=cell.address, logs=str(folder), processes=[describe(child) for child in cell.processes])
        tell.say(f"ready after {time.monotonic() - started:.1f} s; asking: {prompt}\n", "bold")
        return asyncio.run(_ask(cell.address, prompt, ask_adapter, tell))

    code = with_local_cell(CellOptions(model, adapters=adapters, listen="127.0.0.1:0"), tell, use)
    if code is None:
        raise typer.Exit(Exit.CANCELLED)
    tell.say(f"done in {time.monotonic() - started:.1f} s; nothing is left running", "bold")
    raise typer.Exit(code)


async def _ask(address: str, prompt: str, adapter: str, tell: Teller) -> Exit:
    request = pb.GenerateRequest(request_id=f"demo-{secrets.token_hex(4)}", max_output_tokens=OUTPUT_TOKENS, adapter=adapter)
    request.chat.messages.add(role="user", content=prompt)
    request.sampling.temperature = 0.0
    code = await generate(address, request, Printer(tell.as_json, quiet=False), ANSWER_S)
    async with connect(address) as stub:
        try:
            answer = await stub.Get(pb.GetRequest(request_id=request.request_id), timeout=GET_S)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, address) from None
    tell.event("record", record=as_dict(answer.record))
    tell.say("\nits record, as `tandem get` shows it:", "bold")
    tell.console.print(timeline(answer.record))
    tell.say("")
    return code
