"""KV.PREFIX.SAVE: a snapshot when a client asks for it."""

from __future__ import annotations

from typing import Final

from pion.args import show
from pion.command import Arg, Command, Flag
from pion.context import Context
from pion.errors import CommandError
from pion.limits import INLINE_ARG_BYTES
from pion.replies import OK, Buffer, Reply

MEMORY_ONLY: Final = 'this server keeps everything in memory: start it with --dir (not "") to have snapshots'


async def save(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.SAVE [path].

    Cancellation: the old snapshot and the log stay as they were, or the new one is complete.
    """
    data = context.services.data
    if len(argv) > 2:
        raise CommandError("wrong number of arguments for 'kv.prefix.save' command")
    path: str | None = None
    if len(argv) == 2:
        if len(argv[1]) > INLINE_ARG_BYTES:
            raise CommandError(f"path must be at most {INLINE_ARG_BYTES} bytes long, got {len(argv[1])}")
        try:
            path = bytes(argv[1]).decode()
        except UnicodeDecodeError:
            raise CommandError(f"path must be UTF-8, got {show(argv[1])}") from None
    if data is None:
        raise CommandError(MEMORY_ONLY)
    await data.save(path)
    return OK


COMMANDS: Final = (
    Command(
        name="KV.PREFIX.SAVE",
        arity=-1,
        summary="Write a snapshot of all state, then remove the log that it covers",
        since="0.1.0",
        handler=save,
        flags=Flag.ADMIN,
        args=(
            Arg(
                name="path",
                optional=True,
                summary="a second name for the snapshot, relative to the data directory; for backups",
            ),
        ),
        reply="+OK once the snapshot is on the disk",
        complexity="O(bytes stored); other commands go on meanwhile",
        group="kvprefix",
        examples=("KV.PREFIX.SAVE", "KV.PREFIX.SAVE backup.safetensors"),
        errors=(
            "-ERR path must be relative and inside the data directory",
            "-MISCONF no snapshot could be written; the one before and the log stay as they were",
        ),
    ),
)
