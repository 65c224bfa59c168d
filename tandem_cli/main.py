"""The tandem command."""

import asyncio
import json
import secrets
import sys
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
from rich.console import Console

from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import DEFAULT_ADDRESS, EXIT, connect, exit_code, explain, label
from tandem_cli.generate import Printer, generate
from tandem_cli.local import demo, models_app, up
from tandem_cli.record_view import as_dict, timeline

CALL_TIMEOUT_S = 30.0

app = typer.Typer(
    help="Serve language models with separate prefill and decode pools, and call them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models")
app.command("up")(up)
app.command("demo")(demo)

Address = Annotated[str, typer.Option("--address", help="host:port of a router.", envvar="TANDEM_ADDRESS", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Name of a served model; empty means the only one.")] = "",
    system: Annotated[str, typer.Option(help="System message of the chat prompt.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as plain text, without the chat template.")] = False,
    max_output_tokens: Annotated[int | None, typer.Option("--max-output-tokens", "-n", help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Over 0 up to 1.")] = None,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes the choice repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")] = None,
    request_id: Annotated[str, typer.Option("--request-id", help="Id of the request; drawn when empty.")] = "",
    priority: Annotated[int, typer.Option(help="-10 to 10; higher goes first.")] = 0,
    final_only: Annotated[bool, typer.Option("--final-only", help="Send the whole text at the end.")] = False,
    timeout_s: Annotated[float | None, typer.Option("--timeout-s", help="Deadline of the call in seconds.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text: streams it, shows what the request waits for and, at the end, where the time went. Ctrl-C cancels."""
    request = pb.GenerateRequest(
        request_id=request_id or f"cli-{secrets.token_hex(8)}", model=model, priority=_int32("priority", priority)
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        request.text = text
    else:
        messages = [pb.ChatMessage(role="system", content=system)] if system else []
        request.chat.messages.extend([*messages, pb.ChatMessage(role="user", content=text)])
    _set_unsigned(request, "max_output_tokens", max_output_tokens)
    _set_unsigned(request.sampling, "seed", seed)
    _set_unsigned(request.sampling, "top_k", top_k)
    if temperature is not None:
        request.sampling.temperature = temperature
    if top_p is not None:
        request.sampling.top_p = top_p
    request.stop.sequences.extend(stop or [])
    request.output_mode = pb.OUTPUT_MODE_FINAL_ONLY if final_only else pb.OUTPUT_MODE_DELTA
    raise typer.Exit(asyncio.run(generate(address, request, Printer(as_json, quiet), timeout_s)))


@app.command("cancel")
def cancel_command(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    reason: Annotated[str, typer.Option(help="Kept on the record.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Answer when the cancel is effective.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a request, before, while or after it runs, through any router."""
    answer = _call(address, "Cancel", pb.CancelRequest(request_id=request_id, reason=reason, wait=wait))
    if as_json:
        print(json.dumps(as_dict(answer)))
        return
    outcome = label(pb.CancelOutcome, answer.outcome)
    state = f", state {label(pb.RequestState, answer.state)}" if answer.state else ", id not seen yet"
    print(f"{outcome}{state}" + (f", {label(pb.FinishReason, answer.finish_reason)}" if answer.finish_reason else ""))


@app.command("get")
def get_command(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show the record of a request as a timeline."""
    answer = _call(address, "Get", pb.GetRequest(request_id=request_id))
    if as_json:
        print(json.dumps(as_dict(answer.record)))
    else:
        Console(highlight=False).print(timeline(answer.record))


def _call(address: str, method: str, request: Any) -> Any:
    """One unary call; a failure is explained on standard error and ends the program."""

    async def run() -> Any:
        async with connect(address) as stub:
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        print(explain(error, address), file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


def _set_unsigned(message: Any, name: str, value: int | None) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError:
        _bad_input(f"{name}: {value} is not a number that the field can hold; it must be 0 or more")


def _int32(name: str, value: int) -> int:
    if not -(2**31) <= value < 2**31:
        _bad_input(f"{name}: {value} is out of range")
    return value


def _bad_input(words: str) -> None:
    print(words, file=sys.stderr)
    raise typer.Exit(EXIT.BAD_INPUT)


def main() -> None:
    """Entry point of the `tandem` command."""
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
