"""Pion for mlx-lm: prompt caches computed once, used by every process."""

from __future__ import annotations

from pion.compute import device

device.prepare()  # before anything below imports mlx
