"""`attn ask`: one problem from files to a running service, its answer to the screen or a file."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors
import safetensors.torch
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from service.credentials import NOBODY, CommandError, Credentials

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
PROBLEM = "application/problem+json"
LOADABLE = (".json", ".npz", ".safetensors", ".npy")
SAVABLE = (".json", ".npz", ".safetensors")
SPEC = re.compile(r"(\w+)=(\w+)\[([\d, ]*)\]")
"""A tensor of a plan, on the command line: ``query=float32[1,8,128,64]``."""
_LAYER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


class AskError(CommandError):
    """What is wrong with the files, the options or the connection, in one sentence."""


class Refused(AskError):
    """The service's refusal; ``problem`` is its body."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.problem = problem
        super().__init__(f"{problem.get('status')}: {problem.get('title')} ({problem.get('detail')})")


def path_of(
    *,
    gradients: bool = False,
    layer: bool = False,
    layer_name: str | None = None,
    plan: bool = False,
    weighted_sum: bool = False,
    verify: bool = False,
    heatmap: bool = False,
) -> str:
    """Where the call goes that these flags name. Raises: AskError where two of them do not go together."""
    if layer and layer_name is not None:
        raise AskError("--layer sends weights with the input, --layer-name uses those that are kept: give one of them")
    of_layer = "--layer" if layer else "--layer-name" if layer_name is not None else None
    gradients_flag = "--gradients" if gradients else None
    if plan and of_layer:
        raise AskError(
            f"--plan is of attention alone: leave {of_layer} out, and give query, key and value as projected"
        )
    if plan and gradients:
        raise AskError("--plan is of the gradients where grad_context is among the tensors: leave --gradients out")
    for flag in (of_layer, gradients_flag, "--plan" if plan else None, "--verify" if verify else None):
        if weighted_sum and flag:
            raise AskError(f"--weighted-sum is a product and nothing else: leave it or {flag} out")
    without = "--weighted-sum" if weighted_sum else "--plan" if plan else gradients_flag
    if heatmap and without:
        raise AskError(f"--heatmap draws the weights of an answer, and {without} gives none: leave one of them out")
    if weighted_sum:
        return "/v1/weighted_sum"
    if plan:
        return "/v1/attention/plan"
    if layer_name is not None:
        return f"{layer_path(layer_name)}/{'gradients' if gradients else 'forward'}"
    return ("/v1/layer" if layer else "/v1/attention") + "/gradients" * gradients


def layer_path(name: str) -> str:
    """Where a layer is kept. Raises: AskError for a name that no layer can have, and that might lead elsewhere."""
    if not _LAYER_NAME.fullmatch(name):
        raise AskError(f"a layer's name is 1 to 64 of a-z A-Z 0-9 . _ -, beginning with a letter, not {name!r}")
    return f"/v1/layers/{name}"


def ask(
    files: Sequence[str],
    *,
    url: str,
    path: str,
    options: Sequence[str],
    outputs: str | None,
    save: Path | None,
    verify: bool = False,
    heatmap: bool = False,
    credentials: Credentials = NOBODY,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The outputs and ``info`` of one problem; ``heatmap``: the weights among them. Raises: CommandError, Refused."""
    check_save(save, SAVABLE)
    if heatmap and save is not None and save.suffix == ".json":
        raise AskError("--heatmap reads the answer as tensors: --save it as .npz or .safetensors, not .json")
    given = read_options(options, outputs, verify=verify)
    beside = "context" if path == "/v1/attention" else "output"
    body, content_type = read_problem(files, given, beside_weights=beside if heatmap else None)
    accept = JSON if save is not None and save.suffix == ".json" else SAFETENSORS
    answer = call("POST", url, path, content=body, content_type=content_type, accept=accept, credentials=credentials)
    if accept == JSON:
        tensors, info = {}, answer.json()["info"]
    else:
        loaded = safetensors.torch.load(answer.content)
        tensors = {name: loaded[name] for name in _header(answer.content) if name in loaded}
        info = json.loads(_metadata(answer.content)["info"])
    if save is not None:
        save_answer(save, answer.content, tensors)
    return tensors, info


def call(
    method: str,
    url: str,
    path: str,
    *,
    content: bytes | None = None,
    content_type: str = JSON,
    accept: str = JSON,
    credentials: Credentials = NOBODY,
) -> httpx.Response:
    """An answer that is none of refusal, in the form asked for. Raises: CommandError, Refused."""
    headers = {"accept": accept, "accept-encoding": "identity", **credentials.headers()}
    if content is not None:
        headers["content-type"] = content_type
    tls = credentials.tls()
    try:
        answer = httpx.request(
            method, f"{url.rstrip('/')}{path}", content=content, headers=headers, verify=tls, timeout=None
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskError(f"no answer from {url}: {error}{_advice(url, error)}") from None
    if not answer.is_success:
        if answer.headers.get("content-type") == PROBLEM:
            raise Refused(answer.json())
        raise AskError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
    if answer.content and answer.headers.get("content-type") != accept:
        raise AskError(f"{url} answered {answer.headers.get('content-type')}; is attn there?")
    return answer


def _advice(url: str, error: Exception) -> str:
    if isinstance(error, httpx.ConnectError) and url.startswith("http:"):
        return "; `attn serve` starts a service, --url says where one is"
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http:"):
        return "; where TLS is spoken the address begins with https://"
    return ""


def show(tensors: dict[str, Tensor], info: dict[str, Any], console: Console) -> None:
    """The outputs with their numbers, large ones abridged, and info as a table."""
    torch.set_printoptions(precision=4, linewidth=110, sci_mode=False)  # type: ignore[no-untyped-call]
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        # Text, not str: rich would take a row such as [nan, 1.0] for a style and drop it.
        console.print(Text.assemble((name, "bold"), f" {dtype} {list(tensor.shape)}"), soft_wrap=True)
        if tensor.numel():
            numbers = str(tensor).split(", dtype=")[0].rstrip(")")
            # torch indents every line by the word that it begins with.
            lines = [line[len("tensor(") :] for line in numbers.splitlines()]
            console.print(Text("\n".join(lines)), soft_wrap=True)
    table = Table(show_header=False, box=None)
    for name, value in info.items():
        table.add_row(name, Text(str(value)))
    console.print(table)


def show_refusal(problem: dict[str, Any], console: Console) -> None:
    """A refusal with its faults as a table."""
    said = f" {problem.get('title')}: {problem.get('detail')}"
    console.print(Text.assemble((str(problem.get("status")), "bold red"), said), soft_wrap=True)
    if problem.get("errors"):
        table = Table("field", "expected", "received", box=None)
        for fault in problem["errors"]:
            table.add_row(*(Text(text) for text in (fault["field"] or "(body)", fault["expected"], fault["received"])))
        console.print(table)
    for name in ("needed_bytes", "allowed_bytes"):
        if problem.get(name) is not None:
            console.print(f"{name}: {problem[name]:,}")


def check_save(save: Path | None, forms: tuple[str, ...]) -> None:
    """Before anything is sent. Raises: AskError where an answer cannot be saved there."""
    if save is not None and save.suffix not in forms:
        raise AskError(f"--save takes {', '.join(forms)}, not {save.name}")
    if save is not None and not save.parent.is_dir():
        raise AskError(f"there is no folder {save.parent} to save to")


def read_options(options: Sequence[str], outputs: str | None = None, *, verify: bool = False) -> dict[str, Any]:
    """The options of the command line. Raises: AskError where one is said twice and differently."""
    given: dict[str, Any] = {}
    for option in options:
        name, sign, text = option.partition("=")
        if not sign:
            raise AskError(f"--option takes name=value, such as causal=true, not {option}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name in given and _differ(given[name], value):
            raise AskError(f"--option {name} is given twice, and differently: give it once")
        given[name] = value
    if outputs is not None:
        if "outputs" in given:
            raise AskError("--outputs and --option outputs say the same thing: give one of them")
        given["outputs"] = [name.strip() for name in outputs.split(",")]
    if verify:
        if given.get("verify", True) is not True:
            raise AskError(f"--verify and --option verify={json.dumps(given['verify'])} contradict: give one of them")
        given["verify"] = True
    return given


def _differ(one: Any, other: Any) -> bool:
    # As text: True equals 1 in Python, and is not the same option.
    return json.dumps(one) != json.dumps(other)


def read_problem(
    files: Sequence[str], options: dict[str, Any], *, beside_weights: str | None = None
) -> tuple[bytes, str]:
    """The body that says what the files and the options say, and its content type. Raises: AskError.

    ``beside_weights``: the weights must come, and beside them this where no outputs are named.
    """
    if len(files) == 1 and files[0].endswith(".json"):
        body = existing(files[0]).read_bytes()
        if options or beside_weights is not None:
            members = members_of(files[0], body) | options
            _ask_for_weights(members, beside_weights)
            body = json.dumps(members).encode()
        return body, JSON
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = _load(file, options)
        refuse_twice(file, tensors, loaded)
        tensors |= loaded
    _ask_for_weights(options, beside_weights)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"options": json.dumps(options)} if options else None
    return safetensors.torch.save(contiguous, metadata), SAFETENSORS


def _ask_for_weights(options: dict[str, Any], beside: str | None) -> None:
    if beside is None:
        return
    outputs = options.setdefault("outputs", [beside, "weights"])
    # What is no list the service refuses, and says so better.
    if isinstance(outputs, list) and "weights" not in outputs:
        raise AskError(f"--heatmap draws the weights, and the outputs are {', '.join(map(str, outputs))}: add weights")


def members_of(file: str, body: bytes) -> dict[str, Any]:
    """A JSON file taken apart. Raises: AskError."""
    try:
        members = json.loads(body)
    except ValueError as error:
        raise AskError(f"{file} is not JSON: {error}") from None
    if not isinstance(members, dict):
        raise AskError(f"{file} is not a JSON object")
    return members


def refuse_twice(file: str, before: Iterable[str], brought: Iterable[str]) -> None:
    """Raises: AskError where a file brings what others brought."""
    twice = set(before) & set(brought)
    if twice:
        raise AskError(f"{file} brings {', '.join(sorted(twice))} a second time")


def split_name(file: str) -> tuple[str, str]:
    """The name and the path of name=FILE; no name where the whole is a file."""
    name, sign, where = file.partition("=")
    return ("", file) if not sign or Path(file).is_file() else (name, where)


def _load(file: str, options: dict[str, Any]) -> dict[str, Tensor]:
    name, where = split_name(file)
    if name and SPEC.fullmatch(file):
        raise AskError(f"{file} is a shape without numbers: only --plan takes it")
    path = existing(where)
    try:
        match path.suffix:
            case ".npy" if name:
                return {name: torch.from_numpy(np.load(path))}
            case ".npz" if not name:
                # numpy leaves a file that it opened and cannot read open.
                with path.open("rb") as opened, np.load(opened) as arrays:
                    return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
            case ".safetensors" if not name:
                content = path.read_bytes()
                tensors: dict[str, Tensor] = safetensors.torch.load(content)
                add_stored_options(path, _metadata(content), options)
                return tensors
            case ".json":
                raise AskError(f"{file}: a .json file has the whole problem and comes alone")
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise AskError(f"{path}: {error}") from None
    raise AskError(f"{file}: give a .json, .npz or .safetensors file, or name=FILE.npy for each tensor")


def add_stored_options(path: Path, metadata: Mapping[str, str], options: dict[str, Any]) -> None:
    """The options in a safetensors file, as far as the command line has not said them. Raises: ValueError, AskError."""
    stored = json.loads(metadata.get("options", "{}"))
    if not isinstance(stored, dict):
        raise AskError(f"{path}: its options are not a JSON object")
    for key, value in stored.items():
        options.setdefault(key, value)


def existing(file: str) -> Path:
    """Raises: AskError where it is no file."""
    path = Path(file)
    if not path.is_file():
        raise AskError(f"there is no file {file}")
    return path


def _header(content: bytes) -> dict[str, Any]:
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def _metadata(content: bytes) -> dict[str, str]:
    found: dict[str, str] = _header(content).get("__metadata__", {})
    return found


def save_answer(path: Path, content: bytes, tensors: dict[str, Tensor]) -> None:
    """Write the answer in the form that the name asks for. Raises: AskError."""
    try:
        _save(path, content, tensors)
    except OSError as error:
        raise AskError(f"cannot write {path}: {error.strerror}") from None


def _save(path: Path, content: bytes, tensors: dict[str, Tensor]) -> None:
    if path.suffix != ".npz":
        path.write_bytes(content)
        return
    # numpy has no bfloat16; float32 holds every one of its numbers.
    arrays: dict[str, Any] = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }
    np.savez(path, **arrays)
