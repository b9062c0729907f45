"""What a stored format is: the interface behind which the formats stand, and the types that travel."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

import attrs
import numpy as np
from numpy.typing import NDArray

from pion.errors import CommandError
from pion.replies import Buffer


class Wire(enum.Enum):
    """What `AS` names: the type of the values in a request or a reply."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    NATIVE = "native"


@attrs.frozen(eq=False)
class Format(ABC):
    """How the rows of one layer are stored. One object per name, compared by identity."""

    name: str
    wire: Wire | None = attrs.field(default=None, kw_only=True)
    """The wire type whose bytes are these bytes, if there is one."""

    multiple: int = attrs.field(default=1, kw_only=True)
    """D must be divisible by it."""

    rotation: int | None = attrs.field(default=None, kw_only=True)
    """Version of the rotation and the codebooks that stored rows went through, if they did."""

    @property
    def durable_name(self) -> str:
        """The name in what outlives the process: with the version of the rotation, `turbo4/1`."""
        return self.name if self.rotation is None else f"{self.name}/{self.rotation}"

    def check_dim(self, dim: int) -> None:
        """Raise CommandError, naming format and D, unless rows of `dim` values can be stored."""
        if dim < 1:
            raise CommandError(f"{self.name} needs a dim of at least 1, got {dim}")
        if dim % self.multiple:
            raise CommandError(f"{self.name} needs a dim divisible by {self.multiple}, got {dim}")

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values; `dim` is 0 (a side without data) or has passed `check_dim`."""

    @abstractmethod
    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """(n, D) fp32 rows as n * row_bytes(D) bytes, flat.

        Raises CommandError for values that the format can't hold.
        """

    @abstractmethod
    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        """`count` stored rows as (count, dim) fp32. The result may be a view of `raw`."""
