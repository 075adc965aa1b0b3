"""The worker process of OpenVINO GenAI, run by the Python of an environment with openvino-genai and optimum-intel.

It answers the requests of `peer.Peer`. Nothing from specheads or torch is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Pipelines:
    """The open pipelines, by key."""

    def __init__(self, genai: Any, openvino: Any) -> None:
        self.genai, self.openvino = genai, openvino
        self.by_key: dict[str, Any] = {}

    def versions(self) -> dict[str, Any]:
        return {"openvino_genai": self.genai.get_version(), "openvino": self.openvino.get_version()}

    def convert(self, model: str, out: str, layers: list[int] | None = None) -> dict[str, Any]:
        """Convert the model at `model` to OpenVINO's format in `out`. layers: for an EAGLE-3 head, the layers whose
        outputs it reads; by default OpenVINO reads each one layer above the trained one."""
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--trust-remote-code"]
        program = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command = [*program, "--model", model, *task, out]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"optimum-cli could not convert {model}: {done.stdout.strip()[-300:]}")
        if layers:
            path, mark = Path(out, "openvino_model.xml"), '<eagle3_mode value="True" />'
            text = path.read_text("utf8")
            if text.count(mark) != 1:
                raise RuntimeError(f"{path} does not say once that it is an EAGLE-3 head ({mark})")
            listed = f'<hidden_layers_list value="{" ".join(map(str, layers))}" />'
            path.write_text(text.replace(mark, mark + listed), "utf8")
        return {}

    def open(
        self, key: str, base: str, num_threads: int, precision: str, head: str | None = None, lookup: bool = False
    ) -> dict[str, Any]:
        """precision: f32 or bf16, as the other decoders compute; by itself OpenVINO takes what the CPU is fast at."""
        device = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": num_threads}
        options: dict[str, Any] = dict(device)
        if head is not None:
            options["draft_model"] = self.genai.draft_model(head, "CPU", **device)
        if lookup:
            options["prompt_lookup"] = True
        self.by_key[key] = self.genai.LLMPipeline(base, "CPU", **options)
        return {}

    def generate(
        self, key: str, ids: list[list[int]], mask: list[list[int]], max_new_tokens: int, temperature: float, seed: int,
        ends: list[int], options: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        import numpy

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, temperature > 0
        if temperature:
            config.temperature, config.top_p, config.rng_seed = temperature, 1.0, seed
        if ends:
            config.set_eos_token_id(ends[0])
            config.stop_token_ids = set(ends)
        for name, value in options.items():
            setattr(config, name, value)
        tensors = (self.openvino.Tensor(numpy.array(rows, dtype=numpy.int64)) for rows in (ids, mask))
        inputs = self.genai.TokenizedInputs(*tensors)
        began = time.perf_counter()
        out = self.by_key[key].generate(inputs, config)
        seconds = time.perf_counter() - began
        tokens = [list(map(int, row)) for row in out.tokens]
        return {"tokens": tokens, "seconds": seconds, "statistics": self._statistics(out, tokens)}

    def _statistics(self, out: Any, tokens: list[list[int]]) -> dict[str, int]:
        """Tokens after the prefill and the steps that gave them, if the pipeline counts accepted drafts."""
        accepted = getattr(getattr(out, "extended_perf_metrics", None), "get_num_accepted_tokens", None)
        if accepted is None:
            return {}
        gained = sum(map(len, tokens)) - len(tokens)
        return {"gained": gained, "rows_stepped": gained - int(accepted())}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)  # keeps what libraries print out of the answers on stdout
    try:
        import openvino
        import openvino_genai

        pipelines = Pipelines(openvino_genai, openvino)
        problem = ""
    except ImportError as error:
        pipelines, problem = None, f"{error}; pip install openvino-genai optimum-intel in its environment"
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if pipelines is None:
                raise RuntimeError(problem)
            answer = getattr(pipelines, request.pop("op"))(**request)
        except Exception as error:  # any error is sent back and reported there
            answer = {"error": " ".join(str(error).split())[:400] or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
