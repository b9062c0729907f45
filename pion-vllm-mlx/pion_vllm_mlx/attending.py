"""Attention on the server, as `PionPromptCache` asks for it: warming, one retry, counting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from pion.client import PionClient
from pion.client.errors import ColdMissError, ServerError
from pion_vllm_mlx.attention_calls import UnsupportedAttentionError
from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.link import ALWAYS_ERRORS, Operation, logger
from pion_vllm_mlx.slots import SlotShape

T = TypeVar("T")

SUFFIX = "_attn"
"""What the seed appends to a namespace for the rows that attention reads."""

MISSING = "not found"
"""In the server's text about a session that attention knows nothing of: after a restart, or dropped."""


def attention_session(namespace: Namespace) -> Namespace:
    """The session that holds a namespace's rows for attention."""
    return namespace + SUFFIX.encode() if isinstance(namespace, bytes) else namespace + SUFFIX


def uniform_heads(slots: Sequence[SlotShape]) -> tuple[int, int]:
    """(KV heads, width of a head) of all layers. Raises UnsupportedAttentionError if they differ among themselves."""
    shapes = {side for slot in slots for side in (slot.keys, slot.values)}
    if len(shapes) != 1:
        described = ", ".join(sorted(f"{side.heads} x {side.head_dim}" for side in shapes))
        msg = f"the model's layers have keys and values of several shapes ({described}): the server warms one"
        raise UnsupportedAttentionError(msg)
    (side,) = shapes
    return side.heads, side.head_dim


class Attending:
    """Asks one server for attention over prefixes that it stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        """Questions about attention that were sent, retries not counted."""
        self.rehydrates = 0
        """How often a question found its rows cold, or missing after a restart, and they were warmed."""

    def is_warm(self, client: PionClient, namespace: Namespace, slots: Sequence[SlotShape]) -> bool:
        """Whether the first and the last layer are ready to be asked; those between age together with them."""
        layers = sorted({0, len(slots) - 1})
        return all(client.attend_lookup(attention_session(namespace), layer) == "warm" for layer in layers)

    def warm(self, client: PionClient, namespace: Namespace, slots: Sequence[SlotShape]) -> None:
        """Make the server load the rows of every layer. Raises ServerError, also if it leaves one out."""
        heads, head_dim = uniform_heads(slots)
        layers, skipped = client.prefix_warm(namespace, heads, head_dim, sid=attention_session(namespace))
        if layers != len(slots) or skipped:
            msg = f"KV.PREFIX.WARM loaded {layers} layers of {len(slots)} and skipped {skipped}"
            raise ServerError(msg)

    def make_warm(
        self, server: Operation, namespace: Namespace, slots: Sequence[SlotShape], *, anew: bool = False
    ) -> bool:
        """Warm unless it is; whether attention can be asked for. With fallback a failure is a warning and False.

        `anew`: even if it is warm. What was evicted from the store stays warm; under a name that stands for something
        else by now, that would be other rows.
        """
        try:
            uniform_heads(slots)
        except UnsupportedAttentionError as error:
            logger.info("not warmed: %s", error)
            return False

        def ready(client: PionClient) -> bool:
            if not anew and self.is_warm(client, namespace, slots):
                return True
            if client.prefix_chain(namespace) is None:
                return False  # nothing complete is stored there
            self.warm(client, namespace, slots)
            return True

        return server.ask("WARM", ready, otherwise=False)

    def ask(
        self,
        server: Operation,
        namespace: Namespace,
        slots: Sequence[SlotShape],
        question: Callable[[PionClient, Namespace], T],
        *,
        rows: Callable[[PionClient], None] | None = None,
    ) -> T | None:
        """The answer to a question about a session; None when there is none and `Link` may go on without.

        Cold or missing rows are warmed and the question is asked once more. `rows` is called after warming, and raises
        ServerError if what was warmed is not what the caller means.
        """
        session = attention_session(namespace)

        def asked(client: PionClient) -> T:
            try:
                return question(client, session)
            except ServerError as error:
                if isinstance(error, ALWAYS_ERRORS) or not _needs_warming(error):
                    raise
                logger.info("%r: %s; warming it", namespace, error)
            self.warm(client, namespace, slots)
            if rows is not None:
                rows(client)
            answer = question(client, session)
            with self._lock:
                self.rehydrates += 1
            return answer

        with self._lock:
            self.calls += 1
        return server.ask("ATTEND", asked, None)


def _needs_warming(error: ServerError) -> bool:
    return isinstance(error, ColdMissError) or MISSING in str(error)
