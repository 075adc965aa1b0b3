"""Claims about GGUF files: llama.cpp's own converter makes both, of what it should, or nothing is left; a tokenizer it
does not know is named only where its rules are known to be the same. A converter that records what it is asked stands
in for llama.cpp's, which tests/third_party/run_llamacpp.py runs."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specheads import CheckpointError, SpecModel
from specheads.models.formats.export.gguf_converter import pre_tokenizer
from specheads.models.formats.export.gguf_files import folder_of
from tests.support.command_line import run, ship
from tests.support.heads_on_disk import trained
from tests.support.tiny_models import tiny_llama

CONVERSION = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer.known:
            return tokenizer.known
        raise NotImplementedError("BPE pre-tokenizer was not recognized")
"""
CONVERTER = """
import json, sys
from pathlib import Path
import only_gguf_py
from conversion import TextModel
from tokenizers import Tokenizer

class Fast:
    known = only_gguf_py.known
    def __init__(self, folder):
        self.backend_tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

model = Path(sys.argv[1])
found = {
    "model": str(model), "options": sys.argv[2:], "files": sorted(path.name for path in model.iterdir()),
    "tokenizer": TextModel().get_vocab_base_pre(Fast(option("--target-model-dir") if "--target-model-dir" in sys.argv
                                                     else model)),
}
Path(option("--outfile")).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A head for a base of 8 layers, on disk."""
    return ship(tmp_path_factory.mktemp("shipped"), num_hidden_layers=8)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "llama.cpp"
    (folder / "gguf-py").mkdir(parents=True)
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").write_text(CONVERSION)
    (folder / "gguf-py" / "only_gguf_py.py").write_text("known = None\n")
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def written(folder):
    return [json.loads((folder / name).read_text()) for name in ("target.gguf", "draft.gguf")]


def test_the_converter_makes_both_files_in_the_export(small, checkout, tmp_path, capsys):
    out = tmp_path / "served"
    code, said, _ = run(capsys, "export", small / "eagle3", out, "--to", "llamacpp", "--gguf", checkout, "--json")
    files = ["README.md", "config.json", "draft.gguf", "model.safetensors", "target.gguf"]
    assert code == 0 and json.loads(said)["files"] == files
    target, draft = written(out)
    base = str((small / "base").resolve())
    assert target["model"] == base and target["options"][:2] == ["--outtype", "f32"]
    assert {"config.json", "model.safetensors"} <= set(draft["files"])
    assert draft["options"][:4] == ["--target-model-dir", base, "--outtype", "f32"]
    assert draft["model"].endswith("/served")  # which the converter writes into the file
    assert target["tokenizer"] == draft["tokenizer"] == "gpt-2"
    assert f"llama-server -m {out}/target.gguf -md {out}/draft.gguf " in (out / "README.md").read_text()


def test_the_dtype_is_that_of_both_and_the_converters_own_word_on_a_tokenizer_is_kept(small, checkout, tmp_path):
    (checkout / "gguf-py" / "only_gguf_py.py").write_text("known = 'llama-bpe'\n")
    model = SpecModel.from_pretrained(small / "eagle3")
    script = checkout / "convert_hf_to_gguf.py"
    for made in written(model.export(tmp_path / "out", "llamacpp", dtype="bfloat16", gguf=script)):
        assert made["options"][made["options"].index("--outtype") + 1] == "bf16" and made["tokenizer"] == "llama-bpe"


def test_where_the_converter_fails_its_word_is_told_and_nothing_is_left(small, checkout, tmp_path):
    model = SpecModel.from_pretrained(small / "eagle3")
    digits = Tokenizer.from_file(str(small / "base" / "tokenizer.json"))
    digits.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), digits.pre_tokenizer])
    other = tmp_path / "other"
    tiny_llama(vocab_size=258, num_hidden_layers=8).save_pretrained(other)
    digits.save(str(other / "tokenizer.json"))
    model.config.base_model_name_or_path = str(other)
    with pytest.raises(CheckpointError, match=r"convert .*other: NotImplementedError: BPE pre-tokenizer was not reco"):
        model.export(tmp_path / "out", "llamacpp", gguf=checkout)
    model.config.base_model_name_or_path = str(small / "base")
    (checkout / "gguf-py" / "only_gguf_py.py").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"No module named 'only_gguf_py'; .* needs what its requirements/ name: .*-m pip install only_gguf_py$",
    ):
        model.export(tmp_path / "out", "llamacpp", gguf=checkout)
    assert {path.name for path in tmp_path.iterdir()} == {"llama.cpp", "other"}


def test_what_gguf_needs_is_looked_for_before_anything_is_written(base, small, checkout, tmp_path):
    model = SpecModel.from_pretrained(small / "eagle3")
    with pytest.raises(ValueError, match="GGUF files are for llamacpp, not for vllm"):
        model.export(tmp_path / "out", "vllm", gguf=checkout)
    with pytest.raises(CheckpointError, match=r"gguf-py is neither llama.cpp's convert_hf_to_gguf.py nor a checkout"):
        model.export(tmp_path / "out", "llamacpp", gguf=checkout / "gguf-py")
    with pytest.raises(CheckpointError, match=r"written in float32, float16, bfloat16, not torch\.float64"):
        model.export(tmp_path / "out", "llamacpp", gguf=checkout, dtype="float64")
    with pytest.raises(CheckpointError, match="the base in memory is no folder; for GGUF files save it"):
        trained(base, "eagle3").export(tmp_path / "out", "llamacpp", gguf=checkout)
    assert {path.name for path in tmp_path.iterdir()} == {"llama.cpp"}


def test_a_base_of_the_hub_is_converted_in_the_revision_it_was_loaded_in(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return tmp_path

    monkeypatch.setattr("specheads.models.formats.export.gguf_files.snapshot_download", snapshot_download)
    monkeypatch.setattr("specheads.models.formats.export.gguf_files.hub_options", lambda name: {})
    assert folder_of("owner/base", "abc") == tmp_path
    assert asked["name"] == "owner/base" and asked["revision"] == "abc"


def fast(**changes):
    """A byte-level BPE as GPT-2's, but for the changes."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], **changes.pop("bpe", {})))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": DIGITS},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"normalizer": normalizers.NFC()},
        {"bpe": {"ignore_merges": True}},
        {"bpe": {"byte_fallback": True}},
        {"bpe": {"end_of_word_suffix": "</w>"}},
    ],
)
def test_only_the_rules_of_gpt_2_get_its_name(changes):
    assert pre_tokenizer(fast()) == pre_tokenizer(AutoTokenizer.from_pretrained("checkpoints/base")) == "gpt-2"
    assert pre_tokenizer(fast(**changes)) is None
    assert pre_tokenizer(object()) is None
