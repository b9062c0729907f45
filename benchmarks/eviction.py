"""Prefill seconds avoided on a real trace by `lru`, `value`, and an order that knows the future."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import attrs

from benchmarks._lib.clairvoyant import Clairvoyant
from benchmarks._lib.replay import Model, Request, different_bytes, replay, requests
from benchmarks._lib.report import Report, Target, at_least

SHARES = (0.01, 0.03, 0.10, 0.30)
SHOWN_FROM_S = 1800.0
"""The policy was tuned on what is before; what is reported is behind it."""
QUICK_REQUESTS = 400
ARMS = ("lru", "value", "clairvoyant")

SMALL = Model(b"7b|")
LARGE = Model(b"70b|", cost=10.0, row_bytes=320)
LARGE_SHARE = 0.2

ONE, TWO, WHOLE = "one model", "two models", "one prefix a turn"
TARGETS = {
    ONE: dict(zip(SHARES, (1.8, 1.3, 0.98, 0.98), strict=True)),
    TWO: dict(zip(SHARES[:3], (1.3, 1.3, 1.3), strict=True)),
    WHOLE: {},
}

METHOD = (
    "An hour of real conversation requests (Mooncake, benchmarks/data): the first half hour fills the store, the "
    "second is counted. The constants of the policy were chosen on the first half; other families had been compared on "
    "both.",
    "Each request is a MATCH, a use of what is there, and a REGISTER with PARENT and two stores for each block of 512 "
    "tokens that is missing, against the server's own store with its byte budget; the clock is the trace's.",
    "The block at depth d takes 284 (1 + 0.02 d) ms to prefill, and is registered with that PREFILL_MS. It is avoided "
    "if the block and all before it are there.",
    "Shares are of the bytes of all different blocks of the hour.",
    "Two models: a fifth of the conversations (by a hash of their second block) goes to a model whose prefill costs 10 "
    "times as much and whose rows have 0.625 times the bytes, as Llama 2 70B against 7B. Other assignments give 1.23 "
    "to 1.30 at 10 %, see docs/discussion/eviction.md.",
    "Clairvoyant: what is used again latest goes first, or with two models what costs least for each byte and second "
    "until then.",
    f"{WHOLE}: the missing blocks of a request are one prefix instead of one each; shown for comparison.",
)


@attrs.frozen
class Run:
    """One replay."""

    trace: str
    share: float
    arm: str
    quick: bool

    def avoided(self) -> tuple[float, float]:
        """Prefill seconds avoided, and in all."""
        trace = _trace(self.trace)
        start_s = SHOWN_FROM_S
        if self.quick:
            trace, start_s = trace[:QUICK_REQUESTS], 0.0
        budget = int(different_bytes(trace) * self.share)
        foresight: Callable[..., Clairvoyant] | None = None
        if self.arm == "clairvoyant":
            foresight = lambda clock: Clairvoyant(trace, clock)  # noqa: E731  short, and used once
        saved = replay(
            trace,
            "lru" if foresight else self.arm,
            budget,
            start_s,
            foresight,
            segment_blocks=4096 if self.trace == WHOLE else 1,
        )
        return saved.avoided_s, saved.all_s


def _trace(name: str) -> list[Request]:
    return requests(model_of if name == TWO else lambda blocks: SMALL)


def model_of(blocks: list[int]) -> Model:
    """A conversation stays with its model: the second block is its own, the first one is common to all."""
    key = blocks[min(1, len(blocks) - 1)]
    mixed = key * 2_654_435_761 % 2**32
    return LARGE if mixed < LARGE_SHARE * 2**32 else SMALL


def run(quick: bool) -> Report:
    """Replay everything, as many at once as there are cores: nothing is timed."""
    report = Report("eviction", "prefill seconds avoided on a trace, by policy and size", quick, METHOD)
    shares = SHARES[2:3] if quick else SHARES
    runs = [
        Run(trace, share, arm, quick)
        for trace in (ONE, TWO, WHOLE)
        for share in shares
        for arm in ARMS
        if trace != WHOLE or arm != "clairvoyant"
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(runs, pool.map(Run.avoided, runs), strict=True))
    for each, (avoided_s, all_s) in found.items():
        what = f"{each.trace}, {each.share:.0%}"
        report.figure(f"{what}: prefill avoided", each.arm, "s", avoided_s)
        report.figure(f"{what}: of all prefill", each.arm, "%", 100 * avoided_s / all_s)
        if each.arm == "value":
            lru_s = found[attrs.evolve(each, arm="lru")][0]
            bound = TARGETS[each.trace].get(each.share)
            target: Target | None = at_least(bound) if bound is not None else None
            report.find(f"{what}: value", avoided_s / lru_s, against="lru", target=target)
    return report
