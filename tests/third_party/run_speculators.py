"""speculators 0.9 and this library on the same heads, both ways. Not a test of the suite: it needs

    python -m venv spec
    spec/bin/pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0 accelerate peft pytest
    spec/bin/pip install -e . --no-deps --no-build-isolation
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=. spec/bin/python tests/third_party/run_speculators.py

Exports are loaded by its from_pretrained, and its forward gives the logits that real decoding here drafts with, within
1e-5; what its save_pretrained writes is read here, to the same end. The last result is in docs/compatibility.md.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM

from specheads import SpecModel
from tests.reference.foreign_rope import SCALED
from tests.support.assert_drafts import assert_drafts
from tests.support.heads_on_disk import trained
from tests.support.tiny_models import tiny_llama
from tests.third_party.check_export import by_speculators

CASES = {
    "draft vocabulary": {"draft_vocab_size": 40},
    "all tokens, other layers": {"draft_vocab_size": 97, "taps": (1, 3, 4, 6)},
    "three layers with biases": {"draft_vocab_size": 40, "num_layers": 3, "attention_bias": True, "mlp_bias": True},
    **{f"positions: {name}": {"draft_vocab_size": 40, "rope_parameters": rope} for name, rope in SCALED.items()},
}  # fmt: skip


def forward_of(theirs, taps):
    """Its training forward, teacher-forced with the drafted tokens, read at the last position of the prompt."""

    def forward(states, tokens, drafted):
        logits = []
        hook = theirs.lm_head.register_forward_hook(lambda module, given, out: logits.append(out[0, len(tokens) - 2]))
        features = torch.cat([states[tap] for tap in taps], -1)
        features = torch.cat([features, torch.zeros(len(drafted), features.shape[1])])
        following = torch.cat([tokens[1:], torch.tensor(drafted, dtype=torch.long)])
        theirs(
            hidden_states=features.unsqueeze(0), input_ids=following.unsqueeze(0),
            document_ids=torch.zeros(1, len(following), dtype=torch.long), ttt_steps=len(drafted) + 1,
        )  # fmt: skip
        hook.remove()
        return logits

    return forward


def target_ids(theirs):
    return None if theirs.d2t is None else torch.arange(len(theirs.d2t)) + theirs.d2t


def loaded(folder):
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"  # its flex attention needs a GPU
    return SpeculatorModel.from_pretrained(str(folder), config=config).eval()


def scaled(model):
    """A scale at which logits are near 1."""
    with torch.no_grad():
        for key, parameter in model.head.named_parameters():
            parameter.mul_(0.3).add_(1.0 if "norm" in key else 0.0)
    return model


BLOCK = {"causal": False, "mask_token_id": 9, "block_size": 4, "draft_depth": 4, "taps": (1, 4, 6)}
DFLASH = {**BLOCK, "sample_from_anchor": False, "markov_rank": 0}
BLOCKS = {
    "DSpark": {**BLOCK, "markov_rank": 6, "confidence": True, "draft_vocab_size": 40},
    "DSpark, all tokens": {**BLOCK, "markov_rank": 6, "confidence": True},
    "DSpark, llama3 positions": {**BLOCK, "markov_rank": 6, "rope_parameters": SCALED["llama3"]},
    "DSpark, yarn positions": {**BLOCK, "markov_rank": 6, "rope_parameters": SCALED["yarn"]},
    "DSpark, slots of their own place": {**BLOCK, "markov_rank": 6, "confidence": True, "sample_from_anchor": False},
    "DFlash": DFLASH, "DFlash, draft vocabulary": {**DFLASH, "draft_vocab_size": 40},
    "DFlash, three layers with biases": {**DFLASH, "num_layers": 3, "attention_bias": True},
}  # fmt: skip
CONFIGS = {"dspark": DSparkSpeculatorConfig, "dflash": DFlashSpeculatorConfig}


def loaded_block(folder, kind):
    config = CONFIGS[kind].from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(str(folder), config=config).eval()
    assert type(theirs).__name__.lower().startswith(kind)
    return theirs


def block_of(theirs):
    """The backbone and the Markov bias that its training forward is made of, at one anchor: the root."""

    def forward(states, tokens, drafted):
        anchor, rest, size = len(tokens) - 1, 2 * theirs.block_size, theirs.block_size
        features = torch.cat([states[tap] for tap in (1, 4, 6)], -1)
        features = torch.cat([features, torch.zeros(1 + rest, features.shape[1])]).unsqueeze(0)
        ids = torch.tensor([*tokens.tolist(), *drafted, *[0] * (rest - len(drafted))]).unsqueeze(0)
        asked = torch.zeros(ids.shape, dtype=torch.long)
        asked[0, anchor] = 1
        hidden, logits, *_ = theirs._backbone_forward(
            features, ids, asked, torch.zeros(1, ids.shape[1], theirs.hidden_size), torch.zeros_like(ids), max_anchors=1
        )
        behind = theirs.config.sample_from_anchor
        if getattr(theirs, "markov_head", None) is not None:
            block = ids[:, anchor : anchor + size]
            before = block if behind else torch.cat([block[:, :1], block[:, :-1]], 1)
            logits = logits + theirs.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        return list(logits[0, 0 if behind else 1 :][: 1 + len(drafted)])

    return forward


def blocks(folder, base):
    """DSpark and DFlash, there and back."""
    for name, options in BLOCKS.items():
        model, kind = scaled(trained(base, "parallel", **options)), name[:6].lower()
        out = model.export(folder / name, "speculators")
        theirs = loaded_block(out, kind)
        assert_drafts(model, block_of(theirs), target_ids(theirs) if model.head.narrow else None)
        found = by_speculators(out, model)
        print(f"{name}: its backbone (and Markov head) give our draft logits; {found}")
        theirs.save_pretrained(folder / f"{name}-saved")
        again = SpecModel.from_pretrained(folder / f"{name}-saved", base=base)
        assert again.head.config.sample_from_anchor == model.head.config.sample_from_anchor
        assert all(torch.equal(t, again.head_state_dict()[key]) for key, t in model.head_state_dict().items())
        print(f"{name}: what it saves is read here, bit for bit")
    for to in ("dflash", "vllm"):
        model = scaled(trained(base, "parallel", **DFLASH))
        convert_model(
            str(model.export(folder / f"block-{to}", to)), str(folder / "base"), "dflash", str(folder / f"block-{to}-c")
        )
        assert_drafts(model, block_of(loaded_block(folder / f"block-{to}-c", "dflash")))
        print(f"DFlash as {to}: after its converter its backbone gives our draft logits")


def main() -> None:
    print(f"speculators {version('speculators')}, transformers {version('transformers')}, torch {torch.__version__}")
    folder = Path(tempfile.mkdtemp())
    tiny_llama().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    for name, options in CASES.items():
        model = scaled(trained(base, "eagle3", **options))
        out = model.export(folder / name.replace(" ", "-"), "speculators")
        theirs = loaded(out)
        assert_drafts(model, forward_of(theirs, model.head.layers), target_ids(theirs))
        print(f"{name}: its forward gives our draft logits; {by_speculators(out, model)}")
        theirs.save_pretrained(folder / f"{name}-saved")
        again = SpecModel.from_pretrained(folder / f"{name}-saved", base=base)
        assert again.head.layers == model.head.layers
        assert all(torch.equal(t, again.head_state_dict()[key]) for key, t in model.head_state_dict().items())
        print(f"{name}: what it saves is read here, bit for bit")
    converted(folder, base)
    blocks(folder, base)


def converted(folder, base):
    """Its converter, which reads the form that all servers share."""
    for name, engines in {"default": ("eagle", "vllm", "sglang", "llamacpp"), "llama3": ("vllm",)}.items():
        rope = {} if name == "default" else {"rope_parameters": SCALED[name]}
        model = scaled(trained(base, "eagle3", draft_vocab_size=40, **rope))
        for to in engines:
            out = model.export(folder / f"{to}-{name}", to, embeddings=True)  # without, its loader leaves random ones
            convert_model(str(out), str(folder / "base"), "eagle3", str(folder / f"{to}-{name}-converted"))
            theirs = loaded(folder / f"{to}-{name}-converted")
            assert_drafts(model, forward_of(theirs, model.head.layers), target_ids(theirs))
            print(f"{to}, {name} positions: after its converter its forward gives our draft logits")


if __name__ == "__main__":
    main()
