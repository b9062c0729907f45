"""How far two runs of a model agree: their keys and values, their tokens, their texts. NumPy only, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int]
"""One answer, token ids in order."""

INSTALL_SACREBLEU = "sacrebleu is not installed, so there is no BLEU: pip install sacrebleu"


class MissingMetricError(Exception):
    """The package that computes a metric isn't installed; the text says how to install it."""


@attrs.define
class MeanAbsolute:
    """Mean of |found - wanted| over all values added, summed in float64; and of |wanted|, to compare it with."""

    _error: float = 0.0
    _size: float = 0.0
    _count: int = 0

    def add(self, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """Two arrays of one shape. Raises ValueError for two shapes."""
        if wanted.shape != found.shape:
            raise ValueError(f"{found.shape} is not {wanted.shape}")
        exact = wanted.astype(np.float64)
        self._error += float(np.abs(found - exact).sum())
        self._size += float(np.abs(exact).sum())
        self._count += wanted.size

    @property
    def error(self) -> float:
        """The mean absolute error; at least one value was added."""
        return self._error / self._count

    @property
    def size(self) -> float:
        """The mean magnitude of what was wanted."""
        return self._size / self._count


def same_first_percent(wanted: Sequence[Tokens], found: Sequence[Tokens]) -> float:
    """Percentage of answers whose first token is the same."""
    same = [one[0] == other[0] for one, other in zip(wanted, found, strict=True)]
    return 100 * sum(same) / len(same)


def same_percent(wanted: Sequence[Tokens], found: Sequence[Tokens]) -> float:
    """Percentage of all tokens that are the same at the same place.

    After the first difference each answer goes its own way, and then agrees by chance only.
    """
    pairs = [pair for one, other in zip(wanted, found, strict=True) for pair in zip(one, other, strict=True)]
    return 100 * sum(one == other for one, other in pairs) / len(pairs)


def common_tokens(wanted: Sequence[Tokens], found: Sequence[Tokens]) -> list[int]:
    """For each answer, how many tokens come before the first difference; all of them if there is none."""
    return [
        next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        for one, other in zip(wanted, found, strict=True)
    ]


def bleu(wanted: Sequence[str], found: Sequence[str]) -> tuple[float, str]:
    """(corpus BLEU from 0 to 100 with one reference each, sacrebleu's signature). Raises MissingMetricError."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise MissingMetricError(INSTALL_SACREBLEU) from error
    metric: Any = BLEU()
    score = metric.corpus_score(list(found), [list(wanted)]).score
    # The mean of four logarithms of 1 is not 0 in floating point.
    return min(100.0, score), str(metric.get_signature())
