"""MTP modules that a model's own checkpoint holds: read, decoded with, trained, and written back."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_layers

from specheads import SpecModel, convert
from specheads.data.datasets import Collator
from specheads.decoding.verify.hf_base import UnsupportedModel
from specheads.heads import MtpConfig, MtpHead
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.format import read
from specheads.models.formats.mtp.shipped import FORMATS
from tests.reference.slow_heads import rows
from tests.support.mtp_drafts import (
    BY_TRANSFORMERS,
    PLAIN,
    assert_drafts_of_transformers,
    assert_outputs_of_a_plain_implementation,
    drafts_of,
    drafts_of_transformers,
)
from tests.support.prompts import PROMPTS, padded
from tests.support.shipped_mtp import FAMILIES, config_of, write, write_apart

needs_mtp_model = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="older transformers")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Family → its folder and the tensors of its modules, each written once."""
    written = {}

    def get(family):
        if family not in written:
            folder = tmp_path_factory.mktemp("target")
            written[family] = folder, write(folder, family)
        return written[family]

    return get


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_with_modules_writes_its_own_greedy_text(shipped, family):
    model = SpecModel.from_pretrained(shipped(family)[0])
    assert model.head.config.kind == "mtp" and model.head.config.num_modules == FAMILIES[family][4]
    inputs, options = padded(PROMPTS), {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    texts = [model.base.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in PROMPTS]
    for tree in ("chain:3", "static:8", "dynamic:9"):
        out = model.generate(**inputs, tree=tree, **options)
        for row, text in zip(out, texts, strict=True):
            assert torch.equal(row[inputs["input_ids"].shape[1] :], text), tree
    again = [model.generate(**inputs, max_new_tokens=8, do_sample=True, accept="typical", seed=3) for _ in range(2)]
    assert torch.equal(*again)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_head_comes_back(shipped, tmp_path, family):
    model = SpecModel.from_pretrained(shipped(family)[0])
    model.save_pretrained(tmp_path)
    again = SpecModel.from_pretrained(tmp_path)
    assert again.head.config == model.head.config
    assert all(map(torch.equal, again.head.state_dict().values(), model.head.state_dict().values()))


def test_a_saved_head_comes_back_in_the_dtypes_it_was_saved_in(tmp_path):
    """The biases that choose experts are in float32 beside bfloat16: all of the head was float32 then."""
    write(tmp_path / "target", "glm4_moe", dtype=torch.bfloat16)
    model = SpecModel.from_pretrained(tmp_path / "target", dtype="auto")
    model.save_pretrained(tmp_path / "head")
    again = SpecModel.from_pretrained(tmp_path / "head", dtype="auto").head.state_dict()
    assert {tensor.dtype for tensor in again.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in model.head.state_dict().items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


# --- The same drafts as others make of the files ---


@needs_mtp_model
@pytest.mark.parametrize("family", BY_TRANSFORMERS)
def test_drafts_are_those_of_transformers(shipped, family):
    assert_drafts_of_transformers(shipped(family)[0])


@pytest.mark.parametrize("family", PLAIN)
def test_outputs_are_those_of_a_plain_implementation(shipped, family):
    assert_outputs_of_a_plain_implementation(*shipped(family), family)


# --- Training, and writing back ---


def trained(model, steps=12):
    """Its losses while it learns a few rows."""
    batch, losses = Collator(0)(rows(24, 20)), []
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("sharded", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_back_is_what_was_read(tmp_path, family, sharded, dtype):
    modules = write(tmp_path, family, sharded, dtype)
    model = SpecModel.from_pretrained(tmp_path, dtype=None if sharded else "auto")
    out = model.export(tmp_path / "out", "mtp")
    written = load_file(out / "mtp.safetensors")
    copies = {name for name in modules if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert written.keys() == modules.keys() - copies
    assert all(
        torch.equal(tensor, modules[name]) and tensor.dtype == modules[name].dtype for name, tensor in written.items()
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, file in index.items() if file == "mtp.safetensors"} == written.keys()
    assert all((out / file).is_file() for file in index.values())
    base = AutoModelForCausalLM.from_pretrained(out)
    assert all(map(torch.equal, base.state_dict().values(), model.base.state_dict().values()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["deepseek_v3, three modules", "exaone_moe", "mimo", "ernie4_5"])
def test_trained_modules_are_written_and_read_again(shipped, tmp_path, family):
    model = SpecModel.from_pretrained(shipped(family)[0])
    before = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.1
    again = SpecModel.from_pretrained(model.export(tmp_path / "out", "mtp"))
    state = model.head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.head.state_dict().items())
    assert any(not torch.equal(tensor, state[name]) for name, tensor in before.items())
    if family in BY_TRANSFORMERS and hasattr(modeling_layers, "MtpModel"):
        ids = torch.tensor([PROMPTS[2]])
        theirs, _ = drafts_of_transformers(again.base, ids, 12)
        ours, _ = drafts_of(model, ids, 12)
        first = tuple(next(iter(theirs)))
        assert ours[first] == theirs[first]


@pytest.mark.parametrize("holds", ["modules", "none"])
def test_modules_of_a_target_in_one_file_are_written_and_read_again(tmp_path, holds):
    """Readers of model.safetensors pass an index by, and would find the old modules, or none."""
    modules = write(tmp_path / "target", "mimo", sharded=False)
    if holds == "none":
        path = tmp_path / "target" / "model.safetensors"
        base = {name: tensor for name, tensor in load_file(path).items() if name not in modules}
        save_file(base, path, metadata={"format": "pt"})
        model = convert(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), "mtp", hidden_first=True)
    else:
        model = SpecModel.from_pretrained(tmp_path / "target")
    trained(model, steps=2)
    again = SpecModel.from_pretrained(model.export(tmp_path / "out", "mtp"))
    state = model.head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.head.state_dict().items())
    assert all(map(torch.equal, again.base.state_dict().values(), model.base.state_dict().values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_first": True}, "hidden_first=True"),
        ({"final_norm": False}, "final_norm=False"),
        ({"norm_output": False}, "norm_output=False"),
    ],
)
def test_a_head_of_another_form_is_not_written_under_the_familys_names(shipped, tmp_path, options, message):
    base = AutoModelForCausalLM.from_pretrained(shipped("deepseek_v3")[0])
    with pytest.raises(CheckpointError, match=message):
        convert(base, "mtp", **options).export(tmp_path / "out", "mtp")
    convert(base, "mtp", num_modules=2).export(tmp_path / "out", "mtp")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert SpecModel.from_pretrained(tmp_path / "out").head.config.num_modules == 2


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_module_in_a_file_of_its_own_is_the_one_of_the_target_and_goes_back_there(family, tmp_path):
    modules = write_apart(tmp_path, family)
    model, shipped = SpecModel.from_pretrained(tmp_path), SpecModel.from_pretrained(tmp_path / "target")
    assert model.head.config == shipped.head.config
    state = model.head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in shipped.head.state_dict().items())
    with pytest.raises(CheckpointError, match="no server reads a module apart from its model: export it to mtp"):
        model.export(tmp_path / "again", "speculators")
    written = load_file(model.export(tmp_path / "out", "mtp") / "mtp.safetensors")
    assert written.keys() == modules.keys() and all(torch.equal(t, modules[n]) for n, t in written.items())


# --- What is refused ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.3.transformer.shared_head.norm.weight", "Step's modules"),
        ("mtp.0.e_proj.weight", "DeepSeek-V4's modules"),
        ("model.mtp.layers.0.transformer_layer.mlp.down_proj.weight", "LongCat's module has embeddings of its own"),
        ("model.mtp.layers.0.pre_mlp_layernorm.weight", "MiMo-V2"),
        ("mtp.layers.0.transformer_block.mlp.weight", "Inkling"),
    ],
)
def test_modules_that_no_head_can_hold_are_refused_with_the_reason(tmp_path, name, message):
    write(tmp_path, "mimo", sharded=False)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {other: tensor for other, tensor in tensors.items() if "mtp" not in other}
    save_file({**kept, name: torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message) as refusal:
        SpecModel.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.3.embed_tokens.weight": torch.zeros(97, 32)}), "is not the base's matrix"),
        (lambda t: t.pop("model.layers.3.enorm.weight"), "lacks model.layers.3.enorm.weight"),
        (lambda t: t.pop("model.layers.3.self_attn.o_proj.weight"), "missing self_attn.o_proj.weight"),
        (lambda t: t.update({"model.layers.3.self_attn.extra.weight": torch.zeros(2)}), "like none of the target's"),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(32, 65)}),
            r"eh_proj.weight has shape \(32, 65\), not \(32, 64\)",
        ),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(32, 64, dtype=torch.float8_e4m3fn)}),
            "F8_E4M3|quantised",
        ),
        (
            lambda t: t.update({"model.layers.3.enorm.weight": torch.zeros(32, dtype=torch.int32)}),
            "model.layers.3.enorm.weight is quantised",
        ),
    ],
)
def test_damaged_modules_are_refused(tmp_path, change, message):
    modules = write(tmp_path, "deepseek_v3")
    change(modules)
    save_file(modules, tmp_path / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first = {name: file for name, file in index["weight_map"].items() if "00001" in file}
    index["weight_map"] = first | dict.fromkeys(modules, "model-00002-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        SpecModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "lost", "added", "named"),
    [
        ("mimo", "model.mtp_layers.1.input_proj.weight", None, "model.mtp_layers.1.final_layernorm.weight"),
        ("deepseek_v3, three modules", "model.layers.4.eh_proj.weight", None, "model.layers.4.embed_tokens.weight"),
        ("qwen3_next", None, "mtp.norm.extra.weight", "mtp.norm.extra.weight"),
        ("ernie4_5", None, "model.mtp_hidden_gate.0.weight", "model.mtp_hidden_gate.0.weight"),
    ],
)
def test_tensors_of_no_whole_module_are_named(tmp_path, family, lost, added, named):
    """Modules after one that lacks its projection were left out, and so were unknown tensors beside the layers."""
    write(tmp_path, family, sharded=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name != lost}
    tensors |= {} if added is None else {added: torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f": {named}.* are of no MTP module") as refusal:
        SpecModel.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value)


def test_qwens_layers_that_share_a_projection_are_refused(tmp_path):
    modules = write(tmp_path, "exaone_moe", sharded=False)
    tensors = load_file(tmp_path / "model.safetensors")
    second = {name.replace("layers.0.", "layers.1."): t.clone() for name, t in modules.items() if "mtp.layers" in name}
    save_file(tensors | second, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="share one projection"):
        SpecModel.from_pretrained(tmp_path)


# --- Hybrid targets ---


def test_the_module_of_a_hybrid_target_has_a_layer_with_full_attention(shipped):
    """Gated, as the target's own, and with the tensors of the file."""
    folder, modules = shipped("qwen3_next")
    base = AutoModelForCausalLM.from_pretrained(folder)
    files = Files(folder)
    form = next(form for form in FORMATS if form.recognises(files))
    config, tensors = read(form, form.part_of(files), base)
    assert config.layer_indices == (3,) and base.config.layer_types[3] == "full_attention"
    queries = tensors["mtp.0.layers.0.self_attn.q_proj.weight"]  # and their gates
    assert torch.equal(queries, modules["mtp.layers.0.self_attn.q_proj.weight"]) and queries.shape == (64, 32)
    assert tensors["mtp.0.layers.0.mlp.experts.gate_up_proj"].shape[0] == config_of("qwen3_next").num_experts
    recurrent = MtpConfig(layer_indices=(0,)).with_base_defaults(base.config)
    with pytest.raises(UnsupportedModel, match=r"layer 0 .* 'linear_attention'"):
        MtpHead(recurrent)


def test_nemotrons_module_has_a_layer_of_attention_and_one_of_experts(shipped, tmp_path):
    folder, modules = shipped("nemotron_h")
    base = AutoModelForCausalLM.from_pretrained(folder)
    files = Files(folder)
    form = next(form for form in FORMATS if form.recognises(files))
    config, tensors = read(form, form.part_of(files), base)
    assert config.layer_indices == (2, 3) == MtpConfig().with_base_defaults(base.config).layer_indices
    written = form.write(config, tensors, base).tensors
    assert written.keys() == modules.keys()
    assert all(torch.equal(tensor, modules[name]) for name, tensor in written.items())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "nemotron_h"])
def test_the_head_of_a_hybrid_target_sees_no_later_token(family):
    base_config = config_of(family)
    torch.manual_seed(0)
    head = MtpHead(MtpConfig(num_modules=2, steps=3).with_base_defaults(base_config)).eval()
    embed, ids = torch.nn.Embedding(97, 32), torch.randint(3, 97, (1, 12))
    changed = ids.clone()
    changed[0, 7] = 3 if ids[0, 7] != 3 else 4
    features, ones = torch.randn(1, 12, 32), torch.ones(1, 12, dtype=torch.long)
    outputs = []
    for tokens in (ids, changed):
        batch = SimpleNamespace(
            tokens=tokens, features=features, documents=ones, position_ids=torch.arange(12).unsqueeze(0), embed=embed
        )
        with torch.no_grad():
            outputs.append(head.unroll(batch, 3))
    for s, (one, other) in enumerate(zip(*outputs, strict=True)):
        last = 7 - s - 1  # the step s of a position reads the tokens up to position + 1 + s
        torch.testing.assert_close(one[:, :last], other[:, :last], rtol=1e-5, atol=1e-5)
        assert (one[:, last] - other[:, last]).abs().max() > 1e-3
