"""What the machine gives, from trees of files as Linux shows them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from service.host import free_bytes, resident_bytes, total_bytes, usable_cores

CPU = torch.device("cpu")
MEBIBYTE = 2**20
UNLIMITED_V1 = 9223372036854771712


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def make_proc(tmp_path: Path, cgroup: str | None, *, total_mib: int = 8192, available_mib: int = 4096) -> Path:
    files = {
        "meminfo": f"MemTotal:  {total_mib * 1024} kB\nMemFree:  1 kB\nMemAvailable:  {available_mib * 1024} kB\n",
        "self/statm": "5000 300 20 1 0 400 0\n",
    }
    if cgroup is not None:
        files["self/cgroup"] = cgroup
    return write_tree(tmp_path / "proc", files)


def make_v2(tmp_path: Path, **groups: tuple[str, int, int]) -> Path:
    """A tree of v2: folder (``__`` for /) = (limit, current, inactive file), in MiB but for the limit's text."""
    files = {}
    for group, (limit, current, inactive) in groups.items():
        folder = group.replace("__", "/").strip("/")
        at = f"{folder}/" if folder else ""
        files[f"{at}memory.max"] = limit + "\n"
        files[f"{at}memory.current"] = f"{current * MEBIBYTE}\n"
        files[f"{at}memory.stat"] = f"anon 1\ninactive_file {inactive * MEBIBYTE}\nactive_file 3\n"
    return write_tree(tmp_path / "cgroup", files)


def figures(proc: Path, cgroups: Path) -> tuple[int, int]:
    """(total, free) in MiB."""
    total, free = total_bytes(CPU, proc=proc, cgroups=cgroups), free_bytes(CPU, proc=proc, cgroups=cgroups)
    return total // MEBIBYTE, free // MEBIBYTE


@pytest.mark.parametrize("cgroup", [None, "", "0::/\n", "9:name=systemd:/\n8:pids:/\n"])
def test_without_a_limit_the_host_counts(tmp_path: Path, cgroup: str | None) -> None:
    assert figures(make_proc(tmp_path, cgroup), tmp_path / "nothing") == (8192, 4096)


def test_a_container_of_v2_counts_its_own_limit_and_file_cache_as_free(tmp_path: Path) -> None:
    cgroups = make_v2(tmp_path, __=(str(1024 * MEBIBYTE), 700, 200))
    assert figures(make_proc(tmp_path, "0::/\n"), cgroups) == (1024, 1024 - 700 + 200)


def test_every_parent_of_v2_limits_too(tmp_path: Path) -> None:
    cgroups = make_v2(
        tmp_path,
        pods=(str(2000 * MEBIBYTE), 1900, 0),
        pods__one=("max", 10, 0),
        pods__one__box=(str(3000 * MEBIBYTE), 10, 0),
        pods__two=(str(1 * MEBIBYTE), 1, 0),
    )
    assert figures(make_proc(tmp_path, "0::/pods/one/box\n"), cgroups) == (2000, 100)


def test_a_path_of_the_host_that_is_not_mounted_inside_falls_back_to_the_root(tmp_path: Path) -> None:
    cgroups = make_v2(tmp_path, __=(str(512 * MEBIBYTE), 12, 0))
    assert figures(make_proc(tmp_path, "0::/docker/0123abc\n"), cgroups) == (512, 500)


def test_the_limit_of_v1_counts_and_its_unlimited_does_not(tmp_path: Path) -> None:
    cgroups = write_tree(
        tmp_path / "cgroup",
        {
            "memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
            "memory/memory.usage_in_bytes": f"{7000 * MEBIBYTE}\n",
            "memory/box/memory.limit_in_bytes": f"{600 * MEBIBYTE}\n",
            "memory/box/memory.usage_in_bytes": f"{500 * MEBIBYTE}\n",
            "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MEBIBYTE}\n",
        },
    )
    proc = make_proc(tmp_path, "5:cpu,cpuacct:/box\n4:memory:/box\n0::/box\n")
    assert figures(proc, cgroups) == (600, 150)


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    cgroups = make_v2(tmp_path, __=(str(100 * MEBIBYTE), 120, 5))
    assert figures(make_proc(tmp_path, "0::/\n"), cgroups) == (100, 0)


def test_a_limit_above_the_host_changes_nothing(tmp_path: Path) -> None:
    cgroups = make_v2(tmp_path, __=(str(99999 * MEBIBYTE), 10, 0))
    assert figures(make_proc(tmp_path, "0::/\n"), cgroups) == (8192, 4096)


def test_a_file_that_cannot_be_read_as_a_number_limits_nothing(tmp_path: Path) -> None:
    cgroups = make_v2(tmp_path, __=("what", 10, 0))
    assert figures(make_proc(tmp_path, "0::/\n"), cgroups) == (8192, 4096)


def test_resident_memory_is_counted_in_pages(tmp_path: Path) -> None:
    assert resident_bytes(proc=make_proc(tmp_path, None)) == 300 * resource.getpagesize()


def test_this_machine_has_figures_that_agree() -> None:
    assert 0 < resident_bytes() < total_bytes(CPU)
    assert 0 <= free_bytes(CPU) <= total_bytes(CPU)


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cgroup", "cores"),
    [
        ({}, "0::/\n", CORES),
        ({"cpu.max": "max 100000\n"}, "0::/\n", CORES),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "99900000 100000\n"}, "0::/\n", CORES),
        ({"a/cpu.max": "max 100000\n", "cpu.max": "100000 100000\n"}, "0::/a/b\n", 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", CORES),
    ],
)
def test_cores_are_counted_within_the_quota(tmp_path: Path, files: dict[str, str], cgroup: str, cores: int) -> None:
    proc, cgroups = make_proc(tmp_path, cgroup), write_tree(tmp_path / "cgroup", files)
    assert usable_cores(proc=proc, cgroups=cgroups) == cores


def test_a_system_without_proc_still_has_figures(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert total_bytes(CPU, proc=nothing, cgroups=nothing) > 2**28
    assert free_bytes(CPU, proc=nothing, cgroups=nothing) > 2**28
    assert resident_bytes(proc=nothing) > 2**20
    assert usable_cores(proc=nothing, cgroups=nothing) == CORES
