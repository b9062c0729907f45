"""What makes two models the same model, as far as their caches go.

The fingerprint covers every parameter's name, shape and type; all bytes of the small ones (up to 1 MiB, which takes in
norms, biases and adapters) and of everything an adapter adds; of the large ones 256 pieces of 64 bytes, evenly spread
over the tensor. It also covers every plain setting of every module: the scale of an adapter, the base of a rope, bits
and group size of a quantized layer. Two models that differ only in a few values of one large tensor are the one thing
it can miss; training and merging change nearly all of them.

Hashing takes some milliseconds, so the result is kept as long as every parameter is the same object and every setting
the same value, which is checked at each use. An adapter that was loaded, reloaded or removed is therefore noticed.
Writing into an existing array in place (`layer.weight[0] = 1`) is not: call `forget()` after that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import threading
import weakref
from typing import Any, Final

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from pion_vllm_mlx.fields import Field, digest_fields, encode_fields

WHOLE_BYTES: Final = 1 << 20
"""Tensors up to here are hashed in full."""

PIECES: Final = 256
PIECE_BYTES: Final = 64
"""How a larger tensor is sampled: one cache line each, 16 KiB a tensor."""

_SEQUENCES: Final = (list, tuple)
_PLAIN: Final = (bool, int, float, str, type(None))
_ARRAY, _MAPPING, _SEQUENCE = object(), object(), object()
"""Marks that no setting is equal to."""

IGNORED_SETTINGS: Final = frozenset({"_training", "_no_grad"})
"""Settings that change how a module trains, not what it computes."""


@attrs.frozen
class Identity:
    """A model's fingerprint, in the parts a namespace names: digests of 32 bytes and the architecture as text."""

    weights: bytes
    rope: bytes
    architecture: str


class Fingerprint:
    """The identity of one model object, kept up to date. Thread-safe."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._marks: list[Any] = []
        self._arrays: list[weakref.ref[mx.array]] = []
        """Dead once its array is gone, so that a new one at the same address is never taken for it."""
        self._identity: Identity | None = None

    def current(self) -> Identity:
        """The identity of the model as it is now."""
        with self._lock:
            marks: list[Any] = []
            arrays: list[mx.array] = []
            _walk(self._model, marks, arrays)
            if self._identity is None or not self._unchanged(marks, arrays):
                leaves: list[tuple[str, Any]] = []
                _collect(self._model, "", leaves)
                self._identity = _identify(self._model, leaves)
                self._marks, self._arrays = marks, [weakref.ref(array) for array in arrays]
            return self._identity

    def forget(self) -> None:
        """Hash again at the next use, after arrays were written to in place."""
        with self._lock:
            self._identity = None

    def _unchanged(self, marks: list[Any], arrays: list[mx.array]) -> bool:
        if marks != self._marks or len(arrays) != len(self._arrays):
            return False
        return all(map(operator.is_, arrays, [reference() for reference in self._arrays]))


def tokenizer_fingerprint(tokenizer: Any) -> bytes:
    """A digest of how text becomes token ids. Truncation and padding, which callers switch, are left out."""
    inner = getattr(tokenizer, "_tokenizer", None)  # of mlx-lm's wrapper; a fast tokenizer's own is the backend
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
        return digest_fields("fast", json.dumps(state, sort_keys=True))
    slow = inner if hasattr(inner, "get_vocab") else tokenizer
    return digest_fields(type(slow).__name__, json.dumps(sorted(slow.get_vocab().items())))


def _walk(node: Any, marks: list[Any], arrays: list[mx.array]) -> None:
    """Append what tells whether anything that `_collect` finds has changed: quick, as it is done at each use.

    A pass through the model has just taken all of this out of the processor's cache, so it touches little and makes
    nothing: no paths, but names and sizes in the order of the walk.
    """
    if isinstance(node, mx.array):
        arrays.append(node)
        marks.append(_ARRAY)
        return
    if isinstance(node, nn.Module):
        marks.append(type(node).__qualname__)
        for name, value in vars(node).items():
            if name not in IGNORED_SETTINGS and _plain(value):
                marks += name, value
    if isinstance(node, dict):
        marks += _MAPPING, len(node)
        for name, child in node.items():
            marks.append(name)
            _walk(child, marks, arrays)
    elif isinstance(node, _SEQUENCES):
        marks += _SEQUENCE, len(node)
        for child in node:
            _walk(child, marks, arrays)
    elif isinstance(node, _PLAIN):
        marks.append(node)


def _collect(node: Any, path: str, leaves: list[tuple[str, Any]]) -> None:
    """Append every array and plain setting below a module, with its path; underscored arrays (rope tables) too.

    Lists and dicts that a module holds are walked as modules are, to the plain values in them.
    """
    if isinstance(node, mx.array):
        leaves.append((path, node))
        return
    if isinstance(node, nn.Module):
        leaves.append((f"{path}!", type(node).__qualname__))
        for name, value in vars(node).items():
            if name not in IGNORED_SETTINGS and _plain(value):
                leaves.append((f"{path}!{name}", value))
    if isinstance(node, dict):
        for name in node:
            _collect(node[name], f"{path}.{name}", leaves)
    elif isinstance(node, _SEQUENCES):
        for index, value in enumerate(node):
            _collect(value, f"{path}.{index}", leaves)
    elif _plain(node):
        leaves.append((path, node))


def _plain(value: Any) -> bool:
    if isinstance(value, _SEQUENCES):
        return all(_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _identify(model: Any, leaves: list[tuple[str, Any]]) -> Identity:
    weights, rope = hashlib.sha256(), hashlib.sha256()
    ropes = tuple(path[:-1] for path, value in leaves if path.endswith("!") and "rope" in str(value).lower())
    for path, value in sorted(leaves, key=lambda leaf: leaf[0]):
        if isinstance(value, mx.array):
            fields: list[Field] = [path, str(value.dtype), *value.shape]
            weights.update(encode_fields(fields))
            weights.update(_sample(value, whole="lora" in path))
        else:
            weights.update(encode_fields([path, repr(value)]))
        if path.startswith(ropes):
            rope.update(encode_fields([path, repr(value) if not isinstance(value, mx.array) else _sample(value)]))
    return Identity(weights.digest(), rope.digest(), _architecture(model))


def _sample(array: mx.array, *, whole: bool = False) -> bytes:
    """The bytes of an array that are hashed, in an order that doesn't depend on how it lies in memory."""
    flat = mx.contiguous(array)
    mx.eval(flat)
    data = np.frombuffer(memoryview(flat).cast("B"), np.uint8) if flat.size else np.empty(0, np.uint8)
    if whole or data.nbytes <= WHOLE_BYTES:
        return data.tobytes()
    starts = np.linspace(0, data.nbytes - PIECE_BYTES, PIECES).astype(np.int64)
    return data[starts[:, None] + np.arange(PIECE_BYTES)].tobytes()


def _architecture(model: Any) -> str:
    args = getattr(model, "args", None)
    settings = dataclasses.asdict(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else {}
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return json.dumps([kind, settings], sort_keys=True, default=repr)
