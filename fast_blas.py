"""A fast BLAS for MLX's CPU backend on Linux. Import this module before `mlx.core`.

MLX's Linux wheel links the reference BLAS: about 2 GFLOP/s where Intel MKL reaches 200 on the same
two cores. Symbols that are already loaded when `libmlx.so` is loaded win over the ones it links, so
a library loaded first, with `RTLD_GLOBAL`, answers MLX's own `cblas_sgemm` calls.

On macOS (Accelerate, Metal), and where MLX's CUDA backend is installed, nothing happens. Set
FAST_BLAS=0 to switch this off, for instance to see what it is worth.

    import fast_blas  # isort: skip
    import mlx.core as mx
"""

import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path


def _candidates():
    """Libraries to try: what `pip install mkl` (or conda) may have left, then the system's."""
    if platform.machine() == "x86_64":
        with suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files("mkl") or []:
                if file.name.startswith("libmkl_rt.so"):
                    yield str(Path(file.locate()).resolve())
        yield from map(str, sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*")))
        yield ctypes.util.find_library("mkl_rt")
    yield ctypes.util.find_library("openblas")


def _load():
    """Load the first BLAS that is there, say so where none is; return its path or None."""
    if sys.platform != "linux" or os.environ.get("FAST_BLAS") == "0":
        return None
    names = (dist.metadata["Name"] or "" for dist in importlib.metadata.distributions())
    if any(name.lower().replace("_", "-").startswith("mlx-cuda") for name in names):
        return None
    if "mlx.core" in sys.modules:
        problem = "mlx.core was imported before fast_blas; import fast_blas first"
    else:
        for path in filter(None, _candidates()):
            with suppress(OSError):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return path
        remedy = "pip install mkl" if platform.machine() == "x86_64" else "apt install libopenblas0"
        problem = f"no fast one was found; remedy: {remedy}"
    print(
        "fast_blas: MLX's matrix products run on its slow reference BLAS (tens of times slower):"
        f" {problem}",
        file=sys.stderr,
    )
    return None


def use_large_pages(address, size):
    """Ask Linux (6.1 or later) to move memory into pages of 2 MB, from which it is read faster.

    It takes about a millisecond per megabyte; nothing happens where that is not to be had.
    """
    page = 2**21
    first, end = -(-address // page) * page, (address + size) // page * page
    if path is not None and first < end:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        madvise(first, end - first, 25)  # MADV_COLLAPSE


path = _load()  # the library that answers, or None: MLX's own
