"""`attn layer`: layers that a running service keeps by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.ask import call, layer_path, read_options, read_problem
from service.credentials import NOBODY, Credentials

Layer = dict[str, Any]
"""What the service says of a layer: name, options, dtype, shapes, number of parameters."""


def put_layer(
    name: str,
    files: Sequence[str],
    *,
    url: str,
    options: Sequence[str],
    replace: bool = False,
    credentials: Credentials = NOBODY,
) -> tuple[Layer, bool]:
    """What is kept under ``name`` now, and whether that is new. Raises: CommandError, Refused."""
    path = layer_path(name) + "?replace=true" * replace
    body, content_type = read_problem(files, read_options(options))
    answer = call("PUT", url, path, content=body, content_type=content_type, credentials=credentials)
    layer: Layer = answer.json()
    return layer, answer.status_code == 201


def list_layers(*, url: str, credentials: Credentials = NOBODY) -> list[Layer]:
    """Raises: CommandError, Refused."""
    layers: list[Layer] = call("GET", url, "/v1/layers", credentials=credentials).json()["layers"]
    return layers


def get_layer(name: str, *, url: str, credentials: Credentials = NOBODY) -> Layer:
    """Raises: CommandError, Refused."""
    layer: Layer = call("GET", url, layer_path(name), credentials=credentials).json()
    return layer


def delete_layer(name: str, *, url: str, credentials: Credentials = NOBODY) -> None:
    """Raises: CommandError, Refused."""
    call("DELETE", url, layer_path(name), credentials=credentials)


def show_layers(layers: Sequence[Layer], console: Console) -> None:
    """One row for each."""
    if not layers:
        console.print("no layers are kept")
        return
    columns = [name for name in layers[0] if not isinstance(layers[0][name], Mapping | list)]
    table = Table(*columns, box=None)
    for layer in layers:
        table.add_row(*(_text(layer.get(column)) for column in columns))
    console.print(table, highlight=False)


def show_layer(layer: Layer, console: Console) -> None:
    """What is said of it, then its tensors with their shapes."""
    table = Table(show_header=False, box=None)
    for name, value in layer.items():
        if isinstance(value, Mapping):
            for tensor, shape in value.items():
                table.add_row(tensor, _text(shape))
        else:
            table.add_row(name, _text(value))
    console.print(table, highlight=False)


def _text(value: Any) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
