"""llama.cpp as a peer: what is written of a base is that base, and the worker generates what is asked for."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engines import llama
from benchmarks.engines.llama import write_source
from benchmarks.engines.llama_worker import Engines
from specheads.bench.compare import run
from specheads.bench.compare.decoder_spec import BenchSetup, Cell
from specheads.bench.compare.decoder_texts import DECODERS, parse_decoder
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.peer import Peer, PeerError
from specheads.bench.compare.prompt_sets import PromptSet
from specheads.models.named import Models
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.tiny_models import gpt2

FAKE = Path(__file__).parents[1] / "workers" / "fake_peer.py"
PYTHON = "SPECHEADS_LLAMA_CPP"  # the Python of an environment with llama-cpp-python and gguf, docs/bench.md
GREEDY = Cell("p", 1, 0.0)
IDS = [3, 77, 12, 5, 41, 12, 9, 60, 33, 2, 8, 8, 150, 399, 17]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "untied, with biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama3 positions": {"rope_parameters": LLAMA3},
    "linear positions": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
}


def llama_base(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0,
           "eos_token_id": 1, "tie_word_embeddings": False, **options},
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return base


def read(folder):
    header = json.loads((folder / "gguf.json").read_text("utf8"))
    whole = (folder / "tensors.bin").read_bytes()
    found = {}
    for name, shape, dtype, offset in header["tensors"]:
        kind = getattr(torch, dtype)
        flat = torch.frombuffer(bytearray(whole), dtype=kind, count=torch.Size(shape).numel(), offset=offset)
        found[name] = flat.view(shape).float()
    return {key: value for key, _, value in header["metadata"]}, found


def llama_cpp_logits(values, weights, ids):
    """The logits (T, V) of llama.cpp's Llama as its source has it, whose rotary embedding turns neighbours."""

    def value(name):
        return values[f"llama.{name}"]

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], value("attention.layer_norm_rms_epsilon"))

    size, heads, kv_heads = (value(f"attention.{n}") for n in ("key_length", "head_count", "head_count_kv"))
    angles = value("rope.freq_base") ** (-torch.arange(0, size, 2) / size) / weights.get("rope_freqs.weight", 1.0)
    turns = torch.polar(torch.ones(1), torch.arange(len(ids)).unsqueeze(1) * angles).unsqueeze(1)  # (T, 1, d / 2)

    def rotate(x, count):
        x = x.view(len(ids), count, size // 2, 2).contiguous()
        return torch.view_as_real(torch.view_as_complex(x) * turns).flatten(2).transpose(0, 1)

    x = weights["token_embd.weight"][ids]
    for layer in range(value("block_count")):
        name = f"blk.{layer}."
        y = norm(x, name + "attn_norm")
        q, k = (rotate(linear(y, f"{name}attn_{p}"), n) for p, n in (("q", heads), ("k", kv_heads)))
        v = linear(y, name + "attn_v").view(len(ids), kv_heads, size).transpose(0, 1)
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + linear(out, name + "attn_output")
        y = norm(x, name + "ffn_norm")
        x = x + linear(F.silu(linear(y, name + "ffn_gate")) * linear(y, name + "ffn_up"), name + "ffn_down")
    return F.linear(norm(x, "output_norm"), weights.get("output.weight", weights["token_embd.weight"]))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_gives_the_bases_logits_in_llama_cpps_arithmetic(tmp_path, shape):
    base = llama_base(**SHAPES[shape])
    write_source(base, build_tokenizer(), tmp_path / "source")
    values, weights = read(tmp_path / "source")
    with torch.no_grad():
        wanted = base(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(llama_cpp_logits(values, weights, IDS), wanted, atol=2e-4, rtol=1e-4)
    assert ("output.weight" in weights) == (shape != "tied")


def test_weights_keep_the_bases_dtype_and_norms_are_float32(tmp_path):
    base = llama_base().to(torch.bfloat16)
    write_source(base, build_tokenizer(), tmp_path / "source")
    header = json.loads((tmp_path / "source" / "gguf.json").read_text("utf8"))
    kinds = {name: dtype for name, _, dtype, _ in header["tensors"]}
    assert kinds["blk.1.ffn_up.weight"] == "bfloat16" and kinds["blk.1.ffn_norm.weight"] == "float32"
    values, weights = read(tmp_path / "source")
    assert values["general.file_type"] == 32
    assert torch.equal(weights["token_embd.weight"], base.model.embed_tokens.weight.float())


def test_tokens_are_written_with_their_types(tmp_path):
    tokenizer = build_tokenizer()
    write_source(llama_base(vocab_size=len(tokenizer) + 3), tokenizer, tmp_path / "source")
    values, _ = read(tmp_path / "source")
    tokens, types = (values[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(tokens) == len(set(tokens)) == len(types) == len(tokenizer) + 3
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert types[end] == types[-1] == 3 and types[tokenizer.convert_tokens_to_ids("e")] == 1
    assert values["tokenizer.ggml.merges"] and all(merge.count(" ") == 1 for merge in values["tokenizer.ggml.merges"])


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (gpt2, "only LlamaForCausalLM is written as GGUF, not GPT2LMHeadModel"),
        (lambda: llama_base(rope_parameters=YARN), "a rotary embedding of type 'yarn' is not written here"),
        (lambda: llama_base(hidden_act="gelu"), "the base has 'gelu'"),
        (lambda: llama_base().double(), "weights of torch.float64 are not written here"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, make, said):
    with pytest.raises(PeerError, match=r"llama\.cpp: ") as error:
        write_source(make(), build_tokenizer(), tmp_path / "source")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    with pytest.raises(PeerError, match="no byte-level BPE"):
        write_source(llama_base(), SimpleNamespace(backend_tokenizer=None), tmp_path / "source")


# ----------------------------------------------------------------------------------------------------------- its worker


class FakeLlama:
    """Counts up from the prompt's last token, two tokens a pass; says how it was opened and asked."""

    def __init__(self, path, **options):
        self.options, self.seeds, self.resets = options, [], 0

    def set_seed(self, seed):
        self.seeds.append(seed)

    def reset(self):
        self.resets += 1

    def eval(self, tokens):
        """A pass."""

    def generate(self, tokens, **options):
        self.asked, token = options, tokens[-1]
        while True:
            self.eval([])
            for _ in range(2):
                token += 1
                yield token


@pytest.fixture
def engines():
    module = SimpleNamespace(Llama=FakeLlama, GGML_TYPE_F32=0, __version__="0.0")
    speculative = SimpleNamespace(LlamaPromptLookupDecoding=lambda **options: options)
    return Engines(module, speculative, None)


def test_the_worker_generates_up_to_the_limit_or_an_end_and_counts_its_passes(engines):
    engines.open("plain", "x.gguf", num_threads=2, num_positions=50, exact_cache=True)
    asked = {"key": "plain", "mask": [[0, 1, 1]], "temperature": 0.0, "seed": 4, "ends": [99]}
    answer = engines.generate(ids=[[7, 5, 10]], max_new_tokens=5, **asked)
    assert answer["tokens"] == [[11, 12, 13, 14, 15]] and answer["statistics"] == {"gained": 4, "rows_stepped": 2}
    again = engines.generate(ids=[[7, 5, 95]], max_new_tokens=50, **asked)
    assert again["tokens"] == [[96, 97, 98, 99]] and again["statistics"]["rows_stepped"] == 1
    opened = engines.by_key["plain"].llama
    assert opened.resets == 2 and opened.seeds == [4, 4]  # nothing of a text is reused for the next
    assert opened.asked == {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    assert opened.options == {
        "n_ctx": 50, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "type_k": 0, "type_v": 0
    }  # fmt: skip


def test_the_workers_lookup_has_its_length_and_a_cache_of_its_own_dtype(engines):
    engines.open("lookup", "x.gguf", num_threads=1, num_positions=9, exact_cache=False, lookup=4, ngram=3)
    options = engines.by_key["lookup"].llama.options
    assert options["draft_model"] == {"max_ngram_size": 3, "num_pred_tokens": 4} and options["logits_all"]
    assert "type_k" not in options


# --------------------------------------------------------------------------------------------------------- as a decoder


@pytest.fixture
def setup(monkeypatch):
    for name, kind in llama.ENGINE.decoders.items():
        monkeypatch.setitem(DECODERS, name, kind)
    return BenchSetup(Models(llama_base(), build_tokenizer()), None, 4, 8, {})


def test_llama_cpp_is_one_of_the_decoders_in_turn(setup, tmp_path):
    peer = setup.peers["llama.cpp"] = Peer("fake", [sys.executable, "-I", str(FAKE)], tmp_path / "peers")
    asked, ask = [], peer.ask

    def convert(op, **arguments):
        asked.append((op, arguments))
        if op == "convert":
            assert (Path(arguments["model"]) / "gguf.json").is_file()
            Path(arguments["out"]).write_text("GGUF")
        return ask(op, **arguments)

    peer.ask = convert
    options = BenchOptions(
        decoder=("llama.cpp", "llama.cpp-lookup:6"), reference="plain", batch=(1, 2), temperature=0, max_new_tokens=4,
        repeats=1, out=tmp_path,
    )  # fmt: skip
    sets = [PromptSet("p", [[5, 6], [7, 8]], [None, None])]
    outcome = run.run(options, setup, run.decoders_of(options), sets, lambda fraction, note: None)
    peer.close()
    reason = "llama-cpp-python generates one row at a time"
    assert outcome.complete and outcome.left_out == {
        name: {"p, batch 2, T = 0": reason} for name in ("llama.cpp", "llama.cpp-lookup:6")
    }
    assert all(one["decoders"]["llama.cpp"]["seconds"] == 0.25 for one in outcome.rounds if one["batch"] == 1)
    assert [op for op, _ in asked if op in ("convert", "open")] == ["convert", "open", "open"]
    opened = {arguments["key"]: arguments for op, arguments in asked if op == "open"}
    assert opened["plain"]["num_threads"] == torch.get_num_threads() and opened["plain"]["exact_cache"]
    assert opened["plain"]["num_positions"] == 8 + 4 + 1 and opened["lookup 6"]["lookup"] == 6
    assert [path.suffix for path in peer.folder.iterdir()] == [".gguf"]  # neither a half file nor its source


def test_llama_cpp_says_what_it_needs(setup):
    with pytest.raises(ValueError, match="drafts nothing"):
        parse_decoder("llama.cpp-lookup:0")


@pytest.mark.skipif(not os.environ.get(PYTHON), reason=f"{PYTHON} names no Python with llama-cpp-python and gguf")
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_itself_gives_the_bases_logits_and_text(setup, tmp_path, shape):
    base = llama_base(**SHAPES[shape])
    peer = Peer("llama.cpp", [os.environ[PYTHON], "-I", str(llama.ENGINE.worker)], tmp_path)
    setup = BenchSetup(Models(base, build_tokenizer()), None, 12, len(IDS), {"llama.cpp": peer})
    batch = {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS))}
    try:
        ours = parse_decoder("transformers").build(setup, GREEDY)(batch, None).tokens
        for text in ("llama.cpp", "llama.cpp-lookup:4"):
            assert parse_decoder(text).build(setup, GREEDY)(batch, None).tokens == ours
        with torch.no_grad():
            wanted = base(batch["input_ids"]).logits[0, -1].numpy()
        numpy.testing.assert_allclose(peer.ask("logits", key="plain", ids=IDS)["logits"], wanted, atol=2e-3)
    finally:
        peer.close()
