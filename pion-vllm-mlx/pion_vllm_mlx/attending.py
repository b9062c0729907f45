"""Attention on the server, as `PionPromptCache` asks for it: warming, one retry, counting.

A prefix is warmed into a *session*, and a forward pass asks that session layer by layer. All its answers must be of the
same rows, also if somebody drops the prefix between two layers and stores another one under its name:

- A strict name is derived from what the rows depend on, so it never stands for other rows. Its session is shared by all
  clients.
- A name of one's own may come to stand for anything, so its session has a random name, a new one each time it is
  warmed, which nobody else knows or warms. It is asked only after META, read behind the WARM, was what is meant. The
  server gathers the layers of a WARM at one moment, so the session holds the rows of one prefix. Had that been another
  one, it was replaced before META was read, and registering a name drops the sessions made of what it stood for. So
  what answers under such a name is what is meant; else nothing does, and that is an error, never other rows.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import numpy as np

from pion.client import PionClient
from pion.client.errors import (
    ColdMissError,
    ConnectFailedError,
    NotAuthenticatedError,
    PionClientError,
    ServerError,
    WrongPasswordError,
)
from pion.commands.attend_arguments import HEAD_DIM_MAX, HEAD_DIM_STEP
from pion_vllm_mlx.attention_calls import UnsupportedAttentionError
from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.link import Operation, logger
from pion_vllm_mlx.prefix_key import Context
from pion_vllm_mlx.slots import SlotShape

T = TypeVar("T")

SUFFIX: Final = "_attn"
"""What the seed appends to a namespace for the rows that attention reads."""

RANDOM_BYTES: Final = 16
"""In the name of a session that is not shared."""

KNOWN_SESSIONS: Final = 256
"""Names of one's own whose session is remembered. One that is forgotten is warmed anew."""

NOT_FOUND: Final = ServerError("session not found")
"""The server's error about a layer that attention knows nothing of, after a restart or when it was dropped. It is the
same on both lanes; the server keeps the text as it is for clients that compare it."""

NOT_SENT: Final = (ConnectFailedError, WrongPasswordError, NotAuthenticatedError)
"""Errors that come before a question is sent."""


def attention_session(namespace: Namespace) -> Namespace:
    """The session that holds the rows of a strict name for attention, shared by all clients."""
    return _joined(namespace, SUFFIX)


def uniform_heads(slots: Sequence[SlotShape]) -> tuple[int, int]:
    """(KV heads, width of a head) of all layers.

    Raises UnsupportedAttentionError if they differ among themselves, or if the server has no attention of that width.
    """
    shapes = {side for slot in slots for side in (slot.keys, slot.values)}
    if len(shapes) != 1:
        described = ", ".join(sorted(f"{side.heads} x {side.head_dim}" for side in shapes))
        msg = f"the model's layers have keys and values of several shapes ({described}): the server warms one"
        raise UnsupportedAttentionError(msg)
    (side,) = shapes
    if side.head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= side.head_dim <= HEAD_DIM_MAX:
        msg = (
            f"the model's heads are {side.head_dim} wide (head_dim): the server attends to heads of a multiple of "
            f"{HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )
        raise UnsupportedAttentionError(msg)
    return side.heads, side.head_dim


def check_width(q: Any, slots: Sequence[SlotShape]) -> None:
    """Raise ValueError for queries of another width than the model's heads; UnsupportedAttentionError as above."""
    _, head_dim = uniform_heads(slots)
    shape = np.shape(q)
    if shape[-1:] != (head_dim,):
        msg = f"the last axis of q must be the width of the model's heads, {head_dim}; q has the shape {shape}"
        raise ValueError(msg)


@attrs.frozen
class Target:
    """A stored prefix to attend to."""

    namespace: Namespace
    context: Context
    strict: bool = False
    """The name is known to be derived from the content, so it never stands for anything else."""
    meta: bytes | None = None
    """What a name of one's own must stand for; None: whatever it does."""


@attrs.frozen
class _Session:
    """A session, and for a name of one's own the META of what it holds."""

    name: Namespace
    meta: bytes | None = None


@attrs.define(eq=False)
class _Place:
    """The session of one name of one's own."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while it is warmed: threads that find it cold together warm it once."""
    session: _Session | None = None


class Attending:
    """Asks one server for attention over prefixes that it stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[Namespace, _Place] = OrderedDict()
        self.calls = 0
        """Questions about attention that were sent; one that is sent again after warming is two."""
        self.rehydrates = 0
        """How often a question found its rows cold, or missing after a restart, and they were warmed."""

    def is_warm(self, client: PionClient, namespace: Namespace, slots: Sequence[SlotShape]) -> bool:
        """Whether the first and the last layer are ready to be asked; those between age together with them."""
        own = self._own(namespace)
        return _is_warm(client, own.name if own is not None else attention_session(namespace), slots)

    def make_warm(self, server: Operation, target: Target) -> bool:
        """Warm unless it is; whether attention can be asked for. With fallback a failure is a warning and False."""
        namespace, slots = target.namespace, target.context.slots
        try:
            uniform_heads(slots)
        except UnsupportedAttentionError as error:
            logger.info("not warmed: %s", error)
            return False

        def ready(client: PionClient) -> bool:
            if target.strict:
                if _is_warm(client, attention_session(namespace), slots):
                    return True
                if client.prefix_chain(namespace) is None:
                    return False  # nothing complete is stored there
                _warm(client, namespace, slots, attention_session(namespace))
                return True
            meta = client.prefix_meta(namespace) if target.meta is None else target.meta
            if meta is None:
                return False
            own = self._own(namespace)
            if own is None or own.meta != meta or not _is_warm(client, own.name, slots):
                self._warm_own(client, namespace, slots, meta, own)
            return True

        return server.ask("WARM", ready, otherwise=False)

    def ask(self, server: Operation, target: Target, question: Callable[[PionClient, Namespace], T]) -> T | None:
        """The answer to a question about a session; None when there is none and `Link` may go on without.

        Cold or missing rows are warmed and the question is asked once more. A prefix that is not there, or not the one
        that is meant, is a ServerError as any other.
        """

        def asked(client: PionClient) -> T:
            session = self._session(target)
            if session is not None:
                try:
                    return self._put(client, session, question)
                except ServerError as error:
                    if not _needs_warming(error):
                        raise
                    logger.info("%r: %s; warming it", target.namespace, error)
            answer = self._put(client, self._warmed(client, target, session), question)
            with self._lock:
                self.rehydrates += 1
            return answer

        return server.ask("ATTEND", asked, None)

    # Parts

    def _put(self, client: PionClient, session: _Session, question: Callable[[PionClient, Namespace], T]) -> T:
        try:
            answer = question(client, session.name)
        except PionClientError as error:
            self._count(sent=not isinstance(error, NOT_SENT))
            raise
        self._count(sent=True)
        return answer

    def _count(self, *, sent: bool) -> None:
        with self._lock:
            self.calls += sent

    def _session(self, target: Target) -> _Session | None:
        """The session to ask; None if one has to be warmed first."""
        shared = _Session(attention_session(target.namespace))
        if target.strict:
            return shared
        own = self._own(target.namespace)
        if target.meta is None:
            return own if own is not None else shared
        return own if own is not None and own.meta == target.meta else None

    def _own(self, namespace: Namespace) -> _Session | None:
        with self._lock:
            place = self._places.get(namespace)
            if place is None:
                return None
            self._places.move_to_end(namespace)
            return place.session

    def _warmed(self, client: PionClient, target: Target, spent: _Session | None) -> _Session:
        """A session that is warm, after `spent` was found not to be."""
        namespace, slots = target.namespace, target.context.slots
        strict, meta = target.strict, target.meta
        if not strict and meta is None:
            meta = client.prefix_meta(namespace)
            strict = target.context.names(namespace, meta)
        if not strict:
            return self._warm_own(client, namespace, slots, meta, spent)
        shared = _Session(attention_session(namespace))
        _warm(client, namespace, slots, shared.name)
        return shared

    def _warm_own(
        self,
        client: PionClient,
        namespace: Namespace,
        slots: Sequence[SlotShape],
        meta: bytes | None,
        spent: _Session | None,
    ) -> _Session:
        """A session of the prefix with this META, in place of `spent`. Raises ServerError if the name has another."""
        place = self._place(namespace)
        with place.lock:
            old = place.session
            if old is not None and old.meta == meta and old is not spent:
                return old  # another thread was here before
            session = _Session(_joined(namespace, f"{SUFFIX}|{secrets.token_hex(RANDOM_BYTES)}"), meta)
            _check_meta(client, namespace, meta)  # before all of something else is loaded
            try:
                _warm(client, namespace, slots, session.name)
                _check_meta(client, namespace, meta)
            except ServerError:
                _drop(client, session)
                raise
            place.session = session
        if old is not None:
            _drop(client, old)
        return session

    def _place(self, namespace: Namespace) -> _Place:
        with self._lock:
            place = self._places.setdefault(namespace, _Place())
            self._places.move_to_end(namespace)
            if len(self._places) > KNOWN_SESSIONS:
                self._places.popitem(last=False)
            return place


def _warm(client: PionClient, namespace: Namespace, slots: Sequence[SlotShape], session: Namespace) -> None:
    """Make the server load the rows of every layer. Raises ServerError, also if it leaves one out."""
    heads, head_dim = uniform_heads(slots)
    layers, skipped = client.prefix_warm(namespace, heads, head_dim, sid=session)
    if layers != len(slots) or skipped:
        msg = f"KV.PREFIX.WARM loaded {layers} layers of {len(slots)} and skipped {skipped}"
        raise ServerError(msg)


def _is_warm(client: PionClient, session: Namespace, slots: Sequence[SlotShape]) -> bool:
    return all(client.attend_lookup(session, layer) == "warm" for layer in sorted({0, len(slots) - 1}))


def _check_meta(client: PionClient, namespace: Namespace, meta: bytes | None) -> None:
    if client.prefix_meta(namespace) != meta:
        msg = f"the prefix {namespace!r} was dropped or replaced meanwhile"
        raise ServerError(msg)


def _drop(client: PionClient, session: _Session) -> None:
    """Give its memory back. What the server refuses to drop becomes cold by itself."""
    try:
        client.attend_drop(session.name)
    except ServerError as error:
        logger.info("%r was not dropped: %s", session.name, error)


def _needs_warming(error: ServerError) -> bool:
    return isinstance(error, ColdMissError) or error == NOT_FOUND


def _joined(namespace: Namespace, suffix: str) -> Namespace:
    return namespace + suffix.encode() if isinstance(namespace, bytes) else namespace + suffix
