"""Pion for LMCache. Nothing is implemented yet; the package exists so that its name and place are settled."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
