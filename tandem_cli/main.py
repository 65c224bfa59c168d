"""The tandem command."""

import asyncio
import json
import secrets
import sys
from typing import Annotated, Any, NoReturn

import typer

from tandem.v1 import inference_pb2 as pb
from tandem_cli.bench_command import bench
from tandem_cli.calls import Address, call
from tandem_cli.client import DEFAULT_ADDRESS, label
from tandem_cli.consoles import output_console
from tandem_cli.demo import demo
from tandem_cli.doctor_command import doctor
from tandem_cli.exits import Exit, Failure, exit_table
from tandem_cli.generate import attach, generate
from tandem_cli.grammar_options import Ebnf, JsonObject, JsonSchema, Regex, grammar_of
from tandem_cli.models_commands import AsJson, models_app
from tandem_cli.printer import Printer
from tandem_cli.record_view import as_dict, timeline
from tandem_cli.top import top
from tandem_cli.trust import trust
from tandem_cli.up import up

EPILOG = f"\b\nExit status:\n{exit_table()}"
Prompt = Annotated[
    str | None, typer.Argument(help="The prompt; - or nothing reads standard input, whose last line break is left out.")
]
Choices = Annotated[int | None, typer.Option(help="So many outputs of the prompt, shown one after the other.")]
BestOf = Annotated[int | None, typer.Option(help="Make so many, and show the likeliest ones; goes with --final-only.")]
Adapter = Annotated[str, typer.Option(help="Name of an adapter of the model; empty means the model as it is.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text only.")]
EventsAsJson = Annotated[bool, typer.Option("--json", help="Print each event of the stream as a JSON line.")]
INT32_MAX = 2**31 - 1

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(epilog=EPILOG)(trust)
app.command("up", epilog=EPILOG)(up)
app.command("demo", epilog=EPILOG)(demo)
app.command("top", epilog=EPILOG)(top)
app.command("bench", epilog=EPILOG)(bench)
app.command("doctor", epilog=EPILOG)(doctor)
app.add_typer(models_app, name="models")


@app.command("generate", epilog=EPILOG)
def generate_command(
    prompt: Prompt = None,
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Name of a served model; empty means the only one.")] = "",
    system: Annotated[str, typer.Option(help="System message of the chat prompt.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as plain text, without the chat template.")] = False,
    max_output_tokens: Annotated[int | None, typer.Option("--max-output-tokens", "-n", help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Over 0 up to 1.")] = None,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes the choice repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    include_stop: Annotated[bool, typer.Option("--include-stop", help="Show the text that stopped the output.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    ebnf: Ebnf = None,
    json_object: JsonObject = False,
    adapter: Adapter = "",
    request_id: Annotated[str, typer.Option(help="Id of the request; drawn when empty.")] = "",
    priority: Annotated[int, typer.Option(help="-10 to 10; higher goes first.")] = 0,
    final_only: Annotated[bool, typer.Option("--final-only", help="Send the whole text at the end.")] = False,
    choices: Choices = None,
    best_of: BestOf = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Show how likely each token was, and so many of the likeliest ones at its place.")
    ] = None,
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="With --logprobs: show those of the prompt's tokens too.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Show the prompt, as the model was given it, before the output.")] = False,
    timeout_s: Annotated[float | None, typer.Option(help="Time limit of the request in seconds.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Let it run on when the connection or this command ends; see tandem attach.")
    ] = False,
    quiet: Quiet = False,
    as_json: EventsAsJson = False,
) -> None:
    """Stream generated text; show what the request waits for and, at the end, where the time went. Ctrl-C cancels it."""
    grammar = grammar_of(json_schema, regex, ebnf, json_object)
    request = pb.GenerateRequest(request_id=request_id or f"cli-{secrets.token_hex(8)}", grammar=grammar)
    text = _prompt_text(prompt)
    messages = [("system", system)] * bool(system) + [("user", text)]
    values: dict[str, Any] = {"model": model, "adapter": adapter, "priority": priority, "max_output_tokens": max_output_tokens}
    values |= {"choices": choices, "best_of": best_of}
    _fill(request, values | ({"text": text} if raw else {}))
    for role, content in [] if raw else messages:
        _fill(request.chat.messages.add(), {"role": role, "content": content})
    _fill(request.sampling, {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed})
    _fill(request.stop, {"include_stop": include_stop, "ignore_eos": ignore_eos})
    request.stop.sequences.extend(stop or [])
    if prompt_logprobs and logprobs is None:
        raise Failure(Exit.BAD_INPUT, "--prompt-logprobs goes with --logprobs, which says how many likeliest tokens are shown")
    _fill(request.log_probabilities, {"top": logprobs, "prompt": prompt_logprobs or None})
    request.echo_prompt = echo
    request.output_mode = pb.OUTPUT_MODE_FINAL_ONLY if final_only else pb.OUTPUT_MODE_DELTA
    request.on_disconnect = pb.ON_DISCONNECT_DETACH if detach else pb.ON_DISCONNECT_CANCEL
    raise typer.Exit(asyncio.run(generate(address, request, Printer(as_json, quiet), timeout_s)))


@app.command("attach", epilog=EPILOG)
def attach_command(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    from_no: Annotated[int, typer.Option("--from", help="First event that is wanted: one more than the last one seen.")] = 0,
    quiet: Quiet = False,
    as_json: EventsAsJson = False,
) -> None:
    """Take up the stream of a request again, through any router, while it runs and a while after its end. Ctrl-C leaves it."""
    request = pb.AttachRequest()
    _fill(request, {"request_id": request_id, "next_sequence_no": from_no})
    raise typer.Exit(asyncio.run(attach(address, request, Printer(as_json, quiet))))


@app.command("cancel", epilog=EPILOG)
def cancel_command(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    reason: Annotated[str, typer.Option(help="Kept on the record.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Answer when the cancel is effective.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a request, before, while or after it runs, through any router."""
    answer = call(address, "Cancel", pb.CancelRequest(request_id=request_id, reason=reason, wait=wait))
    if as_json:
        print(json.dumps(as_dict(answer)))
        return
    outcome = label(pb.CancelOutcome, answer.outcome)
    state = f", state {label(pb.RequestState, answer.state)}" if answer.state else ", id not seen yet"
    print(f"{outcome}{state}" + (f", {label(pb.FinishReason, answer.finish_reason)}" if answer.finish_reason else ""))


@app.command("get", epilog=EPILOG)
def get_command(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show the record of a request as a timeline."""
    answer = call(address, "Get", pb.GetRequest(request_id=request_id))
    if as_json:
        print(json.dumps(as_dict(answer.record)))
    else:
        output_console().print(timeline(answer.record))


def _prompt_text(prompt: str | None) -> str:
    """The argument, or standard input without its last line break."""
    if prompt is None and sys.stdin.isatty():
        prompt = ""
    elif prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise Failure(Exit.BAD_INPUT, f"standard input is not UTF-8: byte {error.start} cannot be read") from None
    if not prompt:
        raise Failure(Exit.BAD_INPUT, 'no prompt: give it as an argument, tandem generate "Say hello.", or on standard input')
    return prompt


def _fill(message: Any, values: dict[str, Any]) -> None:
    """Set fields; None leaves one unset. What the field cannot hold is a bad option."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            setattr(message, name, value)
        except UnicodeError:
            raise Failure(Exit.BAD_INPUT, f"{name}: the text is not UTF-8") from None
        except ValueError:
            raise Failure(Exit.BAD_INPUT, f"{name}: {value} is out of the range of its field") from None


def _end(failure: Failure, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps(failure.as_dict()), flush=True)
    else:
        print(f"tandem: {failure}", file=sys.stderr)
    sys.exit(failure.code)


def main() -> None:
    """Entry point of the `tandem` command."""
    try:
        app(prog_name="tandem")
    except Failure as failure:
        _end(failure, "--json" in sys.argv[1:])


if __name__ == "__main__":
    main()
