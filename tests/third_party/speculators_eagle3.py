"""speculators 0.9 and this library on the same EAGLE-3 heads, both ways. Not a test of the suite: it needs

    python -m venv spec
    spec/bin/pip install torch==2.13.0 transformers==5.19.0 speculators==0.9.0 accelerate peft pytest
    spec/bin/pip install -e . --no-deps --no-build-isolation
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=tests:. spec/bin/python tests/third_party/speculators_eagle3.py

Exports are loaded by its from_pretrained, and its forward gives the logits that real decoding here drafts with, within
1e-5; what its save_pretrained writes is read here, to the same end. The last result is in docs/compatibility.md.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from conftest import tiny_llama
from drafted import assert_drafts
from heads_on_disk import trained
from speculators import SpeculatorModel
from speculators.convert import convert_model
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM

from specheads import SpecModel
from specheads.formats import checks

CASES = {
    "draft vocabulary": {"draft_vocab_size": 40},
    "all tokens, other layers": {"draft_vocab_size": 97, "taps": (1, 3, 4, 6)},
    "three layers with biases": {"draft_vocab_size": 40, "num_layers": 3, "attention_bias": True, "mlp_bias": True},
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


def main() -> None:
    print(f"speculators {version('speculators')}, transformers {version('transformers')}, torch {torch.__version__}")
    folder = Path(tempfile.mkdtemp())
    tiny_llama().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    for name, options in CASES.items():
        model = trained(base, "eagle3", **options)
        with torch.no_grad():
            for key, parameter in model.head.named_parameters():
                parameter.mul_(0.3).add_(1.0 if "norm" in key else 0.0)
        out = model.export(folder / name.replace(" ", "-"), "speculators")
        theirs = loaded(out)
        assert_drafts(model, forward_of(theirs, model.head.layers), target_ids(theirs))
        print(f"{name}: its forward gives our draft logits; {checks.check(out, 'speculators', model)}")
        theirs.save_pretrained(folder / f"{name}-saved")
        again = SpecModel.from_pretrained(folder / f"{name}-saved", base=base)
        assert again.head.layers == model.head.layers
        assert all(torch.equal(t, again.head_state_dict()[key]) for key, t in model.head_state_dict().items())
        print(f"{name}: what it saves is read here, bit for bit")
    converted(folder, base)


def converted(folder, base):
    """Its converter, which reads the form that all servers share."""
    model = trained(base, "eagle3", draft_vocab_size=40)
    with torch.no_grad():
        for key, parameter in model.head.named_parameters():
            parameter.mul_(0.3).add_(1.0 if "norm" in key else 0.0)
    for to in ("eagle", "vllm", "sglang", "llamacpp"):
        out = model.export(folder / to, to, embeddings=True)  # without, its loader leaves random ones (0.9.0)
        convert_model(str(out), str(folder / "base"), "eagle3", str(folder / f"{to}-converted"))
        theirs = loaded(folder / f"{to}-converted")
        assert_drafts(model, forward_of(theirs, model.head.layers), target_ids(theirs))
        print(f"{to}: after its converter its forward gives our draft logits")


if __name__ == "__main__":
    main()
