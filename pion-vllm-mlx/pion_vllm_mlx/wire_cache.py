"""Caches whose prefix lies on the server: queries travel there, only the suffix is here.

Each call asks the server for the attention over the prefix, computes the attention over the suffix meanwhile, and
merges both. Nothing about a server that is away, slow or has forgotten may cost a generation: then the rows are fetched
once, or, if that fails too, computed from the token ids, and every layer goes on here.

Single queries could let the suffix travel and the server merge (QUERY_FUSED). Merging here is never slower: measured
per call at 9 query and 3 KV heads of 64 and 1,024 prefix rows, on both lanes, it took 0.8 to 0.97 of the time with up
to 32 rows of suffix and at most 0.85 with 64 to 512. The suffix is attended to here while the query is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask

from pion.client import PionClient
from pion_vllm_mlx.attention_calls import AttentionCache, Call, Original, SuffixMasks, check_call, refuse
from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.link import logger
from pion_vllm_mlx.merging import merge, suffix_attention
from pion_vllm_mlx.patching import patch_installed
from pion_vllm_mlx.sparse import SparseAuto


class Remote(Protocol):
    """What a wire cache asks for; `PionPromptCache` is behind it."""

    @property
    def tokens(self) -> int:
        """Rows of the prefix."""

    def attend(self, question: Callable[[PionClient, Namespace], Any]) -> Any | None:
        """The server's answer, or None when there is none. Every answer is of the rows that the prefix had."""

    def rows(self) -> list[Any]:
        """The prefix as mlx-lm caches, from wherever they can be had. May take as long as a prefill."""


class WirePrefix:
    """The prefix of one generation, shared by the caches of its layers."""

    def __init__(self, remote: Remote, tokens: int, sparse: SparseAuto | None) -> None:
        self.remote: Final = remote
        self.tokens: Final = tokens
        self.sparse: Final = sparse if sparse is not None and sparse.leaves_out(tokens) else None
        self.masks: Final = SuffixMasks()
        self._lock = threading.Lock()
        self._rows: list[Any] | None = None

    @property
    def local(self) -> bool:
        """The rows are here now; the server isn't asked any more."""
        return self._rows is not None

    def rows(self, layer: int) -> Any:
        """The cache of one layer's prefix rows, got once for all layers."""
        with self._lock:
            if self._rows is None:
                logger.warning("the prefix's rows are fetched, and attention goes on without the server")
                self._rows = self.remote.rows()
            return self._rows[layer]


class WireKVCache(AttentionCache, _BaseCache):
    """One layer: `offset` counts prefix and suffix, the arrays are the suffix's until the rows are here."""

    def __init__(self, prefix: WirePrefix, layer: int, suffix: Any = None) -> None:
        self._prefix = prefix
        self._layer = layer
        self._suffix: Any = KVCache() if suffix is None else suffix
        self._here: Any = None
        """A plain cache of everything, once the rows are here."""
        self._fetched: tuple[Any, Any] | None = None
        self._failed = False
        """A pass ended here with an exception: its rows are in this cache, and not in those of the layers behind."""

    @property
    def offset(self) -> int:
        """Tokens of the prefix and the suffix."""
        return int(self._here.offset if self._here is not None else self._prefix.tokens + self._suffix.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows; what comes back is for the patched attention function, and for nothing else."""
        if not patch_installed():
            msg = "the attention patch was removed; a cache whose prefix is on the server can't be used without it"
            raise RuntimeError(msg)
        if self._failed:
            msg = "a forward pass failed in the middle, so these caches don't agree any more: make new ones"
            raise RuntimeError(msg)
        if self._fetched is not None:
            refuse("a function of its own: the rows it took from the cache didn't reach scaled_dot_product_attention")
        if keys.shape[0] != 1:
            refuse(f"a batch of {keys.shape[0]} sequences; over a stored prefix it is one")
        self._fetched = (self._here or self._suffix).update_and_fetch(keys, values)
        return self._fetched

    def attend(self, original: Original, call: Call) -> mx.array:
        """See AttentionCache. Evaluates the queries and waits for the server; what it returns isn't evaluated.

        An exception makes the cache useless, as the rows of the pass are in some layers only.
        """
        self._failed = True
        output = self._attended(original, call)
        self._failed = False
        return output

    def _attended(self, original: Original, call: Call) -> mx.array:
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[0] is not call.keys or fetched[1] is not call.values:
            refuse("keys or values that it changed after taking them from the cache (a compressed form, say)")
        if self._here is not None:
            return original(call.queries, call.keys, call.values, None, call.scale, call.mask, sinks=call.sinks)
        check_call(call, self._prefix.tokens)
        mask = self._prefix.masks.of(call.mask, self._prefix.tokens)
        output = None if self._prefix.local else self._on_the_server(call, mask)
        if output is None:
            keys, values = self._bring_here().keys_and_values()
            return original(call.queries, keys, values, None, call.scale, call.mask)
        return output.astype(call.queries.dtype)

    def _bring_here(self) -> Any:
        """Go on with a plain cache of prefix and suffix; that cache."""
        here = KVCache()
        here.update_and_fetch(*self._prefix.rows(self._layer).keys_and_values())
        if self._suffix.offset:
            here.update_and_fetch(*self._suffix.keys_and_values())
        self._here, self._suffix = here, KVCache()
        return here

    def _on_the_server(self, call: Call, mask: Any) -> Any | None:
        _, heads, count, dim = call.queries.shape
        kv_heads = call.keys.shape[1]
        queries = call.queries.astype(mx.float32) * (call.scale * dim**0.5)  # the server's own scale is 1 / sqrt(D)
        sparse = self._prefix.sparse if count == 1 and not isinstance(mask, mx.array) else None
        if sparse is not None:
            return self._sparsely(queries, call, sparse)
        # Every query sees every row of the prefix, so the query heads of one KV head are more queries of that head.
        # With at least two the server sends the LSE.
        rows = queries.reshape(kv_heads, -1, dim)
        mx.eval(rows)
        output, lse = suffix_attention(call.queries, call.keys, call.values, call.scale, mask)
        mx.async_eval(output, lse)
        sent = np.asarray(rows)
        if sent.shape[1] == 1:
            sent = np.repeat(sent, 2, axis=1)
        answer = self._prefix.remote.attend(
            lambda client, session: client.attend_query(session, self._layer, sent, lse=True)
        )
        if answer is None:
            return None
        far, far_lse = (mx.array(part[:, : heads // kv_heads * count]) for part in answer)
        return merge(far.reshape(1, heads, count, dim), far_lse.reshape(1, heads, count, 1), output, lse)

    def _sparsely(self, queries: mx.array, call: Call, sparse: SparseAuto) -> Any | None:
        """One query over the best blocks. That answer has no LSE, so the suffix travels and the server merges."""
        heads, kv_heads = queries.shape[1], call.keys.shape[1]
        arrays = [part[0].astype(mx.float32) for part in (queries, call.keys, call.values)]
        mx.eval(arrays)
        query, keys, values = (np.ascontiguousarray(part) for part in arrays)
        head_map = np.repeat(np.arange(kv_heads, dtype=np.uint32), heads // kv_heads)

        def question(client: PionClient, session: Namespace) -> Any:
            return client.attend_query_sparse_auto_fused(
                session, self._layer, query, keys, values, head_map, block=sparse.block, top=sparse.top
            )

        answer = self._prefix.remote.attend(question)
        return None if answer is None else mx.array(answer).reshape(1, heads, 1, -1)

    # As mlx-lm's other caches

    def size(self) -> int:
        """Tokens of the prefix and the suffix."""
        return self.offset

    def empty(self) -> bool:
        """Never: there is a prefix."""
        return False

    def is_trimmable(self) -> bool:
        """It is; the prefix too, see `trim`."""
        return True

    def trim(self, n: int) -> int:
        """As KVCache. For a trim into the prefix its rows are fetched: mlx-lm doesn't look at how many tokens went."""
        if self._here is None and n > self._suffix.offset:
            self._bring_here()
        return int((self._here or self._suffix).trim(n))

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """As KVCache. Raises UnsupportedAttentionError for a sliding window."""
        window = kwargs.get("window_size")
        if window is not None and self._here is None:
            refuse(f"a sliding window of {window} tokens")
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    @property
    def state(self) -> Any:
        """The suffix's arrays, to be evaluated. Setting it is refused: a prefix on the server is no state."""
        held = self._here or self._suffix
        return [] if held.keys is None else [held.keys, held.values]

    @state.setter
    def state(self, _value: Any) -> None:
        msg = "a cache whose prefix is on a server can't be restored from a state: make it with make_pion_prompt_cache"
        raise TypeError(msg)

    @property
    def nbytes(self) -> int:
        """Memory of this process."""
        return int((self._here or self._suffix).nbytes)

    def __copy__(self) -> WireKVCache:
        """As a deep copy: two caches that write the same suffix would be of no use."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> WireKVCache:
        """Another suffix behind the same prefix, which all copies share, and its rows once they are here.

        A copy made in the middle of a pass, or after one that failed there, is as useless as the original.
        """
        held = self._here or self._suffix
        plain = KVCache()
        plain.offset = held.offset
        if held.keys is not None:
            plain.keys, plain.values = held.keys[:], held.values[:]
        copied = WireKVCache(self._prefix, self._layer, KVCache() if self._here is not None else plain)
        copied._here = plain if self._here is not None else None
        copied._failed = self._failed or self._fetched is not None
        return copied
