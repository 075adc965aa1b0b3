"""Every form of a parallel head's block keeps the base's joint distribution, in chains and trees: every outcome of one
drafted step enumerated, to 1e-12. The selector drafts two of three tokens."""

import itertools

import pytest
import torch

from specheads import BestFirstTree, Block, Exact, SampledTree, Target, Traversal, convert
from specheads.decoding.loop import decode
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import distance, probs_of
from tests.reference.slow_heads import FORMS

PROMPT, FIRST, TOKENS = (1, 0, 2, 1), 2, 3
PLANS = [(SampledTree((1, 1)), Block()), (BestFirstTree(5, 2, 2), Exact())]


@pytest.fixture(scope="module")
def base():
    return small_base(3)


def drafter(base, form):
    options = {"draft_vocab_size": None, "mask_token_id": 0}
    if form != "P-EAGLE":
        options = {"markov_rank": 4, "block_size": 3, **FORMS[form], "candidates": 2, "conv_group": 8, **options}
    torch.manual_seed(1)
    head = convert(base, "eagle3" if form == "P-EAGLE" else "parallel", dtype=base.dtype, **options).head
    for parameter in head.parameters():  # away from the base's own weights, so that q is unlike p
        torch.nn.init.normal_(parameter, std=0.5)
    return head


@pytest.mark.parametrize("form", [*FORMS, "P-EAGLE"])
def test_a_drafted_step_has_the_bases_joint_distribution(form, base):
    head, ids, probs = drafter(base, form), torch.tensor([PROMPT]), BaseProbs(base)
    wanted = {(FIRST, *rest): p for rest, p in probs.joint((*PROMPT, FIRST), TOKENS - 1).items()}
    # Two draws of three tokens have five times the outcomes, too many for each form.
    for plan, rule in [*PLANS, (SampledTree((2, 1)), Traversal())] if form == "DFlash 2" else PLANS:
        gained = set()

        def run(sampler, plan=plan, rule=rule, gained=gained):
            drawn, text = sampler.draw, ()
            sampler.draw = lambda p, numbers=None: torch.tensor([FIRST])  # the prefill's
            steps = decode(
                Target(base, head.layers, scratch=plan.num_nodes), head, ids, torch.tensor([len(PROMPT)]), plan=plan,
                sampler=sampler, accept=rule, stop=lambda row, history, count: -1, max_new_tokens=8,
            )  # fmt: skip
            for step in itertools.islice(steps, 2):
                sampler.draw, text = drawn, (*text, *step.tokens[0])
            gained.add(len(text))
            return text[:TOKENS]

        found = probs.extend_outcomes(probs_of(run), PROMPT, TOKENS)
        assert distance(found, wanted) < 1e-12 and gained == {2, 3, 4}, (plan, gained)
