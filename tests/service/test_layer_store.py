"""Layers by name: what is kept is whole, stays as it is, and is the same in memory and on disk."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors
import safetensors.torch
import torch

from attn_core.errors import InvalidProblem, TooLarge
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import LayerParameters
from service.errors import AlreadyExists, NotFound, Unavailable
from service.layer_directory import SUFFIX, LayerDirectory, UnusableDirectory
from service.layer_store import RESERVED_NAMES, Kept, LayerStore, StoredLayer, name_faults
from service.wire.requests import ReadLimits
from tests.support.factory import DTYPES
from tests.support.kept_layers import GatedDirectory, make_parameters, num_bytes, options_of

T = TypeVar("T")
PLENTY = 2**20
WAIT_S = 30.0


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def within() -> T:
        return await work()

    return asyncio.run(within())


def put(store: LayerStore, name: str, parameters: LayerParameters, **more: Any) -> Kept:
    return run(lambda: store.put(name, parameters, **more))


def delete(store: LayerStore, name: str) -> None:
    run(lambda: store.delete(name))


@pytest.fixture
def store() -> Iterator[LayerStore]:
    made = LayerStore(max_bytes=PLENTY)
    yield made
    made.check_integrity()
    assert run(lambda: made.close(WAIT_S))


def kept_in(path: Path, *, max_bytes: int = PLENTY, directory: LayerDirectory | None = None) -> LayerStore:
    """A store as a service makes it that starts now."""
    store = LayerStore(max_bytes=max_bytes, directory=directory or LayerDirectory(path))
    store.load(ReadLimits())
    store.check_integrity()
    return store


def assert_same(one: LayerParameters, other: LayerParameters) -> None:
    assert options_of(one) == options_of(other)
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        assert tensor.dtype == other.weights[name].dtype
        assert torch.equal(tensor, other.weights[name])


def test_a_layer_that_is_kept_is_the_one_that_was_given(store: LayerStore) -> None:
    parameters = make_parameters(num_heads=4, num_kv_heads=2)
    kept = put(store, "first", parameters)
    assert kept.is_new
    assert store.get("first") is kept.layer
    assert_same(kept.layer.parameters, parameters)
    assert kept.layer.as_dict() == {
        "name": "first",
        "num_heads": 4,
        "num_kv_heads": 2,
        "weight_layout": "in_out",
        "dtype": "float32",
        "shapes": {
            "w_query": [6, 12],
            "w_key": [6, 6],
            "w_value": [6, 6],
            "w_output": [12, 4],
            "b_query": [12],
            "b_key": [6],
            "b_value": [6],
            "b_output": [4],
        },
        "parameters": 72 + 36 + 36 + 48 + 12 + 6 + 6 + 4,
    }
    assert store.num_bytes == kept.layer.num_bytes == num_bytes(parameters) == 4 * 220


def test_key_value_heads_that_were_left_out_are_described_as_many_as_the_heads(store: LayerStore) -> None:
    assert put(store, "first", make_parameters(num_heads=2)).layer.as_dict()["num_kv_heads"] == 2


def test_what_is_kept_has_memory_of_its_own_where_torch_would_put_it(store: LayerStore) -> None:
    given = make_parameters()
    room = torch.empty(sum(tensor.numel() for tensor in given.weights.values()) + 1)
    at, views = 1, {}
    for name, tensor in given.weights.items():
        views[name] = room[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
        at += tensor.numel()
    layer = put(store, "first", replace(given, weights=views)).layer
    room.fill_(7.0)
    assert_same(layer.parameters, given)
    for tensor in layer.parameters.weights.values():
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert tensor.is_contiguous()


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_layer_that_goes_while_it_is_used_lives_on_for_its_user(store: LayerStore, change: str) -> None:
    old = make_parameters(seed=1)
    put(store, "first", old)
    held = store.get("first")
    if change == "replace":
        kept = put(store, "first", make_parameters(seed=2), may_replace=True)
        assert not kept.is_new
        assert_same(store.get("first").parameters, make_parameters(seed=2))
    else:
        delete(store, "first")
        with pytest.raises(NotFound, match="'first'"):
            store.get("first")
    assert_same(held.parameters, old)


def test_the_same_content_changes_nothing(store: LayerStore) -> None:
    layer = put(store, "first", make_parameters()).layer
    for again in (make_parameters(), make_parameters(num_kv_heads=2)):
        for may_replace in (False, True):
            kept = put(store, "first", again, may_replace=may_replace)
            assert kept.layer is layer
            assert not kept.is_new


def negative_zero(zero: float) -> LayerParameters:
    parameters = make_parameters()
    weights = {name: tensor.clone() for name, tensor in parameters.weights.items()}
    weights["w_key"][2, 3] = zero
    return replace(parameters, weights=weights)


SQUARE = make_parameters(output_width=6, biases=False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (make_parameters(seed=1), make_parameters(seed=2)),
        (make_parameters(), make_parameters(biases=False)),
        (make_parameters(), make_parameters(dtype=torch.float64)),
        (negative_zero(0.0), negative_zero(-0.0)),
        (SQUARE, replace(SQUARE, weight_layout="out_in")),
        (SQUARE, replace(SQUARE, num_heads=6)),
        (SQUARE, replace(SQUARE, num_kv_heads=1)),
        (SQUARE, replace(SQUARE, weights={**SQUARE.weights, "w_key": SQUARE.weights["w_query"]})),
    ],
)
def test_other_content_under_a_taken_name_is_refused_unless_it_may_replace(
    store: LayerStore, one: LayerParameters, other: LayerParameters
) -> None:
    layer = put(store, "first", one).layer
    with pytest.raises(AlreadyExists, match=r"first.*replace=true"):
        put(store, "first", other)
    assert store.get("first") is layer
    kept = put(store, "first", other, may_replace=True)
    assert not kept.is_new
    assert kept.layer.content_hash != layer.content_hash


def test_to_replace_what_is_not_there_keeps_a_new_layer(store: LayerStore) -> None:
    assert put(store, "first", make_parameters(), may_replace=True).is_new


def test_layers_are_listed_by_name(store: LayerStore) -> None:
    for name in ("b", "C", "a.2", "a", "a-1"):
        put(store, name, make_parameters())
    assert [layer.name for layer in store.all()] == ["C", "a", "a-1", "a.2", "b"]
    assert store.num_layers == 5


GOOD_NAMES = ["a", "Z", "a.b_c-D9", "x" * 64, "layers", "sdpa_fp8", "SDPA", "a..", "CON", "Stats"]
BAD_NAMES = ["", "x" * 65, "1a", ".", "..", ".a", "-a", "_a", "a b", "a/b", "a\\b", "é", "a\n", "a\0", "\u0430"]


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_good_name_is_taken(store: LayerStore, name: str) -> None:
    assert put(store, name, make_parameters()).layer.name == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(store: LayerStore, name: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        put(store, name, make_parameters())
    (fault,) = caught.value.faults
    assert fault.field == "name"
    assert "beginning with a letter" in fault.expected
    assert store.all() == []


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_a_name_that_means_something_else_under_v2_is_refused(store: LayerStore, name: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        put(store, name, make_parameters())
    assert [fault.field for fault in caught.value.faults] == ["name"]


def test_every_model_in_every_datatype_is_reserved() -> None:
    bases = ("sdpa", "attention", "attention_gradients", "layer")
    models = {base + suffix for base in bases for suffix in ("", "_fp16", "_bf16", "_fp64")}
    assert models | {"stats"} == RESERVED_NAMES
    assert not any(name_faults(name) for name in GOOD_NAMES)


# Room


def test_the_budget_is_exact() -> None:
    parameters = make_parameters()
    size = num_bytes(parameters)
    put(LayerStore(max_bytes=size), "first", parameters)
    store = LayerStore(max_bytes=2 * size - 1)
    put(store, "first", parameters)
    with pytest.raises(TooLarge) as caught:
        put(store, "second", parameters)
    assert (caught.value.needed_bytes, caught.value.allowed_bytes) == (size, size - 1)
    assert [layer.name for layer in store.all()] == ["first"]
    delete(store, "first")
    put(store, "second", parameters)
    store.check_integrity()


def test_a_layer_that_is_replaced_gives_its_room() -> None:
    size = num_bytes(make_parameters())
    store = LayerStore(max_bytes=size)
    put(store, "first", make_parameters(seed=1))
    put(store, "first", make_parameters(seed=2), may_replace=True)
    wide = make_parameters(dtype=torch.float64)
    with pytest.raises(TooLarge) as caught:
        put(store, "first", wide, may_replace=True)
    assert (caught.value.needed_bytes, caught.value.allowed_bytes) == (2 * size, size)
    assert_same(store.get("first").parameters, make_parameters(seed=2))


def test_room_for_one_is_never_given_to_two() -> None:
    store = LayerStore(max_bytes=num_bytes(make_parameters()))

    async def both() -> list[Kept | BaseException]:
        names = ("first", "second", "third")
        return await asyncio.gather(*(store.put(n, make_parameters()) for n in names), return_exceptions=True)

    outcomes = run(both)
    assert [type(outcome) for outcome in outcomes].count(TooLarge) == 2
    assert store.num_layers == 1
    store.check_integrity()


def test_there_are_never_more_layers_than_may_be() -> None:
    store = LayerStore(max_bytes=PLENTY, max_layers=2)
    put(store, "first", make_parameters())
    put(store, "second", make_parameters())
    with pytest.raises(InvalidProblem) as caught:
        put(store, "third", make_parameters())
    assert caught.value.faults[0].field == ""
    assert caught.value.faults[0].expected == "at most 2 layers at a time; delete one that is not needed"
    put(store, "second", make_parameters(seed=2), may_replace=True)
    delete(store, "first")
    put(store, "third", make_parameters())
    store.check_integrity()


# Company


def test_changes_of_one_name_wait_for_each_other(store: LayerStore) -> None:
    async def all_at_once() -> list[Kept | BaseException]:
        puts = (store.put("first", make_parameters(seed=seed)) for seed in range(5))
        return await asyncio.gather(*puts, return_exceptions=True)

    outcomes = run(all_at_once)
    kept = [outcome for outcome in outcomes if isinstance(outcome, Kept)]
    assert len(kept) == 1
    assert kept[0].is_new
    assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 4


def test_a_put_that_nobody_waits_for_changes_nothing(tmp_path: Path) -> None:
    directory = GatedDirectory(tmp_path)
    store = kept_in(tmp_path, directory=directory)

    async def leave() -> None:
        putting = asyncio.ensure_future(store.put("first", make_parameters()))
        assert await asyncio.to_thread(directory.entered.wait, WAIT_S)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert not await store.close(0.0)
        directory.gate.set()
        assert await store.close(WAIT_S)

    run(leave)
    assert store.all() == []
    assert list(tmp_path.iterdir()) == []
    store.check_integrity()


def test_whoever_waits_behind_one_that_left_has_his_turn(tmp_path: Path) -> None:
    directory = GatedDirectory(tmp_path)
    store = kept_in(tmp_path, directory=directory)

    async def leave() -> Kept:
        putting = asyncio.ensure_future(store.put("first", make_parameters(seed=1)))
        assert await asyncio.to_thread(directory.entered.wait, WAIT_S)
        waiting = asyncio.ensure_future(store.put("first", make_parameters(seed=2)))
        putting.cancel()
        directory.gate.set()
        return await waiting

    assert run(leave).is_new
    assert_same(kept_in(tmp_path).get("first").parameters, make_parameters(seed=2))


def test_an_old_layer_answers_while_a_new_one_is_written(tmp_path: Path) -> None:
    put(kept_in(tmp_path), "first", make_parameters(seed=1))
    directory = GatedDirectory(tmp_path)
    store = kept_in(tmp_path, directory=directory)

    async def look() -> StoredLayer:
        putting = asyncio.ensure_future(store.put("first", make_parameters(seed=2), may_replace=True))
        assert await asyncio.to_thread(directory.entered.wait, WAIT_S)
        meanwhile = store.get("first")
        directory.gate.set()
        await putting
        return meanwhile

    assert_same(run(look).parameters, make_parameters(seed=1))
    assert_same(store.get("first").parameters, make_parameters(seed=2))


# On disk


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_a_layer_outlives_its_service_bit_for_bit(tmp_path: Path, dtype: torch.dtype, weight_layout: Any) -> None:
    given = make_parameters(num_heads=4, num_kv_heads=2, memory_width=5, weight_layout=weight_layout, dtype=dtype)
    kept = put(kept_in(tmp_path), "first", given).layer
    found = kept_in(tmp_path).get("first")
    assert_same(found.parameters, given)
    assert found.content_hash == kept.content_hash
    assert found.as_dict() == kept.as_dict()
    for tensor in found.parameters.weights.values():
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_a_file_is_what_other_programs_read(tmp_path: Path) -> None:
    given = make_parameters(num_heads=4, num_kv_heads=2)
    put(kept_in(tmp_path), "first", given)
    (file,) = tmp_path.iterdir()
    assert file.name == "first" + SUFFIX
    with safetensors.safe_open(file, framework="pt") as opened:
        assert json.loads(opened.metadata()["options"]) == options_of(given)
        assert {name: opened.get_tensor(name).tolist() for name in opened.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in given.weights.items()
        }


def test_a_file_that_another_program_wrote_is_read(tmp_path: Path) -> None:
    given = make_parameters(weight_layout="out_in")
    safetensors.torch.save_file(
        dict(given.weights), tmp_path / f"theirs{SUFFIX}", {"format": "pt", "options": json.dumps(options_of(given))}
    )
    assert_same(kept_in(tmp_path).get("theirs").parameters, given)


def test_what_was_deleted_or_replaced_stays_so(tmp_path: Path) -> None:
    store = kept_in(tmp_path)
    put(store, "first", make_parameters(seed=1))
    put(store, "second", make_parameters(seed=2))
    put(store, "second", make_parameters(seed=3), may_replace=True)
    delete(store, "first")
    again = kept_in(tmp_path)
    assert [layer.name for layer in again.all()] == ["second"]
    assert_same(again.get("second").parameters, make_parameters(seed=3))


def test_a_file_that_somebody_else_removed_can_be_deleted(tmp_path: Path) -> None:
    store = kept_in(tmp_path)
    put(store, "first", make_parameters())
    (tmp_path / f"first{SUFFIX}").unlink()
    delete(store, "first")
    assert store.all() == []


def whole_file() -> bytes:
    parameters = make_parameters()
    return safetensors.torch.save(dict(parameters.weights), {"options": json.dumps(options_of(parameters))})


def file_of(**changes: torch.Tensor) -> bytes:
    parameters = make_parameters()
    return safetensors.torch.save({**parameters.weights, **changes}, {"options": json.dumps(options_of(parameters))})


def headed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


DAMAGED = {
    "empty": b"",
    "short": b"\x08\0\0",
    "truncated": whole_file()[:-1],
    "longer": whole_file() + b"\0",
    "no_json": headed(b"{nothing"),
    "huge_header": (2**63).to_bytes(8, "little") + b"{}",
    "deep": headed(b'{"a":' + b"[" * 100_000),
    "no_options": safetensors.torch.save(dict(make_parameters().weights)),
    "one_missing": safetensors.torch.save({"w_query": torch.ones(2, 2)}, {"options": "{}"}),
    "other_shape": file_of(w_output=torch.ones(5, 4)),
    "foreign_dtype": file_of(w_key=torch.ones(6, 6, dtype=torch.uint8)),
    "stranger": file_of(input=torch.ones(1, 6)),
    "nan": file_of(w_value=torch.full((6, 6), float("nan"))),
    "infinity": file_of(b_output=torch.tensor([0.0, 0.0, float("inf"), 0.0])),
}


def test_a_damaged_file_is_named_with_the_reason_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(kept_in(tmp_path), "good", make_parameters())
    for name, content in DAMAGED.items():
        (tmp_path / f"{name}{SUFFIX}").write_bytes(content)
    store = kept_in(tmp_path)
    assert [layer.name for layer in store.all()] == ["good"]
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == len(DAMAGED)
    for name, content in DAMAGED.items():
        path = tmp_path / f"{name}{SUFFIX}"
        (line,) = [line for line in told if line.startswith(f"a layer is not read: {path}: ")]
        assert len(line) > len(f"a layer is not read: {path}: ")
        assert path.read_bytes() == content
    assert any("b_output.2: expected a finite number, received Infinity" in line for line in told)
    assert any("body: expected 616 bytes of data, as the header says, received 617 bytes" in line for line in told)
    assert max(map(len, told)) < 1000


def test_a_file_whose_numbers_have_changed_is_named_and_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(kept_in(tmp_path), "good", make_parameters())
    file = tmp_path / f"good{SUFFIX}"
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x10
    file.write_bytes(content)
    assert kept_in(tmp_path).all() == []
    assert f"{file}: its content is not what was written" in caplog.text


def test_a_file_that_was_not_read_is_written_over_on_request_alone(tmp_path: Path) -> None:
    put(kept_in(tmp_path), "large", make_parameters(dtype=torch.float64))
    file = tmp_path / f"large{SUFFIX}"
    before = file.read_bytes()
    store = kept_in(tmp_path, max_bytes=num_bytes(make_parameters()))
    with pytest.raises(AlreadyExists):
        put(store, "large", make_parameters())
    assert file.read_bytes() == before
    store.check_integrity()
    put(store, "large", make_parameters(), may_replace=True)
    assert [layer.name for layer in kept_in(tmp_path).all()] == ["large"]


def test_a_file_of_another_name_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"1st{SUFFIX}", f"sdpa{SUFFIX}", f"stats{SUFFIX}", SUFFIX, f"a b{SUFFIX}", f"{'x' * 65}{SUFFIX}", "a.txt"]
    for name in names:
        (tmp_path / name).write_bytes(whole_file())
    (tmp_path / f"folder{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (tmp_path / f"dangling{SUFFIX}").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    assert kept_in(tmp_path).all() == []
    assert sorted(tmp_path.iterdir()) == before
    told = " ".join(record.getMessage() for record in caplog.records)
    assert all(str(path) in told for path in before)


def test_a_file_beyond_the_budget_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = num_bytes(make_parameters())
    for name in ("a", "b", "c"):
        put(kept_in(tmp_path), name, make_parameters(dtype=torch.float64 if name == "b" else torch.float32))
    store = kept_in(tmp_path, max_bytes=2 * size)
    assert [layer.name for layer in store.all()] == ["a", "c"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"b{SUFFIX}: needs {2 * size} bytes, {size} bytes are allowed" in line
    assert (tmp_path / f"b{SUFFIX}").exists()


def test_a_file_far_beyond_the_budget_is_not_read_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / f"huge{SUFFIX}").open("wb") as file:
        file.truncate(2**42)
    assert kept_in(tmp_path).all() == []
    assert f"huge{SUFFIX}: needs" in caplog.text


def test_what_an_interrupted_write_has_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    descriptor, unfinished = LayerDirectory(tmp_path)._make_unfinished()
    os.write(descriptor, whole_file()[:100])
    os.close(descriptor)
    assert kept_in(tmp_path).all() == []
    assert list(tmp_path.iterdir()) == []
    assert unfinished in caplog.text


def test_a_file_gets_its_name_once_it_is_synced_and_the_directory_is_synced_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("sync directory" if path == tmp_path else f"sync {path.stat().st_size} bytes")
        fsync(descriptor)

    def seen_rename(source: str, target: Path) -> None:
        steps.append(f"name {Path(source).stat().st_size} bytes {target.name}")
        rename(source, target)

    store = kept_in(tmp_path)
    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_rename)
    put(store, "first", make_parameters())
    size = (tmp_path / f"first{SUFFIX}").stat().st_size
    assert steps == [f"sync {size} bytes", f"name {size} bytes first{SUFFIX}", "sync directory"]
    steps.clear()
    delete(store, "first")
    assert steps == ["sync directory"]


Fails = Callable[[pytest.MonkeyPatch, Path], None]


def full_disk(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def no_rename(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)


def no_new_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def refuse(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("tempfile.mkstemp", refuse)


def no_last_sync(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The disk fails when the new name is there already."""
    fsync, is_first = os.fsync, [True]

    def refuse(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == path and is_first.pop():
            is_first.append(False)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        is_first[:] = is_first or [False]
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


@pytest.mark.parametrize("fails", [full_disk, no_rename, no_new_file, no_last_sync])
def test_where_the_disk_refuses_neither_memory_nor_disk_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    store = kept_in(tmp_path)
    old = put(store, "old", make_parameters(seed=1)).layer
    for name in ("new", "old"):
        with monkeypatch.context() as patched:
            fails(patched, tmp_path)
            with pytest.raises(Unavailable, match=f"layer {name} cannot be written: "):
                put(store, name, make_parameters(seed=2), may_replace=True)
        assert [path.name for path in tmp_path.iterdir()] == [f"old{SUFFIX}"]
        assert store.all() == [old]
        assert_same(kept_in(tmp_path).get("old").parameters, make_parameters(seed=1))
    store.check_integrity()
    put(store, "new", make_parameters(seed=2))
    assert [layer.name for layer in kept_in(tmp_path).all()] == ["new", "old"]


def test_a_layer_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept_in(tmp_path)
    put(store, "first", make_parameters())
    with monkeypatch.context() as patched:
        no_last_sync(patched, tmp_path)
        with pytest.raises(Unavailable, match="layer first cannot be removed: "):
            delete(store, "first")
    assert_same(store.get("first").parameters, make_parameters())
    assert_same(kept_in(tmp_path).get("first").parameters, make_parameters())
    delete(store, "first")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_sync_directories_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    put(kept_in(tmp_path), "first", make_parameters())
    assert kept_in(tmp_path).num_layers == 1


def test_two_names_that_the_file_system_takes_for_one_are_not_both_kept(tmp_path: Path) -> None:
    store = kept_in(tmp_path)
    put(store, "first", make_parameters(seed=1))
    put(store, "First", make_parameters(seed=1))
    delete(store, "First")
    # As a file system would answer for which upper and lower case are the same.
    os.link(tmp_path / f"first{SUFFIX}", tmp_path / f"FIRST{SUFFIX}")
    with pytest.raises(AlreadyExists, match="takes FIRST and first"):
        put(store, "FIRST", make_parameters(seed=2))
    assert [layer.name for layer in store.all()] == ["first"]
    assert_same(kept_in(tmp_path).get("first").parameters, make_parameters(seed=1))


@pytest.mark.parametrize("path", ["nowhere", "file", "/proc"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableDirectory) as caught:
        kept_in(tmp_path / path)
    assert str(tmp_path / path) in str(caught.value)
