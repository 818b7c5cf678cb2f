"""Settings: everything from the environment, nothing guessed, every fault at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.settings import Settings, SettingsError, describe_settings, read_settings


def reasons_of(environment: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(environment)
    return caught.value.reasons


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = read_settings({})
    assert {name: getattr(settings, name) for name in Settings.model_fields} == {
        name: field.default for name, field in Settings.model_fields.items()
    }


def test_every_default_passes_its_own_check() -> None:
    fields = Settings.model_fields.items()
    defaults = {name: str(field.default) for name, field in fields if field.default is not None}
    assert read_settings({"ATTN_" + name.upper(): text for name, text in defaults.items()}) == read_settings({})


def test_variables_are_read_by_type() -> None:
    settings = read_settings(
        {"ATTN_PORT": "9000", "ATTN_REQUEST_TIMEOUT_S": "2.5", "ATTN_HOST": "0.0.0.0", "PATH": "x"}
    )
    assert (settings.port, settings.request_timeout_s, settings.host) == (9000, 2.5, "0.0.0.0")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_MAX_QUEUE_REQUESTS", "7")
    assert read_settings().max_queue_requests == 7
    assert read_settings({}).max_queue_requests == 256


def test_the_command_line_wins_and_leaves_what_it_does_not_say() -> None:
    environment = {"ATTN_PORT": "9000", "ATTN_HOST": "10.0.0.1"}
    settings = read_settings(environment, port=9001, host=None)
    assert (settings.port, settings.host) == (9001, "10.0.0.1")


def test_a_malformed_variable_stops_the_start_though_the_command_line_hides_it() -> None:
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        read_settings({"ATTN_PORT": "tcp://10.0.0.1:8000"}, port=9001)


def test_a_wrong_command_line_is_named_as_its_variable() -> None:
    with pytest.raises(SettingsError, match=r"^ATTN_PORT: .*received 99999"):
        read_settings({}, port=99999)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ATTN_PORT", "eighty"),
        ("ATTN_PORT", "65536"),
        ("ATTN_PORT", "-1"),
        ("ATTN_PORT", "80.5"),
        ("ATTN_PORT", ""),
        ("ATTN_HOST", ""),
        ("ATTN_LAYER_DIRECTORY", ""),
        ("ATTN_DEVICE", "gpu"),
        ("ATTN_DEVICE", "cuda:"),
        ("ATTN_DEVICE", "cpu\n"),
        ("ATTN_MAX_BODY_BYTES", "512MB"),
        ("ATTN_MAX_REQUESTS_INSIDE", "0"),
        ("ATTN_REQUEST_TIMEOUT_S", "0"),
        ("ATTN_REQUEST_TIMEOUT_S", "nan"),
        ("ATTN_REQUEST_TIMEOUT_S", "inf"),
        ("ATTN_DRAIN_NOTICE_S", "-0.1"),
        ("ATTN_LOG_LEVEL", "INFO "),
        ("ATTN_LOG_FORMAT", "xml"),
    ],
)
def test_a_malformed_value_is_refused_and_named(name: str, text: str) -> None:
    (reason,) = reasons_of({name: text})
    assert reason.startswith(f"{name}: ") and repr(text) in reason


def test_every_fault_is_told_at_once() -> None:
    reasons = reasons_of({"ATTN_PROT": "1", "ATTN_PORT": "x", "ATTN_MAX_AXIS": "0", "ATTN_HOST": "0.0.0.0"})
    named = {reason.replace(":", " ").split()[0] for reason in reasons}
    assert named == {"ATTN_PROT", "ATTN_PORT", "ATTN_MAX_AXIS"} and len(reasons) == 3


def test_an_unknown_variable_is_refused_even_if_empty() -> None:
    (reason,) = reasons_of({"ATTN_PROT": ""})
    assert "ATTN_PROT is not a setting" in reason and "attn serve --help" in reason


def test_the_clients_variable_is_known_and_nothing_to_the_server() -> None:
    assert read_settings({"ATTN_URL": "http://elsewhere:1"}) == read_settings({})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ATTN_PORT", "tcp://10.0.0.1:8000"),
        ("ATTN_PORT", "udp://10.0.0.1:8000"),
        ("ATTN_SERVICE_HOST", "10.0.0.1"),
        ("ATTN_SERVICE_PORT", "8000"),
        ("ATTN_SERVICE_PORT_HTTP", "8000"),
        ("ATTN_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("ATTN_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("ATTN_GRPC_SERVICE_HOST", "10.0.0.1"),
        ("ATTN_GRPC_PORT", "tcp://10.0.0.1:9000"),
    ],
)
def test_the_links_of_kubernetes_are_refused_with_their_remedy(name: str, text: str) -> None:
    (reason,) = reasons_of({name: text})
    assert reason.startswith(name) and "enableServiceLinks: false" in reason


def test_settings_cannot_be_changed() -> None:
    settings = read_settings({})
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert [name for name, _, _ in described] == ["ATTN_" + name.upper() for name in Settings.model_fields]
    assert all(meaning for _, _, meaning in described)


def test_a_default_deadline_over_the_longest_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings({"ATTN_MAX_TIMEOUT_S": "5"})
    (reason,) = caught.value.reasons
    assert "ATTN_REQUEST_TIMEOUT_S 60" in reason
    assert "ATTN_MAX_TIMEOUT_S 5" in reason


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("one", ("one",)),
        ("one,two", ("one", "two")),
        (" one , two\n", ("one", "two")),
        ("one,one", ("one", "one")),
        ("!~" + "k" * 510, ("!~" + "k" * 510,)),
    ],
)
def test_keys_come_from_the_variable(text: str, keys: tuple[str, ...]) -> None:
    assert read_settings({"ATTN_API_KEYS": text}).keys() == keys


def test_keys_come_from_the_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\n  one  \ntwo\r\n #three\nfour#")
    assert read_settings({"ATTN_API_KEYS_FILE": str(file)}).keys() == ("one", "two", "four#")
    both = read_settings({"ATTN_API_KEYS_FILE": str(file), "ATTN_API_KEYS": "zero"})
    assert both.keys() == ("zero", "one", "two", "four#")


def test_without_keys_nobody_is_asked_for_one() -> None:
    assert read_settings({}).keys() == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "SECRET,",
        ",SECRET",
        "SECRET,,SECRET",
        "SECRET SECRET",
        "SECRÉT",
        "SECRET\x7f",
        "SECRET\0",
        "S" * 513,
    ],
)
def test_an_empty_key_and_what_is_none_stop_the_start_and_are_not_shown(text: str) -> None:
    (reason,) = reasons_of({"ATTN_API_KEYS": text})
    assert reason.startswith("ATTN_API_KEYS: key ")
    assert "SECR" not in reason
    assert "SSS" not in reason


@pytest.mark.parametrize(
    "content", ["", "\n\n", "# SECRET\n", "SECRET SECRET", "one\nSECRET,SECRET", "\ufeffSECRET", "SECRÉT"]
)
def test_a_file_without_a_key_or_with_what_is_none_stops_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    (reason,) = reasons_of({"ATTN_API_KEYS_FILE": str(file)})
    assert reason.startswith("ATTN_API_KEYS_FILE: ")
    assert reason.endswith(f"received '{file}'")
    assert "SECR" not in reason


@pytest.mark.parametrize(
    "name", ["ATTN_API_KEYS_FILE", "ATTN_TLS_CERTIFICATE_FILE", "ATTN_TLS_KEY_FILE", "ATTN_TLS_CLIENT_CA_FILE"]
)
@pytest.mark.parametrize("path", ["", "/nowhere/keys", "/"])
def test_a_file_that_cannot_be_read_is_named(name: str, path: str) -> None:
    (reason,) = reasons_of({name: path})
    assert reason.startswith(f"{name}: cannot be read: ")
    assert reason.endswith(f"received {path!r}")


def test_keys_are_in_no_text_of_settings() -> None:
    settings = read_settings({"ATTN_API_KEYS": "SECRET"})
    for text in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert "SECRET" not in text


def test_the_name_of_a_misspelt_setting_is_told_without_its_value() -> None:
    (reason,) = reasons_of({"ATTN_API_KEY": "SECRET"})
    assert "SECRET" not in reason


def test_a_key_for_clients_is_nothing_to_the_server() -> None:
    assert read_settings({"ATTN_CLIENT_KEY": "SECRET"}) == read_settings({})


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["TLS_CERTIFICATE"], "ATTN_TLS_CERTIFICATE_FILE and ATTN_TLS_KEY_FILE go together"),
        (["TLS_KEY"], "ATTN_TLS_CERTIFICATE_FILE and ATTN_TLS_KEY_FILE go together"),
        (["TLS_CLIENT_CA"], "ATTN_TLS_CLIENT_CA_FILE needs"),
        (["TLS_CERTIFICATE", "TLS_CLIENT_CA"], "ATTN_TLS_CERTIFICATE_FILE and ATTN_TLS_KEY_FILE go together"),
    ],
)
def test_half_of_a_certificate_is_refused(tmp_path: Path, names: list[str], reason: str) -> None:
    file = tmp_path / "file"
    file.touch()
    (said,) = reasons_of({f"ATTN_{name}_FILE": str(file) for name in names})
    assert said.startswith(reason)


def test_one_port_for_both_doors_is_refused_unless_the_system_chooses() -> None:
    assert reasons_of({"ATTN_PORT": "8001"}) == [
        "ATTN_PORT and ATTN_GRPC_PORT are both 8001: each door needs a port of its own"
    ]
    assert read_settings({"ATTN_PORT": "0", "ATTN_GRPC_PORT": "0"}).port == 0


def test_settings_that_disagree_are_all_told() -> None:
    (reason,) = reasons_of({"ATTN_PORT": "8001", "ATTN_REQUEST_TIMEOUT_S": "700"})
    assert "ATTN_REQUEST_TIMEOUT_S" in reason
    assert "ATTN_GRPC_PORT" in reason


def test_measuring_at_the_start_can_be_switched_off() -> None:
    assert read_settings({}).calibrate
    assert not read_settings({"ATTN_CALIBRATE": "false"}).calibrate
