"""Test doubles and helpers, for Pion's own tests and for plugin authors.

`Harness` calls commands without a socket; `running_server` runs a server inside the test's nursery; `ServerProcess`
starts a real `pion-server` process. `MemoryDisk` stands for the data directory: it fails, tears and forgets on demand.
`MemoryTier` and `FlakyTier` stand for a tier; `pion.testing.tier_conformance` tests one, see the how-to "Write a tier".
"""

from pion.testing.disk import (
    Fault,
    FaultPlan,
    MemoryDisk,
    Operation,
    ProcessDied,
    fault_at,
)
from pion.testing.harness import (
    FakeClock,
    Harness,
    ServerProcess,
    make_harness,
    make_services,
    running_server,
)
from pion.testing.tiers import FlakyTier, MemoryTier, MemoryTierDisk

__all__ = [
    "FakeClock",
    "Fault",
    "FaultPlan",
    "FlakyTier",
    "Harness",
    "MemoryDisk",
    "MemoryTier",
    "MemoryTierDisk",
    "Operation",
    "ProcessDied",
    "ServerProcess",
    "fault_at",
    "make_harness",
    "make_services",
    "running_server",
]
