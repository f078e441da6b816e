"""fast_blas.py: which library is loaded, and what is said where none is."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fast_blas

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="fast_blas does nothing elsewhere")


@pytest.fixture
def fresh(monkeypatch):
    """As before anything was imported, on Linux; what would be loaded is noted instead."""
    loaded = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("FAST_BLAS", raising=False)
    monkeypatch.setattr(fast_blas.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    names = ["METADATA", "libmkl_core.so.3", "libmkl_rt.so.3"]
    files = [SimpleNamespace(name=name, locate=lambda n=name: f"/mkl/{n}") for name in names]
    monkeypatch.setattr(fast_blas.importlib.metadata, "files", lambda package: files)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    return loaded


def missing(path, mode):
    raise OSError(path)


def test_mkl_is_loaded_for_all_to_see(fresh):
    assert fast_blas._load() == "/mkl/libmkl_rt.so.3"
    assert fresh == [("/mkl/libmkl_rt.so.3", ctypes.RTLD_GLOBAL)]


def test_openblas_where_mkl_cannot_be_loaded(fresh, monkeypatch):
    def cdll(path, mode):
        if "mkl" in path:
            raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", cdll)
    assert fast_blas._load() == "libopenblas.so.0"


def test_mkl_that_pip_did_not_install(fresh, monkeypatch, tmp_path):
    def files(package):
        raise fast_blas.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(fast_blas.importlib.metadata, "files", files)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert fast_blas._load() == "libmkl_rt.so.0"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so.2").touch()
    assert fast_blas._load() == str(tmp_path / "lib" / "libmkl_rt.so.2")


def test_no_mkl_on_arm(fresh, monkeypatch):
    monkeypatch.setattr(fast_blas.platform, "machine", lambda: "aarch64")
    assert fast_blas._load() == "libopenblas.so.0"


@pytest.mark.parametrize(
    "machine, remedy", [("x86_64", "pip install mkl"), ("aarch64", "openblas")]
)
def test_one_line_with_the_remedy_where_there_is_none(fresh, monkeypatch, capsys, machine, remedy):
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(fast_blas.platform, "machine", lambda: machine)
    assert fast_blas._load() is None
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and remedy in err


def test_too_late_is_said(fresh, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace())
    assert fast_blas._load() is None and fresh == []
    assert "import fast_blas first" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["macOS", "CUDA", "switched off"])
def test_untouched_elsewhere(fresh, monkeypatch, capsys, where):
    if where == "macOS":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif where == "CUDA":
        cuda = SimpleNamespace(metadata={"Name": "mlx_cuda_13"})
        monkeypatch.setattr(fast_blas.importlib.metadata, "distributions", lambda: [cuda])
    else:
        monkeypatch.setenv("FAST_BLAS", "0")
    assert fast_blas._load() is None and fresh == []
    assert capsys.readouterr() == ("", "")


@linux
def test_every_entry_point_imports_it_before_mlx():
    for module in ("model", "cpu", "convert", "checkpoint", "main"):
        code = f"import {module}, fast_blas; print(fast_blas.path)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        assert "imported before" not in done.stderr, module
        assert done.stdout.strip() == str(fast_blas.path), module


@pytest.mark.parametrize("address", [0, 1, 2**21 - 1, 2**21, 7 * 2**21 + 16])
@pytest.mark.parametrize("size", [0, 1, 2**21, 2**21 + 2**20, 2**22 + 2**21])
def test_large_pages_lie_in_the_memory_itself(monkeypatch, address, size):
    asked = []

    def madvise(first, length, advice):
        asked.append(range(first, first + length))

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(fast_blas, "path", "some library")
    fast_blas.use_large_pages(address, size)
    pages = [p for p in range(0, 2**26, 2**21) if address <= p and p + 2**21 <= address + size]
    expected = [range(pages[0], pages[-1] + 2**21)] if pages else []
    assert asked == expected
    monkeypatch.setattr(fast_blas, "path", None)
    fast_blas.use_large_pages(address, size)
    assert asked == expected


def test_large_pages_hold_what_was_there():
    values = np.random.default_rng(0).integers(0, 256, 5 * 2**21 + 4, np.uint8)
    copy = values.copy()
    fast_blas.use_large_pages(copy.ctypes.data, copy.nbytes)
    assert (copy == values).all()
