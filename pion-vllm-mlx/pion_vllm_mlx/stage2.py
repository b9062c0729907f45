"""The stage 2 of `PionPromptCache`: attention where the rows are, on the server or in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import numpy as np

from pion.client import PionClient
from pion_vllm_mlx import observing
from pion_vllm_mlx.attending import Attending, Target, check_width, uniform_heads
from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.finding import Finder
from pion_vllm_mlx.fingerprint import Identity
from pion_vllm_mlx.inproc import HeldPrefix, HeldPrefixes
from pion_vllm_mlx.link import Link, Operation
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import Context, TokenIds
from pion_vllm_mlx.slots import SlotShape
from pion_vllm_mlx.statistics import Counters

T = TypeVar("T")

KNOWN_PREFIXES: Final = 256
"""Namespaces whose token ids are remembered: with them a prefix can be computed when nobody has its rows any more."""


class Stage2:
    """What stage 2 keeps beside the rest of a prompt cache. Thread-safe."""

    def __init__(self, inproc_bytes: int) -> None:
        self.attending: Final = Attending()
        self.held: Final = HeldPrefixes(inproc_bytes)
        self._lock = threading.Lock()
        self.splittable: str | None = None
        """The architecture whose attention was found to be splittable."""
        self._known: OrderedDict[Namespace, tuple[tuple[bytes, ...], TokenIds]] = OrderedDict()

    def remember(self, name: Namespace, media: Sequence[bytes], ids: TokenIds) -> None:
        """That a namespace stands for these tokens and media."""
        with self._lock:
            self._known[name] = tuple(media), ids
            self._known.move_to_end(name)
            if len(self._known) > KNOWN_PREFIXES:
                self._known.popitem(last=False)

    def known(self, name: Namespace) -> tuple[tuple[bytes, ...], TokenIds | None]:
        """(media, token ids) of a namespace; no media and None if it isn't remembered."""
        with self._lock:
            return self._known.get(name, ((), None))

    def drop(self, *names: Namespace) -> None:
        """Hold these no more, and forget what they stand for."""
        self.held.drop(*names)
        with self._lock:
            for name in names:
                self._known.pop(name, None)


class PrefixAttention:
    """The part of `PionPromptCache` that `stage2=True` turns on."""

    _stage2: Stage2 | None
    _link: Link
    _finder: Finder
    _counters: Counters
    _model: Any
    _step: int

    def _context(self, media: Sequence[bytes] = ()) -> Context:
        raise NotImplementedError

    def _identity(self) -> Identity:
        raise NotImplementedError

    def _deadline_s(self, tokens: int) -> float | None:
        raise NotImplementedError

    # For everybody

    @property
    def cold_rehydrates_observed(self) -> int:
        """How often a question found its rows cold, or missing after a restart, and had them warmed."""
        return self._stage2.attending.rehydrates if self._stage2 is not None else 0

    def attend_query(
        self, namespace: Namespace, layer: int, q: Any, *, top_k: int = 0, window: int = 0, lse: bool = False
    ) -> Any:
        """Attention of `q` over one layer of a stored prefix; arguments and answer as `PionClient.attend_query`.

        As the four methods below: NumPy float32 arrays; rows that are cold, or missing after a restart, are warmed and
        the question is asked once more; with `fallback` the answer is None when the server gives none, else its error
        is raised. Raises ValueError without `stage2=True` and for a `q` that isn't as wide as the model's heads, and
        UnsupportedAttentionError for a model whose rows the server can't attend to; nothing is asked then.
        """
        return self._ask(
            namespace,
            q,
            lambda client, session: client.attend_query(session, layer, q, top_k=top_k, window=window, lse=lse),
        )

    def attend_query_fused(
        self, namespace: Namespace, layer: int, q: Any, keys: Any, values: Any, head_map: Any, *, window: int = 0
    ) -> Any:
        """As `attend_query`, over the prefix and a suffix that travels along: `PionClient.attend_query_fused`."""
        return self._ask(
            namespace,
            q,
            lambda client, session: client.attend_query_fused(session, layer, q, keys, values, head_map, window=window),
        )

    def attend_query_sparse(
        self, namespace: Namespace, layer: int, q: Any, indices: Any, counts: Any, *, window: int = 0
    ) -> Any:
        """As `attend_query`, over the rows that `indices` names: `PionClient.attend_query_sparse`."""
        return self._ask(
            namespace,
            q,
            lambda client, session: client.attend_query_sparse(session, layer, q, indices, counts, window=window),
        )

    def attend_query_sparse_auto(
        self, namespace: Namespace, layer: int, q: Any, head_map: Any, *, block: int, top: int, window: int = 0
    ) -> Any:
        """As `attend_query`, over the blocks that fit best: `PionClient.attend_query_sparse_auto`."""
        heads, _ = uniform_heads(self._context().slots)
        return self._ask(
            namespace,
            q,
            lambda client, session: client.attend_query_sparse_auto(
                session, layer, q, head_map, block=block, top=top, kv_heads=heads, window=window
            ),
        )

    def attend_query_sparse_auto_fused(
        self,
        namespace: Namespace,
        layer: int,
        q: Any,
        keys: Any,
        values: Any,
        head_map: Any,
        *,
        block: int,
        top: int,
        window: int = 0,
    ) -> Any:
        """As `attend_query_sparse_auto`, and a suffix: `PionClient.attend_query_sparse_auto_fused`."""
        return self._ask(
            namespace,
            q,
            lambda client, session: client.attend_query_sparse_auto_fused(
                session, layer, q, keys, values, head_map, block=block, top=top, window=window
            ),
        )

    # For make_pion_prompt_cache

    @property
    def stage2(self) -> bool:
        """Whether it is on."""
        return self._stage2 is not None

    @property
    def model(self) -> Any:
        """The model that this prompt cache was made for."""
        return self._model

    @property
    def _slots(self) -> tuple[SlotShape, ...]:
        """What the model's cache holds, layer by layer."""
        return self._context().slots

    def _check_attention(self) -> None:
        """Raise UnsupportedAttentionError if the model's attention can't be split; looked at once per architecture."""
        stage2, architecture = self._on(), self._identity().architecture
        if stage2.splittable != architecture:
            observing.watch(self._model, len(self._slots))
            stage2.splittable = architecture

    def _held(self, namespace: Namespace) -> HeldPrefix | None:
        """The prefix as this process holds it, if it does and the model hasn't changed since."""
        stage2 = self._on()
        media, _ = stage2.known(namespace)
        return stage2.held.get(namespace, self._context(media).digest)

    def _remote_prefix(self, namespace: Namespace) -> RemotePrefix:
        """The prefix as the server has it, warmed if it can be.

        If the name stands for other tokens on the server than it does here, those here count, and the server isn't
        asked. Raises LookupError if nothing of this model is stored under the name and its tokens aren't known here,
        and UnsupportedAttentionError if the server can't attend to rows of these shapes.
        """
        stage2 = self._on()
        media, ids = stage2.known(namespace)
        context = self._context(media)
        uniform_heads(context.slots)
        with self._link.operation(self._deadline_s(0)) as server:
            meta = server.ask("META", lambda client: client.prefix_meta(namespace), None)
            stored = context.stored_ids(meta)
            if stored is not None and ids is not None and not np.array_equal(stored, ids):
                stored = None
            target = Target(namespace, context, context.names(namespace, meta), meta)
            if stored is not None:
                stage2.attending.make_warm(server, target)
        known = stored if stored is not None else ids
        if known is None:
            msg = f"nothing that this model computed is stored under {namespace!r}: call get_or_prefill first"
            raise LookupError(msg)
        return RemotePrefix(self, target, known, stored is not None)

    # Parts

    def _on(self) -> Stage2:
        if self._stage2 is None:
            msg = "attention over stored prefixes needs PionPromptCache(model, stage2=True)"
            raise ValueError(msg)
        return self._stage2

    def _ask(self, namespace: Namespace, q: Any, question: Callable[[PionClient, Namespace], T]) -> T | None:
        stage2 = self._on()
        media, _ = stage2.known(namespace)
        context = self._context(media)
        check_width(q, context.slots)
        with self._link.operation(self._deadline_s(0)) as server:
            return stage2.attending.ask(server, Target(namespace, context), question)

    def _from_here(self, server: Operation, context: Context, name: Namespace, ids: TokenIds) -> list[Any] | None:
        """A prefix that is held here, if its name can stand for nothing else and the server, if any, has it too."""
        held = self._stage2.held.get(name, context.digest, ids) if self._stage2 is not None else None
        if self._stage2 is None or held is None or name != context.namespace(ids):
            return None
        # A server that has lost it is to get it again.
        if not server.ask("LOOKUP", lambda client: client.prefix_lookup(name, tokens=len(ids)), otherwise=True):
            return None
        self._stage2.attending.make_warm(server, Target(name, context, strict=True))
        self._counters.add(hits=1)
        return held.plain()

    def _make_ready(
        self,
        server: Operation,
        context: Context,
        name: Namespace,
        ids: TokenIds,
        media: Sequence[bytes],
        caches: list[Any],
        *,
        stored: bool,
    ) -> list[Any]:
        """After `get_or_prefill`: hold the prefix here, and have the server warm what it stores."""
        if self._stage2 is None:
            return caches
        self._stage2.remember(name, media, ids)
        self._stage2.held.keep(name, context.digest, ids, caches)
        if stored:
            self._stage2.attending.make_warm(server, Target(name, context, name == context.namespace(ids)))
        return caches


@attrs.frozen(eq=False)
class RemotePrefix:
    """A prefix on the server, for the caches of one generation. See `wire_cache.Remote`."""

    _pc: PrefixAttention
    _target: Target
    ids: TokenIds
    _stored: bool
    """The server had it when the generation began; else it isn't asked."""

    @property
    def tokens(self) -> int:
        """Rows of the prefix."""
        return len(self.ids)

    def attend(self, question: Callable[[PionClient, Namespace], T]) -> T | None:
        """See `wire_cache.Remote`."""
        pc = self._pc
        if not self._stored:
            return None
        with pc._link.operation(pc._deadline_s(0)) as server:
            return pc._on().attending.ask(server, self._target, question)

    def rows(self) -> list[Any]:
        """The prefix as mlx-lm caches: fetched, else computed."""
        pc, target = self._pc, self._target
        with pc._link.operation(pc._deadline_s(len(self.ids))) as server:
            found, _ = pc._finder.exact(server, target.context, target.namespace, self.ids, count=False)
        return found.caches if found is not None else prefill(pc._model, self.ids, step=pc._step)
