"""Facts of the machine and the versions, for the JSON. No paths, no host names, nothing that names a person."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("pion", "trio", "numpy", "mlx", "mlx-lm", "redis", "hiredis")


def facts() -> dict[str, Any]:
    """What someone needs to judge the figures; `load_1min` tells whether the machine was busy when the run began."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "load_1min": round(os.getloadavg()[0], 2),
        "transparent_hugepages": _hugepages(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _hugepages() -> str:
    """`always`, `madvise` or `never`: it decides what a fresh buffer costs."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
