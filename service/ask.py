"""`attn ask`: one problem from files to a running service, its answer to the screen or a file."""

from __future__ import annotations

import json
import ssl
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
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

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"
PROBLEM = "application/problem+json"
LOADABLE = (".json", ".npz", ".safetensors", ".npy")
SAVABLE = (".json", ".npz", ".safetensors")


class AskError(Exception):
    """What is wrong with the files, the options or the connection, in one sentence."""


class Refused(AskError):
    """The service's refusal; ``problem`` is its body."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self.problem = problem
        super().__init__(f"{problem.get('status')}: {problem.get('title')} ({problem.get('detail')})")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a service may want to see, and by what it is known itself; ``ca`` None: by what this machine trusts."""

    key: str | None = None
    ca: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None

    def headers(self) -> dict[str, str]:
        """Raises: AskError, which does not show the key."""
        key = (self.key or "").strip()
        if not key:
            return {}
        if not (key.isascii() and key.isprintable()):
            raise AskError("the key has characters that no key has: keys are printable ASCII")
        return {"authorization": f"Bearer {key}"}

    def tls(self) -> ssl.SSLContext | bool:
        """As httpx takes it. Raises: AskError naming the file."""
        if self.certificate_key is not None and self.certificate is None:
            raise AskError("--cert-key needs --cert")
        if self.ca is None and self.certificate is None:
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise AskError(f"--ca {self.ca}: {error.strerror or error}") from None
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.certificate_key, password="")
            except OSError as error:
                files = f"--cert {self.certificate}" + (
                    f" --cert-key {self.certificate_key}" * bool(self.certificate_key)
                )
                raise AskError(f"{files}: {error.strerror or error}") from None
        return context


NOBODY = Credentials()


def ask(
    files: Sequence[str],
    *,
    url: str,
    path: str,
    options: Sequence[str],
    outputs: str | None,
    save: Path | None,
    credentials: Credentials = NOBODY,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The outputs and ``info`` of one problem. Raises: AskError, Refused."""
    if save is not None and save.suffix not in SAVABLE:
        raise AskError(f"--save takes {', '.join(SAVABLE)}, not {save.name}")
    if save is not None and not save.parent.is_dir():
        raise AskError(f"there is no folder {save.parent} to save to")
    given = _read_options(options, outputs)
    body, content_type = _read_problem(files, given)
    accept = JSON if save is not None and save.suffix == ".json" else SAFETENSORS
    headers = {"content-type": content_type, "accept": accept, "accept-encoding": "identity", **credentials.headers()}
    tls = credentials.tls()
    try:
        answer = httpx.post(f"{url.rstrip('/')}{path}", content=body, headers=headers, verify=tls, timeout=None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskError(f"no answer from {url}: {error}") from None
    if answer.status_code != 200:
        if answer.headers.get("content-type") == PROBLEM:
            raise Refused(answer.json())
        raise AskError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
    if answer.headers.get("content-type") != accept:
        raise AskError(f"{url} answered {answer.headers.get('content-type')}; is attn there?")
    if accept == JSON:
        tensors, info = {}, answer.json()["info"]
    else:
        loaded = safetensors.torch.load(answer.content)
        tensors = {name: loaded[name] for name in _header(answer.content) if name in loaded}
        info = json.loads(_metadata(answer.content)["info"])
    if save is not None:
        try:
            _save(save, answer.content, tensors)
        except OSError as error:
            raise AskError(f"cannot write {save}: {error.strerror}") from None
    return tensors, info


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


def _read_options(options: Sequence[str], outputs: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for option in options:
        name, sign, text = option.partition("=")
        if not sign:
            raise AskError(f"--option takes name=value, such as causal=true, not {option}")
        try:
            given[name] = json.loads(text)
        except ValueError:
            given[name] = text
    if outputs is not None:
        given["outputs"] = [name.strip() for name in outputs.split(",")]
    return given


def _read_problem(files: Sequence[str], options: dict[str, Any]) -> tuple[bytes, str]:
    if len(files) == 1 and files[0].endswith(".json"):
        body = _existing(files[0]).read_bytes()
        if options:
            try:
                members = json.loads(body)
            except ValueError as error:
                raise AskError(f"{files[0]} is not JSON: {error}") from None
            if not isinstance(members, dict):
                raise AskError(f"{files[0]} is not a JSON object")
            body = json.dumps(members | options).encode()
        return body, JSON
    tensors: dict[str, Tensor] = {}
    for file in files:
        loaded = _load(file, options)
        twice = tensors.keys() & loaded.keys()
        if twice:
            raise AskError(f"{file} brings {', '.join(sorted(twice))} a second time")
        tensors |= loaded
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"options": json.dumps(options)} if options else None
    return safetensors.torch.save(contiguous, metadata), SAFETENSORS


def _load(file: str, options: dict[str, Any]) -> dict[str, Tensor]:
    name, sign, where = file.partition("=")
    if not sign or Path(file).is_file():
        name, sign, where = "", "", file
    path = _existing(where)
    try:
        match path.suffix:
            case ".npy" if sign:
                return {name: torch.from_numpy(np.load(path))}
            case ".npz" if not sign:
                # numpy leaves a file that it opened and cannot read open.
                with path.open("rb") as opened, np.load(opened) as arrays:
                    return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
            case ".safetensors" if not sign:
                content = path.read_bytes()
                tensors: dict[str, Tensor] = safetensors.torch.load(content)
                stored = json.loads(_metadata(content).get("options", "{}"))
                if not isinstance(stored, dict):
                    raise AskError(f"{path}: its options are not a JSON object")
                for key, value in stored.items():
                    options.setdefault(key, value)
                return tensors
            case ".json":
                raise AskError(f"{file}: a .json file has the whole problem and comes alone")
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise AskError(f"{path}: {error}") from None
    raise AskError(f"{file}: give a .json, .npz or .safetensors file, or name=FILE.npy for each tensor")


def _existing(file: str) -> Path:
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


def _save(path: Path, content: bytes, tensors: dict[str, Tensor]) -> None:
    if path.suffix != ".npz":
        path.write_bytes(content)
        return
    # numpy has no bfloat16; float32 holds every one of its numbers.
    arrays: dict[str, Any] = {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }
    np.savez(path, **arrays)
