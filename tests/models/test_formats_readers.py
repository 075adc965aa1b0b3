"""Claims about block heads for servers that read them with code of their own: what is written is what each one's reader
(tests/reference/foreign_readers.py) takes, whole, and what is then drafted is what is drafted here."""

from __future__ import annotations

import json

import pytest
import torch

from tests.models.test_formats_blocks import DFLASH, DSPARK, NARROW, SHORT, lm_head_of
from tests.reference import foreign_blocks
from tests.reference.foreign_readers import READERS
from tests.support.assert_drafts import assert_drafts, embeddings
from tests.support.export_files import made, tensors_in
from tests.support.markdown import blocks

OPTIONS = {
    ("sglang", "dflash"): [{}, SHORT], ("trtllm", "dflash"): [{}, SHORT], ("openvino", "dflash"): [{}, SHORT],
    ("llamacpp", "dflash"): [{}, {"num_layers": 1}],
    ("vllm", "dspark"): [{}, SHORT, NARROW, {**NARROW, "confidence": False}],
    ("sglang", "dspark"): [{}, {**SHORT, "confidence": False}],
    ("llamacpp", "dspark"): [{}, NARROW, {"confidence": False}],
}  # fmt: skip
CASES = [(to, kind, options) for (to, kind), several in OPTIONS.items() for options in several]


@pytest.mark.parametrize(("to", "kind", "options"), CASES)
def test_each_reader_takes_the_whole_head_and_drafts_what_is_drafted_here(to, kind, options, base, tmp_path):
    model = made(base, "parallel", **{**(DFLASH if kind == "dflash" else DSPARK), **options})
    out = model.export(tmp_path / "out", to)
    config = json.loads((out / "config.json").read_text())
    read = READERS[to, kind](config, tensors_in(out))
    assert (read.layers, read.mask, read.slots, read.causal) == ([1, 4, 6], 9, 4, False)
    assert (read.predicts_next, read.rank) == ((False, 0) if kind == "dflash" else (True, 6))
    assert not {"embed_tokens.weight"} & set(read.tensors)  # they are the target's
    narrow = "d2t" in read.tensors
    lm_head = read.tensors["lm_head.weight"] if narrow else lm_head_of(base)
    form = "z-lab" if kind == "dflash" else "deepspec"
    assert_drafts(
        model,
        lambda s, t, d: foreign_blocks.logits(
            read.tensors, form, s, embeddings(base), lm_head, t, d, read.predicts_next
        ),
        torch.arange(40) + read.tensors["d2t"] if narrow else None,
    )


COMMANDS = {
    ("sglang", "dflash"): "--speculative-algorithm DFLASH --speculative-draft-model-path {out} --speculative-num-draft"
    "-tokens 4",
    ("sglang", "dspark"): "--speculative-algorithm DSPARK --speculative-draft-model-path {out} --speculative-dspark-"
    "block-size 4",
    ("trtllm", "dflash"): "--extra_llm_api_options {out}/trtllm.yml",
    ("llamacpp", "dflash"): "--spec-type draft-dflash --spec-draft-n-max 3",
    ("llamacpp", "dspark"): "--spec-type draft-dspark --spec-draft-n-max 4",
    ("vllm", "dspark"): '"method": "dspark", "model": "{out}", "num_speculative_tokens": 4',
    ("openvino", "dflash"): "optimum-cli export openvino --model {out} --task text-generation-with-past",
}  # fmt: skip


@pytest.mark.parametrize(("to", "kind"), COMMANDS)
def test_the_readme_starts_the_reader_with_the_whole_block(to, kind, base, tmp_path):
    model = made(base, "parallel", **(DFLASH if kind == "dflash" else DSPARK))
    out = model.export(tmp_path / "out", to)
    commands = " ".join(" ".join(blocks((out / "README.md").read_text(), "bash")).replace("\\\n", " ").split())
    assert COMMANDS[to, kind].format(out=out) in commands
    if to == "openvino":
        assert "enable_prefix_caching = False" in blocks((out / "README.md").read_text(), "python")[0]
    if to == "trtllm":
        lines = f"speculative_config:\n  decoding_type: DFlash\n  max_draft_len: 3\n  speculative_model: {out}\n"
        assert (out / "trtllm.yml").read_text() == lines
