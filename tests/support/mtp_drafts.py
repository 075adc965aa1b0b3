"""What MTP modules of a checkpoint draft, against transformers' own MtpModel and against plain implementations."""

import pytest
import torch
from transformers import modeling_layers

from specheads import SpecModel, chain
from tests.reference.plain_mtp import plain_module
from tests.reference.slow_heads import mtp_outputs, rows
from tests.support.prompts import PROMPTS
from tests.support.shipped_mtp import FAMILIES

BY_TRANSFORMERS = ("deepseek_v3", "deepseek_v3, three modules", "glm4_moe")
WINDOW = 8
# Family → how its plain implementation differs from a Llama's.
PLAIN = {"exaone_moe": {"window": WINDOW}, "mimo": {"hidden_first": True}, "ernie4_5": {"interleaved": True}}


def drafts_of_transformers(base, ids, new):
    """{text: the drafts after it} of transformers' own generate(use_mtp=True)."""
    found, forward, layers = {}, modeling_layers.MtpModel.forward, base.config.num_hidden_layers
    # The published models' layers, by number, are what it looks for.
    patterns = [rf"model\.layers\.{layers + k}\." for k in range(base.config.num_mtp_layers)]

    def spy(self, *args, full_input_ids, **kwargs):
        drafted = forward(self, *args, full_input_ids=full_input_ids, **kwargs)
        found[tuple(full_input_ids[0].tolist())] = drafted[0][0].tolist()
        return drafted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_keys_to_ignore_on_load_unexpected", patterns)
        patch.setattr(modeling_layers.MtpModel, "forward", spy)
        return found, base.generate(ids, use_mtp=True, max_new_tokens=new, do_sample=False)


def drafts_of(model, ids, new):
    """The same of ours, a chain of as many tokens as there are modules."""
    found, propose = {}, model.head.propose

    def spy(context, sampler, plan):
        tree = propose(context, sampler, plan)
        found[tuple(context.history[0])] = tree.tokens[0, 1:].tolist()
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.head, "propose", spy)
        plan = chain(model.head.config.num_modules)
        return found, model.generate(ids, max_new_tokens=new, do_sample=False, tree=plan)


def assert_drafts_of_transformers(folder):
    model = SpecModel.from_pretrained(folder)
    ids = torch.tensor([PROMPTS[2]])
    theirs, text = drafts_of_transformers(model.base, ids, 40)
    ours, same = drafts_of(model, ids, 40)
    assert torch.equal(text, same)
    whole = {prefix: drafts for prefix, drafts in ours.items() if len(drafts) == model.head.config.num_modules}
    common = whole.keys() & theirs.keys()
    assert len(common) >= 10 and {p: ours[p] for p in common} == {p: theirs[p] for p in common}
    assert len({draft[0] for draft in theirs.values()}) > 5, "the drafts hardly vary"


def assert_outputs_of_a_plain_implementation(folder, tensors, family):
    """In float64, of the unrolled steps of training."""
    model = SpecModel.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    naming, count = FAMILIES[family][3:]
    config, ids, steps = model.base.config, rows(14)[0]["input_ids"], count + 2
    modules = [
        plain_module(tensors, naming, k, config.num_hidden_layers, config, **PLAIN[family]) for k in range(count)
    ]
    with torch.no_grad():
        features = model.base(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        slow = mtp_outputs(modules, model.base.get_input_embeddings().weight, ids, features, steps)
        unrolled = []
        unroll = model.head.unroll
        model.head.unroll = lambda batch, *more: unrolled.append(unroll(batch, steps)) or unroll(batch, *more)
        model(torch.tensor([ids]), labels=torch.tensor([ids]))
    for (i, s), (_, normed) in slow.items():
        torch.testing.assert_close(unrolled[0][s][0, i], normed, rtol=1e-5, atol=1e-5)
