"""Claims about specheads/models/checkpoint.py: files that hold no usable head are refused with the reason."""

from __future__ import annotations

import json
import os
import random
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specheads import CheckpointError, SpecModel, load_head
from tests.reference import published_keys
from tests.support.heads_on_disk import edit_config, kept_files, trained
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture
def saved(named, tmp_path):
    trained(named, "eagle3", draft_vocab_size=40).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def refused(folder, message, base=None):
    base = base or tiny_llama()
    for loader in (SpecModel.from_pretrained, lambda source: load_head(base, source)):
        with pytest.raises(CheckpointError, match=message):
            loader(folder)


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata)


MISFITS = [
    (lambda t: t.pop("head.fc.weight"), r"do not fit its head: missing \['head.fc.weight'\]$"),
    (lambda t: t.pop("head.d2t"), r"missing \['head.d2t'\]$"),
    (lambda t: t.update({"head.x": torch.ones(1)}), r"unexpected \['head.x'\]$"),
    (lambda t: t.update({"base.lm_head.weight": torch.ones(1)}), r"unexpected \['base.lm_head.weight'\]$"),
    (
        lambda t: t.update({"head.fcc.weight": t.pop("head.fc.weight")}),
        r"missing \['head.fc.weight'\]; unexpected \['head.fcc.weight'\]$",
    ),
    (lambda t: t.clear(), r"missing \['head.blocks.0"),
    (
        lambda t: t.update({"head.fc.weight": torch.ones(32, 95)}),
        r"head.fc.weight has shape \(32, 95\), not \(32, 96\)$",
    ),
    (lambda t: t.update({"head.fc.weight": torch.ones(32 * 96)}), r"shape \(3072,\), not \(32, 96\)$"),
    (
        lambda t: t.update({"head.fc.weight": torch.ones(32, 96, dtype=torch.int64)}),
        r"head.fc.weight is torch.int64, not torch.float32$",
    ),
    (lambda t: t.update({"head.d2t": torch.ones(40)}), r"head.d2t is torch.float32, not torch.int64$"),
    (
        lambda t: t.update({n: v.long() for n, v in t.items() if v.is_floating_point()}),
        r"head.norm.weight is torch.int64, not torch.float32",
    ),
]


def test_tensors_that_do_not_fit_are_named(saved):
    for edit, message in MISFITS:
        with kept_files(saved):
            edit_tensors(saved, edit)
            refused(saved, message)


def test_a_truncated_file_is_refused_whatever_is_left(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    lengths = {0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(whole) // 2, len(whole) - 1}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        refused(saved, "model.safetensors is damaged or cut short .*; copy or train it again")
    path.write_bytes(whole + b"more")
    refused(saved, "model.safetensors")
    path.write_bytes(whole)
    assert SpecModel.from_pretrained(saved)


def raw(header: dict | bytes, body=b"0000", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = [
    raw({"head.fc.weight": entry(shape=(10**9, 10**9))}),
    raw({"head.fc.weight": entry(shape=(10**12,), offsets=(0, 4 * 10**12))}),
    raw({"head.fc.weight": entry(shape=(-1,))}),
    raw({"head.fc.weight": entry(), "head.norm.weight": entry()}),
    raw({"head.fc.weight": entry(), "head.norm.weight": entry(offsets=(2, 6))}, b"000000"),
    raw({"head.fc.weight": entry(dtype="Pickle")}),
    raw({"head.fc.weight": entry(offsets=(4, 0))}),
    raw({}, length=2**60),
    raw(b"[1, 2]"),
    raw(b"\x80\x04not json"),
    b"PK\x03\x04 a zip, as torch.save writes it" * 9,
]


def test_a_hostile_header_is_refused(saved):
    for content in HOSTILE:
        (saved / "model.safetensors").write_bytes(content)
        refused(saved, "model.safetensors")


def test_damage_anywhere_gives_a_checkpoint_error_or_a_whole_head(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    rng, base = random.Random(0), tiny_llama()
    failed = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            content[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            load_head(base, saved)
        except CheckpointError:
            failed += 1
    assert failed > 100


def test_options_that_claim_more_than_the_file_holds_allocate_nothing(saved):
    huge = {**json.loads((saved / "config.json").read_text())["head"], "hidden_size": 10**6, "intermediate_size": 10**7}
    edit_config(saved, head=huge)
    refused(saved, r"has shape \(.*\), not \(.*1000000")
    edit_config(saved, head={**huge, "hidden_size": 32, "num_layers": 10**9})
    refused(saved, "eagle3 head option num_layers=1000000000 ")


def test_a_config_nested_deeper_than_any_is_refused(saved):
    (saved / "config.json").write_bytes(b'{"head": ' + b"[" * 100_000)
    refused(saved, "config.json is not JSON")


NO_HEADS = [
    ({"kind": "cerberus"}, "does not describe a head this version knows: unknown head 'cerberus'; known: medusa"),
    ({}, "unknown head None"),
    ({"kind": "medusa", "num_heads": "five"}, "does not describe a head"),
    ({"kind": "medusa", "num_heads": 0}, "num_heads=0 "),
    ({"kind": "medusa", "newer": 1}, "unknown medusa head option 'newer'"),
    ({"kind": "medusa", "hidden_size": -5, "vocab_size": 3}, "does not describe a head"),
    ({"kind": "eagle3"}, "does not describe a head"),
    (["medusa"], r"head must be a table of options, not \['medusa'\]"),
    ("medusa", "head must be a table of options, not 'medusa'"),
]


def test_a_config_that_describes_no_head_is_refused(saved):
    for head, message in NO_HEADS:
        edit_config(saved, head=head)
        refused(saved, message)


NO_CONFIGS = [
    (b"", "config.json is not JSON"),
    (b"{'model_type': 'specheads'}", "config.json is not JSON"),
    (b"\xff\xfe\x00garbage", "config.json is not JSON"),
    (b"[]", r"config.json is not the config of a draft head \(model_type=None\)"),
    (b"{}", r"model_type=None.*for a base model train one, `specheads train eagle3 base=.*convert\(\)"),
    (b'{"model_type": "llama"}', r"model_type='llama'.*specheads.convert\(\)"),
]


def test_a_config_that_is_none_is_refused(saved):
    for text, message in NO_CONFIGS:
        (saved / "config.json").write_bytes(text)
        refused(saved, message)


def test_a_key_that_is_not_known_is_refused_by_name_in_both_places_and_those_of_transformers_are_not(saved, named):
    edit_config(saved, **published_keys.TRANSFORMERS)
    load_head(named, saved)
    (saved / "config.json").write_text(json.dumps(json.loads((saved / "config.json").read_text()) | {"windowed": True}))
    refused(saved, "config.json has windowed, which this version of specheads does not know", named)
    edit_config(saved, windowed=True)
    (saved / "config.json").unlink()
    refused(saved, "the header of .* has windowed, which", named)


def test_a_garbled_config_in_the_header_is_refused(saved):
    path = saved / "model.safetensors"
    save_file(load_file(path), path, {"specheads_config": "{garbage"})
    refused(saved, "the header of .*model.safetensors is not JSON")


def test_a_base_model_is_pointed_to_convert(named, base_dir, tmp_path):
    refused(
        base_dir, rf"config of a draft head \(model_type='llama'\); for a base model train one, `.* base={base_dir}`"
    )
    named.save_pretrained(tmp_path, max_shard_size="20KB")  # in several files
    refused(tmp_path, r"convert\(\)")


def test_a_pickle_is_not_loaded(saved, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (saved / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "head.pt", "model.pth", "last.ckpt", "x.pkl"):
        with kept_files(saved):
            torch.save({"head.fc.weight": Bomb()}, saved / name)
            refused(
                saved, rf"has no model.safetensors; its pickles \['{name}'\] are not loaded, since a pickle can run"
            )
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_the_files_is_refused(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no model.safetensors: it is not a head checkpoint, or an unfinished one")
    (saved / "model.safetensors").unlink()
    refused(saved, "has no model.safetensors")


def test_a_weights_file_alone_without_a_config_is_refused(saved):
    path = saved / "model.safetensors"
    save_file(load_file(path), path)
    (saved / "config.json").unlink()
    refused(saved, "has no config.json, and no config in the header of model.safetensors")


def test_what_does_not_exist_is_refused(saved, tmp_path):
    refused(tmp_path / "nothing", "nothing is not a directory with config.json and model.safetensors, nor a hub id")
    refused("./nothing", "nor a hub id")
    refused(saved / "config.json", "config.json is a file; give the folder")
    refused("out/run/checkpoint-5", "out/run/checkpoint-5 is not a directory with config.json")
    refused("someone/some-head", "no such folder: someone/some-head, and the hub cannot be asked for it")
