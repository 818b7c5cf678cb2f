"""Every setting, read once from the environment; what is unknown or malformed stops the start, by name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX = "ATTN_"
CLIENT_VARIABLES = frozenset({"ATTN_URL", "ATTN_CLIENT_KEY"})
"""Read by clients: known, and nothing to the server."""

_KUBERNETES = re.compile(r"ATTN_(.*_)?(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*)")
_LINK = ("tcp://", "udp://", "sctp://")
_LINKS_ADVICE = (
    "Kubernetes sets it in every pod beside a Service called attn: put `enableServiceLinks: false` into the pod's spec"
)
_KEY = re.compile(r"[!-+\--~]{1,512}")
_KEY_ADVICE = "a key has 1 to 512 printable ASCII characters, without spaces and commas"
_NEVER_SHOWN = frozenset({"api_keys"})


class SettingsError(Exception):
    """Settings that cannot be used; every reason is in ``reasons``, naming its variable."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class Settings(BaseSettings):
    """Each field is the environment variable ATTN_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=False)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 lets the system choose")
    grpc_port: int = Field(8001, ge=0, le=65535, description="port of gRPC; 0 lets the system choose")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one",
    )
    calibrate: bool = Field(
        True, description="whether speed is measured at the start, for estimates; false: they begin with built-in rates"
    )
    torch_threads: int | None = Field(
        None, ge=1, le=1024, description="threads of one large problem on CPU; unset: as many as there are cores"
    )
    max_body_bytes: int = Field(512 * 2**20, ge=1024, description="largest body, as sent and inflated")
    max_json_bytes: int = Field(
        256 * 2**20, ge=1024, description="largest JSON body: reading text takes six times its memory, safetensors none"
    )
    max_json_lists: int = Field(2**22, ge=1, description="lists in one JSON body, at every depth: rows of its tensors")
    text_workers: int | None = Field(
        None,
        ge=0,
        le=64,
        description="processes for long JSON; unset: 1 on up to two cores, else 2; 0: the server reads it, all wait",
    )
    max_grpc_answer_bytes: int = Field(
        2**31 - 1,
        ge=1024,
        le=2**31 - 1,
        description="largest answer over gRPC; clients have a limit of their own, 4 MiB where nothing else is said",
    )
    max_body_bytes_inside: int = Field(
        2 * 2**30, ge=1024, description="bodies and answers inside together; one request alone is always let in"
    )
    max_requests_inside: int = Field(1024, ge=1, description="requests inside: read, waiting, computed or answered")
    max_wait_s: float = Field(
        5.0, gt=0, le=86400, description="estimated wait for the engine from which on requests are refused with 429"
    )
    max_queue_requests: int = Field(256, ge=1, description="problems that may wait for the engine")
    max_tensor_elements: int = Field(2**31 - 1, ge=1, description="elements of one tensor")
    max_axis: int = Field(2**24, ge=1, description="length of one axis of a tensor")
    memory_budget_bytes: int | None = Field(
        None, ge=1, description="memory that one problem may need; unset: four fifths of what is free at that moment"
    )
    layer_budget_bytes: int = Field(
        2**30, ge=0, description="weights of all layers that are kept by name; 0: none is kept"
    )
    layer_directory: Path | None = Field(
        None, description="directory in which they outlive the process, a file for each; unset: in memory alone"
    )
    request_timeout_s: float = Field(60.0, gt=0, le=86400, description="deadline of a request that names none")
    max_timeout_s: float = Field(600.0, gt=0, le=86400, description="longest deadline a request may ask for")
    head_timeout_s: float = Field(10.0, gt=0, le=86400, description="how long the head of a request may take")
    write_timeout_s: float = Field(
        60.0, gt=0, le=86400, description="how long a client may take to read a mebibyte of its answer"
    )
    keep_alive_s: float = Field(75.0, gt=0, le=86400, description="how long an idle connection is kept")
    drain_notice_s: float = Field(
        0.5, ge=0, le=3600, description="after SIGTERM the port stays open at least this long, answering 503"
    )
    drain_timeout_s: float = Field(
        30.0, gt=0, le=86400, description="after SIGTERM the longest wait for requests inside"
    )
    shared_memory: bool = Field(
        False, description="whether clients on this machine may register POSIX shared memory, for tensors under /v2"
    )
    api_keys: SecretStr | None = Field(
        None,
        description="keys with commas between, one of which each caller must bring; unset: nobody is asked for one",
    )
    api_keys_file: Path | None = Field(None, description="a file of such keys, one a line")
    tls_certificate_file: Path | None = Field(
        None, description="PEM file of the certificate and its chain: both doors then speak TLS alone"
    )
    tls_key_file: Path | None = Field(None, description="PEM file of the certificate's private key")
    tls_client_ca_file: Path | None = Field(
        None, description="PEM file of authorities: callers must then bring a certificate that one of them signed"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug logs every request")
    log_format: Literal["json", "text"] = Field("json", description="one JSON object a line, or text")

    _keys: tuple[str, ...] = PrivateAttr(default=())

    def keys(self) -> tuple[str, ...]:
        """Every key, of the variable and of the file as it was at the start; none: nobody is asked for one."""
        return self._keys

    @field_validator("api_keys")
    @classmethod
    def _keys_are_keys(cls, text: SecretStr | None) -> SecretStr | None:
        _keys_of_text(text)
        return text

    @field_validator("api_keys_file")
    @classmethod
    def _file_has_keys(cls, file: Path | None) -> Path | None:
        _keys_of_file(file)
        return file

    @field_validator("tls_certificate_file", "tls_key_file", "tls_client_ca_file")
    @classmethod
    def _file_can_be_read(cls, file: Path | None) -> Path | None:
        if file is not None:
            _read(file)
        return file

    @field_validator("layer_directory", mode="before")
    @classmethod
    def _directory_is_named(cls, path: object) -> object:
        # Path makes "." of it, and layers would be written wherever the process happens to run.
        if path == "":
            raise ValueError("a directory, or leave the variable unset")
        return path

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        reasons = []
        if self.request_timeout_s > self.max_timeout_s:
            reasons.append(
                f"ATTN_REQUEST_TIMEOUT_S {self.request_timeout_s:g} is over ATTN_MAX_TIMEOUT_S {self.max_timeout_s:g}"
            )
        if self.port == self.grpc_port != 0:
            reasons.append(f"ATTN_PORT and ATTN_GRPC_PORT are both {self.port}: each door needs a port of its own")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            reasons.append("ATTN_TLS_CERTIFICATE_FILE and ATTN_TLS_KEY_FILE go together, and only one of them is set")
        elif self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            reasons.append("ATTN_TLS_CLIENT_CA_FILE needs ATTN_TLS_CERTIFICATE_FILE and ATTN_TLS_KEY_FILE")
        if reasons:
            raise ValueError("; ".join(reasons))
        self._keys = (*_keys_of_text(self.api_keys), *_keys_of_file(self.api_keys_file))
        return self


def read_settings(environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """The settings of this process; ``overrides`` (the command line) win over the environment.

    Raises: SettingsError with every variable that is unknown or malformed.
    """
    environment = os.environ if environment is None else environment
    given = {name.upper(): text for name, text in environment.items() if name.upper().startswith(PREFIX)}
    reasons = []
    values: dict[str, Any] = {}
    for name, text in sorted(given.items()):
        field = name.removeprefix(PREFIX).lower()
        if field in Settings.model_fields and not _KUBERNETES.fullmatch(name):
            values[field] = text
        elif name not in CLIENT_VARIABLES:
            is_link = _KUBERNETES.fullmatch(name) or text.startswith(_LINK)
            close = difflib.get_close_matches(field, Settings.model_fields, n=1)
            hint = f"did you mean {PREFIX}{close[0].upper()}? " if close else ""
            advice = _LINKS_ADVICE if is_link else f"{hint}`attn serve --help` lists the settings"
            reasons.append(f"{name} is not a setting; {advice}")
    settings: Settings | None = None
    try:
        # What the command line hides is looked at all the same.
        settings = _Given(**values)
        settings = _Given(**values | {name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        for wrong in error.errors(include_url=False, include_context=False):
            if not wrong["loc"]:
                reasons.append(str(wrong["msg"]).removeprefix("Value error, "))
                continue
            field = str(wrong["loc"][0])
            said = str(wrong["msg"]).removeprefix("Value error, ")
            received = "" if field in _NEVER_SHOWN else f", received {wrong['input']!r}"
            advice = f"; {_LINKS_ADVICE}" if str(wrong["input"]).startswith(_LINK) else ""
            reasons.append(f"{PREFIX}{field.upper()}: {said[:1].lower() + said[1:]}{received}{advice}")
    if reasons or settings is None:
        raise SettingsError(reasons)
    return settings


class _Given(Settings):
    """Settings from the values handed in, and from nowhere else: the environment was read, and checked, before."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _keys_of_text(text: SecretStr | None) -> list[str]:
    """The keys between commas. Raises: ValueError, which shows none of them."""
    if text is None:
        return []
    keys = [key.strip() for key in text.get_secret_value().split(",")]
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            what = f"key {number} of {len(keys)} is {'not one' if key else 'empty'}"
            raise ValueError(f"{what}: {_KEY_ADVICE}; unset, nobody is asked for a key")
    return keys


def _keys_of_file(file: Path | None) -> list[str]:
    """The keys of a file, one a line; empty lines and those that begin with # are none. Raises: ValueError."""
    if file is None:
        return []
    # Whatever is not ASCII is no key, in any encoding.
    lines = [line.strip() for line in _read(file).decode("latin-1").split("\n")]
    keys = {number: line for number, line in enumerate(lines, start=1) if line and not line.startswith("#")}
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"line {number} is not a key: {_KEY_ADVICE}")
    if not keys:
        raise ValueError("has no key in it; unset, nobody is asked for one")
    return list(keys.values())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def describe_settings() -> list[tuple[str, str, str]]:
    """(variable, default, meaning) of every setting, for help and documentation."""
    return [
        (PREFIX + name.upper(), "unset" if field.default is None else str(field.default), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
