"""Write a head in vLLM's format, start vLLM with it, ask one question, and read how many drafts were accepted.

python examples/serve_vllm.py HEAD [FOLDER]            # needs vllm and openai
python examples/serve_vllm.py HEAD [FOLDER] --export   # writes the files and prints the command
"""

import json
import shlex
import subprocess
import sys
import time
import urllib.request

import specheads

arguments = [text for text in sys.argv[1:] if text != "--export"]
HEAD = arguments[0] if arguments else "checkpoints/eagle3"
FOLDER = arguments[1] if len(arguments) > 1 else "runs/served"
ADDRESS = "http://127.0.0.1:8000"

model = specheads.SpecModel.from_pretrained(HEAD, dtype="auto")
folder = model.export(FOLDER, to="vllm")  # config.json, model.safetensors and a README with vLLM's command
lines = (folder / "README.md").read_text("utf8").splitlines()
command = next(line for line in lines if line.startswith("vllm serve"))
print(command)


def read(path: str, data: dict | None = None) -> str:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(ADDRESS + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read().decode()


if "--export" not in sys.argv:
    with subprocess.Popen(shlex.split(command)) as server:
        try:
            while server.poll() is None:
                try:
                    read("/health")
                    break
                except OSError:
                    time.sleep(2)
            asked = {
                "model": shlex.split(command)[2],
                "prompt": "def read_lines(path):\n",
                "max_tokens": 64,
                "temperature": 0,
            }
            print(json.loads(read("/v1/completions", asked))["choices"][0]["text"])
            print(*(line for line in read("/metrics").splitlines() if line.startswith("vllm:spec_decode")), sep="\n")
        finally:
            server.terminate()
