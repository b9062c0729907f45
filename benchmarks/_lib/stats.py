"""Interleaving and the numbers that come out of it."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns

import attrs


@attrs.frozen
class Summary:
    """Percentiles of one arm's samples, in the samples' unit."""

    n: int
    p50: float
    p90: float
    p99: float
    low: float
    high: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of samples in rising order."""
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summarize(samples: Sequence[float]) -> Summary:
    """Percentiles of at least one sample."""
    ordered = sorted(samples)
    return Summary(
        n=len(ordered),
        p50=statistics.median(ordered),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        low=ordered[0],
        high=ordered[-1],
    )


Arm = Callable[[], None]


def interleave(
    arms: Mapping[str, Arm], rounds: int, *, warmup: int = 1, between: Arm | None = None, seed: int = 7
) -> dict[str, list[float]]:
    """Run every arm once a round, in an order shuffled each round, and return the seconds of each arm's runs.

    So a slow minute of the machine meets all arms alike and no arm always runs after the same other one. The garbage
    collector, and `between`, run between the runs, not in them.
    """
    order, shuffle = list(arms), random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in order}
    for number in range(warmup + rounds):
        shuffle(order)
        for name in order:
            gc.collect()
            gc.disable()
            try:
                start = perf_counter_ns()
                arms[name]()
                took = perf_counter_ns() - start
            finally:
                gc.enable()
            if between is not None:
                between()
            if number >= warmup:
                samples[name].append(took / 1e9)
    return samples
