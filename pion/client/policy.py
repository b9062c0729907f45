"""What may be tried again and how failures are named; pure, and the same for both clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pion.client.errors import (
    BusyError,
    ConnectFailedError,
    ConnectionLostError,
    ExistsError,
    OutcomeUnknownError,
    PionClientError,
    ServerError,
    TransportError,
)
from pion.client.records import Stored
from pion.client.requests import Call, Request
from pion.client.settings import Settings

T = TypeVar("T")


def converted(request: Call[T], reply: object) -> T:
    """The result of a reply. Raises the server's error, or `BadReplyError`."""
    if isinstance(reply, ServerError):
        raise reply
    return request.convert(reply)


def pause_before_connecting(error: PionClientError, attempt: int, settings: Settings) -> float:
    """Seconds to wait before connecting again, or raises `error`.

    Nothing of the request was sent, so it doesn't matter whether it reads or writes. A server that refuses (a wrong
    password) or is silent will do so again.
    """
    if not isinstance(error, ConnectFailedError | ConnectionLostError) or attempt >= settings.retries:
        raise error
    return settings.pause_s(attempt)


def pause_before_repeating(request: Call[Any], error: TransportError, attempt: int, settings: Settings) -> float:
    """Seconds to wait before sending the request again, or raises what the caller is told."""
    if not request.reads:
        raise outcome_unknown(request.name, error) from error
    # Silence and nonsense are not a lost connection: asking again only adds to the server's work.
    if not isinstance(error, ConnectionLostError) or not request.repeatable or attempt >= settings.retries:
        raise error
    return settings.pause_s(attempt)


def outcome_unknown(name: str, error: TransportError) -> OutcomeUnknownError:
    """For a write that was sent and not answered; raise it from `error`."""
    return OutcomeUnknownError(f"{name} was sent but not answered; it may or may not have been applied: {error}")


def stored(stores: Sequence[Request[None]], replies: Sequence[object]) -> Stored:
    """The end of `store_prefix`. Raises the first error, except that a complete prefix is no failure."""
    try:
        # Fewer replies than stores: the rest was not sent after the first error.
        for request, reply in zip(stores, replies, strict=False):
            converted(request, reply)
    except ExistsError:
        return Stored.EXISTS
    return Stored.STORED


def leaves_half_a_prefix(error: ServerError) -> bool:
    """After this error of a store, the half-filled prefix is still this connection's, and must be dropped."""
    return not isinstance(error, BusyError)


def no_binary_lane(settings: Settings) -> ConnectFailedError:
    """The server says that it has none, or none that is safe to use."""
    return ConnectFailedError(
        f"the server at {settings.where} has no binary lane, or listens on another port than this one"
    )
