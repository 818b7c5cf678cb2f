"""`attn ask --plan`: what a problem would cost, from dtypes and shapes alone: no number is read from a file or sent."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import safetensors
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn_core.problem import GRADIENTS_TENSOR_NAMES, LAYER_GRADIENTS_TENSOR_NAMES
from service.ask import (
    SPEC,
    AskError,
    add_stored_options,
    call,
    check_save,
    existing,
    members_of,
    read_options,
    refuse_twice,
    save_answer,
    split_name,
)
from service.credentials import NOBODY, Credentials

Spec = dict[str, Any]
"""``dtype`` and ``shape`` of a tensor, as the service takes them."""
_TENSORS = frozenset((*GRADIENTS_TENSOR_NAMES, *LAYER_GRADIENTS_TENSOR_NAMES))
_MASKS = frozenset({"allow_mask", "block_mask"})
_WHOLE_NUMBERS = frozenset({"key_lengths", "query_lengths", "query_offset"})
_DTYPE_OF_CODE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
}


def plan(
    files: Sequence[str],
    *,
    url: str,
    path: str,
    options: Sequence[str],
    outputs: str | None,
    save: Path | None,
    verify: bool = False,
    credentials: Credentials = NOBODY,
) -> dict[str, Any]:
    """The service's answer to the specs of a problem. Raises: CommandError, Refused."""
    check_save(save, (".json",))
    given = read_options(options, outputs, verify=verify)
    members: dict[str, Any] = {}
    for file in files:
        specs = _specs_of(file, given)
        refuse_twice(file, members, specs)
        members |= specs
    body = json.dumps(members | given).encode()
    answer = call("POST", url, path, content=body, credentials=credentials)
    if save is not None:
        save_answer(save, answer.content, {})
    planned: dict[str, Any] = answer.json()
    return planned


def show_plan(planned: dict[str, Any], console: Console) -> None:
    """The verdict, what it rests on, and each path as a row; the one that would run stands bold."""
    verdict = ("admitted", "bold green") if planned["admitted"] else ("not admitted", "bold red")
    path = f" by the {planned['path']} path" if planned["admitted"] and planned.get("path") else ""
    why = f": {planned['why']}" if planned.get("why") else ""
    console.print(Text.assemble(verdict, path + why), soft_wrap=True)
    summary = Table(show_header=False, box=None)
    for name in ("needed_bytes", "allowed_bytes", "answer_bytes", "max_seq_len"):
        if planned.get(name) is not None:
            summary.add_row(name, f"{planned[name]:,}")
    console.print(summary, highlight=False)
    columns = ("path", "supported", "flops", "bytes moved", "peak", "estimated ms", "why")
    table = Table(box=None)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in ("path", "supported", "why") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "why")
    for name, cost in planned["paths"].items():
        table.add_row(
            name,
            "yes" if cost["supported"] else "no",
            _scaled(cost.get("flops"), 1000, ("", " k", " M", " G", " T", " P", " E")),
            _scaled(cost.get("bytes_moved"), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB")),
            _scaled(cost.get("peak_bytes"), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB")),
            _milliseconds(cost.get("estimated_ms")),
            Text(str(cost.get("why") or "")),
            style="bold" if planned["admitted"] and name == planned.get("path") else "",
        )
    console.print(table, highlight=False)


def _scaled(number: float | None, step: int, units: Sequence[str]) -> str:
    """Three digits and a unit; a number below ``step`` as it is."""
    if number is None:
        return "-"
    power = 0
    # 999.5 and more would be written as 1000 of the unit below.
    while number >= step - step / 2000 and power < len(units) - 1:
        number /= step
        power += 1
    if power == 0:
        return f"{number:g}{units[0]}"
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}{units[power]}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _specs_of(file: str, options: dict[str, Any]) -> dict[str, Any]:
    """The members of the plan that one word of the command line brings; stored options join ``options``."""
    name, where = split_name(file)
    if name and (said := SPEC.fullmatch(file)):
        return {name: {"dtype": said[2], "shape": _shape_said(file, said[3])}}
    path = existing(where)
    try:
        match path.suffix:
            case ".npy" if name:
                with path.open("rb") as opened:
                    return {name: _array_spec(opened)}
            case ".npz" if not name:
                with zipfile.ZipFile(path) as archive:
                    return {member.removesuffix(".npy"): _member_spec(archive, member) for member in archive.namelist()}
            case ".safetensors" if not name:
                with safetensors.safe_open(path, framework="pt") as opened:
                    specs = {key: _slice_spec(opened.get_slice(key)) for key in opened.keys()}  # noqa: SIM118
                    add_stored_options(path, opened.metadata() or {}, options)
                return specs
            case ".json" if not name:
                return _specs_of_members(members_of(file, path.read_bytes()), options)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise AskError(f"{path}: {error}") from None
    raise AskError(f"{file}: give a .json, .npz or .safetensors file, name=FILE.npy or name=float32[1,8,128,64]")


def _shape_said(file: str, shape: str) -> list[int]:
    sizes = [size.strip() for size in shape.split(",")] if shape.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise AskError(f"{file}: a shape is whole numbers with commas between, such as float32[1,8,128,64]")
    return [int(size) for size in sizes]


def _array_spec(opened: IO[bytes]) -> Spec:
    """What the head of an .npy file says. Raises: ValueError."""
    version = np.lib.format.read_magic(opened)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"arrays in version {version[0]}.{version[1]} of the format are not tensors")
    shape, _, dtype = readers[version](opened)
    return {"dtype": dtype.name, "shape": list(shape)}


def _member_spec(archive: zipfile.ZipFile, member: str) -> Spec:
    with archive.open(member) as opened:
        return _array_spec(opened)


def _slice_spec(stored: Any) -> Spec:
    code = stored.get_dtype()
    return {"dtype": _DTYPE_OF_CODE.get(code, code), "shape": stored.get_shape()}


def _specs_of_members(members: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """A whole problem without its numbers; what is no tensor of ours stays as it is, for the service to judge.

    ``dtype`` is what lists would be rounded to: it has been said once they are specs.
    """
    dtype = options.get("dtype", members.get("dtype")) or "float32"
    specs = {
        name: _spec_of_member(name, value, dtype) if name in _TENSORS else value for name, value in members.items()
    }
    if any(isinstance(members.get(name), list) for name in _TENSORS):
        specs.pop("dtype", None)
        options.pop("dtype", None)
    return specs


def _spec_of_member(name: str, value: Any, dtype: str) -> Any:
    if isinstance(value, dict):
        return {key: said for key, said in value.items() if key != "data"}
    if not isinstance(value, list):
        return value
    shape = _shape_of_lists(name, value)
    leaf: Any = value
    while isinstance(leaf, list):
        leaf = leaf[0]
    if isinstance(leaf, bool):
        return {"dtype": "bool", "shape": shape}
    is_whole = name in _MASKS | _WHOLE_NUMBERS and isinstance(leaf, int)
    return {"dtype": "int64" if is_whole else dtype, "shape": shape}


def _shape_of_lists(name: str, value: list[Any]) -> list[int]:
    shape: list[int] = []
    level: list[Any] = [value]
    while any(isinstance(node, list) for node in level):
        lengths = {len(node) if isinstance(node, list) else None for node in level}
        if len(lengths) > 1:
            raise AskError(f"{name}: its lists are of unequal length or depth, so it has no shape")
        if lengths == {0}:
            raise AskError(f'{name}: give an empty tensor as {{"dtype", "shape"}}, since an empty list has no shape')
        shape.append(len(level[0]))
        level = [child for node in level for child in node]
    return shape
