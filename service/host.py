"""What the machine gives this process: memory of the device and cores of the host, the container's limits counted."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_UNLIMITED = 2**60
# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def total_bytes(device: torch.device, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """The memory of the device: of the GPU, or of the host within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([_meminfo("MemTotal", proc), *(limit for limit, _ in _cgroup_limits(proc, cgroups))])


def free_bytes(device: torch.device, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What could be allocated now; memory that torch keeps for reuse counts as free."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    within_limits = [limit - used for limit, used in _cgroup_limits(proc, cgroups)]
    return max(0, min([_meminfo("MemAvailable", proc), *within_limits]))


def resident_bytes(*, proc: Path = _PROC) -> int:
    """The resident memory of this process; its peak where the system does not say what it is now."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * resource.getpagesize()


def private_bytes(pid: int, *, proc: Path = _PROC) -> int:
    """The resident memory of another process that it shares with none; 0 where the system does not say."""
    try:
        _, resident, shared = map(int, (proc / str(pid) / "statm").read_text().split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared) * resource.getpagesize()


def peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def keep_freed_memory() -> None:
    """Have glibc keep memory that was freed, for the next answer: fresh pages cost a millisecond a megabyte.

    Nothing happens where the C library is another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 64 * 2**20), (_M_TOP_PAD, 2**20)):
        mallopt(option, value)


def usable_cores(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """How many cores this process may keep busy: those it may run on, within the cgroup's quota of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.floor(quota) for quota in _cpu_quotas(proc, cgroups)]
    return max(1, min([cores, *quotas]))


def _meminfo(name: str, proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), _UNLIMITED)


def _cgroup_limits(proc: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without reclaimable file cache) of each cgroup, v2 or v1, that limits this process."""
    for folder, is_v2 in _cgroup_folders(proc, root, "memory"):
        names = (
            ("memory.max", "memory.current", "inactive_file")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and used is not None and limit < _UNLIMITED:
            yield limit, used - _reclaimable(folder / "memory.stat", names[2])


def _cpu_quotas(proc: Path, root: Path) -> Iterator[float]:
    """The cores' worth of time of each cgroup that limits it."""
    for folder, is_v2 in _cgroup_folders(proc, root, "cpu"):
        if is_v2:
            try:
                quota_text, period_text = (folder / "cpu.max").read_text().split()
                quota, period = int(quota_text), int(period_text)
            except (OSError, ValueError):
                continue
        else:
            v1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if v1[0] is None or v1[1] is None:
                continue
            quota, period = v1[0], v1[1]
        if quota > 0 and period > 0:
            yield quota / period


def _cgroup_folders(proc: Path, root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroup and of all above it, and whether they are v2."""
    own = proc / "self/cgroup"
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        base = root if is_v2 else root / controller
        # In a container the own group is the root that is mounted; outside, every parent limits too.
        place = base / group.lstrip("/")
        for folder in (place, *place.parents):
            if base not in (folder, *folder.parents):
                break
            yield folder, is_v2


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
