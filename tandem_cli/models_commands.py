"""`tandem models`: what is on this machine, and what a cell serves."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

import models
from tandem.v1 import inference_pb2 as pb
from tandem_cli.calls import Address, call
from tandem_cli.client import DEFAULT_ADDRESS
from tandem_cli.completion import model_names
from tandem_cli.consoles import error_console, output_console
from tandem_cli.exits import Exit, Failure
from tandem_cli.pulling import pull
from tandem_cli.record_view import as_dict

models_app = typer.Typer(help="Models on this machine, and those that a cell serves.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


@models_app.command("pull")
def models_pull(
    name: Annotated[
        str, typer.Argument(help="A known name or a hub id org/name.", autocompletion=model_names)
    ] = models.DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """Fetch a model into the cache folder, with its checksum; does nothing when it is there."""
    try:
        ref = pull(name, error_console(quiet=as_json))
    except KeyboardInterrupt:
        raise Failure(Exit.CANCELLED, "interrupted; pull again to go on") from None
    print(json.dumps(_as_dict(ref)) if as_json else f"{ref.name}: {ref.path} ({ref.format}), snapshot {ref.snapshot[:12]}")


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """Models in the cache folder (TANDEM_CACHE, or ~/.cache/tandem)."""
    found = models.list_models()
    if as_json:
        print(json.dumps([_as_dict(ref) for ref in found]))
    elif not found:
        print(f"no models yet; fetch the default one with `tandem models pull {models.DEFAULT_MODEL}`")
    else:
        _print_table(
            ("name", "format", "snapshot", "path"), [(ref.name, ref.format, ref.snapshot[:12], str(ref.path)) for ref in found]
        )


@models_app.command("served")
def models_served(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """Models that a running cell serves."""
    answer = call(address, "ListModels", pb.ListModelsRequest())
    if as_json:
        print(json.dumps([as_dict(model) for model in answer.models]))
        return
    rows = [
        (m.name, m.snapshot[:12], str(m.context_tokens), str(m.prefill_members), str(m.decode_members), ", ".join(m.adapters))
        for m in answer.models
    ]
    _print_table(("name", "snapshot", "context tokens", "prefill members", "decode members", "adapters"), rows)


def _as_dict(ref: models.ModelRef) -> dict[str, str]:
    return {"name": ref.name, "path": str(ref.path), "format": ref.format, "snapshot": ref.snapshot}


def _print_table(columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    output_console().print(table)
