"""generate_many(stream=True) that is left early, and what the caller's own code runs under between results."""

import ast
import subprocess
import sys
from pathlib import Path

import torch

import specheads
from specheads import generate_many
from tests.support.refilled import BASE, GREEDY, PROMPTS

LEFT_EARLY = """
import specheads
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
base = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
stream = specheads.generate_many(base, [[5, 6]] * 4, batch_size=2, draft="lookup", stream=True, max_new_tokens=8)
next(stream)
"""


def test_a_stream_left_early_says_nothing_at_exit(pytestconfig):
    """It is freed when torch is gone."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LEFT_EARLY], cwd=pytestconfig.rootpath, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_no_generator_is_decorated_by_torch():
    """torch's wrapper of a generator runs when the generator is freed, which may be after torch."""
    found = []
    for path in Path(specheads.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(isinstance(n, ast.Yield) for n in ast.walk(function)):
                names = [ast.unparse(decorator) for decorator in function.decorator_list]
                found += [f"{path.name}: {function.name}" for name in names if name.startswith("torch.")]
    assert not found


def test_between_results_the_caller_has_the_mode_it_had():
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            for one in generate_many(BASE, PROMPTS[:3], batch_size=2, stream=True, **GREEDY):
                assert torch.is_grad_enabled() == enabled and not torch.is_inference_mode_enabled()
                assert one.tokens
