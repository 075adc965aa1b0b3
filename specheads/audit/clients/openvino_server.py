"""OpenVINO GenAI with a draft head as a small HTTP server. It runs in OpenVINO's own Python, without this package:

    python openvino_server.py PORT BASE HEAD FOLDER DEPTH LAYERS

BASE and HEAD (an export with --to eagle --embeddings, or --to openvino) are converted into FOLDER, in float32. LAYERS:
the `hidden_layers_list` of an EAGLE-3 head, numbers with spaces between them; empty for others. It answers
/v1/completions with `token_ids` and `gained`, /counters with how many drafts were accepted, /health. A request at a
time.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # the cache has eight bits by default
MODE = '<eagle3_mode value="True" />'


def generation_config(genai: Any, asked: dict[str, Any], seed: int) -> Any:
    """A GenerationConfig of a request of /v1/completions, with every sampler set, neutral ones too. Its samplers cut by
    top-k before top-p, as transformers does. ValueError for min-p, which it does not have."""
    if asked["min_p"]:
        raise ValueError(f"OpenVINO GenAI has no min-p, and {asked['min_p']:g} was asked for")
    config, sampled, ends = genai.GenerationConfig(), asked["temperature"] > 0, asked.get("stop_token_ids") or []
    config.do_sample, config.rng_seed, config.apply_chat_template = sampled, seed, False
    config.max_new_tokens, config.repetition_penalty = asked["max_tokens"], asked["repetition_penalty"]
    config.presence_penalty, config.frequency_penalty = asked["presence_penalty"], asked["frequency_penalty"]
    config.ignore_eos, config.include_stop_str_in_output = not ends, True
    if ends:
        config.eos_token_id, config.stop_token_ids = ends[0], set(ends)
    if asked.get("stop"):
        config.stop_strings = set(asked["stop"])
    if sampled:
        config.temperature, config.top_p = asked["temperature"], asked["top_p"]
        config.top_k = asked["top_k"] or 2**63 - 1
    return config


def gained_tokens(out: Any) -> list[int]:
    """Of each pass of a pipeline with drafts, that over the prompt first. The last may count tokens past the end."""
    return [int(gained) for gained in out.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes]


def convert(source: str, out: Path) -> None:
    """By optimum-intel, in float32."""
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", source]
    task = ["--task", "text-generation-with-past", "--trust-remote-code", "--weight-format", "fp32"]
    if subprocess.run([*command, *task, str(out)], check=False).returncode:
        sys.exit(1)  # it has said why


def name_layers(head: Path, layers: str) -> None:
    """Write the numbers of the layers that an EAGLE-3 head reads into the converted head."""
    path = head / "openvino_model.xml"
    text = path.read_text("utf8")
    if text.count(MODE) != 1:
        raise SystemExit(f"error: {path} is no EAGLE-3 head: optimum-intel did not write {MODE}")
    path.write_text(text.replace(MODE, f'{MODE}<hidden_layers_list value="{layers}" />'), "utf8")


class Pipeline:
    """Base and head. steps, tokens, by_depth: passes after the one over the prompt, the tokens gained in them, and how
    many of them accepted so many drafts. Of a step that ends its text one draft too few may be counted."""

    def __init__(self, base: Path, head: Path, depth: int) -> None:
        self.genai, self.openvino, self.numpy = map(importlib.import_module, ("openvino_genai", "openvino", "numpy"))
        scheduler = self.genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # which its DFlash refuses
        draft = self.genai.draft_model(str(head), "CPU", **EXACT)
        self.pipe = self.genai.LLMPipeline(str(base), "CPU", draft_model=draft, scheduler_config=scheduler, **EXACT)
        self.depth, self.seed = depth, 0
        self.steps, self.tokens, self.by_depth = 0, 0, [0] * depth
        self.lock = threading.Lock()

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.seed += 1
            config = generation_config(self.genai, asked, self.seed)
            config.num_assistant_tokens = self.depth
            ids = self.openvino.Tensor(self.numpy.array([asked["prompt"]], dtype=self.numpy.int64))
            out = self.pipe.generate(ids, config)
            gains = gained_tokens(out)
            for gained in gains[1:]:
                self.steps += 1
                self.tokens += gained
                for depth in range(gained - 1):
                    self.by_depth[depth] += 1
        return {"choices": [{"token_ids": [int(token) for token in out.tokens[0]], "gained": gains}]}

    def counters(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": self.tokens, "by_depth": self.by_depth}


def serve(
    port: int, answer: Callable[[dict[str, Any]], dict[str, Any]], counters: Callable[[], dict[str, Any]]
) -> None:
    """Until the process ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, counters() if self.path == "/counters" else {})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, said = 200, answer(asked)
            except (ValueError, RuntimeError) as error:
                status, said = 400, {"error": str(error)}
            self.send(status, said)

        def send(self, status: int, said: dict[str, Any]) -> None:
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main(port: str, base: str, head: str, folder: str, depth: str, layers: str = "") -> None:
    base_folder, head_folder = Path(folder, "ov-base"), Path(folder, "ov-head")
    convert(base, base_folder)
    convert(head, head_folder)
    if layers:
        name_layers(head_folder, layers)
    pipeline = Pipeline(base_folder, head_folder, int(depth))
    serve(int(port), pipeline.answer, pipeline.counters)


if __name__ == "__main__":
    main(*sys.argv[1:])
