"""Claims about `--check`: it asks the program the export is for where that is installed, says which and what it
compared, and fails on what was read otherwise. Small modules stand in for vLLM's and gguf's here; the programs
themselves were asked by hand (docs/compatibility.md)."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specheads import CheckpointError
from specheads.heads.layers.rope import frequencies
from specheads.models import export_checks
from specheads.models.export_checks import by_gguf, comparison
from specheads.models.formats import ENGINES
from tests.reference.foreign_rope import SCALED
from tests.support.families import FAMILIES, build
from tests.support.heads_on_disk import trained

LLAMA3 = SCALED["llama3"]


@pytest.fixture(scope="module")
def scaled(base):
    return trained(base, "eagle3", draft_vocab_size=40, taps=(1, 3, 6), rope_parameters=LLAMA3)


DFLASH = {"sample_from_anchor": False, "causal": False, "markov_rank": 0, "mask_token_id": 9, "block_size": 4}
BLOCKS = {
    "dflash": DFLASH, "openvino": DFLASH, "jetspec": {**DFLASH, "causal": True},
    "deepspec": {**DFLASH, "sample_from_anchor": True, "markov_rank": 6},
}  # fmt: skip


def installed(monkeypatch, *names):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in names else None)


@pytest.mark.parametrize("to", sorted(ENGINES))
def test_where_its_program_is_missing_that_is_said_in_one_line(to, tmp_path, monkeypatch, base):
    kind = {"medusa": "medusa", "hydra": "hydra", **dict.fromkeys(BLOCKS, "parallel"), "mtp": "mtp"}.get(to, "eagle3")
    target = build(*FAMILIES["DeepSeek-V3"]) if kind == "mtp" else base
    model = trained(target, kind, **BLOCKS.get(to, {}))
    model.export(tmp_path / "out", to)
    installed(monkeypatch)
    found = export_checks.check(tmp_path / "out", to, model)
    module = {"trtllm": "tensorrt_llm", "llamacpp": "gguf", "openvino": "openvino_genai", "mtp": "vllm"}.get(to, to)
    assert found.startswith(f"not checked: {module} is not installed here") and "\n" not in found
    assert (f"transformers {transformers.__version__} reads its config" in found) == (
        kind == "eagle3" and to != "speculators"
    )


def test_a_program_that_reads_heads_in_its_server_alone_is_not_asked(scaled, tmp_path, monkeypatch):
    scaled.export(tmp_path / "out", "sglang")
    installed(monkeypatch, "sglang")
    assert export_checks.check(tmp_path / "out", "sglang", scaled).startswith(
        "not checked: sglang reads heads in a running"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate_size": 52}, r"reads of .* intermediate_size as 52, not 48"),
        ({"rope_scaling": {**LLAMA3, "factor": 2.0}}, "rope_parameters as .*'factor': 2.0.*, not .*'factor': 8.0"),
        ({"rope_theta": 400.0}, "rope_parameters as"),
    ],
)
def test_what_transformers_reads_otherwise_is_an_error(change, said, scaled, tmp_path):
    scaled.export(tmp_path / "out", "sglang")
    assert "10 sizes, rotary positions up to 1,023" in export_checks.by_transformers.check(tmp_path / "out", scaled)
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=said):
        export_checks.by_transformers.check(tmp_path / "out", scaled)


@pytest.mark.parametrize("to", ["vllm", "modelopt", "llamacpp", "speculators"])
def test_a_program_that_is_here_is_asked(to, scaled, tmp_path, monkeypatch):
    folder, (module, run) = scaled.export(tmp_path / "out", to), export_checks._CHECKS[to]
    assert run is not None
    installed(monkeypatch, module)
    monkeypatch.setitem(export_checks._CHECKS, to, (module, lambda given, model: f"asked of {given.name}"))
    assert export_checks.check(folder, to, scaled).startswith("asked of out")


# --- vLLM ---


@pytest.fixture
def vllm(monkeypatch, named):
    """What its process writes, without it: the file's tensors stacked and padded as vLLM has them, changed at will."""
    model = trained(named, "eagle3", draft_vocab_size=40, taps=(1, 3, 6), rope_parameters=LLAMA3)
    state = SimpleNamespace(model=model, change=lambda found: None, code=0, command=None)

    def run(command, **options):
        state.command = command
        _, _, _, folder, _, _, _, _, out = command
        tensors = load_file(f"{folder}/model.safetensors")
        attention, mlp = "midlayer.self_attn.{}_proj.weight", "midlayer.mlp.{}_proj.weight"
        stacked = {
            "model.layers.0.self_attn.qkv_proj.weight": torch.cat([tensors.pop(attention.format(m)) for m in "qkv"]),
            "model.layers.0.mlp.gate_up_proj.weight": torch.cat([tensors.pop(mlp.format(m)) for m in ("gate", "up")]),
            "lm_head.weight": torch.cat([tensors.pop("lm_head.weight"), torch.zeros(24, 32)]),
            "draft_id_to_target_id": tensors.pop("d2t"),
        }
        del tensors["t2d"]
        rest = {f"model.{name.replace('midlayer.', 'layers.0.')}": t for name, t in tensors.items()}
        positions = comparison.positions_below(512)
        angle = torch.outer(positions.float(), frequencies(8, LLAMA3)[0])
        found = {
            "version": "0.0", "class": "Eagle3LlamaForCausalLM", "layers": [1, 3, 6], "tensors": rest | stacked,
            "positions": positions, "cos": angle.cos(), "sin": angle.sin(),
        }  # fmt: skip
        state.change(found)
        torch.save(found, out)
        return SimpleNamespace(returncode=state.code, stderr="a line\nValueError: no such head\n")

    monkeypatch.setattr("subprocess.run", run)
    installed(monkeypatch, "vllm")
    return state


def test_vllm_is_asked_for_the_head_and_all_it_holds_is_compared(vllm, tmp_path):
    vllm.model.export(tmp_path / "out", "vllm", dtype="float32")
    found = export_checks.check(tmp_path / "out", "vllm", vllm.model)
    assert found.startswith(
        "vLLM 0.0 loads it as Eagle3LlamaForCausalLM, with the values of all 14 tensors, hidden states [1, 3, 6], "
        "rotary positions up to 511; transformers "
    )
    base = vllm.model.config.base_model_name_or_path
    assert vllm.command[3:8] == [str(tmp_path / "out"), base, "eagle3", "5", "float32"]


def wrong_rows(found):
    found["tensors"]["model.layers.0.self_attn.qkv_proj.weight"][33, 0] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (wrong_rows, "vLLM 0.0 did not read midlayer.self_attn.k_proj.weight of"),
        (lambda found: found["tensors"].pop("draft_id_to_target_id"), "did not read d2t of"),
        (lambda found: found.update(layers=[2, 4, 7]), r"layers as \[2, 4, 7\], not \[1, 3, 6\]"),
        (lambda found: found["cos"].mul_(1.1), "rotates positions up to 511 by other angles"),
    ],
)
def test_what_vllm_holds_otherwise_is_an_error(change, said, vllm, tmp_path):
    vllm.model.export(tmp_path / "out", "vllm")
    vllm.change = change
    with pytest.raises(CheckpointError, match=said):
        export_checks.check(tmp_path / "out", "vllm", vllm.model)


def test_where_vllm_fails_its_last_word_is_the_error(vllm, tmp_path):
    vllm.model.export(tmp_path / "out", "vllm")
    vllm.code = 1
    with pytest.raises(CheckpointError, match=r"vLLM cannot load .*out: ValueError: no such head"):
        export_checks.check(tmp_path / "out", "vllm", vllm.model)


# --- gguf ---


class Reader:
    """A GGUF file as its package reads it: what `content` says, whatever the path."""

    content: dict

    def __init__(self, path):
        fields, tensors = self.content["fields"], self.content["tensors"]
        self.fields = {name: SimpleNamespace(contents=lambda v=value: v) for name, value in fields.items()}
        kind = SimpleNamespace(name="F32")
        self.tensors = [SimpleNamespace(name=n, data=t.numpy(), tensor_type=kind) for n, t in tensors.items()]


class Names:
    """llama.cpp's names for a Llama's."""

    parts = {  # noqa: RUF012
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip

    def get_name(self, name, try_suffixes):
        for theirs, own in {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}.items():
            if name == theirs:
                return own
        part = name.removeprefix("model.layers.0.").removesuffix(".weight")
        return f"blk.0.{self.parts[part]}.weight" if part in self.parts else None


@pytest.fixture
def gguf(monkeypatch, scaled, tmp_path):
    """An export of a head, and its GGUF file as llama.cpp's converter writes it."""
    folder = scaled.export(tmp_path / "out", "llamacpp")
    (folder / "draft.gguf").touch()
    tensors, heads = load_file(folder / "model.safetensors"), {"q_proj": 4, "k_proj": 2}
    names, written = Names(), {}
    for name, tensor in tensors.items():
        part = next((part for part in heads if part in name), None)
        if part:  # rows i and i + d/2 of a head side by side
            tensor = tensor.view(heads[part], 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        written[by_gguf._renamed(name, names)] = tensor.clone()
    del written["t2d"]
    written["d2t"] = written["d2t"] + torch.arange(40)
    written["rope_freqs.weight"] = frequencies(8, {**LLAMA3, "rope_type": "default"})[0] / frequencies(8, LLAMA3)[0]
    fields = {
        "target_layers": [1, 3, 6], "embedding_length": 32, "feed_forward_length": 48, "block_count": 1,
        "vocab_size": 97, "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 500.0,
        "attention.layer_norm_rms_epsilon": float(torch.tensor(1e-6)), "norm_before_residual": False,
        "norm_before_fc": False,
    }  # fmt: skip
    fields = {f"eagle3.{name}": value for name, value in fields.items()} | {"general.architecture": "eagle3"}
    Reader.content = {"fields": fields, "tensors": written}
    module = ModuleType("gguf")
    module.GGUFReader, module.MODEL_ARCH = Reader, SimpleNamespace(EAGLE3="eagle3")
    module.get_tensor_name_map = lambda arch, blocks: names
    module.quants = SimpleNamespace(dequantize=lambda data, kind: data)
    monkeypatch.setitem(sys.modules, "gguf", module)
    installed(monkeypatch, "gguf")
    return SimpleNamespace(folder=folder, **Reader.content)


def test_a_gguf_file_is_read_back_whole(gguf, scaled):
    found = export_checks.check(gguf.folder, "llamacpp", scaled)
    assert found.startswith("gguf reads draft.gguf: 12 values of its metadata, the values of 14 tensors; transformers ")
    (gguf.folder / "draft.gguf").unlink()
    assert "holds no draft.gguf; export with --gguf" in export_checks.check(gguf.folder, "llamacpp", scaled)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: g.fields.update({"eagle3.target_layers": [2, 4, 5]}), r"target_layers as \[2, 4, 5\], not \[1, 3"),
        (lambda g: g.fields.pop("eagle3.rope.freq_base"), "rope.freq_base as None, not 500.0"),
        (lambda g: g.tensors["blk.0.attn_k.weight"].data[0].add_(1), "did not read midlayer.self_attn.k_proj.weight"),
        (lambda g: g.tensors["blk.0.attn_q.weight"].set_(g.tensors["blk.0.attn_q.weight"].flip(0)), "q_proj.weight"),
        (lambda g: g.tensors.pop("d2t"), "did not read d2t of"),
        (lambda g: g.tensors.pop("rope_freqs.weight"), "other angles in rope_freqs than llama3's"),
        (lambda g: g.tensors["rope_freqs.weight"].fill_(1), "other angles in rope_freqs"),
    ],
)
def test_what_a_gguf_file_holds_otherwise_is_an_error(change, said, gguf, scaled):
    change(gguf)
    with pytest.raises(CheckpointError, match=said):
        export_checks.check(gguf.folder, "llamacpp", scaled)


def test_a_changed_file_is_seen(scaled, tmp_path):
    folder = scaled.export(tmp_path / "out", "sglang")
    tensors = load_file(folder / "model.safetensors")
    assert comparison.compare_tensors("it", folder, tensors) == len(tensors)
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"it did not read fc\.weight of"):
        comparison.compare_tensors("it", folder, tensors)
    assert comparison.positions_below(70).tolist() == [*range(66)]
