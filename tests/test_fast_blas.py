"""fast_blas.py: which library is loaded, and what is said where none is."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    for module in ("model", "convert", "checkpoint", "main"):
        code = f"import {module}, fast_blas; print(fast_blas.path)"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        assert "imported before" not in done.stderr, module
        assert done.stdout.strip() == str(fast_blas.path), module
