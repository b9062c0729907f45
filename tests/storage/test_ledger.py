"""What the ledger says against what the process holds."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import tracemalloc

import numpy as np
import pytest

from pion.storage.block import Layer
from pion.storage.ledger import Ledger, Memory, owned


def test_a_request_payload_is_kept_without_a_copy() -> None:
    array = np.arange(64, dtype=np.uint8)
    assert owned(memoryview(array)) is array
    blob = b"x" * 100
    assert owned(blob) is blob
    assert owned(memoryview(blob)) is blob
    converted = np.arange(64, dtype=np.float32).view(np.uint8).data.toreadonly()
    assert owned(converted) is converted


@pytest.mark.parametrize("parent", [np.zeros(4096, np.uint8), b"x" * 4096, bytearray(4096)])
def test_a_slice_of_something_larger_is_copied(parent) -> None:
    kept = owned(memoryview(parent)[1024:2048])
    assert isinstance(kept, np.ndarray)
    assert kept.base is None
    assert kept.nbytes == 1024


def test_slices_of_a_large_buffer_do_not_keep_it() -> None:
    """Fault class 36: 100 slices of 1 KiB out of 256 MiB."""
    tracemalloc.start()
    try:
        ledger = Ledger()
        layer = Layer(1024, ledger)
        parent = np.zeros(256 * 1024 * 1024, np.uint8)
        for index in range(100):
            layer.store(index, 1, owned(memoryview(parent)[index * 2048 : index * 2048 + 1024]))
        del parent
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < ledger.charged_bytes + 200_000
    finally:
        tracemalloc.stop()


def test_a_release_in_another_thread_is_counted() -> None:
    ledger = Ledger()
    box = [Memory(b"x" * 1000, ledger)]
    assert ledger.charged_bytes == 1000
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert ledger.charged_bytes == 0
    assert ledger.freed_bytes == 1000


MEASURE = """
    import gc, os, sys
    from pion.config import Config
    from pion.process import tune_allocator
    from pion.storage.changes import *
    from pion.storage.formats import get_format
    from pion.storage.journal import NullJournal
    from pion.storage.ledger import Ledger
    from pion.storage.schema import Schema
    from pion.storage.tiers.runs import PlacedRun
    from pion.storage.vstore import VStore
    from pion.context import Clock

    def anonymous():
        gc.collect()
        for line in open("/proc/self/smaps_rollup"):
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024

    tune_allocator()
    gc.set_threshold(50_000, 20, 100)
    store = VStore(Config(max_sessions=16_000_000), Clock(), NullJournal(), Ledger())
    schema = Schema.uniform(get_format(b"fp16"), 64)
    small = Schema.uniform(get_format(b"fp32"), 4)
    before = anonymous()
    what, count = sys.argv[1], int(sys.argv[2])
    for i in range(count):
        name = b"namespace-%018d" % i
        if what == "prefixes":
            store.commit(Register(ns=name, k_schema=schema, v_schema=schema))
        elif what == "tables":
            store.commit(Register(ns=name, k_schema=schema, v_schema=schema,
                                  hashes=Hashes(64, os.urandom(128))))
        elif what == "chains":
            parent = b"namespace-%018d" % (i - 1) if i % 8 else None
            store.commit(Register(ns=name, k_schema=schema, v_schema=schema, parent=parent))
        elif what == "layers":
            if i % 32 == 0:
                store.commit(CreateSession(b"s%d" % (i // 32), small))
            store.commit(StoreRows(b"s%d" % (i // 32), i % 32, 0, 1, os.urandom(16)))
        elif what == "blocks":
            if i == 0:
                store.commit(CreateSession(b"s", schema))
            store.commit(StoreRows(b"s", 0, 2 * i, 1, os.urandom(128)))
        elif what == "placed":
            layer = i % 32
            if layer == 0:
                store.commit(CreateSession(b"s%d" % (i // 32), small))
            store.commit(StoreRows(b"s%d" % (i // 32), layer, 0, 1, os.urandom(16)))
            if layer == 31:
                numbers = [int.from_bytes(os.urandom(8)) for _ in range(64)]
                runs = tuple(PlacedRun(0, n, 0, 1, 4096 + 64 * n, 16, *numbers[2 * n : 2 * n + 2]) for n in range(32))
                store.commit(PlaceRows(b"s%d" % (i // 32), True, os.urandom(16).hex(), 8192, runs))
        elif what == "pending":
            store.commit(Register(ns=name, k_schema=schema, v_schema=schema, declaration=Declaration(2, 2), owner=i))
    print((anonymous() - before) / store.ledger.charged_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("what", ["prefixes", "tables", "chains", "layers", "blocks", "placed", "pending"])
def test_fixed_costs_are_what_they_cost(what: str) -> None:
    """The small objects of a store of nothing but small things weigh what is charged for them."""
    code = textwrap.dedent(MEASURE)
    done = subprocess.run([sys.executable, "-c", code, what, "15000"], capture_output=True, text=True, check=True)
    ratio = float(done.stdout)
    assert 0.8 <= ratio <= 1.10, ratio
