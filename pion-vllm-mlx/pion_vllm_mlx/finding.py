"""Finding what is stored and restoring it.

A name is only a hint: META decides whether what is under it was computed from these tokens in this context.
"""

from __future__ import annotations

import time
from typing import Any

import attrs

from pion_vllm_mlx import transfer
from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.link import Operation, logger, unless_refused
from pion_vllm_mlx.prefix_key import BLOCK_TOKENS, Context, TokenIds
from pion_vllm_mlx.statistics import Counters


@attrs.frozen
class Found:
    """A stored prefix that was restored: caches of exactly `tokens` tokens, and the namespace they came from."""

    namespace: Namespace
    tokens: int
    caches: list[Any]
    strict: bool
    """The name is derived from the content, so it never stands for anything else."""


class Finder:
    """Exact and longest matches. Thread-safe; counts what it restores and what it must leave alone."""

    def __init__(self, counters: Counters, *, longest_match: bool) -> None:
        self._counters = counters
        self._longest_match = longest_match

    def exact(
        self, server: Operation, context: Context, name: Namespace, ids: TokenIds, *, count: bool = True
    ) -> tuple[Found | None, bool]:
        """(the prefix stored under this name, whether something else is). A hit is counted once it is restored."""
        meta = server.ask("META", lambda client: client.prefix_meta(name), None)
        common = context.common_tokens(meta, ids)
        if common == len(ids):
            return self._restored(server, context, name, len(ids), meta, count=count), False
        if not count:
            return None, False
        # Tells the server about the miss. A hit is a prefix that is there, but not ours to use.
        there = server.ask("LOOKUP", lambda client: client.prefix_lookup(name, tokens=0), otherwise=False)
        if there:
            self._counters.add(mismatches=1)
            logger.warning(
                "namespace %r holds something else: other tokens, or the same computed with another model or adapter "
                "(weights, adapter_path), another tokenizer or none given, another format (vquant, boundary_protect) "
                "or other media. It is left alone and not used. Give every process the same arguments, or use another "
                "name, or drop this one",
                name,
            )
        return None, there

    def match(self, server: Operation, context: Context, ids: TokenIds) -> Found | None:
        """The longest stored prefix of these tokens, in whole blocks."""
        hashes = context.block_hashes(ids)
        if not len(hashes) or not self._longest_match:
            return None
        match = server.ask("MATCH", lambda client: client.prefix_match(hashes, size=BLOCK_TOKENS), None)
        if match is None:
            return None
        meta = server.ask("META", lambda client: client.prefix_meta(match.namespace), None)
        # The hashes only nominate; the token ids decide.
        common = min(context.common_tokens(meta, ids), match.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        return self._restored(server, context, match.namespace, common, meta) if common else None

    def _restored(
        self,
        server: Operation,
        context: Context,
        name: Namespace,
        tokens: int,
        meta: bytes | None,
        *,
        count: bool = True,
    ) -> Found | None:
        """Fetch what has this META; None when it isn't there any more, or not in the expected shape."""
        start = time.perf_counter()
        fetched = unless_refused("FETCH", lambda client: transfer.fetch(client, name, context, tokens), None)
        result = server.ask("FETCH", fetched, None)
        if result is None:
            return None
        caches, nbytes = result
        elapsed_ms = (time.perf_counter() - start) * 1000
        # The LOOKUP comes after the fetch, so that the receipt counts what was really restored.
        if context.names(name, meta):
            strict = True
            if count:
                server.ask("LOOKUP", lambda client: client.prefix_lookup(name, tokens=tokens), otherwise=False)
        else:
            strict = False
            # Another client may have dropped the name and stored something else under it between META and FETCH.
            questions = [("KV.PREFIX.META", name), ("KV.PREFIX.LOOKUP", name, "TOKENS", tokens)][: 1 + count]
            replies = server.ask("META", lambda client: transfer.answers(client, questions), [])
            if replies[:1] != [meta]:
                logger.info("prefix %r was replaced while it was being fetched; not used", name)
                return None
        self._counters.add(fetch_ms_total=elapsed_ms, bytes_fetched=nbytes, tokens_restored=tokens)
        return Found(name, tokens, caches, strict)

    def parent(self, server: Operation, found: Found) -> tuple[Namespace, int] | None:
        """The segment to continue, and where. None, so that all is stored, for a name of somebody's own.

        That one may come to stand for something else before we continue it.
        """
        chain = server.ask("CHAIN", lambda client: client.prefix_chain(found.namespace), None) if found.strict else None
        if chain is None:
            return None
        # What was found may have ended long before: segments whose rows we don't use shouldn't be kept for us.
        while len(chain) > 1 and chain[-1].offset >= found.tokens:
            chain.pop()
        return chain[-1].namespace, found.tokens
