"""How much memory the device has: its size, and what is free of it, the container's limit counted."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import torch

_UNLIMITED = 2**60
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
    """The resident memory of this process."""
    pages = int((proc / "self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _meminfo(name: str, proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_limits(proc: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used without reclaimable file cache) of each cgroup, v2 or v1, that limits this process."""
    own = proc / "self/cgroup"
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the own group is the root that is mounted; outside, every parent limits too.
        place = base / group.lstrip("/")
        for folder in (place, *place.parents):
            if base not in (folder, *folder.parents):
                break
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, used - _reclaimable(folder / "memory.stat", names[2])


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
