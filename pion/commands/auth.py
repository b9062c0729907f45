"""Checking a password: what AUTH and HELLO share."""

from __future__ import annotations

import hashlib
import hmac

from pion.context import Context
from pion.errors import WrongPassError
from pion.replies import Buffer

DEFAULT_USER = "default"


def log_in(context: Context, user: Buffer, password: Buffer) -> None:
    """Authenticate the session or raise `WrongPassError`, which leaves it as it was.

    Without a configured password the default user takes any, as in Redis: clients that were given one still connect.
    """
    wanted = context.services.config.requirepass
    known = bytes(user[:64]) == DEFAULT_USER.encode() and len(user) == len(DEFAULT_USER)
    if not known or (wanted and not _same(password, wanted)):
        raise WrongPassError("invalid username-password pair or user is disabled.")
    context.session.authenticated = True
    context.session.user = DEFAULT_USER


def _same(given: Buffer, wanted: str) -> bool:
    """Compare digests: then the time tells neither the length nor the common prefix of the password."""
    return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(wanted.encode()).digest())
