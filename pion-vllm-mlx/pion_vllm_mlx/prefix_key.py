"""What a stored prefix is named, how its blocks are hashed, and what its META says.

A prefix may be used only by a model that would have computed the same rows. So the strict namespace and the block
hashes are both seeded with a digest of everything the rows depend on (`Context`), and META carries that digest and all
token ids: hashes of 64 bits find a candidate, the comparison of META decides.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from pion.errors import CommandError
from pion.storage.formats import get_format
from pion_vllm_mlx.fields import digest_fields
from pion_vllm_mlx.fingerprint import Identity
from pion_vllm_mlx.slots import SlotShape

BLOCK_TOKENS: Final = 16
"""Tokens per hashed block. A match ends at a block's end, so on average half a block is computed again."""

MAX_TOKEN_ID: Final = 0xFFFFFFFF

META_MAGIC: Final = b"PION-MLX"
META_VERSION: Final = 1
META_HEADER: Final = struct.Struct("<8sHHI")
"""Magic, version, 0, length of the JSON that follows; the rest of the blob is token ids, u32 little-endian."""

TokenIds = npt.NDArray[np.uint32]


def token_ids(ids: Sequence[int] | Any) -> TokenIds:
    """Token ids from a list, a NumPy or MLX array of one axis. Raises ValueError for none, or what is no token id."""
    values = np.asarray(ids.tolist() if hasattr(ids, "tolist") else list(ids))
    if values.ndim != 1 or not values.size:
        msg = f"expected at least one token id on one axis, got an array of shape {values.shape}"
        raise ValueError(msg)
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > MAX_TOKEN_ID:
        msg = "token ids must be whole numbers from 0 to 4,294,967,295"
        raise ValueError(msg)
    return values.astype("<u4")


@attrs.frozen
class Layout:
    """The stored format of every slot, K and V side, in cache order."""

    keys: tuple[str, ...]
    values: tuple[str, ...]

    @classmethod
    def of(cls, slots: Sequence[SlotShape], vquant: str, boundary_protect: int) -> Layout:
        """`native` is each slot's own element type; with `boundary_protect` N, K and N outer layers of V are fp16.

        The seed's rule: K drives the softmax and tolerates noise poorly, the outer layers are the most sensitive.
        Raises ValueError for a format that isn't known or can't hold rows of these widths.
        """
        if vquant != "native":
            _check_format(vquant, slots)
        chosen = [slot.dtype if vquant == "native" else vquant for slot in slots]
        if not boundary_protect or vquant == "native":
            return cls(tuple(chosen), tuple(chosen))
        last = len(slots) - boundary_protect
        values = ["fp16" if i < boundary_protect or i >= last else fmt for i, fmt in enumerate(chosen)]
        return cls(("fp16",) * len(slots), tuple(values))

    def runs(self, slots: Sequence[SlotShape]) -> tuple[str, str]:
        """The K and V runs of KV.PREFIX.REGISTER.SCHEMA: equal neighbours are joined, `fp32@192*30`."""
        keys = [(fmt, slot.keys.width) for fmt, slot in zip(self.keys, slots, strict=True)]
        values = [(fmt, slot.values.width) for fmt, slot in zip(self.values, slots, strict=True)]
        return _runs(keys), _runs(values)


def _check_format(name: str, slots: Sequence[SlotShape]) -> None:
    try:
        fmt = get_format(name.encode())
        for slot in slots:
            fmt.check_dim(slot.keys.width)
            fmt.check_dim(slot.values.width)
    except CommandError as error:
        msg = f"vquant={name!r}: {error}; or native"
        raise ValueError(msg) from None


def _runs(layers: list[tuple[str, int]]) -> str:
    runs: list[list[Any]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return ",".join(f"{fmt}@{width}*{count}" for (fmt, width), count in runs)


@attrs.frozen
class Context:
    """Everything the rows of a prefix depend on but the tokens."""

    digest: bytes
    slots: tuple[SlotShape, ...]
    layout: Layout

    @classmethod
    def of(
        cls,
        identity: Identity,
        slots: tuple[SlotShape, ...],
        layout: Layout,
        *,
        tokenizer: bytes | None,
        adapter_path: str | None,
        media: Sequence[bytes] = (),
    ) -> Context:
        """The context of a model. `tokenizer` is its fingerprint, None when none was given.

        `media` are digests of the images and sounds that the prompt's placeholder tokens stand for, in order.
        """
        digest = digest_fields(
            "pion-mlx-context-1",
            identity.weights,
            identity.architecture,
            json.dumps([slot.describe() for slot in slots]),
            identity.rope,
            adapter_path,
            tokenizer,
            *layout.runs(slots),
            *media,
        )
        return cls(digest, slots, layout)

    def namespace(self, ids: TokenIds) -> str:
        """The strict name of the prefix that is exactly these tokens."""
        return "mlx1|" + digest_fields("pion-mlx-namespace-1", self.digest, ids.tobytes()).hex()

    def block_hashes(self, ids: TokenIds) -> npt.NDArray[np.uint64]:
        """One hash per full block; hash i stands for all tokens up to the end of block i, in this context."""
        chain = digest_fields("pion-mlx-blocks-1", self.digest, BLOCK_TOKENS)
        data = memoryview(ids.tobytes())
        step = BLOCK_TOKENS * ids.itemsize
        hashes = np.empty(len(ids) // BLOCK_TOKENS, "<u8")
        for i in range(len(hashes)):
            chain = hashlib.sha256(chain + data[i * step : (i + 1) * step]).digest()
            hashes[i] = int.from_bytes(chain[:8], "little")
        return hashes

    def meta(self, ids: TokenIds, label: str) -> bytes:
        """The META blob of a prefix of these tokens, ancestors included."""
        header = {
            "context": self.digest.hex(),
            "tokens": len(ids),
            "slots": [slot.describe() for slot in self.slots],
            "label": label,
        }
        text = json.dumps(header).encode()
        return META_HEADER.pack(META_MAGIC, META_VERSION, 0, len(text)) + text + ids.tobytes()

    def names(self, name: str | bytes, meta: bytes | None) -> bool:
        """Whether `name` is the strict name of the prefix with this META: it can stand for nothing else, ever."""
        stored = self.stored_ids(meta)
        text = name if isinstance(name, bytes) else name.encode(errors="replace")
        return stored is not None and text == self.namespace(stored).encode()

    def stored_ids(self, meta: bytes | None) -> TokenIds | None:
        """The tokens of the prefix with this META, or None as for `common_tokens`."""
        return _stored_ids(meta, self.digest) if meta else None

    def common_tokens(self, meta: bytes | None, ids: TokenIds) -> int:
        """How many of the first tokens of `ids` the prefix with this META holds, computed in this very context.

        0 for a META that is absent, of another client, version or context, or damaged.
        """
        stored = self.stored_ids(meta)
        if stored is None:
            return 0
        n = min(len(stored), len(ids))
        differ = np.flatnonzero(stored[:n] != ids[:n])
        return int(differ[0]) if differ.size else n


def _stored_ids(meta: bytes, digest: bytes) -> TokenIds | None:
    if len(meta) < META_HEADER.size:
        return None
    magic, version, _, size = META_HEADER.unpack_from(meta)
    if magic != META_MAGIC or version != META_VERSION:
        return None
    try:
        header = json.loads(meta[META_HEADER.size : META_HEADER.size + size])
        context, tokens = header["context"], header["tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    data = meta[META_HEADER.size + size :]
    if context != digest.hex() or not isinstance(tokens, int) or len(data) != tokens * 4:
        return None
    return np.frombuffer(data, "<u4")
