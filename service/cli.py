"""The command ``attn``: serve, ask, version."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.settings import SettingsError, describe_settings, read_settings

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="attn, the attention service: attention and nothing else.",
)
_SETTINGS_HELP = "Every setting is also a variable, and the command line wins:\n\n" + "\n\n".join(
    f"[bold]{name}[/bold] {escape(meaning)} [dim](default {escape(default)})[/dim]"
    for name, default, meaning in describe_settings()
)
BAD_SETTINGS, BAD_START = 2, 1


@app.command(epilog=_SETTINGS_HELP)
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (ATTN_HOST).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (ATTN_PORT).")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of gRPC (ATTN_GRPC_PORT).")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N (ATTN_DEVICE).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (ATTN_LOG_LEVEL).")] = None,
    log_format: Annotated[str | None, typer.Option(help="json or text (ATTN_LOG_FORMAT).")] = None,
) -> None:
    """Start the service."""
    try:
        settings = read_settings(
            host=host, port=port, grpc_port=grpc_port, device=device, log_level=log_level, log_format=log_format
        )
    except SettingsError as error:
        for reason in error.reasons:
            print(f"attn: {reason}", file=sys.stderr)
        raise typer.Exit(BAD_SETTINGS) from None
    # Until the service listens for them: nothing is accepted yet, so nothing is lost. Without a handler of its own the
    # first process of a container would not even notice.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    # Read as gRPC is imported: its own lines on stderr have another form than ours, and say nothing that we do not.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Only now: torch takes seconds to import, and a wrong setting should be told at once.
    from service import main

    try:
        code = main.serve(settings)
    except main.StartError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise typer.Exit(BAD_START) from None
    raise typer.Exit(code)


@app.command()
def ask(
    files: Annotated[
        list[str],
        typer.Argument(help="A .json, .npz or .safetensors file; or query=q.npy key=k.npy ..., one for each tensor."),
    ],
    url: Annotated[str, typer.Option(envvar="ATTN_URL", help="Where the service is.")] = "http://127.0.0.1:8000",
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="name=value, such as causal=true.")] = None,
    outputs: Annotated[str | None, typer.Option(help="What to ask for, such as context,weights.")] = None,
    weighted_sum: Annotated[bool, typer.Option("--weighted-sum", help="weights and value are given.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the answer to a .json, .npz or .safetensors file.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="ATTN_CLIENT_KEY", help="A key, if the service asks for one; the variable shows it to fewer."
        ),
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authorities by which to know the service.")] = None,
    cert: Annotated[Path | None, typer.Option(help="PEM file of a certificate to show the service.")] = None,
    cert_key: Annotated[Path | None, typer.Option(help="PEM file of its key, if that lies apart.")] = None,
) -> None:
    """Send one problem from files and print or save the answer."""
    from service import ask as asking

    console, errors = Console(), Console(stderr=True)
    path = "/v1/weighted_sum" if weighted_sum else "/v1/attention"
    credentials = asking.Credentials(key=key, ca=ca, certificate=cert, certificate_key=cert_key)
    try:
        tensors, info = asking.ask(
            files,
            url=url,
            path=path,
            options=option or [],
            outputs=outputs,
            save=save,
            credentials=credentials,
        )
    except asking.Refused as error:
        asking.show_refusal(error.problem, errors)
        raise typer.Exit(1) from None
    except asking.AskError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if save is None:
        asking.show(tensors, info, console)
    else:
        console.print(f"wrote {save}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def version() -> None:
    """The versions of the service and of what its numbers depend on."""
    import platform

    import torch

    from service.main import choose_device, service_version

    table = Table(show_header=False, box=None)
    table.add_row("attn", service_version())
    table.add_row("torch", torch.__version__)
    table.add_row("python", platform.python_version())
    table.add_row("device", str(choose_device("auto")))
    Console().print(table, highlight=False)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def run() -> None:
    """The entry point."""
    app()
