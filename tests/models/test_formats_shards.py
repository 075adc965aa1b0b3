"""Claims about heads in several safetensors files: they are the head that one file would be, and an index that names
what is not there, or anything but a file beside it, is a CheckpointError."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specheads import CheckpointError, SpecModel
from tests.reference import foreign, foreign_depths, foreign_modelopt

WRITERS = {
    "EAGLE-3": lambda folder: foreign.eagle3(folder, "vllm"),
    "ModelOpt": foreign_modelopt.megatron,
    "Medusa of vLLM": lambda folder: foreign_depths.medusa(folder, "vllm"),
}  # fmt: skip


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_a_head_in_several_files_is_that_of_one(name, count, base, tmp_path):
    WRITERS[name](tmp_path)
    whole = SpecModel.from_pretrained(tmp_path, base=base)
    foreign_modelopt.shard(tmp_path, count)
    assert not (tmp_path / "model.safetensors").exists()
    again = SpecModel.from_pretrained(tmp_path, base=base)
    assert again.head.config == whole.head.config
    own = whole.head_state_dict()
    assert all(torch.equal(t, own[n]) for n, t in again.head_state_dict().items())


def test_one_file_beside_an_index_is_the_one_that_is_read(base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    foreign_modelopt.write_index(tmp_path, {"weight_map": {"fc.weight": "other.safetensors"}})
    SpecModel.from_pretrained(tmp_path, base=base)


def test_a_sharded_base_model_is_no_head_and_none_of_it_is_fetched(base, tmp_path):
    base.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    for path in files:
        path.unlink()
    with pytest.raises(CheckpointError, match="model_type='llama'"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_file_that_the_index_names_and_that_is_not_there_is_named(base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    foreign_modelopt.shard(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00003.safetensors, which is not beside it; copy"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_file_that_is_cut_short_is_named(base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    foreign_modelopt.shard(tmp_path)
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors"):
        SpecModel.from_pretrained(tmp_path, base=base)


FIRST = "model-00001-of-00003.safetensors"
INDICES = {
    "a tensor that is not there": ({"x.weight": FIRST}, rf"{FIRST} lacks x\.weight, as the index has it"),
    "a tensor in another file": ({"fc.weight": FIRST}, rf"{FIRST} lacks fc\.weight, as the index has it"),
    "a path": ({"fc.weight": f"sub/{FIRST}"}, "expected the name of a .safetensors file beside it"),
    "a path upwards": ({"fc.weight": f"../{FIRST}"}, r"has fc\.weight in '\.\./model-00001"),
    "an absolute path": ({"fc.weight": f"/{FIRST}"}, "expected the name of a .safetensors file beside it"),
    "a path of Windows": ({"fc.weight": f"..\\{FIRST}"}, "expected the name of a .safetensors file beside it"),
    "a drive": ({"fc.weight": f"c:{FIRST}"}, "expected the name of a .safetensors file beside it"),
    "a pickle": ({"fc.weight": "pytorch_model.bin"}, r"'pytorch_model\.bin'; expected the name of a .safetensors"),
    "dots": ({"fc.weight": ".."}, "expected the name of a .safetensors file"),
    "nothing": ({"fc.weight": ""}, "expected the name of a .safetensors file"),
    "a number": ({"fc.weight": 3}, "has fc.weight in 3"),
    "a long name": ({"fc.weight": "x" * 10**5}, "expected the name of a .safetensors file"),
    "many files": ({f"{i}.weight": f"{i}.safetensors" for i in range(100)}, "names 103 files; a head has at most 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_an_index_that_does_not_fit_its_files_is_refused(case, base, tmp_path):
    changes, message = INDICES[case]
    head = tmp_path / "head"
    foreign.eagle3(head, "vllm")
    index = foreign_modelopt.shard(head)
    for folder in (tmp_path, head / "sub"):  # where a path would lead
        folder.mkdir(exist_ok=True)
        (folder / FIRST).write_bytes((head / FIRST).read_bytes())
    foreign_modelopt.write_index(head, {"weight_map": index["weight_map"] | changes})
    with pytest.raises(CheckpointError, match=message) as raised:
        SpecModel.from_pretrained(head, base=base)
    assert len(str(raised.value)) < 600


def test_a_tensor_that_the_index_leaves_out_is_not_read_past(base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    foreign_modelopt.shard(tmp_path)
    tensors = load_file(tmp_path / FIRST)
    save_file({**tensors, "extra.weight": torch.ones(3)}, tmp_path / FIRST)
    with pytest.raises(CheckpointError, match=rf"{FIRST} also holds extra\.weight"):
        SpecModel.from_pretrained(tmp_path, base=base)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}', "[" * 10**5]
)
def test_an_index_that_is_none_is_refused(text, base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    foreign_modelopt.shard(tmp_path)
    foreign_modelopt.write_index(tmp_path, text)
    with pytest.raises(CheckpointError, match=r"index.json is not an index of tensors: it has no weight_map"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_shard_that_is_a_link_is_read_as_what_it_points_to(base, tmp_path):
    foreign.eagle3(tmp_path / "blobs", "vllm")
    foreign_modelopt.shard(tmp_path / "blobs")
    (tmp_path / "head").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "head" / path.name).symlink_to(path)  # as the hub's cache has them
    SpecModel.from_pretrained(tmp_path / "head", base=base)
    assert json.loads((tmp_path / "head" / "model.safetensors.index.json").read_text())["weight_map"]
