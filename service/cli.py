"""The command ``attn``: serve, ask, load, layer, version."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

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
layers = typer.Typer(no_args_is_help=True, help="Layers that the service keeps by name.")
app.add_typer(layers, name="layer")
_SETTINGS_HELP = "Every setting is also a variable, and the command line wins:\n\n" + "\n\n".join(
    f"[bold]{name}[/bold] {escape(meaning)} [dim](default {escape(default)})[/dim]"
    for name, default, meaning in describe_settings()
)
BAD_SETTINGS, BAD_START, REFUSED = 2, 1, 1

Url = Annotated[str, typer.Option(envvar="ATTN_URL", help="Where the service is.")]
Option = Annotated[list[str] | None, typer.Option("--option", "-o", help="name=value, such as causal=true.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="ATTN_CLIENT_KEY", help="A key, if the service asks for one; the variable shows it to fewer."),
]
Ca = Annotated[Path | None, typer.Option(help="PEM file of the authorities by which to know the service.")]
Cert = Annotated[Path | None, typer.Option(help="PEM file of a certificate to show the service.")]
CertKey = Annotated[Path | None, typer.Option(help="PEM file of its key, if that lies apart.")]
LayerName = Annotated[str, typer.Argument(help="1 to 64 of a-z A-Z 0-9 . _ -, beginning with a letter.")]


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
        typer.Argument(
            help="A .json, .npz or .safetensors file; or query=q.npy key=k.npy ..., one for each tensor. With --plan "
            r"'query=float32\[1,8,128,64]' too."
        ),
    ],
    url: Url = "http://127.0.0.1:8000",
    option: Option = None,
    outputs: Annotated[str | None, typer.Option(help="What to ask for, such as context,weights.")] = None,
    gradients: Annotated[
        bool,
        typer.Option("--gradients", help="Ask for gradients; grad_context, grad_logsumexp or grad_output is given."),
    ] = False,
    layer: Annotated[bool, typer.Option("--layer", help="input and a layer's weights are given.")] = False,
    layer_name: Annotated[
        str | None, typer.Option(help="input is given; the weights are those that the service keeps by this name.")
    ] = None,
    weighted_sum: Annotated[bool, typer.Option("--weighted-sum", help="weights and value are given.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Compute nothing; say what it would cost. Sends dtypes and shapes alone.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute in float64 too, and show the errors; as -o verify=true.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the answer to a .json, .npz or .safetensors file; a plan to .json.")
    ] = None,
    heatmap: Annotated[
        bool, typer.Option("--heatmap", help="Draw the weights of each head here, as far as they fit; asks for them.")
    ] = False,
    heatmap_file: Annotated[
        Path | None,
        typer.Option(
            help="Draw them, whole, to a .png, .svg or .pdf file; needs matplotlib: pip install 'attn\\[plot]'."
        ),
    ] = None,
    key: Key = None,
    ca: Ca = None,
    cert: Cert = None,
    cert_key: CertKey = None,
) -> None:
    """Send one problem from files and print, draw or save the answer."""
    from service import ask as asking
    from service import heatmap as pictures
    from service.plan_command import plan as ask_plan
    from service.plan_command import show_plan

    console = Console()
    draws = heatmap or heatmap_file is not None
    with _told_in_a_sentence():
        path = asking.path_of(
            gradients=gradients,
            layer=layer,
            layer_name=layer_name,
            plan=plan,
            weighted_sum=weighted_sum,
            verify=verify,
            heatmap=draws,
        )
        if heatmap_file is not None:
            pictures.check_file(heatmap_file)
        given: dict[str, Any] = _service(url, key, ca, cert, cert_key) | {
            "path": path,
            "options": option or [],
            "outputs": outputs,
            "save": save,
            "verify": verify,
        }
        if plan:
            planned = ask_plan(files, **given)
        else:
            tensors, info = asking.ask(files, heatmap=draws, **given)
    if save is not None:
        _say(f"wrote {save}")
    elif plan:
        show_plan(planned, console)
    else:
        asking.show(tensors, info, console)
    if heatmap:
        pictures.draw(tensors["weights"], console)
    if heatmap_file is not None:
        with _told_in_a_sentence():
            pictures.write(tensors["weights"], heatmap_file)
        _say(f"drew {heatmap_file}")


@app.command()
def load(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(envvar="ATTN_URL", help="Where the service is. Default 127.0.0.1, port 8000; 8001 with --grpc."),
    ] = None,
    over_grpc: Annotated[bool, typer.Option("--grpc", help="The Open Inference Protocol over gRPC.")] = False,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            "-s",
            help=r"B,H,T,D; H/K: K key heads, T/S: S keys, D/V: values of size V; T may be a range, 17-256; @3: three "
            r"times as often. Several make a mix. \[default: 1,8,128,64]",
        ),
    ] = None,
    form: Annotated[str, typer.Option(help="safetensors, json, base64; several with commas.")] = "safetensors",
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float32",
    option: Option = None,
    outputs: Annotated[str | None, typer.Option(help="What to ask for, such as context,weights.")] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: so many requests a second, planned before; several with commas.")
    ] = None,
    arrivals: Annotated[str, typer.Option(help="How they arrive: poisson or even.")] = "poisson",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help=r"Closed loop: so many at once; several with commas. \[default: 8, where there is no --rate]"
        ),
    ] = None,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds that count, of each step.")] = 10.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds before them that do not.")] = 1.0,
    ramp: Annotated[float, typer.Option(min=0, help="Seconds before those in which the load rises.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds after which an answer is given up.")] = 30.0,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="So many requests under way; a planned send beyond is a failure.")
    ] = 1000,
    check: Annotated[
        int, typer.Option(min=0, help="Answers of each step to hold against torch in float64; 0: none.")
    ] = 32,
    ceiling: Annotated[
        float,
        typer.Option(min=0, help="Seconds, at each concurrency, for what the client can do against an echo; 0: none."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the numbers, the lengths and the arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything there, for --compare.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write a row for each step there.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a report with charts, one file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="A --json of an earlier run to hold this one against.")] = None,
    key: Key = None,
    ca: Ca = None,
    cert: Cert = None,
    cert_key: CertKey = None,
) -> None:
    """Load a service: how fast it answers, at which rate, and whether it is right."""
    from service.ask import read_options
    from service.credentials import CommandError, Credentials
    from service.load_command import Files, plan_of
    from service.load_command import load as run_load

    with _told_in_a_sentence():
        source = context.get_parameter_source("url")
        if over_grpc and source is not None and source.name == "ENVIRONMENT":
            raise CommandError("--grpc: say --url as well, since ATTN_URL is where HTTP is spoken")
        plan = plan_of(
            url=url,
            over_grpc=over_grpc,
            shapes=shape or [],
            forms=form,
            rates=rate,
            arrivals=arrivals,
            concurrency=concurrency,
            dtype=dtype,
            options=read_options(option or [], outputs),
            num_checked=check,
            credentials=Credentials(key=key, ca=ca, certificate=cert, certificate_key=cert_key),
            ramp_s=ramp,
            warm_up_s=warm_up,
            duration_s=duration,
            num_processes=processes,
            max_in_flight=max_in_flight,
            timeout_s=timeout,
            ceiling_s=ceiling,
            seed=seed,
            command=_command_line(),
        )
        is_good = run_load(plan, Files(json=json_file, csv=csv_file, html=html_file, compare=compare), Console())
    if not is_good:
        raise typer.Exit(REFUSED)


@layers.command("put")
def put_layer(
    name: LayerName,
    files: Annotated[
        list[str],
        typer.Argument(help="A .json, .npz or .safetensors file with w_query, ...; or w_query=q.npy ... for each."),
    ],
    url: Url = "http://127.0.0.1:8000",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="num_heads=8, weight_layout=in_out or out_in, num_kv_heads=2."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where another layer has that name (?replace=true).")
    ] = False,
    key: Key = None,
    ca: Ca = None,
    cert: Cert = None,
    cert_key: CertKey = None,
) -> None:
    """Have the service keep a layer's weights under a name."""
    from service import layers_command

    with _told_in_a_sentence():
        layer, is_new = layers_command.put_layer(
            name, files, options=option or [], replace=replace, **_service(url, key, ca, cert, cert_key)
        )
    _say(f"keeps {name}" if is_new or replace else f"{name} was there already, the same in every number")
    layers_command.show_layer(layer, Console())


@layers.command("list")
def list_layers(
    url: Url = "http://127.0.0.1:8000", key: Key = None, ca: Ca = None, cert: Cert = None, cert_key: CertKey = None
) -> None:
    """The layers that the service keeps."""
    from service import layers_command

    with _told_in_a_sentence():
        kept = layers_command.list_layers(**_service(url, key, ca, cert, cert_key))
    layers_command.show_layers(kept, Console())


@layers.command("get")
def get_layer(
    name: LayerName,
    url: Url = "http://127.0.0.1:8000",
    key: Key = None,
    ca: Ca = None,
    cert: Cert = None,
    cert_key: CertKey = None,
) -> None:
    """What the service says of one layer; not its weights."""
    from service import layers_command

    with _told_in_a_sentence():
        layer = layers_command.get_layer(name, **_service(url, key, ca, cert, cert_key))
    layers_command.show_layer(layer, Console())


@layers.command("delete")
def delete_layer(
    name: LayerName,
    url: Url = "http://127.0.0.1:8000",
    key: Key = None,
    ca: Ca = None,
    cert: Cert = None,
    cert_key: CertKey = None,
) -> None:
    """Have the service forget a layer; requests that run finish on it."""
    from service import layers_command

    with _told_in_a_sentence():
        layers_command.delete_layer(name, **_service(url, key, ca, cert, cert_key))
    _say(f"deleted {name}")


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


@contextmanager
def _told_in_a_sentence() -> Iterator[None]:
    """What goes wrong between here and the service: shown on stderr, exit code 1."""
    from service import ask as asking
    from service.credentials import CommandError

    try:
        yield
    except asking.Refused as error:
        asking.show_refusal(error.problem, Console(stderr=True))
        raise typer.Exit(REFUSED) from None
    except CommandError as error:
        print(f"attn: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None


def _service(url: str, key: str | None, ca: Path | None, cert: Path | None, cert_key: Path | None) -> dict[str, Any]:
    """Where the service is and what to show it, as every call takes them."""
    from service.credentials import Credentials

    return {"url": url, "credentials": Credentials(key=key, ca=ca, certificate=cert, certificate_key=cert_key)}


def _say(sentence: str) -> None:
    Console().print(sentence, highlight=False, markup=False, soft_wrap=True)


def _command_line() -> str:
    """What was asked, for a report; no key is shown."""
    words = ["attn", *sys.argv[1:]]
    for place, word in enumerate(words):
        if word == "--key" and place + 1 < len(words):
            words[place + 1] = "..."
        elif word.startswith("--key="):
            words[place] = "--key=..."
    return shlex.join(words)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def run() -> None:
    """The entry point."""
    app()
