"""Every outcome of decoding, each with its probability: the distribution of the output without sampling error.

Every random choice of decoding goes through Sampler.draw, so a sampler that plays all outcomes in turn gives it.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from specheads.decoding.acceptance import Exact, walk
from specheads.decoding.loop import decode
from specheads.decoding.planner import ChildLogits
from specheads.decoding.planner.plan import RecordDraftLogits
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.verify.verifier import TargetOutput, Verifier


def stop_after(prompts, length):
    """A `stop` of decode() that keeps `length` new tokens in each row."""

    def stop(row, history, count):
        kept = length - (len(history) - len(prompts[row]) - count)
        return kept if kept <= count else -1

    return stop


class Enumerating(Sampler):
    """Plays one script of choices a run; `advance` moves on to the next until all have been played."""

    def __init__(self, processors=None):
        super().__init__(processors, do_sample=True)
        self.script = []  # [index, count] of each draw so far

    def restart(self):
        self.cursor, self.weight = 0, 1.0

    def draw(self, p, numbers=None):
        p, shape = p.double().reshape(-1, p.shape[-1]), p.shape[:-1]
        p = p / p.sum(-1, keepdim=True)
        options = [[(i, chance) for i, chance in enumerate(row) if chance > 0] for row in p.tolist()]
        count = 1
        for row in options:
            count *= len(row)
        if self.cursor == len(self.script):
            self.script.append([0, count])
        index, expected = self.script[self.cursor]
        assert count == expected, "the same choices led to another draw: something random bypasses Sampler.draw"
        self.cursor += 1
        chosen = []
        for row in options:
            index, slot = divmod(index, len(row))
            token, chance = row[slot]
            self.weight *= chance
            chosen.append(token)
        return torch.tensor(chosen).view(shape)

    def draw_from_logits(self, logits, numbers=None):
        return self.draw(self.probs(logits)), torch.ones(len(logits), dtype=torch.bool)

    def draw_nodes(self, logits, tree, numbers, p=None):
        """Of the nodes that a row's path reaches alone: what is drawn elsewhere is never looked at, and here is what
        would be accepted if it were."""
        drawn = torch.zeros_like(tree.tokens)
        p = self.probs(logits.flatten(0, 1)).view_as(logits) if p is None else p
        for b, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            for token, parent in reversed([*zip(tokens, parents, strict=True)]):
                if parent >= 0:
                    drawn[b, parent] = token
            node = 0
            while node is not None:
                drawn[b, node] = token = int(self.draw(p[b, node : node + 1]))
                node = next((i for i, x in enumerate(tokens) if x == token and parents[i] == node), None)
        return drawn, torch.ones_like(drawn, dtype=torch.bool)

    def bernoulli(self, chance):
        chance = chance.nan_to_num(0).clamp(max=1)
        return self.draw(torch.stack([1 - chance, chance], dim=-1)).bool()

    def coin(self, chance):
        return bool(self.bernoulli(torch.tensor(chance, dtype=torch.float64)))

    def advance(self):
        while self.script and self.script[-1][0] + 1 == self.script[-1][1]:
            self.script.pop()
        if self.script:
            self.script[-1][0] += 1
        return bool(self.script)


def probs_of(run, processors=None):
    """{outcome: probability} of run(sampler)."""
    sampler, probs = Enumerating(processors), {}
    while True:
        sampler.restart()
        outcome = run(sampler)
        probs[outcome] = probs.get(outcome, 0.0) + sampler.weight
        if not sampler.advance():
            break
    assert sum(probs.values()) == pytest.approx(1, abs=1e-12)
    return probs


def distance(probs, other):
    """The largest difference of one outcome's probability."""
    return max(abs(probs.get(key, 0.0) - other.get(key, 0.0)) for key in probs.keys() | other.keys())


class Table:
    """Logits as a function of the whole prefix, random but fixed. holes: some tokens have no chance at all."""

    def __init__(self, vocab_size, seed, *, holes=False, scale=1.5):
        self.vocab_size, self.seed, self.holes, self.scale = vocab_size, seed, holes, scale
        self.known = {}

    def __call__(self, prefix):
        key = tuple(prefix)
        if key not in self.known:
            generator = torch.Generator().manual_seed(hash((self.seed, *key)) % 2**31)
            logits = torch.randn(self.vocab_size, generator=generator, dtype=torch.float64) * self.scale
            if self.holes:
                logits[int(torch.randint(self.vocab_size, (), generator=generator))] = -torch.inf
            self.known[key] = logits
        return self.known[key]

    def joint(self, prompt, length, eos=None):
        """The joint distribution of the next `length` tokens, stopping after eos."""
        probs = {(): 1.0}
        for _ in range(length):
            longer = {}
            for tokens, chance in probs.items():
                if tokens and tokens[-1] == eos:
                    longer[tokens] = chance
                    continue
                for token, p in enumerate(self((*prompt, *tokens)).softmax(-1).tolist()):
                    if p:
                        longer[*tokens, token] = chance * p
            probs = longer
        return probs


class TableTarget(Verifier):
    """A table instead of a model."""

    name = "a table"
    limit = 99  # tokens a row may get to

    def __init__(self, table):
        self.table = table

    @property
    def vocab_size(self):
        return self.table.vocab_size

    def prefill(self, ids, lengths, *, room, inputs=None):
        self.rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return TargetOutput(
            torch.stack([self.table(row) for row in self.rows]).unsqueeze(1), torch.empty(*ids.shape, 0)
        )

    def prepare(self, bound):
        assert all(len(row) <= bound for row in self.rows)

    def verify(self, tree):
        self.tree = tree
        logits = torch.zeros(*tree.tokens.shape, self.table.vocab_size, dtype=torch.float64)
        for b, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
            prefixes = []
            for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                above = self.rows[b] if i == 0 else prefixes[parent] if parent >= 0 else None
                prefixes.append(None if above is None else [*above, token])
                if above is not None:
                    logits[b, i] = self.table(prefixes[i])
        return TargetOutput(logits, torch.empty(*tree.tokens.shape, 0))

    def commit(self, path, length):
        for b, row in enumerate(self.rows):
            row += self.tree.tokens[b, path[b, : length[b]]].tolist()


@dataclass
class TableDrafter:
    """Drafts from a table; `change` may tamper with the tree it grew."""

    table: Table
    change: object = staticmethod(lambda tree: tree)
    layers: tuple = ()

    def propose(self, context, sampler, plan):
        paths = [[tuple(row)] for row in context.history]

        def expand(tokens, parents):
            nonlocal paths
            if parents is not None:
                paths = [
                    [(*paths[b][parent], token) for token, parent in zip(row, parents[b].tolist(), strict=True)]
                    for b, row in enumerate(tokens.tolist())
                ]
            return ChildLogits(torch.stack([torch.stack([self.table(path) for path in row]) for row in paths]))

        return self.change(plan.grow(context.root, expand, sampler, self.table.vocab_size))


def output_probs(target, draft, plan, prompts, length, *, accept=None, eos=None, steps=None, change=None, drafter=None):
    """The joint distribution of the first `length` tokens of each row, as a tuple of rows.

    steps: draw only so many from trees and continue with the target's own distribution, which by induction (a step
    depends on the prefix alone) shows as much as a whole run, of a tree too large to enumerate twice. The prefill's
    token, drawn without a tree, is then made certain. drafter: drafts instead of the table `draft`.
    """
    if steps is not None:
        for prompt in prompts:
            target.known[prompt] = torch.full((target.vocab_size,), -torch.inf, dtype=torch.float64)
            target.known[prompt][1] = 0
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)

    def stop(row, history, count):
        generated = history[lengths[row] :]
        for kept in range(1, count + 1):
            until = len(generated) - count + kept
            if until >= length or generated[until - 1] == eos:
                return kept
        return -1

    def run(sampler):
        own = drafter or TableDrafter(draft, change or (lambda tree: tree))
        rows = [() for _ in prompts]
        made = decode(
            TableTarget(target), own if plan else None, ids, torch.tensor(lengths), plan=plan, sampler=sampler,
            accept=accept or Exact(), stop=stop, max_new_tokens=length,
        )  # fmt: skip
        for step in itertools.islice(made, None if steps is None else steps + 1):
            rows = [(*row, *gained) for row, gained in zip(rows, step.tokens, strict=True)]
        return tuple(rows)

    probs = probs_of(run)
    if steps is None:
        return probs
    assert eos is None
    for row, prompt in enumerate(prompts):
        probs = extend_outcomes(probs, target, prompt, length, row)
    return probs


def true_probs(target, prompts, length, eos=None):
    """Independent rows: the product of their distributions."""
    probs = {(): 1.0}
    for prompt in prompts:
        own = target.joint(prompt, length, eos)
        probs = {(*rows, row): a * b for rows, a in probs.items() for row, b in own.items()}
    return probs


def step_probs(target, draft, plan, rule, prompt, *, processors=None, change=lambda tree: tree):
    """{tokens that one step gives after a prompt: probability}."""

    def run(sampler):
        verifier = TableTarget(target)
        verifier.rows = [list(prompt[:-1])]
        context = SimpleNamespace(history=[list(prompt)], root=torch.tensor([prompt[-1]]))
        tree = TableDrafter(draft, change).propose(
            context, sampler, RecordDraftLogits(plan) if rule.uses_draft_probs else plan
        )
        verdict = walk(tree, verifier.verify(tree).logits, rule, sampler, [list(prompt)])
        path = verdict.path[0, 1 : verdict.length[0]]
        return (*tree.tokens[0, path].tolist(), int(verdict.bonus))

    return probs_of(run, processors)


def extend_outcomes(probs, target, prompt, length, row=None):
    """Steps of differing lengths, each continued with the target's own distribution; of several rows, that one."""
    whole = {}
    for outcome, chance in probs.items():
        tokens = outcome if row is None else outcome[row]
        for rest, p in target.joint((*prompt, *tokens), length - len(tokens)).items():
            longer = (*tokens, *rest)
            key = longer if row is None else (*outcome[:row], longer, *outcome[row + 1 :])
            whole[key] = whole.get(key, 0.0) + chance * p
    return whole


def mean_accepted(probs):
    """Tokens a step gives, the bonus left out."""
    return sum(chance * (len(tokens) - 1) for tokens, chance in probs.items())
