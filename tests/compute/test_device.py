"""Loading the fast BLAS before MLX, and saying what is in use.

What loading does to a process can't be undone, so those tests run in processes of their own.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pion.compute import device

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
    monkeypatch.setattr(device, "_load_openblas", pytest.fail)
    blas = device._load("linux", mlx_imported=True)
    assert (blas.state, blas.fast) == ("late", False)
    assert "prepare()" in blas.detail


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
def test_importing_mlx_first_is_reported():
    code = "import mlx.core; from pion.compute import device; print(device.prepare().state, device.report()[0][1])"
    assert python(code) == "late late"


@pytest.mark.skipif(not LINUX, reason="glibc")
def test_freed_memory_is_kept_when_asked_for():
    """Resident memory after freeing 20 MiB: given back by default, kept when asked."""
    code = """
import ctypes
from pion.compute import device
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
    assert rows["mlx"].startswith("missing: No module named 'mlx.core'")
    assert "device" not in rows
    assert device.version("no-such-distribution") == "missing"
