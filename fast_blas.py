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
from pathlib import Path


def _mkl_candidates():
    """Paths at which `pip install mkl` (or conda) may have left MKL's single dynamic library."""
    try:
        for file in importlib.metadata.files("mkl") or []:
            if file.name.startswith("libmkl_rt.so"):
                yield str(Path(file.locate()).resolve())
    except importlib.metadata.PackageNotFoundError:
        pass
    for path in sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*")):
        yield str(path)
    yield ctypes.util.find_library("mkl_rt")


def _candidates():
    if platform.machine() == "x86_64":
        yield from _mkl_candidates()
    yield ctypes.util.find_library("openblas")


def _load():
    """Load the first BLAS that is there, say so where none is; return its path or None."""
    if sys.platform != "linux" or os.environ.get("FAST_BLAS") == "0":
        return None
    names = (dist.metadata["Name"] or "" for dist in importlib.metadata.distributions())
    if any(name.lower().replace("_", "-").startswith("mlx-cuda") for name in names):
        return None
    if "mlx.core" in sys.modules:
        print(
            "fast_blas: mlx.core was imported before fast_blas, so matrix products stay on"
            " MLX's slow reference BLAS; import fast_blas first.",
            file=sys.stderr,
        )
        return None
    for path in _candidates():
        try:
            if path:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
                return path
        except OSError:
            continue
    remedy = "pip install mkl" if platform.machine() == "x86_64" else "apt install libopenblas0"
    print(
        "fast_blas: no fast BLAS found, so MLX's matrix products run on its slow reference BLAS"
        f" (tens of times slower); remedy: {remedy}",
        file=sys.stderr,
    )
    return None


path = _load()  # the library that answers, or None: MLX's own
