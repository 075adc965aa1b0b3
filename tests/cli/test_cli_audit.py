"""specheads audit."""

import json
import threading

import torch
from transformers import AutoModelForCausalLM

from tests.support.command_line import run
from tests.support.openai_server import serving


def test_audit_tells_a_right_server_from_a_wrong_one(shipped, tmp_path, capsys):
    """Exit codes 0, 3 and 4, and the same verdict as JSON."""
    model, lock, scale = AutoModelForCausalLM.from_pretrained(shipped / "base"), threading.Lock(), [1.0]
    torch.manual_seed(0)

    def reply(route, body, headers):
        prompt = torch.tensor([body["prompt"]])
        with lock:
            out = model.generate(
                prompt, do_sample=body["temperature"] > 0, temperature=scale[0], top_k=0, pad_token_id=0,
                max_new_tokens=body["max_tokens"], eos_token_id=body["stop_token_ids"],
            )  # fmt: skip
        return 200, {"choices": [{"token_ids": out[0, len(body["prompt"]) :].tolist()}]}

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(f"def f{i}(x):") + "\n" for i in range(4)), "utf8")
    with serving(reply) as url:
        ask = ("audit", url, "--base", shipped / "base", "--prompts", prompts, "--tv", 0.3)  # fmt: skip
        code, out, _ = run(capsys, *ask, "--temperature", 1)
        assert code == 0 and "lossless" in out
        code, out, _ = run(capsys, *ask, "--temperature", 0, "--json")
        assert code == 4 and json.loads(out)["results"][0]["more_tokens"] > 0
        scale[0] = 0.3
        code, out, _ = run(capsys, *ask, "--temperature", 1, "--json")
        assert code == 3 and json.loads(out)["verdict"] == "not lossless"
        code, _, err = run(capsys, *ask, "--kind", "other")
        assert code == 2 and "--kind" in err
