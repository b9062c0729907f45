"""`PionPromptCache`: the prompt cache of an mlx-lm model, kept in a Pion server."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from pion.client import PionClient
from pion.client.errors import PionClientError, ServerError
from pion.client.records import LaneChoice
from pion_vllm_mlx import transfer
from pion_vllm_mlx.claims import Claim, Namespace, Plan, claim, register
from pion_vllm_mlx.finding import Finder, Found
from pion_vllm_mlx.fingerprint import Fingerprint, Identity, tokenizer_fingerprint
from pion_vllm_mlx.inproc import HELD_BYTES
from pion_vllm_mlx.link import Link, Operation, logger, unless_refused
from pion_vllm_mlx.prefill import PREFILL_STEP, Progress, Watched, prefill
from pion_vllm_mlx.prefix_key import BLOCK_TOKENS, Context, Layout, TokenIds, token_ids
from pion_vllm_mlx.slots import SlotShape, probe
from pion_vllm_mlx.stage2 import PrefixAttention, Stage2
from pion_vllm_mlx.statistics import Counters
from pion_vllm_mlx.threads import release_at_thread_end

MIN_SEGMENT_TOKENS: Final = 64
"""`prepare_prompt` stores what it computed only from this many tokens on: each segment takes two sessions of the
server, and a short one saves less than it costs."""

TRIAL_TOKENS: Final = 32
"""Tokens evaluated to estimate the prefill time of a model that this instance has not run yet."""

LABEL_TOKENS: Final = 24
"""How much of the text the label in META shows."""

LONGEST_WAIT_MS: Final = 600_000
"""The server's own default limit for one WAIT, which it refuses to exceed."""


class PionPromptCache(PrefixAttention):
    """Fetches the prefix of a prompt from a Pion server, or computes it and stores it for everyone else.

        pc = PionPromptCache(model, tokenizer=tokenizer)
        caches, rest = pc.prepare_prompt(prompt_ids)
        generate(model, tokenizer, prompt=rest, prompt_cache=caches)

    Args:
        model: an mlx-lm model. Each entry of its cache must be a class that `slots.py` knows; today that is `KVCache`.
        tokenizer: its tokenizer. Goes into the strict namespace, and gives stored prefixes a readable label.
        vquant: the stored format. "native" keeps the model's own element type: what comes back is bit-identical. Any
            other name ("fp16", "int8", ...) is a format of the server, which converts.
        boundary_protect: with N > 0, K and the first and last N layers of V are stored as fp16, the rest as `vquant`.
            Ignored with "native".
        stage2: attention where the rows are, see `mlx_lm_patch.py`: what is fetched or stored is made ready for
            attention on the server, and `lookup` asks for that too.
        inproc: with stage2, hold what `get_or_prefill` returned, and attend to it without the server.
        inproc_bytes: the budget for that; the least recently used prefix is let go first.
        host, port, unix, tls, username, password, timeout_s, lane: as for `pion.client.PionClient`.
        fallback: go on without the server when it is away, slow or full; `stats()["fallbacks"]` counts that. Without it
            the client's error is raised. A refused password is an error in both cases.
        adapter_path: names the adapter in the strict namespace, beside its content, which is always in it.
        prefill_step: tokens of one forward pass.
        longest_match: look for a stored prefix of the text when the exact one isn't there.

    Thread-safe. Arrays that are returned are evaluated, so another thread may use them. A thread of yours that uses MLX
    and never calls this class should call `release_at_thread_end()`, see `threads.py`. The model may be changed between
    calls (another element type, another adapter); that gives other names. Raises `slots.UnsupportedCacheError` for a
    model whose cache it can't keep, and ValueError for arguments that can't work, an unknown format among them.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        vquant: str = "native",
        boundary_protect: int = 0,
        stage2: bool = False,
        inproc: bool = True,
        inproc_bytes: int = HELD_BYTES,
        host: str = "127.0.0.1",
        port: int = 1974,
        unix: str | None = None,
        tls: Any = None,
        username: str | None = None,
        password: str | None = None,
        timeout_s: float | None = 30,
        lane: LaneChoice = "auto",
        fallback: bool = True,
        adapter_path: str | None = None,
        prefill_step: int = PREFILL_STEP,
        longest_match: bool = True,
    ) -> None:
        if boundary_protect < 0 or prefill_step < 1:
            msg = "boundary_protect must be 0 or more, prefill_step 1 or more"
            raise ValueError(msg)
        self._model = model
        self._tokenizer = tokenizer
        self._vquant = vquant
        self._boundary_protect = boundary_protect
        self._fingerprint = Fingerprint(model)
        self._lock = threading.Lock()
        self._probed: tuple[Identity, tuple[SlotShape, ...], Layout] | None = None
        self._tokenizer_hash = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        self._adapter_path = None if adapter_path is None else str(adapter_path)
        self._step = prefill_step
        self._stage2 = Stage2(inproc_bytes if inproc else 0) if stage2 else None
        self._timeout_s = timeout_s
        self._counters = Counters()
        self._finder = Finder(self._counters, longest_match=longest_match)
        self._ms_per_token: float | None = None
        settings = {
            "host": host, "port": port, "unix": unix, "tls": tls,
            "username": username, "password": password, "timeout_s": timeout_s, "lane": lane,
        }  # fmt: skip
        self._link = Link(settings, fallback=fallback)
        self._context()  # now, while the model has just been loaded, rather than in the first answer

    def __enter__(self) -> PionPromptCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server. Later calls open new ones."""
        self._link.close()

    def get_or_prefill(
        self,
        ids: Sequence[int] | Any,
        namespace: Namespace | None = None,
        *,
        media: Sequence[bytes] = (),
        progress: Progress | None = None,
    ) -> list[Any]:
        """Caches, in mlx-lm's order, that hold exactly `len(ids)` tokens: fetched if stored, else computed and stored.

        Args:
            ids: token ids, at least one.
            namespace: where the prefix is stored. None derives a strict name from the model and the ids; if that isn't
                stored, the longest stored beginning is fetched and only the rest is computed, and stored as a segment
                that continues it. A name of one's own stands for itself: all is computed and stored under it. What is
                found under it is used only if it was computed from these tokens by this very model, tokenizer and
                format; anything else counts as a mismatch and is left alone.
            media: digests of the images and sounds that the placeholder tokens stand for, in order.
            progress: called with (tokens done, tokens in all) before and after each step of a prefill. An exception
                that it raises cancels: nothing is stored.

        Each call returns caches of its own; changing them changes nothing stored.
        """
        wanted = token_ids(ids)
        context = self._context(media)
        name = context.namespace(wanted) if namespace is None else namespace
        with self._link.operation(self._deadline_s(len(wanted))) as server:
            if (caches := self._from_here(server, context, name, wanted)) is not None:
                return caches
            found, mismatch = self._finder.exact(server, context, name, wanted)
            if found is not None:
                self._counters.add(hits=1)
                caches = found.caches
            else:
                found = self._finder.match(server, context, wanted) if namespace is None else None
                caches = self._complete(
                    server, context, name, wanted, found, store=not mismatch, looked_up=True, progress=progress
                )
            return self._make_ready(server, context, name, wanted, media, caches, stored=not mismatch)

    def prepare_prompt(
        self, ids: Sequence[int] | Any, *, media: Sequence[bytes] = (), progress: Progress | None = None
    ) -> tuple[list[Any], list[int]]:
        """(caches, rest): the caches hold the beginning of the prompt, `rest` are the tokens still to be evaluated.

        The longest stored prefix is fetched. What follows it is computed up to the last full block and stored, as a
        segment that continues what was found; text shorter than a segment is left in `rest`. `rest` has at least one
        token, because a model needs one to answer: hand both to mlx-lm's `generate`. A call that computes all and one
        that finds exactly that split the prompt at the same token: after an exact match vquant="native" gives the same
        bits. After a shorter match they are those of a prefill that was split where the match ends.
        """
        wanted = token_ids(ids)
        boundary = (len(wanted) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        head = wanted[:boundary]
        context = self._context(media)
        with self._link.operation(self._deadline_s(len(wanted))) as server:
            found = self._finder.match(server, context, head) if boundary else None
            have = found.tokens if found is not None else 0
            if boundary - have >= MIN_SEGMENT_TOKENS:
                name = context.namespace(head)
                caches = self._complete(
                    server, context, name, head, found, store=True, looked_up=False, progress=progress
                )
                return caches, wanted[boundary:].tolist()
        if found is None:
            self._counters.add(misses=1)
            return prefill(self._model, wanted[:0]), wanted.tolist()
        self._counters.add(**{"hits" if have == boundary else "partial_hits": 1})
        return found.caches, wanted[have:].tolist()

    def lookup(self, namespace: Namespace) -> bool:
        """Whether a prefix is stored under this name; with stage2, and the server can attend to it without warming.

        The server counts it as a hit or a miss of no tokens.
        """
        slots = self._context().slots if self._stage2 is not None else ()

        def there(client: PionClient) -> bool:
            stored = client.prefix_lookup(namespace, tokens=0)
            return stored and (self._stage2 is None or self._stage2.attending.is_warm(client, namespace, slots))

        with self._link.operation(self._deadline_s(0)) as server:
            return server.ask("lookup", there, otherwise=False)

    def drop(self, *namespaces: Namespace, cascade: bool = False) -> int:
        """Drop prefixes; how many there were. With `cascade` also those that continue them.

        Raises the server's error for a prefix that others continue, unless `cascade` is given: that is a question for
        the caller, not a failure to fall back from. Other refusals are, with `fallback`, a warning and 0.
        """
        if not namespaces:
            return 0
        if self._stage2 is not None:
            self._stage2.drop(*namespaces)
        with self._link.operation(self._deadline_s(0)) as server:
            refused: list[ServerError] = []

            def dropped(client: PionClient) -> int:
                try:
                    return client.prefix_drop(*namespaces, cascade=cascade)
                except ServerError as error:
                    if "CASCADE" not in str(error):
                        raise
                    refused.append(error)
                    return 0

            count = server.ask("drop", dropped, otherwise=0)
            if refused:
                raise refused[0]
            return count

    def stats(self) -> dict[str, Any]:
        """Counters since this instance was made.

        hits, partial_hits, misses, hit_rate; fetch_ms_total, store_ms_total, prefill_ms_total; tokens_restored,
        tokens_prefilled; bytes_fetched, bytes_stored; stored, not_stored (prefixes); waited (for another client's
        prefill); mismatches (something else was found under the name); fallbacks (went on without the server). With
        stage2 also attend_calls (questions about attention that were sent) and cold_rehydrates (see
        `cold_rehydrates_observed`).
        """
        stats = {**self._counters.as_dict(), "fallbacks": self._link.failures}
        if self._stage2 is not None:
            stats |= {"attend_calls": self._stage2.attending.calls, "cold_rehydrates": self.cold_rehydrates_observed}
        return stats

    @staticmethod
    def make_namespace(*parts: Any, **seed_names: Any) -> str:
        """A name made of parts: the first 32 hex digits of SHA-256 of the parts joined by "|".

        Keyword arguments (model_id=..., prompt_text=...) are parts in the order given. Parts that contain "|" can
        collide, and what isn't named isn't covered: the strict name that `namespace=None` derives has neither fault.
        """
        text = "|".join(map(str, (*parts, *seed_names.values())))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def namespace(self, ids: Sequence[int] | Any, *, media: Sequence[bytes] = ()) -> str:
        """The strict name under which `get_or_prefill(ids, media=media)` stores."""
        return self._context(media).namespace(token_ids(ids))

    # Parts

    def _identity(self) -> Identity:
        return self._fingerprint.current()

    def _context(self, media: Sequence[bytes] = ()) -> Context:
        """What the rows depend on now: a model's weights, and even its element type, may change between calls."""
        release_at_thread_end()
        identity = self._fingerprint.current()
        with self._lock:
            if self._probed is None or self._probed[0] != identity:
                slots = probe(self._model)
                self._probed = identity, slots, Layout.of(slots, self._vquant, self._boundary_protect)
            _, slots, layout = self._probed
        return Context.of(
            identity, slots, layout, tokenizer=self._tokenizer_hash, adapter_path=self._adapter_path, media=media
        )

    def _deadline_s(self, tokens: int) -> float | None:
        """When to stop asking a server that is slow without being silent: after the time it takes to do without."""
        if self._timeout_s is None or not self._link.fallback:
            return None
        return max(self._timeout_s, (self._ms_per_token or 0.0) * tokens / 1000)

    def _complete(
        self,
        server: Operation,
        context: Context,
        name: Namespace,
        ids: TokenIds,
        found: Found | None,
        *,
        store: bool,
        looked_up: bool,
        progress: Progress | None,
    ) -> list[Any]:
        """Compute what `found` lacks and store it; or wait for another client that is computing it."""
        have = found.tokens if found is not None else 0
        if found is not None and have == len(ids):
            self._counters.add(hits=1)
            return found.caches
        parent = self._finder.parent(server, found) if store and found is not None else None
        plan = Plan(context, name, ids, parent, looked_up)
        whose = server.ask("REGISTER", lambda client: claim(client, plan), Claim.NO) if store else Claim.NO
        if whose is Claim.OTHERS:
            waited = self._wait(server, context, name, ids, have)
            if waited is not None:
                return waited.caches
        watched = Watched(progress)
        start = time.perf_counter()
        caches = prefill(
            self._model, ids, found.caches if found is not None else None,
            done=have, step=self._step, progress=watched,
        )  # fmt: skip
        elapsed_ms = (time.perf_counter() - start - watched.spent_s) * 1000
        computed = len(ids) - have
        if computed >= TRIAL_TOKENS:  # fewer say nothing about many
            self._ms_per_token = elapsed_ms / computed
        self._counters.add(
            **{"partial_hits" if have else "misses": 1}, prefill_ms_total=elapsed_ms, tokens_prefilled=computed
        )
        stored = whose is Claim.OURS and self._store(server, plan, caches, elapsed_ms if not have else None)
        self._counters.add(**{"stored" if stored else "not_stored": 1})
        return caches

    def _wait(self, server: Operation, context: Context, name: Namespace, ids: TokenIds, have: int) -> Found | None:
        """Wait for another client's prefill, at most as long as the same would take here."""
        self._counters.add(waited=1)
        wait_ms = min(max(1, round(self._estimate_ms(len(ids) - have))), LONGEST_WAIT_MS)
        wait = unless_refused(
            "WAIT", lambda client: client.prefix_lookup(name, wait_ms=wait_ms, tokens=len(ids)), otherwise=False
        )
        there = server.ask("WAIT", wait, otherwise=False)
        found = self._finder.exact(server, context, name, ids, count=False)[0] if there else None
        if found is not None:
            self._counters.add(hits=1)
        return found

    def _estimate_ms(self, tokens: int) -> float:
        """How long this process would take for a prefill: as the last one went, else after a short trial."""
        if self._ms_per_token is None:
            start = time.perf_counter()
            prefill(self._model, token_ids([0] * TRIAL_TOKENS))
            self._ms_per_token = (time.perf_counter() - start) * 1000 / TRIAL_TOKENS
        return self._ms_per_token * tokens

    def _store(self, server: Operation, plan: Plan, caches: list[Any], prefill_ms: float | None) -> bool:
        """Send the rows of a prefix that is registered for us. The server shows it to nobody until it is complete."""
        start = time.perf_counter()

        def stored(client: PionClient) -> int:
            # Again: if the server dropped it because the prefill took longer than it waits, this makes it ours once
            # more, or says that another client took over.
            if claim(client, plan) is not Claim.OURS:
                return 0
            try:
                hashes = plan.hashes(BLOCK_TOKENS)
                register(
                    client,
                    plan,
                    meta=plan.context.meta(plan.ids, self._label(plan.ids)),
                    blocks=(BLOCK_TOKENS, hashes),  # also if no block ends here: it joins what continues this
                    prefill_ms=prefill_ms,
                )
                return transfer.store(client, plan.name, plan.context, caches, plan.offset)
            except PionClientError:
                client.close()  # what is pending goes with the connection
                raise

        nbytes = server.ask("store", stored, 0)
        self._counters.add(store_ms_total=(time.perf_counter() - start) * 1000, bytes_stored=nbytes)
        return nbytes > 0

    def _label(self, ids: TokenIds) -> str:
        """For people who look at what is stored: the beginning of the text, if there is a tokenizer to tell it."""
        if self._tokenizer is None:
            return ""
        try:
            return str(self._tokenizer.decode(ids[:LABEL_TOKENS].tolist()))
        except Exception:  # whatever a tokenizer raises: a label is worth no answer
            logger.debug("no label: the tokenizer can't decode these tokens", exc_info=True)
            return ""
