"""What trains is what drafts: the logits of decoding are those of the training unroll, in every row of a batch."""

import pytest
import torch

from specheads.decoding.planner import AdaptiveChain, DynamicTree, SampledTree, StaticTree, comb
from specheads.decoding.tree import DraftTree
from tests.reference.foreign_rope import PARTIAL, SCALED
from tests.reference.slow_heads import FORMS, KINDS, LATENT, WINDOWED, taps
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.prompts import PROMPTS, padded


class Forced:
    """A plan that drafts known texts as chains, and keeps what the head said after each token of them.

    Chains turn wrong at a depth that differs from row to row and from step to step, so each row accepts what it likes.
    prompts, texts: per row the prompt alone and with its greedy continuation. seen: of each row and step, the text up
    to the end of the chain, and the logits (Vd,) that were given for each drafted token of it.
    """

    def __init__(self, prompts, texts, depth, new):
        self.texts, self.depth, self.seen, self.accepted = texts, depth, [], []
        self.ends = [len(prompt) + new for prompt in prompts]
        self.at = [len(prompt) for prompt in prompts]  # where each row's root is
        self.num_nodes, self.drafting_slots = depth + 1, depth

    def drafts(self, row):
        """A row's next chain, and how much of it is right."""
        right = (row + len(self.accepted)) % (self.depth + 1)
        chain = self.texts[row][self.at[row] + 1 : self.at[row] + 1 + self.depth]
        return [t if depth < right else (t + 1) % 97 for depth, t in enumerate(chain)], right

    def grow(self, root, expand, sampler, vocab_size):
        going = [row for row, at in enumerate(self.at) if at + 1 < self.ends[row]]
        known = [text[: at + 1] for text, at in zip(self.texts, self.at, strict=True)]
        assert all(int(root[row]) == known[row][-1] for row in going)
        chains, right = zip(*map(self.drafts, range(len(self.texts))), strict=True)
        drafted = torch.tensor(chains)
        level, parents, said = root.unsqueeze(1), None, []
        for s in range(self.depth):
            said.append(expand(level, parents).logits[:, 0])
            level, parents = drafted[:, s : s + 1], torch.zeros(len(root), 1, dtype=torch.long)
        self.seen += [(known[row] + chains[row], [logits[row] for logits in said]) for row in going]
        self.accepted.append([right[row] for row in going])
        for row in going:
            self.at[row] += right[row] + 1
        shape = torch.arange(-1, self.depth).expand(len(root), -1)
        return DraftTree(torch.cat([root.unsqueeze(1), drafted], 1), shape, self.depth)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS), ("hydra", {"prefix_layer": True}), ("eagle", {"num_layers": 2}),
        ("eagle3", {"num_layers": 2}), ("eagle3", {"norm_features": True, "norm_output": True}),
        ("eagle3", {"norm_before_fc": True, "norm_before_residual": False}),
        ("mtp", {"num_modules": 2}), ("mtp", {"num_modules": 3, "hidden_first": True}),
        ("mtp", {"norm_output": False, "zero_first_embedding": True}),
        ("parallel", {"causal": False, "mask_token_id": 5, "draft_vocab_size": 40, "block_size": 4}),
        ("eagle3", {"rope_parameters": SCALED["yarn"]}), ("eagle", {"rope_parameters": SCALED["linear"]}),
        ("hydra", {"prefix_layer": True, "rope_parameters": SCALED["llama3"]}),
        ("parallel", {"rope_parameters": SCALED["llama3"]}),
        ("parallel", {"sample_from_anchor": False, "block_size": 5}),
        ("parallel", {"sample_from_anchor": False, "block_size": 5, "causal": False, "markov_rank": 0}),
        ("eagle3", {"qk_norm": True, "hidden_act": "gelu", "rope_parameters": PARTIAL, "own_embeddings": True}),
        ("eagle3", {"num_layers": 2, **LATENT}),
        *WINDOWED,
        *(("parallel", {**options, "block_size": 5}) for options in FORMS.values()),
    ],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_each_row_drafts_with_the_logits_of_the_training_unroll(kind, options):
    model, depth, new = spec_model(kind, **options).eval(), 3, 14
    texts = [  # longer than is asked for: the drafts of a row that waits for others to come as far go on
        model.base.generate(
            torch.tensor([prompt]), max_new_tokens=new + 3 * depth, do_sample=False, eos_token_id=None
        )[0].tolist()
        for prompt in PROMPTS
    ]  # fmt: skip
    plan = Forced(PROMPTS, texts, depth, new)
    inputs = padded(PROMPTS)
    columns = inputs["input_ids"].shape[1]

    def enough(ids, scores, **kwargs):  # so that no draft is cut to what a limit leaves
        return torch.full((len(ids),), ids.shape[1] >= columns + new)

    out = model.generate(
        **inputs, max_new_tokens=new + 3 * depth, do_sample=False, eos_token_id=None, tree=plan,
        stopping_criteria=[enough],
    )  # fmt: skip
    assert [row[columns:] for row in out.tolist()] == [
        text[len(prompt) : len(prompt) + new] for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    assert len(plan.accepted) >= 3  # steps on a fresh cache and on a filled one
    assert all(len(set(step)) == len(step) for step in plan.accepted), "rows never accepted different lengths"
    # Softmax and RoPE run in float32 whatever the dtype, hence no tighter.
    for text, said in plan.seen:
        last = len(text) - depth - 2  # of the last feature the head had, that of the token before the root
        for logits, trained in zip(said, training_logits(model, text), strict=True):
            torch.testing.assert_close(logits, trained[last], rtol=1e-5, atol=1e-5)


def training_logits(model, text):
    """[(T, V)] per depth: what the loss compares with the teacher, read through TapBatch."""
    head = model.head
    if head.config.kind == "hydra":
        return hydra_logits(model, text)
    if head.config.kind == "medusa":
        with torch.no_grad():
            features = torch.stack(taps(model, text)[0])
            return [head.draft_logits(block(features), i) for i, block in enumerate(head.blocks)]
    if head.config.kind == "parallel":
        return block_logits(model, text)
    seen, unroll = [], head.unroll

    def spy(batch, *more):
        outputs = unroll(batch, *more)
        seen.extend(head.draft_logits(out[0], 0, batch.lm_head).detach() for out in outputs)
        return outputs

    head.unroll = spy
    try:
        model(torch.tensor([text]), loss_mask=torch.ones(1, len(text)))
    finally:
        del head.unroll
    return seen


def hydra_logits(model, text):
    """Of every position, zeros where a draft runs past the end: what the loss's own rows come to."""
    logits_by_depth, draft_rows = [], model.head.draft_rows

    def spy(batch, targets):
        for i, drafts in enumerate(draft_rows(batch, targets)):
            logits = model.head.draft_logits(drafts, i).detach()
            by_start = logits.new_zeros(targets.size, logits.shape[1])
            by_start[targets.starts_of(i)] = logits
            logits_by_depth.append(by_start)
        return draft_rows(batch, targets)

    model.head.draft_rows = spy
    try:
        model(torch.tensor([text]), loss_mask=torch.ones(1, len(text)))
    finally:
        del model.head.draft_rows
    return logits_by_depth


class Recorded:
    """Wraps a plan, and records the path from the root to each node and the logits after it."""

    def __init__(self, plan):
        self.plan, self.seen = plan, []
        self.num_nodes, self.depth, self.drafting_slots = plan.num_nodes, plan.depth, plan.drafting_slots

    def limited(self, depth):
        return self.plan.limited(depth)

    def grow(self, root, expand, sampler, vocab_size):
        if self.seen:  # the first step alone
            return self.plan.grow(root, expand, sampler, vocab_size)
        level = []

        def spy(tokens, parents):
            nonlocal level
            above = [[[]] * tokens.shape[1]] * len(root) if parents is None else [
                [paths[p] for p in own] for paths, own in zip(level, parents.tolist(), strict=True)
            ]  # fmt: skip
            rows = zip(above, tokens.tolist(), strict=True)
            level = [[[*path, t] for path, t in zip(*row, strict=True)] for row in rows]
            scored = expand(tokens, parents)
            logits = scored.logits.expand(-1, tokens.shape[1], -1)
            self.seen += [
                (row, path, own[i]) for row, own in enumerate(logits) for i, path in enumerate(level[row])
            ]  # fmt: skip
            return scored

        return self.plan.grow(root, spy, sampler, vocab_size)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plan",
    [
        comb(3, 2), StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))), DynamicTree(9, 3, 3),
        SampledTree((2, 2, 1)), AdaptiveChain(3, confidence=0.0, sampled=True),
    ],
    ids=lambda plan: type(plan).__name__,
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hydra", {"prefix_layer": True}),
        ("eagle3", {"num_layers": 2}),
        ("mtp", {}),
        ("mtp", {"num_modules": 2}),
        *(case for case in WINDOWED if case[0] in ("eagle3", "mtp")),
    ],
)
def test_every_node_of_a_tree_is_scored_after_its_own_path(kind, options, plan):
    model = spec_model(kind, **options).eval()
    recorded = Recorded(plan)
    sampled = not isinstance(plan, StaticTree | DynamicTree)
    model.generate(**padded(PROMPTS), max_new_tokens=5, do_sample=sampled, seed=0, eos_token_id=None, tree=recorded)
    paths = {(row, tuple(path)): logits for row, path, logits in recorded.seen}
    assert len(paths) >= 9 and len({path for _, path in paths}) >= 9 and {len(path) for _, path in paths} == {1, 2, 3}
    for (row, path), logits in paths.items():
        text = [*PROMPTS[row], *path, 5]  # the last token is only a target
        trained = training_logits(model, text)[len(path) - 1]
        torch.testing.assert_close(logits, trained[len(PROMPTS[row]) - 1], rtol=1e-5, atol=1e-5)


def block_logits(model, text):
    """The same of a parallel head: entry a of each depth is of the block that position a + 1 anchors."""
    head, seen, outputs = model.head, [], model.head.outputs
    head.outputs = lambda batch, blocks: seen.append((batch, blocks, outputs(batch, blocks))) or seen[0][2]
    try:
        model(torch.tensor([text]), loss_mask=torch.ones(1, len(text)))
    finally:
        del head.outputs
    batch, blocks, out = seen[0]
    assert blocks.anchors.tolist() == [[*range(1, len(text) - 1)]]
    ids, drafted = torch.tensor(text), torch.arange(out.shape[2])
    before = ids[(blocks.anchors.unsqueeze(2) + drafted).clamp(max=len(text) - 1)]
    rows = head.rows(out, head.read_before(before, batch.embed), torch.ones_like(before, dtype=torch.bool))
    return list(head.draft_logits(rows, 0, batch.lm_head).view(*before.shape[1:], -1).unbind(1))[:3]
