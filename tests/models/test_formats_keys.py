"""Claims about the keys of foreign configs, as a rule: each is read, or listed as without effect, or refused by name.

Checked for every format and every key of its representative configs; so a new format or key needs no test of its own.
"""

from __future__ import annotations

import contextlib
import json
from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from specheads import CheckpointError, SpecModel
from specheads.models.formats import FORMATS
from specheads.models.formats.importing import find_foreign
from specheads.models.formats.keys.other_kinds import OTHER_KINDS
from specheads.models.formats.keys.without_effect import ONLY, WITHOUT_EFFECT
from specheads.models.formats.mtp.shipped import Shipped
from specheads.models.named import holds_head
from tests.reference import foreign, foreign_blocks, foreign_depths, foreign_modelopt, published_keys
from tests.support import shipped_mtp
from tests.support.assert_drafts import embeddings

RECOGNISED_BY = "speculators_model_type"
NESTED = {**published_keys.TRANSFORMERS, **published_keys.COMMON}


def speculators(form):
    """A head of speculators whose decoder's config is a whole config of transformers."""

    def write(folder, base):
        writer = foreign.eagle3 if form == "speculators" else foreign_blocks.head
        writer(folder, form, **published_keys.SPECULATORS)
        add(folder, "transformer_layer_config", NESTED)

    return write


def add(folder, table, keys):
    """Keys that a config, or a table inside it, does not have yet."""
    config = json.loads((folder / "config.json").read_text())
    inner = config.setdefault(table, {}) if table else config
    for name, value in keys.items():
        inner.setdefault(name, value)
    (folder / "config.json").write_text(json.dumps(config))


def with_tables(folder, base):
    """ModelOpt's, with its whole table."""
    foreign_modelopt.megatron(folder, draft=40, layers=2, **published_keys.EAGLE3)


HEADS = {
    "EAGLE": lambda folder, base: foreign.eagle(folder, "sglang", embed=embeddings(base), **published_keys.COMMON),
    "EAGLE-3": lambda folder, base: foreign.eagle3(folder, "vllm", **published_keys.EAGLE3),
    "EAGLE-3 with layers": lambda folder, base: foreign.eagle3(
        folder, "specforge", top=[1, 3, 6], nested=[0, 2, 5], **published_keys.EAGLE3
    ),
    "EAGLE-3 of AngelSlim": lambda folder, base: foreign.eagle3(
        folder, "vllm", **published_keys.EAGLE3 | published_keys.HUNYUAN | {"architectures": ["Eagle3LlamaForCausalLM"]}
    ),
    "speculators EAGLE": lambda folder, base: foreign.speculators_eagle(folder, embeddings(base)),
    "P-EAGLE": lambda folder, base: foreign.peagle(folder, "vllm", **published_keys.EAGLE3),
    "speculators P-EAGLE": lambda folder, base: foreign.peagle(
        folder, "speculators", **published_keys.SPECULATORS
    ),
    "ModelOpt": with_tables,
    "speculators EAGLE-3": speculators("speculators"),
    "speculators DFlash": speculators("dflash"),
    "speculators DSpark": speculators("dspark"),
    "speculators DFlash 2": speculators("dflash2-sp"),
    "DFlash": lambda folder, base: foreign_blocks.head(folder, "z-lab", **published_keys.PARALLEL),
    "DFlash of ModelOpt": lambda folder, base: foreign_blocks.head(folder, "modelopt", **published_keys.PARALLEL),
    "JetSpec": lambda folder, base: foreign_blocks.head(folder, "jetspec", **published_keys.PARALLEL),
    "DFlash 2": lambda folder, base: foreign_blocks.head(folder, "dflash2", **published_keys.PARALLEL),
    "Domino": lambda folder, base: foreign_blocks.head(folder, "domino", **published_keys.PARALLEL),
    "DeepSpec": lambda folder, base: foreign_blocks.head(folder, "deepspec", base=base, **published_keys.PARALLEL),
    "Medusa": lambda folder, base: foreign_depths.medusa(folder, "trtllm", transformers_version="4.34.1", version="2"),
    "Medusa with the base's config": lambda folder, base: foreign_depths.medusa(
        folder, "trtllm", **published_keys.WITH_THE_BASES_CONFIG
    ),
    "vLLM Medusa": lambda folder, base: foreign_depths.medusa(
        folder, "vllm", draft=40, max_paths=64, topk=10, max_seq_len=2**20, torch_dtype="float32", logit_scale=1.0
    ),
    "Hydra": lambda folder, base: foreign_depths.hydra(folder, transformers_version="4.34.1"),
}  # fmt: skip


def read(folder, base):
    """Everything that a reader could make of a folder, for a comparison."""
    return find_foreign(folder, allow_pickle=True).read(base)


def differ(one, other):
    return one[0] != other[0] or any(not torch.equal(t, other[1][n]) for n, t in one[1].items())


def keys_of(config, above=()):
    """The path of every key, of tables inside too."""
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, name))


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 2 + 1
    if isinstance(value, str):
        return f"other {value}"
    return [*value[:-1], changed(value[-1])]


def at(config, path):
    for name in path:
        config = config[name]
    return config


def written(folder, config, path, value):
    """The config with one value replaced."""
    edited = deepcopy(config)
    at(edited, path[:-1])[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(edited))


def test_every_format_that_is_read_is_here(base, tmp_path):
    """By class: several engines share one, and MTP modules are below and in test_mtp_shipped.py."""
    found = set()
    for name, write in HEADS.items():
        write(tmp_path / name, base)
        found.add(type(find_foreign(tmp_path / name, allow_pickle=True).form))
    assert found == {type(form) for form in FORMATS if not isinstance(form, Shipped)}


@pytest.mark.parametrize("name", HEADS)
def test_a_published_config_is_read_with_all_its_keys(name, base, tmp_path):
    HEADS[name](tmp_path, base)
    SpecModel.from_pretrained(tmp_path, base=base, allow_pickle=True)


@pytest.mark.parametrize("name", HEADS)
def test_every_key_is_listed_as_without_effect_and_has_none_or_changes_the_head_or_is_refused(name, base, tmp_path):
    HEADS[name](tmp_path, base)
    config = json.loads((tmp_path / "config.json").read_text())
    form, before = find_foreign(tmp_path, allow_pickle=True).form, read(tmp_path, base)
    others, dropped = deepcopy(config), []
    for path in keys_of(config):
        value = at(config, path)
        # No layer has the window; by the type of a speculators head the format is recognised.
        if value in (None, [], {}) or isinstance(value, dict) or path[-1] in ("sliding_window", RECOGNISED_BY):
            continue
        if not WITHOUT_EFFECT.keys().isdisjoint(path) or form.ignores(path):
            at(others, path[:-1])[path[-1]] = changed(value)
            continue
        written(tmp_path, config, path, changed(value))
        with contextlib.suppress(CheckpointError):
            if not differ(before, read(tmp_path, base)):
                dropped.append(path)
    assert not dropped
    (tmp_path / "config.json").write_text(json.dumps(others))
    assert not differ(before, read(tmp_path, base))


@pytest.mark.parametrize("name", HEADS)
def test_an_unknown_key_is_refused_by_name_wherever_it_is(name, base, tmp_path):
    HEADS[name](tmp_path, base)
    config = json.loads((tmp_path / "config.json").read_text())
    tables = [()] + [path for path in keys_of(config) if isinstance(at(config, path), dict)]
    for table in tables:
        if not WITHOUT_EFFECT.keys().isdisjoint(table):
            continue
        written(tmp_path, config, (*table, "attention_temperature"), 0.5)
        with pytest.raises(CheckpointError, match=rf"{'.'.join((*table, 'attention_temperature'))}=0.5, which is not"):
            read(tmp_path, base)
        written(tmp_path, config, (*table, "attention_temperature"), None)
        read(tmp_path, base)


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash", "vLLM Medusa"])
def test_an_option_with_one_value_is_taken_with_that_value_and_with_another_refused_or_read(name, base, tmp_path):
    HEADS[name](tmp_path, base)
    before = read(tmp_path, base)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | ONLY))
    assert not differ(before, read(tmp_path, base))
    for option in ONLY:
        written(tmp_path, config, (option,), changed(ONLY[option]))
        with contextlib.suppress(CheckpointError):
            assert differ(before, read(tmp_path, base)), option


def test_no_key_is_listed_twice():
    assert not WITHOUT_EFFECT.keys() & ONLY.keys()


# --- MTP modules: the config is the base's, and only its keys about modules are the reader's ---


def test_an_option_of_mtp_modules_that_is_not_known_is_refused_and_those_of_the_base_are_not(tmp_path):
    shipped_mtp.write(tmp_path, "mimo", sharded=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    written(tmp_path, config, ("attention_temperature",), 0.5)
    read(tmp_path, base)
    written(tmp_path, config, ("mtp_temperature",), 0.5)
    with pytest.raises(CheckpointError, match=r"its head has mtp_temperature=0.5"):
        read(tmp_path, base)


def test_a_module_has_the_type_that_the_config_gives_its_layers(tmp_path):
    """EXAONE-MoE's layers of both types have the same tensors."""
    shipped_mtp.write(tmp_path, "exaone_moe", sharded=False)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    types = base.config.layer_types
    for kind in set(types):
        (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_layer_types": [kind]}))
        (index,) = find_foreign(tmp_path).head_config(base).layer_indices
        assert types[index] == kind
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_layer_types": ["chunked_attention"]}))
    with pytest.raises(CheckpointError, match=r"'chunked_attention' \(mtp_layer_types\), and none of the target's is"):
        find_foreign(tmp_path).head_config(base)


# --- Kinds of drafts that are not read ---

OTHERS = {
    "a PARD draft model": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "pard_token": 90},
    "a Gemma-4 assistant": {"model_type": "gemma4_assistant"},
    "a Muse Glimmer assistant": {"model_type": "muse_glimmer_assistant"},
    "an Arctic speculator": {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"},
    "an MLPSpeculator": {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"},
    "a ReDrafter": {"model_type": "recurrent_drafting_drafter"},
    "an EAGLE head in vLLM's wrapper": {"model_type": "eagle", "model": {"model_type": "llama"}},
    "a DSpine head": {"architectures": ["DSpineDraftModel"], "dspine_config": {}},
    "an EAGLE-3 head whose config has the model_type of its target": {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "phi3", "draft_vocab_size": 97
    },
}  # fmt: skip


def test_every_other_kind_is_here():
    assert len(OTHERS) == len(OTHER_KINDS)
    assert all(kind.what.startswith(what) for what, kind in zip(OTHERS, OTHER_KINDS, strict=True))


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_draft_is_named_with_what_to_do_instead(what, base, tmp_path):
    foreign.write(tmp_path, OTHERS[what], foreign.eagle3_tensors("layers.0."))
    with pytest.raises(CheckpointError) as refusal:
        SpecModel.from_pretrained(tmp_path, base=base)
    kind = OTHER_KINDS[list(OTHERS).index(what)]
    assert f"it is {kind.what}, which is not read here: {kind.instead}" in str(refusal.value)


def test_a_drafter_by_name_that_is_another_kind_says_so_and_a_whole_model_drafts(tmp_path):
    for what in ("a PARD draft model", "an MLPSpeculator"):
        foreign.write(tmp_path / what, OTHERS[what], {"model.norm.weight": torch.ones(32)})
        assert holds_head(str(tmp_path / what)) == (what != "a PARD draft model")
