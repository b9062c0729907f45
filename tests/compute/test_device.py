"""Loading the fast BLAS before MLX, and saying what is in use.

What loading does to a process can't be undone, so those tests run in processes of their own.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pion.compute import device
from pion.compute.rebind import RebindError, _slots, loaded, rebind

LINUX = sys.platform.startswith("linux")


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints for this code."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_does_not_import_mlx():
    assert python("import sys, pion.compute.device; print('mlx.core' in sys.modules)") == "False"


def test_macos_needs_nothing(monkeypatch):
    monkeypatch.setattr(device, "_load_openblas", pytest.fail)
    for imported in (False, True):
        blas = device._load("darwin", mlx_imported=imported)
        assert (blas.state, blas.fast, blas.path) == ("system", True, None)


def test_an_unknown_platform_is_said_to_be_slow():
    blas = device._load("plan9", mlx_imported=False)
    assert (blas.state, blas.fast) == ("missing", False)
    assert "plan9" in blas.detail


def test_too_late_is_a_report_not_a_failure(monkeypatch):
    def refuse(path):
        raise RebindError("bound to something else")

    monkeypatch.setattr(device, "_load_openblas", lambda path: None)
    monkeypatch.setattr(device, "_rebind_mlx", refuse)
    blas = device._load("linux", mlx_imported=True)
    assert (blas.state, blas.fast, blas.path) == ("late", False, None)
    assert "bound to something else" in blas.detail
    assert "prepare()" in blas.detail


@pytest.mark.skipif(not LINUX, reason="on macOS there is nothing to load")
def test_a_slow_blas_is_a_warning_of_the_package():
    code = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
from pion.compute import device
device._prepared = device.Blas("missing", "no such library")
import pion_vllm_mlx
"""
    assert python(code) == "pion.mlx WARNING matrix products will be slow: no such library"


def test_a_missing_package_is_named(monkeypatch):
    def not_found(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", not_found)
    blas = device._load("linux", mlx_imported=False)
    assert blas.state == "missing"
    assert "pip install 'cmeel-openblas'" in blas.detail


def test_a_library_that_cannot_be_loaded_is_a_report(monkeypatch):
    def refuse(path):
        raise OSError(f"{path}: wrong ELF class")

    monkeypatch.setattr(metadata, "distribution", lambda name: Found())
    monkeypatch.setattr(device, "_load_openblas", refuse)
    blas = device._load("linux", mlx_imported=False)
    assert blas.state == "missing"
    assert "wrong ELF class" in blas.detail


class Found:
    """An installed distribution, as far as the loader looks at it."""

    def locate_file(self, path):
        return Path("/nowhere") / path


def test_the_fortran_runtime_of_a_wheel_is_used_only_when_that_is_what_is_missing(monkeypatch):
    loaded = []

    def load(path, mode=0):
        loaded.append(path)
        if len(loaded) == 1:
            raise OSError(problem)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(device, "_load_bundled_fortran", lambda: loaded.append("fortran") or True)
    problem = "libgfortran.so.5: cannot open shared object file"
    device._load_openblas(Path("blas.so"))
    assert loaded == ["blas.so", "fortran", "blas.so"]
    loaded.clear()
    problem = "blas.so: file too short"
    with pytest.raises(OSError, match="too short"):
        device._load_openblas(Path("blas.so"))
    assert loaded == ["blas.so"]


def test_renaming_a_library_moves_nothing():
    image = b"\x7fELF..libgfortran-abc.so.5.0.0\0libm.so.6\0"
    renamed = device._with_soname(image, b"libgfortran-abc.so.5.0.0", b"libgfortran.so.5")
    assert len(renamed) == len(image)
    assert renamed.split(b"\0")[0] == b"\x7fELF..libgfortran.so.5"
    assert renamed.endswith(b"\0libm.so.6\0")
    with pytest.raises(OSError, match="longer"):
        device._with_soname(image, b"a", b"bc")


@pytest.mark.skipif(not LINUX, reason="on macOS there is nothing to load")
def test_mlx_computes_with_openblas():
    """The symbol MLX calls is OpenBLAS's: asking the process for it gives the address inside that library."""
    code = """
import ctypes
from pion.compute import device
from pion.compute.rebind import RebindError, _slots, loaded
blas = device.prepare()
assert blas.state == "openblas", blas
assert device.prepare() is blas
import mlx.core as mx
ours = ctypes.cast(ctypes.CDLL(str(blas.path)).cblas_sgemm, ctypes.c_void_p).value
seen = ctypes.cast(ctypes.CDLL(None).cblas_sgemm, ctypes.c_void_p).value
a = mx.arange(6, dtype=mx.float32).reshape(2, 3)
print(ours == seen, (a @ a.T).tolist(), device.report()[0])
"""
    assert python(code) == "True [[5.0, 14.0], [14.0, 50.0]] ('blas', 'openblas')"


@pytest.mark.skipif(not LINUX, reason="on macOS there is nothing to load")
def test_importing_and_using_mlx_first_is_made_good():
    """As in the Quick Start, which imports mlx_lm before pion_vllm_mlx. The products that follow are OpenBLAS's."""
    code = """
import mlx.core as mx
a = mx.arange(6, dtype=mx.float32).reshape(2, 3)
mx.eval(a @ a.T)
from pion.compute import device, rebind
import ctypes
blas = device.prepare()
library, base = rebind.loaded("libmlx.so")
slots = dict(rebind._slots(library))
openblas = ctypes.CDLL(str(blas.path))
for name in device.MATRIX_PRODUCTS:
    bound = ctypes.c_uint64.from_address(base + slots[name]).value
    assert bound == ctypes.cast(getattr(openblas, name), ctypes.c_void_p).value, name
print(blas.state, (a @ a.T).tolist(), device.report()[0][1])
"""
    assert python(code) == "openblas [[5.0, 14.0], [14.0, 50.0]] openblas"


@pytest.mark.skipif(not LINUX, reason="on macOS there is nothing to load")
def test_what_is_bound_to_something_else_is_left_alone():
    code = """
import mlx.core as mx
from pion.compute import device, rebind
import ctypes, pathlib
from importlib import metadata
openblas = pathlib.Path(metadata.distribution(device.OPENBLAS_DISTRIBUTION).locate_file(device.OPENBLAS_FILE))
device._load_openblas(openblas)
library, base = rebind.loaded("libmlx.so")
reference, _ = rebind.loaded("libblas")
slots = dict(rebind._slots(library))
def bound():
    return [ctypes.c_uint64.from_address(base + slots[name]).value for name in device.MATRIX_PRODUCTS]
before = bound()
for names, old in ((("cblas_sgemm", "printf"), reference), (("cblas_sgemm", "no_such"), reference),
                   (("cblas_sgemm",), openblas), (("cblas_sgemm",), pathlib.Path("/no/such/library"))):
    try:
        rebind.rebind(library, base, names, old, reference)
    except rebind.RebindError as error:
        print(str(error).replace("\\n", " ")[:40])
assert bound() == before
"""
    assert len(python(code).splitlines()) == 4


@pytest.mark.skipif(not LINUX, reason="on macOS there is nothing to load")
def test_a_sealed_table_of_calls_is_neither_read_nor_written():
    """As in a library linked with -z now; here the text of the maps says so."""
    code = """
import mlx.core as mx
from pion.compute import device, rebind
import pathlib
from importlib import metadata
openblas = pathlib.Path(metadata.distribution(device.OPENBLAS_DISTRIBUTION).locate_file(device.OPENBLAS_FILE))
device._load_openblas(openblas)
library, base = rebind.loaded("libmlx.so")
reference, _ = rebind.loaded("libblas")
maps = pathlib.Path("/proc/self/maps").read_text()
slot = base + dict(rebind._slots(library))["cblas_sgemm"]
sealed = f"{slot & -4096:x}-{(slot & -4096) + 4096:x} r--p 00000000 00:00 0\\n"
for text in (sealed + maps, sealed.replace("r--p", "---p") + maps, ""):
    try:
        rebind.rebind(library, base, device.MATRIX_PRODUCTS, reference, openblas, maps=text)
    except rebind.RebindError as error:
        print(str(error)[:33])
"""
    first, second, third = python(code).splitlines()
    assert first == "the table of calls is sealed (r--"
    assert second == "the table of calls is sealed (---"
    assert third.startswith("nothing is mapped at")


def test_untested_versions_of_mlx_are_left_alone(monkeypatch):
    monkeypatch.setattr(device, "_load_openblas", lambda path: None)
    monkeypatch.setattr(device, "version", lambda name: "0.33.0")
    monkeypatch.setattr(metadata, "distribution", lambda name: Found())
    monkeypatch.setattr(device, "rebind", pytest.fail)
    blas = device._load("linux", mlx_imported=True)
    assert blas.state == "late"
    assert "mlx 0.33.0 is not one" in blas.detail


def elf(*, machine=62, plt_kind=7, relocation=7, first=0x400000):
    """A library that calls one function, `product`, through a pointer at 0x3000; its first segment is at `first`."""
    head = b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", machine) + bytes(12) + struct.pack("<Q", 64) + bytes(14)
    head += struct.pack("<HH", 56, 2) + bytes(6)
    tables = 64 + 2 * 56
    strings = b"\0product\0".ljust(16, b"\0")
    symbols = bytes(24) + struct.pack("<I", 1) + bytes(20)
    calls = struct.pack("<QQq", first + 0x3000, 1 << 32 | relocation, 0)
    at = [first + tables, first + tables + 16, first + tables + 64]
    tags = [(5, at[0]), (6, at[1]), (23, at[2]), (2, 24), (20, plt_kind), (0, 0)]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    body = strings + symbols + calls
    size = tables + len(body) + len(dynamic)
    programs = struct.pack("<IIQQQQQQ", 1, 4, 0, first, first, size, size, 4096)
    programs += struct.pack("<IIQQQQQQ", 2, 4, tables + len(body), 0, 0, len(dynamic), len(dynamic), 8)
    return head + programs + body + dynamic


def test_pointers_count_from_the_first_address_wherever_the_file_wants_to_be(tmp_path):
    path = tmp_path / "lib.so"
    for first in (0, 0x400000):
        path.write_bytes(elf(first=first))
        assert list(_slots(path)) == [("product", 0x3000)]
    path.write_bytes(elf(machine=183, relocation=1026))
    assert list(_slots(path)) == [("product", 0x3000)]


def test_only_pointers_for_calls_count(tmp_path):
    path = tmp_path / "lib.so"
    for options in ({"relocation": 37}, {"machine": 183, "relocation": 7}):
        path.write_bytes(elf(**options))
        assert list(_slots(path)) == []
        with pytest.raises(RebindError, match="doesn't call product"):
            rebind(path, 0, ["product"], path, path)
    for options, problem in (({"plt_kind": 17}, "another kind"), ({"machine": 8}, "machine 8")):
        path.write_bytes(elf(**options))
        with pytest.raises(RebindError, match=problem):
            list(_slots(path))


@pytest.mark.skipif(not LINUX, reason="glibc")
def test_freed_memory_is_kept_when_asked_for():
    """Resident memory after freeing 20 MiB: given back by default, kept when asked."""
    code = """
import ctypes
from pion.compute import device
from pion.compute.rebind import RebindError, _slots, loaded
if {keep}:
    assert device.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
block = libc.malloc(20 << 20)
ctypes.memset(block, 1, 20 << 20)
libc.free(block)
print(resident() - before > 10 << 20)
"""
    assert python(code.format(keep=True)) == "True"
    assert python(code.format(keep=False)) == "False"


def test_a_loaded_library_is_found_by_its_name():
    maps = (
        "7f10-7f20 r-xp 00002000 08:01 1 /usr/lib/libblas-1.so\n7f00-7f10 r--p 00000000 08:01 1 /usr/lib/libblas-1.so\n"
        "7f30-7f40 rw-p 00000000 00:00 0 \n7f50-7f60 r--p 00000000 08:01 2 /with space/libmlx.so\n"
    )
    assert loaded("libblas", maps) == (Path("/usr/lib/libblas-1.so"), 0x7F00)
    assert loaded("libmlx.so", maps) == (Path("/with space/libmlx.so"), 0x7F50)
    with pytest.raises(RebindError, match="no libother"):
        loaded("libother", maps)


@pytest.mark.parametrize("content", [b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(80), b"text" * 30])
def test_files_that_are_no_such_library_are_refused(tmp_path, content):
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    with pytest.raises(RebindError, match=r"lib\.so"):
        list(_slots(path))


def test_keeping_memory_is_linux_only(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert device.keep_freed_memory() is False


def test_the_report_names_device_and_versions():
    rows = dict(device.report())
    assert rows["device"] in ("cpu", "gpu")
    assert rows["mlx"] == metadata.version("mlx")
    assert rows["python"] == sys.version.split()[0]
    assert rows["blas"] in ("openblas", "late", "system")
    assert rows["blas_detail"]


def test_the_report_without_mlx_says_so(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(device, "import_module", absent)
    rows = dict(device.report())
    assert rows["mlx"] == "missing: No module named 'mlx.core' (pip install -e 'pion-vllm-mlx/[mlx]')"
    assert "device" not in rows
    assert device.version("no-such-distribution") == "missing"
