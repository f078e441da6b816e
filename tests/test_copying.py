"""decoder.py and prompt_lookup.py, copied into an empty folder, drive models of mlx-lm.

The adapter is the one that the README shows.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ["decoder.py", "prompt_lookup.py"]

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

# What runs in the empty folder. mlx-lm's own generation is the judge.
SCRIPT = """
import json, sys
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, qwen3
from adapter import Adapter
from decoder import Decoder, SpeculativeDecoder
from prompt_lookup import PromptLookupDecoder

tiny, results = json.loads(sys.argv[1]), []
for name, module in (("llama", llama), ("qwen3", qwen3)):
    models = []
    for seed in range(2):
        mx.random.seed(seed)
        model = module.Model(module.ModelArgs(model_type=name, **tiny))
        model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.3, model.parameters()))
        models.append(model)
    target, draft_model = map(Adapter, models)
    for size in (1, 2, 30):
        prompt = mx.random.randint(0, 6, (size,)).astype(mx.uint32)
        own = [t.item() if hasattr(t, "item") else t
               for t, _ in generate_step(prompt, models[0], max_tokens=40)]
        results.append([name, size, own, {}])
        for decoder in (
            Decoder(target, None),
            PromptLookupDecoder(target, None),
            PromptLookupDecoder(target, None, num_draft=24, fixed_draft=True),
            SpeculativeDecoder(target, draft_model, None, num_draft=5, fixed_draft=True),
            SpeculativeDecoder(target, target, None, num_draft=5, fixed_draft=True),
        ):
            stream = decoder.stream(prompt, 40)
            ids = [t.id for t in stream]
            stats = stream.stats
            key = type(decoder).__name__ + str(len(results[-1][3]))
            results[-1][3][key] = [ids, stats.passes, stats.drafted, stats.accepted]
print(json.dumps([results, sorted(sys.modules)]))
"""


def adapter():
    section = (ROOT / "README.md").read_text().partition("\n## Your own MLX model")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    return next(block for block in blocks if "class Adapter" in block)


@pytest.fixture
def folder(tmp_path):
    for name in COPIED:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "adapter.py").write_text(adapter())
    return tmp_path


def run(folder, script, *args):
    """Runs in the folder, which alone is on the path beside the installed packages."""
    command = [sys.executable, "-c", script, *args]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", COPIED)
def test_imports_are_mlx_and_the_standard_library(name):
    modules = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add((node.module or ".").partition(".")[0])
    assert modules <= set(sys.stdlib_module_names) | {"mlx", "decoder"}


def test_copies_import_nothing_else_of_ours(folder):
    script = "import prompt_lookup, sys; print(*sys.modules)"
    modules = set(run(folder, script).split())
    ours = {path.stem for path in ROOT.glob("*.py")}
    assert modules & ours == {"decoder", "prompt_lookup"}
    assert not modules & {"numpy", "transformers", "mlx_lm"}


def test_adapter_is_a_few_lines():
    lines = [line for line in adapter().splitlines() if line.strip()]
    assert len(lines) <= 36


def test_llama_and_qwen_write_what_mlx_lm_writes(folder):
    results, modules = json.loads(run(folder, SCRIPT, json.dumps(TINY)).splitlines()[-1])
    assert not {"model", "fast_blas", "main"} & set(modules)
    assert len(results) == 6
    accepted = dict.fromkeys(range(5), 0)
    for name, size, own, ours in results:
        assert len(own) == 40
        for i, (decoder, (ids, passes, drafted, right)) in enumerate(ours.items()):
            assert ids == own, (name, size, decoder)
            assert (passes == 40) == (right == 0)
            accepted[i] += right
            if i == 4:
                assert drafted == right and passes == 7  # the target drafts for itself
    assert accepted[0] == 0 and min(accepted[i] for i in (1, 2, 4)) > 40, accepted


REFUSED = """
import mlx.core as mx
from adapter import Adapter
from mlx_lm.models import mamba, gemma3_text
from prompt_lookup import PromptLookupDecoder

window = gemma3_text.Model(gemma3_text.ModelArgs(
    model_type="gemma3_text", hidden_size=32, num_hidden_layers=2, intermediate_size=64,
    num_attention_heads=4, head_dim=8, num_key_value_heads=2, vocab_size=40, sliding_window=8,
    sliding_window_pattern=2))
recurrent = mamba.Model(mamba.ModelArgs(
    model_type="mamba", vocab_size=40, hidden_size=32, intermediate_size=64, state_size=4,
    num_hidden_layers=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=4))
for model in (recurrent, window):
    try:
        PromptLookupDecoder(Adapter(model)).stream(mx.array([1, 2], mx.uint32))
        print("taken")
    except ValueError as error:
        print(error)
"""


def test_a_cache_that_cannot_be_rewound_is_refused(folder):
    recurrent, window = run(folder, REFUSED).splitlines()
    assert "no trim(n)" in recurrent
    assert window == "taken"  # it keeps what has left it
