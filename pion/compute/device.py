"""What MLX computes with: the fast BLAS on Linux, the device, the versions.

The Linux wheel of MLX links a reference BLAS, which is some fifty times slower than the machine. Symbols of a library
loaded with RTLD_GLOBAL win over those of a library's own dependencies, so loading an OpenBLAS that exports the plain
`cblas_*` names before MLX is first imported makes the same wheel run at OpenBLAS speed. `prepare()` does that; whatever
imports `mlx` calls it first. On macOS MLX uses Metal and Accelerate and there is nothing to do.

OpenBLAS is partly Fortran and wants `libgfortran.so.5`, which a fresh machine may lack. The wheels of MLX and NumPy
carry that library under a name of their own; `prepare()` then loads a copy in memory that has its usual name again.

A program that imported MLX first has it bound to the reference BLAS; `rebind.py` then redirects the matrix products.
Products computed before and after that differ in their last bits.

Nothing here imports MLX until `report()` is called.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from importlib import import_module, metadata
from pathlib import Path
from typing import Final

import attrs

from pion.compute.rebind import RebindError, loaded, rebind

OPENBLAS_DISTRIBUTION: Final = "cmeel-openblas"
OPENBLAS_FILE: Final = "cmeel.prefix/lib/libopenblas.so.0"
FORTRAN_SONAME: Final = b"libgfortran.so.5"
FORTRAN_WHEELS: Final = (("mlx-cpu", "mlx_cpu.libs"), ("numpy", "numpy.libs"))
"""Distributions that bundle a Fortran runtime, and the folder beside the package where they keep it."""


MATRIX_PRODUCTS: Final = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""The functions that matter: what MLX calls for every layer of a model."""

REBIND_TESTED: Final = "0.32."
"""The versions of MLX whose calls may be redirected: those that the tests have done it with."""

IMPORT_FIRST: Final = "import pion_vllm_mlx, or call pion.compute.device.prepare(), before mlx"

MIB: Final = 1 << 20

KEEPING_MALLOC_OPTIONS: Final = (
    (-3, 32 * MIB),  # M_MMAP_THRESHOLD: the largest glibc accepts; larger blocks still come from the kernel
    (-1, (1 << 31) - 1),  # M_TRIM_THRESHOLD: never shrink the heap
    (-2, 64 * MIB),  # M_TOP_PAD: grow it in large steps
)
"""What `keep_freed_memory` sets, as numbered in glibc's malloc.h."""


@attrs.frozen
class Blas:
    """How `prepare()` went.

    Fields: `state` is "openblas" (in use), "system" (macOS: Accelerate), "late" (MLX was imported before, and could not
    be pointed at it any more) or "missing"; `detail` says the rest to a person; `path` is the library in use.
    """

    state: str
    detail: str
    path: Path | None = None

    @property
    def fast(self) -> bool:
        """Whether matrix products run at the machine's speed."""
        return self.state in ("openblas", "system")


_lock = threading.Lock()
_prepared: Blas | None = None


def prepare() -> Blas:
    """Load the fast BLAS, once per process, before MLX is imported.

    Never raises for a missing or unloadable library: MLX still works, slowly, and the result says why. Threads may call
    it at the same time. If MLX was imported already, its calls are redirected (see `rebind.py`), else the state is
    "late".
    """
    global _prepared  # a library is loaded into the process, not into an object
    with _lock:
        if _prepared is None:
            _prepared = _load(sys.platform, mlx_imported="mlx.core" in sys.modules)
        return _prepared


def _load(platform: str, *, mlx_imported: bool) -> Blas:
    """The decision, apart from the process-wide record so that tests can give another platform."""
    if platform == "darwin":
        return Blas("system", "Accelerate and Metal, part of macOS")
    if not platform.startswith("linux"):
        return Blas("missing", f"no fast BLAS is known for {platform}")
    try:
        path = Path(str(metadata.distribution(OPENBLAS_DISTRIBUTION).locate_file(OPENBLAS_FILE)))
    except metadata.PackageNotFoundError:
        return Blas("missing", f"{OPENBLAS_DISTRIBUTION} is not installed (pip install '{OPENBLAS_DISTRIBUTION}')")
    try:
        _load_openblas(path)
    except OSError as error:
        return Blas("missing", f"{path.name} can't be loaded: {error}")
    if mlx_imported:
        try:
            _rebind_mlx(path)
        except RebindError as error:
            return Blas("late", f"mlx was imported before Pion and keeps the reference BLAS ({error}); {IMPORT_FIRST}")
    return Blas("openblas", _openblas_text(path), path)


def _rebind_mlx(openblas: Path) -> None:
    """MLX was imported first: its matrix products are bound to the reference BLAS already. Raises RebindError."""
    found = version("mlx")
    if not found.startswith(REBIND_TESTED):
        msg = f"mlx {found} is not one of the versions this is tested with, {REBIND_TESTED}*"
        raise RebindError(msg)
    library, base = loaded("libmlx.so")
    reference, _ = loaded("libblas")
    rebind(library, base, MATRIX_PRODUCTS, reference, openblas)


def _load_openblas(path: Path) -> None:
    """Load OpenBLAS for every library that comes after it. Raises OSError."""
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if FORTRAN_SONAME.decode() not in str(error) or not _load_bundled_fortran():
            raise
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _load_bundled_fortran() -> bool:
    """Load the Fortran runtime that some wheel bundles, under its usual name; False when no wheel has one."""
    for distribution, folder in FORTRAN_WHEELS:
        try:
            libraries = Path(str(metadata.distribution(distribution).locate_file(folder)))
        except metadata.PackageNotFoundError:
            continue
        for fortran in sorted(libraries.glob("libgfortran-*.so.5*")):
            # Its own dependency is found by the path it was built with, which a copy in memory doesn't have.
            for quadmath in libraries.glob("libquadmath-*.so*"):
                ctypes.CDLL(str(quadmath))
            image = _with_soname(fortran.read_bytes(), fortran.name.encode(), FORTRAN_SONAME)
            _load_image(image)
            return True
    return False


def _with_soname(image: bytes, old: bytes, new: bytes) -> bytes:
    """An ELF image whose string `old` reads `new`. Shorter by padding, so that no offset moves."""
    if len(new) > len(old):
        msg = f"{new!r} is longer than {old!r}"
        raise OSError(msg)
    return image.replace(old + b"\0", new + b"\0" * (len(old) - len(new) + 1))


def _load_image(image: bytes) -> None:
    """Load a shared library from memory; the file descriptor stays open because the loader knows it by that name."""
    descriptor = os.memfd_create("libgfortran.so.5")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(image)
    ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)


def _openblas_text(path: Path) -> str:
    library = ctypes.CDLL(str(path))
    library.openblas_get_config.restype = ctypes.c_char_p
    library.openblas_get_num_threads.restype = ctypes.c_int
    config = re.sub(r"\s+", " ", library.openblas_get_config().decode()).strip()
    return f"{config}, {library.openblas_get_num_threads()} threads, from {OPENBLAS_DISTRIBUTION}"


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next large allocation; whether that is possible here.

    glibc gives large freed blocks back to the kernel, and taking fresh pages again is slow: 17 ms or more for the 47 MB
    of a 1,024-token prefix of the demo model. A process that restores caches again and again may prefer to keep them,
    at the price of a larger resident size after a peak. The server wants the opposite. Nothing calls this by itself;
    the demo does, and so may a program at its start. Linux with glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, value) == 1 for option, value in KEEPING_MALLOC_OPTIONS)


def report() -> tuple[tuple[str, str], ...]:
    """Rows (name, value) for `pion doctor` and INFO: BLAS, device, versions, and what is missing.

    Imports MLX, after preparing it. Never raises because MLX is absent: a row says so.
    """
    blas = prepare()
    rows = [("blas", blas.state), ("blas_detail", blas.detail)]
    try:
        core = import_module("mlx.core")
    except ImportError as error:
        rows.append(("mlx", f"missing: {error} (pip install -e 'pion-vllm-mlx/[mlx]')"))
    else:
        rows.append(("mlx", version("mlx")))
        rows.append(("device", str(core.default_device().type).removeprefix("DeviceType.")))
    rows.extend((name.replace("-", "_"), version(name)) for name in ("mlx-lm", "numpy", OPENBLAS_DISTRIBUTION))
    rows.append(("python", sys.version.split()[0]))
    rows.append(("platform", sys.platform))
    return tuple(rows)


def version(distribution: str) -> str:
    """The installed version, or "missing"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"
