"""Is the text right? Greedy texts against the base's own, sampled ones by a G-test, both also compiled.

Shapes: B batch rows, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import specheads
from gpu_sections.sizes import Sizes
from gpu_sections.timing import Deadline
from specheads import DraftModel, DynamicTree, SampledTree, chain, comb, convert

TITLE = "Correctness"
COLUMNS = ("what", "compared with", "result", "right")
LENGTHS = (5, 17, 11, 30)  # of the prompts: rows accept different lengths
FALSE_ALARM = 1e-6  # the probability that a right distribution fails the G-test
BATCH = 500  # sampled texts of one call


def measure(sizes: Sizes, device: torch.device, deadline: Deadline) -> dict[str, Any]:
    lines = []
    for backend in (None, sizes.backend):  # compiling takes the most time, so it comes last
        given = sizes, device, deadline, backend
        for line in itertools.chain(greedy(*given), sampled(*given)):
            lines.append(line)
            print("  " + " · ".join(line), flush=True)
    return {"lines": lines, "right": all(line[-1] == "yes" for line in lines)}


def small_base(device: torch.device, layers: int, **sizes: int) -> PreTrainedModel:
    """A random Llama in float32, whose greedy text varies."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, bos_token_id=1,
        eos_token_id=None, pad_token_id=0, max_position_embeddings=512, **sizes,
    )  # fmt: skip
    with torch.device(device):
        base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.generation_config.eos_token_id, base.generation_config.pad_token_id = None, 0
    return base.eval()


def disturbed(base: PreTrainedModel, noise: float = 0.005) -> PreTrainedModel:
    """A draft model that is often right: the base with noise on its weights."""
    small = copy.deepcopy(base)
    with torch.no_grad():
        for weight in small.parameters():
            weight += noise * torch.randn_like(weight)
    return small


def greedy(sizes: Sizes, device: torch.device, deadline: Deadline, backend: str | None) -> Iterator[list[str]]:
    """Float32 texts of ragged prompts, which neither drafts nor compiling change. backend: None for the eager cases."""
    base = small_base(device, sizes.layers_small, hidden_size=64, intermediate_size=96, vocab_size=199)
    coin, width = torch.Generator().manual_seed(1), max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.long), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, width - length :], mask[row, width - length :] = torch.randint(2, 199, (length,), generator=coin), 1
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    own = base.generate(**batch, max_new_tokens=sizes.new, do_sample=False)  # type: ignore[operator]
    near = DraftModel(disturbed(base))
    head = convert(base, "medusa").head
    cases: list[tuple[str, Any, Any, bool]] = [
        ("plain", False, None, True), ("lookup", "lookup", None, False),
        ("draft model, chain of 4", near, chain(4), False), ("draft model, comb of 3 × 2", near, comb(3, 2), True),
        ("draft model, dynamic tree", near, DynamicTree(8, 3, 3), False),
        ("Medusa head, comb of 3 × 2", head, comb(3, 2), False),
    ]  # fmt: skip
    for name, draft, tree, also_compiled in cases:
        what = name + (", compiled" if backend else "")
        if (backend and not also_compiled) or deadline.over(f"greedy, {what}"):
            continue
        options = {"draft": draft, "tree": tree, "compile": backend or False, "do_sample": False}
        out: Any = specheads.generate(base, **batch, max_new_tokens=sizes.new, return_dict_in_generate=True, **options)
        same = int((out.sequences == own).all(1).sum())
        accepted = out.statistics()["accepted_length"]
        yield [
            f"greedy, {what}", "transformers generate", f"{same} of {len(own)} texts, {accepted:.2f} tokens a step",
            "yes" if same == len(own) else "NO",
        ]  # fmt: skip


def sampled(sizes: Sizes, device: torch.device, deadline: Deadline, backend: str | None) -> Iterator[list[str]]:
    """The counts of all texts of a few tokens, at temperature 1, against the base's own distribution of them."""
    vocab = 4
    base = small_base(device, 1, hidden_size=32, intermediate_size=48, vocab_size=vocab)
    prompt = torch.tensor([[1, 2, 3]], device=device)
    expected = text_probs(base, prompt, sizes.drawn)
    torch.manual_seed(2)
    head = convert(base, "medusa").head
    for weight in head.parameters():  # away from the base's own, so that its drafts are often rejected
        torch.nn.init.normal_(weight, std=0.5)
    small = DraftModel(disturbed(base, 0.3))
    cases: list[tuple[str, Any, Any, bool]] = [
        ("plain", False, None, False), ("Medusa head, comb of 2 × 2", head, comb(2, 2), True),
        ("draft model, tree of drawn tokens 2 × 1", small, SampledTree((2, 1)), True),
    ]  # fmt: skip
    calls = math.ceil(sizes.draws / BATCH)
    for case, (name, draft, tree, also_compiled) in enumerate(cases):
        what = name + (", compiled" if backend else "")
        if (backend and not also_compiled) or deadline.over(f"sampled, {what}"):
            continue
        counts = torch.zeros(vocab**sizes.drawn, dtype=torch.float64)
        for seed in range(case * calls, (case + 1) * calls):  # one seed gives one text, whatever drafts
            out: Any = specheads.generate(
                base, prompt.expand(BATCH, -1), attention_mask=torch.ones_like(prompt).expand(BATCH, -1),
                max_new_tokens=sizes.drawn, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, seed=seed,
                draft=draft, tree=tree, compile=backend or False,
            )  # fmt: skip
            counts += counts_of(out[:, prompt.shape[1] :].cpu(), vocab)
        p = g_test(counts, expected)
        yield [
            f"sampled, {what}", "the base's distribution, G-test", f"p = {p:.3g} over {int(counts.sum())} texts",
            "yes" if p > FALSE_ALARM else "NO",
        ]  # fmt: skip


@torch.no_grad()
def text_probs(base: PreTrainedModel, prompt: Tensor, length: int) -> Tensor:
    """(V ** length,) the probability of each text of so many tokens after the prompt (1, T), first token first."""
    vocab = base.config.vocab_size
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length).to(prompt.device)
    whole = torch.cat([prompt.expand(len(texts), -1), texts], 1)
    logits = base(whole).logits[:, prompt.shape[1] - 1 : -1].double().log_softmax(-1)
    return logits.gather(2, texts.unsqueeze(2)).sum((1, 2)).exp().cpu()


def counts_of(texts: Tensor, vocab: int) -> Tensor:
    """texts (B, n) → (V ** n,) how often each occurs."""
    weights = vocab ** torch.arange(texts.shape[1] - 1, -1, -1)
    return torch.bincount((texts * weights).sum(1), minlength=vocab ** texts.shape[1]).double()


def g_test(counts: Tensor, probs: Tensor) -> float:
    """The p-value of counts under probabilities (both (C,)), by the likelihood ratio. Cells expected fewer than five
    times are one cell."""
    expected = probs / probs.sum() * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    used = expected > 0
    statistic = 2 * torch.special.xlogy(counts[used], counts[used] / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1).double() / 2, statistic / 2))
