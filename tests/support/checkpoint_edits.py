"""Edits of a checkpoint on disk, each of which leaves files that no program should have written.

Each takes the folder and a random.Random, and returns what it did in a few words, or None where it does not apply.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import struct

import torch
from safetensors.torch import load_file, save_file

LONG = "x" * 100_000
ODD = [
    None, True, False, -1, 0, 1, 2, 3, 5, 7, 63, 64, 97, 1000, 2**20, 2**31 - 2, 2**31, 2**63, 10**12, 10**400,
    0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "", "8", "eagle3", LONG, "zeile\nzwei\x1b[31m",
    "ü🤖\ud800", [], [[]], [0], [[0], [1], [0, 0]], [[0, 99]], [1, "x"], [1.5, None], [0] * 200, [2**40], {}, {"a": 1},
    {LONG: LONG}, {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "llama3", "rope_theta": 1e30}, "tv:nan",
]  # fmt: skip
# Keys of configs of all forms, which some other form may heed too.
KEYS = [
    "head", "kind", "joint", "base_fingerprint", "base_quantization", "base_revision", "model_type", "architectures",
    "hidden_size", "vocab_size", "draft_vocab_size", "num_layers", "num_heads", "draft_depth", "tree", "taps", "tap",
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "dflash_config", "block_size",
    "mask_token_id", "markov_rank", "truncated_vocab_size", "token_map", "logit_scale", "rope_scaling",
    "rope_parameters", "rope_theta", "max_position_embeddings", "head_dim", "num_key_value_heads",
    "quantization_config",
    "num_hidden_layers", "layer_types", "speculators_config", "transformer_layer_config", "norm_before_residual",
    "norm_output", "fc_norm", "medusa_num_heads", "hydra_num_heads", "torch_dtype", "dtype", "auto_map", "to_dict",
    "save_pretrained", "partial_rotary_factor", "original_max_position_embeddings", "rms_norm_eps", "bias", "steps",
    "original_lm_head", "medusa_fc_bias", "return_hidden_post_norm", "parallel_drafting", "intermediate_size",
]  # fmt: skip


# --- config.json, and the config in the header of a weights file ---


def odd(rng):
    return copy.deepcopy(rng.choice(ODD))  # which the next edit may change


def tables(value, depth=12):
    """Every table and list inside a config, itself included, down to a depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = [value] if isinstance(value, dict | list) and value else []
    return found + [one for part in inner if depth for one in tables(part, depth - 1)]


def changed(config, rng):
    """What was done to a config, in place."""
    table = rng.choice(tables(config) or [config])
    if isinstance(table, list):
        table[rng.randrange(len(table))] = value = odd(rng)
        return f"an entry of a list is {str(value)[:40]!r}"
    key, way = rng.choice(list(table)) if table else "a", rng.randrange(10)
    if way < 5:
        table[key] = value = odd(rng)
        return f"{key} is {repr(value)[:40]}"
    if way == 5:
        table.pop(key, None)
        return f"{key} is missing"
    if way == 6:
        table[rng.choice([LONG, "ключ", "", "a\nb"])] = table.pop(key, 1)
        return f"{key} has another name"
    if way == 7:
        other = rng.choice(list(table)) if table else "b"
        table[key], table[other] = table.get(other), table.get(key)
        return f"{key} and {other} are swapped"
    key, value = rng.choice(KEYS), odd(rng)
    table[key] = value
    return f"{key} is there, {repr(value)[:40]}"


def text_changed(text, rng):
    """The same of its text, which may be JSON no more."""
    way = rng.randrange(6)
    if way == 0:
        return text[: rng.randrange(len(text))]
    if way == 1:
        return text.replace("1", rng.choice(["NaN", "-Infinity", "1e999", "9" * 5000, "0x1"]), 1)
    if way == 2:
        return text[:-1] + ', "deep": ' + "[" * 900 + "]" * 900 + "}"
    if way == 3:
        return '{"a":' * 100_000 + text
    if way == 4:
        at = rng.randrange(len(text))
        return text[:at] + chr(rng.randrange(1, 0x300)) + text[at + 1 :]
    return text[:-1] + ", " + text[1:]  # every key twice


def config(folder, rng):
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_text("utf8"))
        assert isinstance(table, dict)
    except (ValueError, AssertionError, RecursionError):
        return None  # edited before
    if rng.random() < 0.1:
        path.write_text(text_changed(path.read_text("utf8"), rng), "utf8", errors="surrogatepass")
        return "the text of config.json"
    done = "; ".join(changed(table, rng) for _ in range(rng.choice((1, 1, 1, 3))))
    path.write_text(json.dumps(table))
    return f"config.json: {done}"


# --- The header of a safetensors file, byte for byte ---


def safe(folder):
    return next((p for p in sorted(folder.glob("*.safetensors")) if p.is_file() and p.stat().st_size > 8), None)


def split(path):
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def header(folder, rng):
    if (path := safe(folder)) is None:
        return None
    try:
        table, body = split(path)
    except (ValueError, struct.error):
        return None
    names = [name for name in table if name != "__metadata__"]
    if not names:
        return None
    name, other, way = rng.choice(names), rng.choice(names), rng.randrange(11)
    entry = table[name]
    if way == 0:
        entry["dtype"] = rng.choice(["F64", "F16", "BF16", "I64", "BOOL", "U8", "F8_E4M3", "F4", "Pickle", LONG])
    elif way == 1:
        entry["shape"] = rng.choice(
            [[], [0], [-1], [2**62, 2**62], entry["shape"][::-1], [*entry["shape"], 1], [1] * 10_000, [10**9, 10**9]]
        )
    elif way == 2:
        table[rng.choice([LONG, "a\nb", "ü🤖", "head.x", "d2t", f"{name}s"])] = table.pop(name)
    elif way == 3:
        del table[name]
    elif way == 4:
        table[other]["data_offsets"] = entry["data_offsets"]
    elif way == 5:
        entry["data_offsets"], table[other]["data_offsets"] = table[other]["data_offsets"], entry["data_offsets"]
    elif way == 6:
        entry["data_offsets"] = rng.choice([[4, 0], [0, 2**62], [-4, 4], [], LONG, [0, len(body) + 8]])
    elif way == 7:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
        return f"{path.name} is cut short"
    elif way == 8:
        content = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 4))):
            content[rng.randrange(len(content) - len(body))] = rng.randrange(256)
        path.write_bytes(content)
        return f"bytes of the header of {path.name}"
    elif way == 9:
        table["__metadata__"] = rng.choice([{}, {"format": LONG}, {LONG: LONG}, {"specheads_config": "{}"}, [1], None])
    else:
        table |= {f"more.{i}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)}
    write_header(path, table, body)
    return f"header of {path.name}: {['dtype', 'shape', 'renamed', 'dropped', 'same offsets', 'swapped', 'offsets', '', '', 'metadata', '3000 more'][way]} {name}"  # fmt: skip # noqa: E501


def header_config(folder, rng):
    """The config in the header of one of ours, which counts; sometimes in config.json alike."""
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    try:
        table, body = split(path)
        inside = json.loads(table["__metadata__"]["specheads_config"])
        done = "; ".join(changed(inside, rng) for _ in range(rng.choice((1, 1, 2))))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError, AttributeError):
        return None
    text = json.dumps(inside)
    table["__metadata__"]["specheads_config"] = text if rng.random() < 0.9 else text_changed(text, rng)
    write_header(path, table, body)
    if rng.random() < 0.5:
        (folder / "config.json").write_text(text)
    return f"config in the header: {done}"


# --- Tensors ---


@contextlib.contextmanager
def tensors(folder):
    """The tensors of the weights file, written again when the block ends; None where it cannot be read."""
    path, metadata, found = safe(folder), None, None
    pickled = next((p for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt") and p.is_file()), None)
    with contextlib.suppress(Exception):
        if path is not None:
            metadata, found = split(path)[0].get("__metadata__"), load_file(path)
        elif pickled is not None:
            path, found = pickled, torch.load(pickled, weights_only=True)
    plain = isinstance(found, dict) and all(
        isinstance(name, str) and isinstance(t, torch.Tensor) and t.dim() and t.numel() and t.layout == torch.strided
        and t.device.type == "cpu" and t.untyped_storage().nbytes() >= t.nbytes
        for name, t in found.items()
    )  # fmt: skip
    found = found if plain else None
    yield found
    if found and path.suffix == ".safetensors":
        save_file({name: t.contiguous().clone() for name, t in found.items()}, path, metadata)
    elif found:
        torch.save(found, path)


def values(folder, rng):
    with tensors(folder) as found:
        if not found:
            return None
        name, other, way = rng.choice(sorted(found)), rng.choice(sorted(found)), rng.randrange(12)
        tensor = found[name]
        if way < 4:
            value = [float("nan"), float("inf"), 1e30, -3e38][way]
            if not tensor.is_floating_point():
                return None
            found[name] = tensor = tensor.clone()
            tensor.view(-1)[rng.randrange(tensor.numel())] = value
        elif way == 4:
            found[name] = tensor.to(rng.choice([torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]))
        elif way == 5:
            found[name] = rng.choice(
                [tensor.flatten(), tensor.unsqueeze(0), tensor.transpose(0, -1), tensor[:-1], tensor[:0]]
            )
        elif way == 6:
            found[name], found[other] = found[other], found[name]
        elif way == 7:
            found[rng.choice(["head.extra", "fc_norm.0.weight", LONG, "layers.7.mlp.up_proj.weight"])] = tensor
        elif way == 8:
            del found[name]
        elif way == 9:
            found[name] = tensor * 0
        elif way == 10:
            found[name] = torch.cat([tensor, tensor])
        else:
            for one in list(found):
                found[f"model.{one}"] = found.pop(one)
        return f"tensor {name}: way {way}"


def vocabulary(folder, rng):
    with tensors(folder) as found:
        names = [name for name in found or () if name.split(".")[-1] in ("d2t", "t2d", "token_map")]
        if not found:
            return None
        if not names:
            found["d2t"] = torch.arange(40) * rng.choice((0, 1, 3))
            return "a d2t that is not needed"
        name, way = rng.choice(names), rng.randrange(9)
        ids = found[name].clone()
        at = rng.randrange(len(ids))
        if name.endswith("t2d"):
            ids[at] = ~ids[at]
        elif way < 6:
            ids = ids.long()
            ids[at] = [-1, -98, 96, 97, 2**62, -(2**63)][way]
        elif way == 6:
            ids = ids.flip(0)
        elif way == 7:
            ids = ids.to(rng.choice([torch.int32, torch.float32]))
        else:
            ids = torch.zeros_like(ids)
        found[name] = ids
        return f"{name}: way {way} at {at}"


# --- Files ---


def index(folder, rng):
    """An index as sharded files have it, beside the weights or in their table."""
    path = safe(folder)
    try:
        table = load_file(path) if path is not None else None
    except Exception:
        table = None
    if not table:
        return None
    names, way = sorted(table), rng.randrange(6)
    map_ = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    if way >= 2:
        for shard in set(map_.values()):
            save_file({name: table[name] for name in names if map_[name] == shard}, folder / shard)
        path.unlink()
    if way == 3:
        map_[names[0]] = rng.choice(["../../base/model.safetensors", "/etc/passwd", LONG, "no.safetensors", ""])
    elif way == 4:
        map_[rng.choice(names)] = rng.choice([None, 3, [], {}])
    elif way == 5:
        (folder / map_[names[0]]).write_bytes(b"junk")
    found = rng.choice([[], {}, {"weight_map": 3}, {"weight_map": {LONG: LONG}}]) if way == 0 else {"weight_map": map_}
    (folder / "model.safetensors.index.json").write_text(json.dumps(found))
    return f"an index: way {way}"


def extra(folder, rng):
    way = rng.randrange(8)
    if way == 0:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    elif way == 1:
        torch.save({"0.0.linear.weight": torch.ones(2)}, folder / "medusa_lm_head.pt")
    elif way == 2:
        torch.save(torch.ones(2), folder / "mask_embedding.pt")
    elif way == 3:
        (folder / "config.json").unlink(missing_ok=True)
        (folder / "config.json").mkdir()
    elif way == 4:
        (folder / "config.json").unlink(missing_ok=True)
    elif way == 5:
        path = rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))
        path.write_bytes(b"" if rng.random() < 0.5 else path.read_bytes() + b"more")
    elif way == 6:
        (folder / "config.json").unlink(missing_ok=True)
        os.symlink("config.json", folder / "config.json")
    else:
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return f"files: way {way}"


def pickled(folder, rng):
    """The weights as a pickle, whole, damaged, or with more in it than tensors."""
    with tensors(folder) as found:
        if not found:
            return None
        content, way = dict(found), rng.randrange(6)
    if way == 1:
        content[rng.choice([LONG, 10**9, None])] = torch.ones(1)
    elif way == 2:
        content["fc.weight"] = rng.choice([{"a": torch.ones(1)}, torch.eye(3).to_sparse(), torch.ones(2).to("meta")])
    elif way == 3:
        content = [content]
    elif way == 4:
        content["fc.weight"] = torch.zeros(1).expand(10**6, 10**6)
    path = safe(folder)
    if path is not None:
        path.unlink()
        target = folder / ("medusa_lm_head.pt" if path.name.startswith("medusa") else "pytorch_model.bin")
    else:
        target = next(p for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt"))
    torch.save(content, target)
    if way == 5:
        damaged = bytearray(target.read_bytes())
        for _ in range(4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        target.write_bytes(damaged)
    return f"a pickle: way {way}"


def base_name(folder, rng):
    """The base that a config names, which the head is then loaded beside."""
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text())
        named = table["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(named, str):
        return None
    table["base_model_name_or_path"] = name = rng.choice(
        [
            f"./{named}",
            "./nowhere",
            "org/no-such-model",
            "a b",
            LONG,
            "../" * 3000,
            "a\0b",
            "\ud800",
            7,
            [],
            {"a": 1},
            "",
        ]
    )
    table["base_revision"] = rng.choice([None, "abc", LONG, 5])
    table["base_quantization"] = rng.choice([None, None, odd(rng), {"quant_method": odd(rng)}])
    path.write_text(json.dumps(table))
    return f"the base is {repr(name)[:40]}"


MUTATIONS = {
    config: 6, header_config: 5, header: 3, values: 4, vocabulary: 2, index: 1, extra: 1, pickled: 1, base_name: 1,
}  # fmt: skip
