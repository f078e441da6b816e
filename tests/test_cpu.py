"""cpu.py: which library answers, the same bits among any other rows, and the right values."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import cpu
from layers import ACTIVATIONS, Activation
from model import load

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
WIDTHS = range(1, cpu.FEW + 1)
pytestmark = pytest.mark.skipif(not cpu.in_use(), reason="the device is no CPU")
SHAPES = [(64, 64), (2048, 512), (768, 3072), (999, 200), (333, 1000), (31, 33), (4100, 128)]


def normal(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.fixture(params=["as found", "as for AVX-512", "a row at a time"])
def layout(request, monkeypatch):
    if request.param == "as for AVX-512":
        monkeypatch.setattr(cpu, "narrow_blocks", lambda: (32, 960))
    if request.param == "a row at a time":
        monkeypatch.setattr(cpu, "rows_of_products_agree", lambda columns: False)


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_a_row_of_a_product_has_the_same_bits_among_any_others(layout, rows, columns):
    weight, x = normal(rows, columns), normal(cpu.FEW, columns, seed=1)
    product = cpu.BlockLinear(weight)
    assert mx.array_equal(product.weight, weight)
    whole = product(x)
    exact = np.array(x, np.float64) @ np.array(weight, np.float64).T
    assert np.abs(np.array(whole) - exact).max() < 1e-4 * columns**0.5
    for n in WIDTHS:
        assert mx.array_equal(product(x[:n]), whole[:n]), f"{n} rows"
        assert mx.array_equal(product(x[n - 1 : n]), whole[n - 1 : n]), f"row {n} alone"


@pytest.mark.parametrize("rows", [33, 65, 97, 200])
def test_many_rows_and_a_bias(layout, rows):
    layer = nn.Linear(96, 700)
    x = normal(2, rows // 2, 96)
    assert mx.allclose(cpu.BlockLinear(layer.weight, layer.bias)(x), layer(x), atol=1e-4)


@pytest.mark.parametrize("width", [40, 400, 1600])
@pytest.mark.parametrize("rows", [1, 20, 33, 600, 3000])
def test_a_prompt_of_any_length(rows, width):
    """Blocks for the streams: fewer than there are of them, and more than are worth it."""
    layer, x = nn.Linear(300, width), normal(rows, 300)
    assert mx.allclose(cpu.BlockLinear(layer.weight, layer.bias, few=False)(x), layer(x), atol=1e-4)


@pytest.mark.parametrize("rows", [40, 4032, 32100])
def test_a_table_that_is_the_head_as_well(layout, rows):
    table = nn.Embedding(rows, 64)
    blocks, ids = cpu.BlockEmbedding(table.weight), mx.array([0, 1, 31, 39, rows // 2, rows - 1])
    assert mx.array_equal(blocks(ids), table(ids))
    assert mx.allclose(blocks.as_linear(normal(3, 64)), table.as_linear(normal(3, 64)), atol=1e-4)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("keys", [1, 20, 64, 65, 200, 255, 256, 257, 400, 900])
def test_attention_over_a_prompt(monkeypatch, keys, alone):
    if alone:
        monkeypatch.setattr(cpu, "rows_of_attention_agree", lambda d_kv: False)
    q, k, v = normal(4, cpu.FEW, 32), normal(4, keys, 32, seed=1), normal(4, keys, 32, seed=2)
    memory = cpu.KeysAndValues(k, v)
    whole = memory.attend(q)
    right = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=1)[0]
    assert mx.allclose(whole, right, atol=1e-5)
    for n in WIDTHS:
        assert mx.array_equal(memory.attend(q[:, :n]), whole[:, :n])


@pytest.mark.parametrize("keys", [33, 300, 700])
def test_attention_within_a_prompt(keys):
    q, k, v = (normal(5, keys, 16, seed=i) for i in range(3))
    bias = normal(5, keys, keys, seed=3)
    right = mx.fast.scaled_dot_product_attention(q[None], k[None], v[None], scale=1, mask=bias)[0]
    assert mx.allclose(cpu.KeysAndValues(k, v).attend(q, bias), right, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 32, 33, 100])
def test_activations_of_few_and_many_rows(name, rows):
    x = normal(rows, 50) * 3
    right = {
        "relu": nn.relu,
        "gelu": nn.gelu,
        "silu": nn.silu,
        "swish": nn.silu,
    }.get(name, nn.gelu_approx)
    mx.disable_compile()  # which needs a C++ compiler
    assert mx.allclose(cpu.Activation(Activation(name)).eval()(x), right(x), atol=1e-5)


@pytest.mark.parametrize("differs", [lambda rows: rows == 1, lambda rows: rows > 8])
def test_rows_that_round_in_other_ways_are_found(monkeypatch, differs):
    """A product whose row differs where it is alone, and one that differs above 8 rows."""
    checks = cpu.rows_of_products_agree, cpu.rows_of_attention_agree
    for check in checks:
        check.cache_clear()
    product, attend = cpu.product, cpu.attend

    def other_product(x, *rest):
        return product(x, *rest) * (1.0001 if differs(x.shape[-2]) else 1)

    def other_attend(q, *rest):
        return attend(q, *rest) * (1.0001 if differs(q.shape[1]) else 1)

    monkeypatch.setattr(cpu, "product", other_product)
    monkeypatch.setattr(cpu, "attend", other_attend)
    assert [check(16) for check in checks] == [False, False]
    monkeypatch.setattr(cpu, "attend", lambda q, k, *rest: attend(q, k, *rest) * k.shape[2])
    cpu.rows_of_attention_agree.cache_clear()
    assert not cpu.rows_of_attention_agree(16)  # what is masked counts
    for check in checks:
        check.cache_clear()


def test_prepare_swaps_leaves_of_any_module():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(40, 60), nn.Linear(60, 40, bias=False)]
            self.norm = nn.RMSNorm(40)
            self.half = nn.Linear(40, 8)

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.half(self.norm(x))

    model = Other()
    model.half.set_dtype(mx.float16)
    x = normal(3, 40)
    right = model(x)
    cpu.prepare(model)
    assert [type(layer) for layer in model.layers] == [cpu.BlockLinear] * 2
    assert type(model.half) is nn.Linear and mx.allclose(model(x), right, atol=1e-2)


# Which library answers


def child(code, **environment):
    """What a new process prints, and its standard error."""
    names = "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "FAST_BLAS"
    environment = {n: v for n, v in os.environ.items() if n not in names} | environment
    code = f"import mlx.core as mx, cpu, os\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Accelerate")
def test_openblas_answers_after_mlx_was_imported():
    code = """
a = mx.random.normal((300, 300)); mx.eval(a @ a)
before = "libscipy_openblas.so" in open("/proc/self/maps").read()
print(before, bool(cpu.load_blas()), "libscipy_openblas.so" in open("/proc/self/maps").read())
print(mx.allclose(a @ a, (a[:, :, None] * a[None]).sum(1), atol=1e-3).item())
print("OPENBLAS_CORETYPE" in os.environ, "OPENBLAS_NUM_THREADS" in os.environ)
"""
    assert child(code)[0].split() == ["False", "True", "True", "True", "False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="Accelerate")
def test_it_can_be_switched_off_or_replaced():
    show = "print(cpu.load_blas())"
    assert child(show, FAST_BLAS="0") == ("None", "")
    text, said = child(show, FAST_BLAS="/no/such/library.so")
    assert text == "None" and said.count("\n") == 1
    assert "pip install scipy-openblas32" in said and "/no/such/library.so" in said


@pytest.mark.skipif(sys.platform != "linux", reason="Accelerate")
def test_where_it_is_not_installed_one_line_says_so():
    code = "import sys; sys.modules['scipy_openblas32'] = None\nprint(cpu.load_blas())"
    text, said = child(code, FAST_BLAS="")
    assert text == "None" and said.count("\n") == 1 and "pip install scipy-openblas32" in said


@pytest.mark.parametrize("length", [3000, 30_000, 10**6])
def test_a_prompt_without_room_is_told_beforehand(monkeypatch, length):
    """Whichever limit is the lowest; what could fit is not refused."""
    model = load(GOLDEN / "t5-v1.1")[0]
    prompt = mx.arange(length) % 100 + 3
    needed = 4 * 4 * 2048 * (2 * length + 2048)
    monkeypatch.setattr(cpu, "memory_left", lambda: needed - 1)
    with pytest.raises(ValueError, match=rf"{length} tokens .* takes {needed / 1e9:.1f} GB"):
        model.start(prompt)
    monkeypatch.setattr(cpu, "memory_left", lambda: needed)
    cpu.check_memory(4, 2048, length)


def test_the_memory_that_is_left(monkeypatch):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < cpu.memory_left() <= physical
    limit = [2**60]
    monkeypatch.setattr("resource.getrlimit", lambda kind: (limit[0], 2**62))
    before = cpu.memory_left()
    limit[0] = 2**40
    assert cpu.memory_left() <= before
    limit[0] = 10**6  # less than this process has
    assert cpu.memory_left() < 10**6 + mx.get_cache_memory()
