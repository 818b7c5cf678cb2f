"""Regions of shared memory: whatever a client says and whatever an owner does, nothing outside is touched."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory as Object
from pathlib import Path

import pytest

from attn_core.errors import InvalidProblem
from attn_core.placement import ALIGNMENT_BYTES
from service.errors import AlreadyExists, NotFound
from service.shared_memory import COPY_BYTES, FOLDER, MAX_NAME_BYTES, MAX_REGIONS, SharedMemory
from service.wire.inference import MemoryPlace

PAGE = mmap.PAGESIZE
LARGE = 4 * COPY_BYTES
_numbers = itertools.count()


class Owner:
    """An object in shared memory as a client makes it, and what its owner may do to it."""

    def __init__(self, content: bytes) -> None:
        self.key = f"/attn_test_{os.getpid()}_{next(_numbers)}"
        self.path = Path(FOLDER) / self.key[1:]
        self.path.write_bytes(content)

    def truncate(self, size: int) -> None:
        os.truncate(self.path, size)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(is_enabled=True)
    before = _num_descriptors()
    yield memory
    memory.check_integrity()
    memory.close()
    assert _num_descriptors() == before


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner(_numbered(LARGE + 3 * PAGE))
    yield owner
    owner.unlink()


def _numbered(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_mappings(owner: Owner) -> int:
    return Path("/proc/self/maps").read_text().count(str(owner.path))


def fields_of(error: pytest.ExceptionInfo[InvalidProblem]) -> set[str]:
    return {fault.field for fault in error.value.faults}


@pytest.mark.parametrize("offset", [0, 1, ALIGNMENT_BYTES, PAGE - 1, PAGE, PAGE + 64, 2 * PAGE + 7])
@pytest.mark.parametrize("size", [1, COPY_BYTES, COPY_BYTES + 1, LARGE - 100])
@pytest.mark.parametrize("inner", [0, 64, 100])
def test_a_part_is_the_bytes_of_its_object(
    memory: SharedMemory, owner: Owner, offset: int, size: int, inner: int
) -> None:
    memory.register("r", owner.key, offset, LARGE)
    with memory.part(MemoryPlace("r", inner, size)) as part:
        assert part.read(name="query") == owner.path.read_bytes()[offset + inner : offset + inner + size]


def test_a_large_aligned_part_is_read_in_place_and_others_from_a_copy(memory: SharedMemory, owner: Owner) -> None:
    memory.register("r", owner.key, 64, LARGE)
    with (
        memory.part(MemoryPlace("r", 0, LARGE)) as large,
        memory.part(MemoryPlace("r", 0, COPY_BYTES)) as small,
        memory.part(MemoryPlace("r", 1, LARGE - 1)) as unaligned,
    ):
        views = [part.read(name="query") for part in (large, small, unaligned)]
        with owner.path.open("r+b") as file:
            file.seek(65)
            file.write(b"\xff")
        assert [view[1] == 255 for view in views[:2]] == [True, False]
        assert views[2][0] != 255


def test_an_object_with_holes_is_read_from_a_copy_that_fills_none(memory: SharedMemory, owner: Owner) -> None:
    owner.truncate(0)
    owner.truncate(LARGE)
    memory.register("r", owner.key, 0, LARGE)
    with memory.part(MemoryPlace("r", 0, LARGE)) as part:
        assert part.read(name="query") == bytes(LARGE)
    assert owner.path.stat().st_blocks == 0


def test_a_part_without_holes_is_read_in_place_though_its_object_has_some(memory: SharedMemory, owner: Owner) -> None:
    owner.truncate(2**24)
    memory.register("r", owner.key, 0, 2**24)
    with memory.part(MemoryPlace("r", 0, LARGE)) as part:
        view = part.read(name="query")
        with owner.path.open("r+b") as file:
            file.write(b"\xff")
        assert view[0] == 255


def test_an_object_that_python_made_can_be_registered_and_is_never_unlinked() -> None:
    made = Object(create=True, size=PAGE)
    try:
        view = made.buf
        assert view is not None
        view[:4] = b"1234"
        memory = SharedMemory(is_enabled=True)
        memory.register("r", made.name, 0, PAGE)
        with memory.part(MemoryPlace("r", 0, 4)) as part:
            assert bytes(part.read(name="query")) == b"1234"
            part.write(memoryview(b"56"), name="context")
        memory.close()
        assert bytes(view[:4]) == b"5634"
        assert (Path(FOLDER) / made.name).exists()
        del view
    finally:
        made.close()
        made.unlink()


def test_nothing_here_is_known_to_the_resource_tracker(
    memory: SharedMemory, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the tracker would unlink the object at exit")

    monkeypatch.setattr(resource_tracker, "register", refuse)
    memory.register("r", owner.key, 0, 1)


def test_writing_touches_its_bytes_alone(memory: SharedMemory, owner: Owner) -> None:
    before = owner.path.read_bytes()
    memory.register("r", owner.key, 5, 100)
    with memory.part(MemoryPlace("r", 7, 20)) as part:
        part.write(memoryview(b"x" * 20), name="context")
        part.write(memoryview(b"y"), name="context")
        part.write(memoryview(b""), name="context")
    assert owner.path.read_bytes() == before[:12] + b"y" + b"x" * 19 + before[32:]


def test_a_result_that_does_not_fit_is_refused_and_nothing_is_written(memory: SharedMemory, owner: Owner) -> None:
    before = owner.path.read_bytes()
    memory.register("r", owner.key, 0, 100)
    with memory.part(MemoryPlace("r", 0, 20)) as part, pytest.raises(InvalidProblem) as caught:
        part.write(memoryview(b"x" * 21), name="context")
    assert fields_of(caught) == {"context"}
    assert owner.path.read_bytes() == before


@pytest.mark.parametrize("left", [0, 1, PAGE, LARGE - 1])
@pytest.mark.parametrize("size", [100, LARGE])
def test_a_region_truncated_by_its_owner_is_refused_at_the_next_use(
    memory: SharedMemory, owner: Owner, left: int, size: int
) -> None:
    place = MemoryPlace("r", LARGE - size, size)
    memory.register("r", owner.key, 0, LARGE)
    with memory.part(place) as part:
        assert len(part.read(name="query")) == size
        owner.truncate(left)
        for use in (lambda: part.read(name="query"), lambda: part.write(memoryview(bytes(size)), name="query")):
            with pytest.raises(InvalidProblem) as caught:
                use()
            assert fields_of(caught) == {"query"}
        assert owner.path.stat().st_size == left
        owner.truncate(LARGE)
        assert len(part.read(name="query")) == size


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 101), (100, 1), (1, 100), (101, 0), (2**64 - 1, 1), (1, 2**64 - 1), (2**64, 2**64), (-1, 1), (0, -1)],
)
def test_a_part_outside_its_region_is_refused(memory: SharedMemory, owner: Owner, offset: int, size: int) -> None:
    memory.register("r", owner.key, 50, 100)
    with pytest.raises(InvalidProblem), memory.part(MemoryPlace("r", offset, size)):
        raise AssertionError("it is outside")


@pytest.mark.parametrize("offset", [0, 100])
def test_a_part_of_no_bytes_is_empty(memory: SharedMemory, owner: Owner, offset: int) -> None:
    memory.register("r", owner.key, 0, 100)
    owner.truncate(0)
    with memory.part(MemoryPlace("r", offset, 0)) as part:
        assert bytes(part.read(name="query")) == b""
        part.write(memoryview(b""), name="context")


@pytest.mark.parametrize(
    ("offset", "size", "field"),
    [
        (0, 101, "byte_size"),
        (1, 100, "byte_size"),
        (100, 1, "byte_size"),
        (2**64 - 1, 1, "byte_size"),
        (0, 2**64 - 1, "byte_size"),
        (2**64 - 1, 2**64 - 1, "byte_size"),
        (0, 0, "byte_size"),
        (0, -1, "byte_size"),
        (-1, 1, "offset"),
    ],
)
def test_a_region_beyond_its_object_is_refused(
    memory: SharedMemory, owner: Owner, offset: int, size: int, field: str
) -> None:
    owner.truncate(100)
    with pytest.raises(InvalidProblem) as caught:
        memory.register("r", owner.key, offset, size)
    assert fields_of(caught) == {field}
    assert memory.status() == []


@pytest.mark.parametrize(
    "key",
    [
        "", "/", "//", ".", "/..", "..", "/../etc/passwd", "../etc/passwd", "//a", "/a/b", "a/", "/\0", "a\0b",
        "\ud800", "/" + "a" * (MAX_NAME_BYTES + 1), "é" * MAX_NAME_BYTES, "/attn_test_which_is_not_there",
    ],
)  # fmt: skip
def test_a_key_that_names_no_object_is_refused(memory: SharedMemory, key: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        memory.register("r", key, 0, 1)
    assert fields_of(caught) == {"key"}


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "unreadable"])
def test_what_is_no_object_of_shared_memory_is_refused(memory: SharedMemory, owner: Owner, kind: str) -> None:
    other = Path(f"{owner.path}_{kind}")
    if kind == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        other.touch(mode=0)
    elif kind == "pipe":
        os.mkfifo(other)
    elif kind == "folder":
        other.mkdir()
    else:
        other.symlink_to(owner.path if kind == "link" else "/nowhere")
    try:
        with pytest.raises(InvalidProblem) as caught:
            memory.register("r", other.name, 0, 1)
        assert fields_of(caught) == {"key"}
    finally:
        other.rmdir() if kind == "folder" else other.unlink()


@pytest.mark.parametrize("name", ["", "n" * (MAX_NAME_BYTES + 1), "\ud800"])
def test_a_name_that_cannot_be_one_is_refused(memory: SharedMemory, owner: Owner, name: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        memory.register(name, owner.key, 0, 1)
    assert fields_of(caught) == {"name"}


def test_every_fault_of_a_registration_is_told_at_once(memory: SharedMemory) -> None:
    with pytest.raises(InvalidProblem) as caught:
        memory.register("", "/a/b", -1, 0)
    assert fields_of(caught) == {"name", "key", "offset", "byte_size"}


def test_a_name_that_is_taken_is_refused_and_the_region_stays(memory: SharedMemory, owner: Owner) -> None:
    memory.register("r", owner.key, 0, 10)
    with pytest.raises(AlreadyExists):
        memory.register("r", owner.key, 0, 20)
    assert memory.status("r") == [{"name": "r", "key": owner.key, "offset": 0, "byte_size": 10}]


def test_one_object_may_be_registered_by_several_names(memory: SharedMemory, owner: Owner) -> None:
    memory.register("a", owner.key, 0, 10)
    memory.register("b", owner.key[1:], 5, 10)
    with memory.part(MemoryPlace("a", 5, 1)) as part:
        part.write(memoryview(b"!"), name="context")
    memory.unregister("a")
    with memory.part(MemoryPlace("b", 0, 1)) as part:
        assert bytes(part.read(name="query")) == b"!"


def test_a_region_more_than_the_limit_is_refused(memory: SharedMemory, owner: Owner) -> None:
    for number in range(MAX_REGIONS):
        memory.register(f"{number}", owner.key, 0, 1)
    with pytest.raises(InvalidProblem, match=f"at most {MAX_REGIONS}"):
        memory.register("more", owner.key, 0, 1)
    memory.unregister("0")
    memory.register("more", owner.key, 0, 1)


def test_status_and_unregistering_tell_one_or_all(memory: SharedMemory, owner: Owner) -> None:
    assert memory.status() == []
    for name in "abc":
        memory.register(name, owner.key, 0, 1)
    assert [region["name"] for region in memory.status()] == ["a", "b", "c"]
    memory.unregister("nobody")
    memory.unregister("b")
    memory.unregister("b")
    assert [region["name"] for region in memory.status()] == ["a", "c"]
    with pytest.raises(NotFound):
        memory.status("b")
    with pytest.raises(NotFound), memory.part(MemoryPlace("b", 0, 0)):
        raise AssertionError("it is gone")
    memory.unregister()
    assert memory.status() == []


def test_a_region_unregistered_in_use_is_read_and_written_to_the_end(memory: SharedMemory, owner: Owner) -> None:
    memory.register("r", owner.key, 0, LARGE)
    with memory.part(MemoryPlace("r", 0, LARGE)) as part:
        view = part.read(name="query")
        memory.unregister("r")
        memory.register("r", owner.key, 0, 1)
        assert view == owner.path.read_bytes()[:LARGE]
        part.write(memoryview(b"late"), name="context")
    assert owner.path.read_bytes()[:4] == b"late"


def test_a_mapping_goes_with_the_last_view_of_it(memory: SharedMemory, owner: Owner) -> None:
    memory.register("r", owner.key, 0, LARGE)
    with memory.part(MemoryPlace("r", 0, LARGE)) as part:
        view = part.read(name="query")
    del part
    memory.unregister("r")
    assert _num_mappings(owner) == 1
    assert view[0] == 0
    del view
    assert _num_mappings(owner) == 0


def test_an_object_that_its_owner_unlinked_serves_on(memory: SharedMemory, owner: Owner) -> None:
    memory.register("r", owner.key, 0, LARGE)
    owner.unlink()
    with memory.part(MemoryPlace("r", 0, 1)) as part:
        part.write(memoryview(b"!"), name="context")
        assert bytes(part.read(name="query")) == b"!"
