"""The shape of a V session: which format and width each layer has.

Written as runs of equal layers, `format[@dim]*layers`, joined by commas: `fp16@512*2,int8@512*12,fp16@512*2`. `@0` is a
side without data. Equal shapes are one object, so a million namespaces of one model share it and comparing is `is`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Final
from weakref import WeakValueDictionary

import attrs

from pion.args import MAX_ID, integer, show
from pion.errors import CommandError
from pion.limits import INLINE_ARG_BYTES
from pion.replies import Buffer
from pion.storage.formats import Format, get_durable_format, get_format

MAX_RUNS: Final = 256
"""Runs of one schema: one per layer of the deepest models, and about 40 KiB, so that schemas needn't be charged."""


@attrs.frozen(eq=False)
class LayerSpec:
    """How one layer stores its rows. `dim` is D, values in a row; `row_bytes` is 0 for a side without data."""

    format: Format
    dim: int
    row_bytes: int


_Run = tuple[Format, int, int]
"""Format, dim and number of layers; 0 layers stands for any number."""


@attrs.frozen(eq=False, init=False, repr=False)
class Schema:
    """Format and width per layer. Frozen and interned: equal shapes are the same object.

    Made in the event loop's thread only: two threads could make two objects of one shape.
    """

    layers: int | None
    """How many layers there are; None when any number may be stored."""
    _runs: tuple[_Run, ...]
    _specs: tuple[LayerSpec, ...]
    _ends: tuple[int, ...]

    def __init__(self) -> None:
        raise TypeError("use Schema.uniform or Schema.parse")

    @staticmethod
    def uniform(fmt: Format, dim: int) -> Schema:
        """Any number of layers of one format and width. Raises CommandError when the format doesn't take that width."""
        found = _interned.get(((fmt, dim, 0),))
        if found is None:
            fmt.check_dim(dim)
            found = _intern(((fmt, dim, 0),))
        return found

    @staticmethod
    def parse(runs: Buffer, dim: int | None, max_layers: int, max_dim: int) -> Schema:
        """A schema from its runs; `dim` is the width of runs that don't give one.

        Raises CommandError that names the bad run.
        """
        if not 1 <= len(runs) <= INLINE_ARG_BYTES:
            raise CommandError(f"runs must be 1 to {INLINE_ARG_BYTES} bytes long, got {len(runs)}")
        return _intern(_parse_runs(bytes(runs), dim, max_layers, max_dim, get_format))

    @staticmethod
    def from_text(text: str) -> Schema:
        """The schema whose `durable_text` this is: for records of ours, so without limits of the configuration.

        Raises CommandError when it is none, or when it has a rotation of another version.
        """
        if "*" in text:
            return _intern(_parse_runs(text.encode(), None, MAX_ID, MAX_ID, get_durable_format))
        (fmt, dim, _), *more = _parse_runs(text.encode() + b"*1", None, MAX_ID, MAX_ID, get_durable_format)
        if more:
            raise CommandError(f"not a schema: {show(text.encode())}")
        return Schema.uniform(fmt, dim)

    def layer(self, index: int) -> LayerSpec:
        """The spec of layer `index`, from 0. Raises CommandError past the end."""
        if self.layers is None:
            return self._specs[0]
        if not 0 <= index < self.layers:
            raise CommandError(f"no layer {index}: the schema has {self.layers} layers")
        return self._specs[bisect_right(self._ends, index)]

    @property
    def durable_text(self) -> str:
        """The text for what outlives the process: `str`, but each format that rotates has the version with it."""
        return self._text(lambda fmt: fmt.durable_name)

    @property
    def rotation(self) -> int | None:
        """The version of the rotation that rows of some layer went through; None if no format here rotates."""
        return next((fmt.rotation for fmt, _, _ in self._runs if fmt.rotation is not None), None)

    def __str__(self) -> str:
        """The runs: equal neighbours merged, every width given. Without `*layers` when any number may be stored."""
        return self._text(lambda fmt: fmt.name)

    def _text(self, name: Callable[[Format], str]) -> str:
        return ",".join(f"{name(fmt)}@{dim}" + (f"*{layers}" if layers else "") for fmt, dim, layers in self._runs)

    def __repr__(self) -> str:
        return f"Schema({self})"

    def __reduce__(self) -> tuple[Callable[[str], Schema], tuple[str]]:
        """Copies and pickles come back as the interned object."""
        return Schema.from_text, (self.durable_text,)


_interned: Final[WeakValueDictionary[tuple[_Run, ...], Schema]] = WeakValueDictionary()


def _intern(runs: tuple[_Run, ...]) -> Schema:
    found = _interned.get(runs)
    if found is None:
        specs = tuple(LayerSpec(fmt, dim, fmt.row_bytes(dim)) for fmt, dim, _ in runs)
        ends = tuple(accumulate(layers for _, _, layers in runs))
        found = Schema.__new__(Schema)
        found.__attrs_init__(layers=ends[-1] or None, runs=runs, specs=specs, ends=ends)
        _interned[runs] = found
    return found


def _parse_runs(
    text: bytes, dim: int | None, max_layers: int, max_dim: int, find: Callable[[bytes], Format]
) -> tuple[_Run, ...]:
    merged: list[_Run] = []
    left = max_layers
    if text.count(b",") >= MAX_RUNS:
        raise CommandError(f"at most {MAX_RUNS} runs, got {text.count(b',') + 1}")
    for number, run in enumerate(text.split(b","), 1):
        try:
            fmt, width, layers = _parse_run(run, dim, left, max_layers, max_dim, find)
        except CommandError as error:
            raise CommandError(f"run {number} {show(run)}: {error}") from None
        left -= layers
        if merged and merged[-1][:2] == (fmt, width):
            layers += merged.pop()[2]
        merged.append((fmt, width, layers))
    return tuple(merged)


def _parse_run(
    text: bytes, dim: int | None, left: int, max_layers: int, max_dim: int, find: Callable[[bytes], Format]
) -> _Run:
    head, star, layer_text = text.partition(b"*")
    if not star:
        raise CommandError("expected format[@dim]*layers")
    name, at, dim_text = head.partition(b"@")
    fmt = find(name)
    layers = integer(layer_text, "layers", 1, max_layers)
    if layers > left:
        raise CommandError(f"more than {max_layers} layers in all")
    if at:
        dim = integer(dim_text, "dim", 0, max_dim)
    elif dim is None:
        raise CommandError("@dim is missing")
    if dim:
        fmt.check_dim(dim)
    return fmt, dim, layers
