"""Work for a client that may leave before it is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from pion.context import Context
from pion.errors import CommandError

T = TypeVar("T")


async def unless_left(context: Context, function: Callable[[], Awaitable[T]]) -> T:
    """What an async function returns. If its client stops sending first, it is cancelled and this raises CommandError.

    Else clients that give up and ask again would fill a queue with what nobody wants. Watching costs some 50 us, so it
    is for what may take long. Raises what the function raises. Cancellation: the function is cancelled.
    """
    peer_left = context.session.peer_left
    if peer_left is None:
        return await function()
    found: T | Exception = CommandError("the client stopped sending while its query waited")
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await peer_left()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            found = await function()
        except Exception as error:  # whatever it is, not in a group
            found = error
        nursery.cancel_scope.cancel()
    if isinstance(found, Exception):
        try:
            raise found
        finally:
            del found  # its traceback holds this frame, and what the function had
    return found
