"""Checks and errors that the connection and server commands share, in Redis's words."""

from __future__ import annotations

from pion.args import MAX_NAME_BYTES, word
from pion.context import Context
from pion.errors import CommandError
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
