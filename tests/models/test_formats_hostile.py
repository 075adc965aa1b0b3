"""Claims about hostile and damaged foreign files: a CheckpointError that says what is wrong, never a crash, never code
that runs, and nothing allocated for what a file merely claims."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import struct
import zipfile

import pytest
import torch
from huggingface_hub.errors import GatedRepoError

from specheads import CheckpointError, SpecModel, hub
from specheads.models.formats import importing
from specheads.models.formats.medusa.hydra import Hydra
from tests.reference import foreign, foreign_blocks, foreign_depths, foreign_modelopt
from tests.support.assert_drafts import embeddings


def hydra(folder, base):
    """Hydra++ in safetensors, which its repository does not write, and which is read too."""
    tensors = foreign_depths.hydra(folder, prefix=True, base=base)
    (folder / "hydra_lm_head.pt").unlink()
    foreign.write(folder, None, tensors)


WRITERS = {
    "eagle3": lambda folder, base: foreign.eagle3(folder, "vllm"),
    "modelopt": lambda folder, base: foreign_modelopt.megatron(folder, layers=2, inner={"has_lm_head": False}),
    "speculators": lambda folder, base: foreign.eagle3(folder, "speculators", embed=embeddings(base)),
    "eagle": lambda folder, base: foreign.eagle(folder, "sglang", embed=embeddings(base)),
    "medusa": lambda folder, base: foreign_depths.medusa(folder, "trtllm"),
    "vllm medusa": lambda folder, base: foreign_depths.medusa(folder, "vllm", draft=40),
    "hydra": hydra,
    "dspark": lambda folder, base: foreign_blocks.head(folder, "dspark", draft=40),
    "dflash": lambda folder, base: foreign_blocks.head(folder, "z-lab"),
    "deepspec": lambda folder, base: foreign_blocks.head(folder, "deepspec", base=base),
}  # fmt: skip


def load(folder, base):
    return SpecModel.from_pretrained(folder, base=base, allow_pickle=True)


def weights(folder):
    return next(path for path in folder.iterdir() if path.name != "config.json")


def refused(folder, base, message="not those of|does not describe a head"):
    with pytest.raises(CheckpointError, match=message):
        load(folder, base)


@pytest.mark.parametrize("name", WRITERS)
def test_a_truncated_file_is_refused_whatever_is_left(name, base, tmp_path):
    WRITERS[name](tmp_path, base)
    path = weights(tmp_path)
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    rng = random.Random(1)
    for length in {0, 1, 7, 8, header - 1, header, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))}:
        path.write_bytes(content[:length])
        refused(tmp_path, base, path.name)
    path.write_bytes(content)
    load(tmp_path, base)


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_header_gives_an_error_or_a_whole_head(name, base, tmp_path):
    WRITERS[name](tmp_path, base)
    path = weights(tmp_path)
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    rng, failed = random.Random(2), 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load(tmp_path, base)
        except CheckpointError:
            failed += 1
    assert failed > 40


ODD = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "8",
    "",
    [],
    [[]],
    {},
    {"a": 1},
    [1, "x"],
]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.sampled(2)
def test_odd_values_in_a_config_give_an_error_or_a_whole_head(name, base, tmp_path):
    WRITERS[name](tmp_path, base)
    config = json.loads((tmp_path / "config.json").read_text())
    rng, tables = random.Random(3), [()] + [(key,) for key, value in config.items() if isinstance(value, dict)]
    paths = [(*path, key) for path in tables for key in (config if not path else config[path[0]])]
    extra = ["rope_scaling", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "architectures"]
    for path in [*paths, *((key,) for key in extra)]:
        for value in rng.sample(ODD, 2):
            changed = json.loads(json.dumps(config))
            inner = changed[path[0]] if len(path) == 2 else changed
            inner[path[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed))
            with contextlib.suppress(CheckpointError):
                load(tmp_path, base)


def test_a_config_that_claims_more_than_the_file_holds_allocates_nothing(base, tmp_path):
    for sizes in (
        {"intermediate_size": 2**30},
        {"num_attention_heads": 2**20, "head_dim": 2**20},
        {"head_dim": 2**31 - 2},
    ):
        foreign.eagle3(tmp_path, "vllm", **sizes)
        refused(tmp_path, base)
    foreign.eagle3(tmp_path, "vllm", num_hidden_layers=2**30)
    refused(tmp_path, base, "1073741824")
    foreign_depths.medusa(tmp_path / "m", "vllm", num_heads=2**30)
    refused(tmp_path / "m", base, "says 1073741824 heads")


@pytest.mark.parametrize(
    ("heads", "layers", "message"),
    [(1000, 1, "make up 1000 heads or layers"), (1, 65, "make up 65 heads"), (64, 1, r"0.0.linear.weight has shape")],
)
def test_empty_tensors_of_many_heads_are_refused_before_anything_is_copied(
    heads, layers, message, base, tmp_path, monkeypatch
):
    """Heads without output matrices have the base's, a copy each."""
    empty = {
        f"{h}.{i}.linear.{what}": torch.zeros(0)
        for h in range(heads)
        for i in range(layers)
        for what in ("weight", "bias")
    }
    foreign.write(tmp_path, {"medusa_num_heads": 2}, empty, "medusa_lm_head.safetensors")
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **kwargs: pytest.fail("a tensor was copied"))
    refused(tmp_path, base, message)


def test_a_file_without_a_weight_in_it_is_refused(base, tmp_path):
    for options in ({"biased": False}, {"shared": True}):
        tensors = foreign_depths.medusa(tmp_path, "vllm", **options)
        foreign.write(tmp_path, None, {name: t.long() for name, t in tensors.items()})
        refused(tmp_path, base, r"none of its \d+ tensors holds floating point numbers")


@pytest.mark.parametrize("cause", [PermissionError, GatedRepoError])
def test_a_file_that_the_hub_does_not_hand_out_is_named(cause, base, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("no access") from cause.__new__(cause)  # whose makers differ between versions of the hub's client

    monkeypatch.setattr("specheads.models.formats.files.cached_file", fails)
    monkeypatch.setattr(hub, "_ask", lambda *name: (hub.THERE, ""))
    with pytest.raises(CheckpointError, match=r"of org/head could not be fetched: no access"):
        load("org/head", base)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"architectures": ' + b"[" * 100_000, b"\xff\xfe", b"", b"[]", b"null",
     b'{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_config_that_is_no_table_is_refused(text, base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    (tmp_path / "config.json").write_bytes(text)
    refused(tmp_path, base, "config.json is not")


def test_a_config_of_many_megabytes_is_not_read(base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    (tmp_path / "config.json").write_bytes(b'{"a": "' + b"x" * (5 << 20) + b'"}')
    refused(tmp_path, base, "5,242,889.*4,194,304")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "I16", "F4"])
def test_a_dtype_that_no_head_has_is_refused(dtype, base, tmp_path):
    foreign.eagle3(tmp_path, "vllm")
    size = {"F8_E4M3": 1, "U8": 1, "I16": 2, "F4": 1}[dtype]
    header = json.dumps({"norm.weight": {"dtype": dtype, "shape": [32], "data_offsets": [0, 32 * size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32 * size))
    named = f"norm.weight is {dtype}; expected F64" if dtype == "I16" else rf"norm.weight is quantised \({dtype}\)"
    refused(tmp_path, base, named if dtype != "F4" else "model.safetensors")


def test_a_link_is_read_as_what_it_points_to(base, tmp_path):
    foreign.eagle3(tmp_path / "blobs", "vllm")
    (tmp_path / "head").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "head" / path.name).symlink_to(path)
    load(tmp_path / "head", base)


@pytest.mark.parametrize("form", ["vllm", "eagle"])
def test_a_loaded_head_does_not_follow_its_file(form, base, tmp_path):
    """A file that is written over in place must not change the weights of a running model."""
    foreign.eagle3(tmp_path, form)
    model, path = load(tmp_path, base), weights(tmp_path)
    before = {name: t.clone() for name, t in model.head_state_dict().items()}
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\0" * (path.stat().st_size - 8192))
    assert all(torch.equal(t, before[name]) for name, t in model.head_state_dict().items())


# --- Pickles ---


@pytest.fixture
def pickled(base, tmp_path):
    """An EAGLE-3 head as the EAGLE repository ships it, a pickle."""
    foreign.eagle3(tmp_path / "head", "eagle")
    return tmp_path / "head"


def test_a_pickle_is_read_only_when_asked_for(pickled, base):
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, .* allow_pickle=True of"):
        SpecModel.from_pretrained(pickled, base=base)
    load(pickled, base)


def test_a_base_model_in_a_pickle_is_no_head(base, tmp_path):
    base.config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="model_type='llama'"):
        SpecModel.from_pretrained(tmp_path, base=base)


def test_a_pickle_in_a_format_from_outside_is_known_by_a_key_of_its_config(base, tmp_path, monkeypatch):
    class Toy(Hydra):
        config_keys = ("toy_depths",)

        def recognises(self, files):
            return True

    monkeypatch.setattr(importing, "FORMATS", [])
    (tmp_path / "config.json").write_text(json.dumps({"toy_depths": 1, "num_hidden_layers": 3}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert importing.find_foreign(tmp_path) is None
    importing.FORMATS.append(Toy())
    assert importing.find_foreign(tmp_path) is not None


def test_a_pickle_beside_safetensors_is_not_looked_at(pickled, base):
    foreign.eagle3(pickled, "vllm")
    (pickled / "pytorch_model.bin").write_bytes(b"junk")
    load(pickled, base)


def test_a_pickle_that_runs_code_runs_none(pickled, base, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    for content in ({"fc.weight": Bomb()}, Bomb(), [Bomb()]):
        torch.save(content, pickled / "pytorch_model.bin")
        refused(pickled, base, r"its pickle calls '\w+.mkdir', which plain tensors by name do not need")
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    refused(pickled, base, "older than torch 1.6")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_that_asks_for_memory_gets_none(pickled, base, monkeypatch):
    class Bomb:
        def __init__(self, make):
            self.make = make

        def __reduce__(self):
            return self.make, (10**11,)

    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("the pickle was run"))
    for make in (bytearray, torch.zeros, torch.Size, torch.UntypedStorage):
        torch.save({"fc.weight": Bomb(make)}, pickled / "pytorch_model.bin")
        refused(pickled, base, "pickle")
    for protocol in (4, 5):
        torch.save({"fc.weight": Bomb(bytearray)}, pickled / "pytorch_model.bin", pickle_protocol=protocol)
        refused(pickled, base, "its pickle calls 'STACK_GLOBAL'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list, not tensors by name"),
        ({"fc.weight": {"a": torch.zeros(2)}}, "'fc.weight' is not a plain tensor"),
        ({3: torch.zeros(2)}, "'3' is not a plain tensor under a name"),
        ({"fc.weight": torch.eye(3).to_sparse()}, "its pickle calls 'torch._utils._rebuild_sparse_tensor'"),
        ({"fc.weight": torch.zeros(1).expand(10**6, 10**6)}, r"shape \(1000000, 1000000\) over fewer values"),
        ({"fc.weight": torch.zeros(3, dtype=torch.complex64)}, "fc.weight is torch.complex64"),
    ],
)
def test_a_pickle_of_anything_but_tensors_is_refused(content, message, pickled, base):
    torch.save(content, pickled / "pytorch_model.bin")
    refused(pickled, base, message)


def test_a_packed_archive_is_refused(pickled, base):
    path = pickled / "pytorch_model.bin"
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in entries.items():
            packed.writestr(name, content)
    refused(pickled, base, "holds compressed entries")


def test_a_damaged_pickle_gives_an_error_or_a_whole_head(pickled, base):
    path = pickled / "pytorch_model.bin"
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
    rng, failed = random.Random(4), 0
    for i in range(60):
        damaged = bytearray(content)
        # half of them inside the pickle itself, where a wrong byte is another instruction
        first, size = (entry.header_offset, entry.file_size + 100) if i % 2 else (0, len(content))
        for _ in range(rng.choice((1, 4))):
            damaged[first + rng.randrange(size)] = rng.randrange(256)
        path.write_bytes(damaged[: rng.randrange(len(content))] if i % 10 == 0 else damaged)
        try:
            load(pickled, base)
        except CheckpointError:
            failed += 1
    assert failed > 25
