"""The distribution is installable and says the version of the Pion it belongs to."""

from importlib.metadata import requires, version

import pion
import pion_lmcache


def test_version_is_that_of_pion() -> None:
    assert version("pion-lmcache") == pion_lmcache.__version__ == pion.__version__


def test_it_needs_pion_and_nothing_else() -> None:
    assert requires("pion-lmcache") == ["pion==0.1.*"]
