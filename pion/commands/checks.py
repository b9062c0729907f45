"""Checks and errors that the connection and server commands share, in Redis's words."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import trio

from pion.args import MAX_NAME_BYTES, word
from pion.context import Context
from pion.errors import CommandError
from pion.limits import MAX_NAMES_PER_CALL, MAX_PATTERN_BYTES, TURN_NS
from pion.replies import Buffer


def wrong_arity(command: str) -> CommandError:
    """For a command whose arity alone can't tell, such as PING with none or one argument."""
    return CommandError(f"wrong number of arguments for '{command}' command")


def syntax_error() -> CommandError:
    """Redis's error for an option that is not one; clients match it."""
    return CommandError("syntax error")


def switch(value: Buffer) -> bool:
    """ON or OFF."""
    found = word(value)
    if found not in (b"ON", b"OFF"):
        raise syntax_error()
    return found == b"ON"


def label(value: Buffer, what: str) -> bytes:
    """A client's name or attribute: printable ASCII without blanks, so that a line of CLIENT LIST stays readable."""
    if len(value) > MAX_NAME_BYTES:
        raise CommandError(f"{what} can be at most {MAX_NAME_BYTES} bytes long, got {len(value)}")
    text = bytes(value)
    if any(not 33 <= byte <= 126 for byte in text):
        raise CommandError(f"{what} cannot contain spaces, newlines or special characters.")
    return text


def refuse_in_transaction(context: Context) -> None:
    """For commands that can't wait for EXEC; as in Redis, the transaction is then lost."""
    transaction = context.session.transaction
    if transaction is not None:
        transaction.failed = True
        raise CommandError("Command not allowed inside a transaction")


def refuse_too_many(args: Sequence[Buffer], what: str) -> None:
    """Bound the work of one call that looks at each of its arguments."""
    if len(args) > MAX_NAMES_PER_CALL:
        raise CommandError(f"at most {MAX_NAMES_PER_CALL} {what} in one call, got {len(args)}")


def pattern_text(pattern: Buffer) -> bytes:
    """A glob's text, if it isn't longer than any name."""
    if len(pattern) > MAX_PATTERN_BYTES:
        raise CommandError(f"a pattern can be at most {MAX_PATTERN_BYTES} bytes long, got {len(pattern)}")
    return bytes(pattern)


class Turn:
    """For a command that looks at many things: `await turn.pause()` between two of them lets other connections run,
    once a turn's time is over. Cancellation: at a pause.
    """

    __slots__ = ("_end_ns",)

    def __init__(self) -> None:
        self._end_ns = perf_counter_ns() + TURN_NS

    async def pause(self) -> None:
        """Let others run if it is their turn."""
        if perf_counter_ns() > self._end_ns:
            await trio.lowlevel.checkpoint()
            self._end_ns = perf_counter_ns() + TURN_NS
