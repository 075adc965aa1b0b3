"""A random base whose greedy text is known in any precision, and a drafter that is right for a given number of tokens.

Shapes: B batch rows, D drafted tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_sections.sizes import Sizes
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import Plan, StaticTree, chain
from specheads.decoding.planner.plan import unwrapped_plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


@torch.no_grad()
def successor_base(sizes: Sizes, device: torch.device) -> PreTrainedModel:
    """A random Llama that continues token t with t + 1, in arithmetic of V, by a margin that no rounding reaches.

    Each weight is read as in any model: what layers add to the residual stream is small beside the embeddings, and row
    t + 1 of the output matrix is the embedding of t. Made on the device itself.
    """
    torch.manual_seed(0)
    with torch.device(device):
        base: Any = AutoModelForCausalLM.from_config(sizes.config(), dtype=sizes.dtype)
    embeddings = base.get_input_embeddings().weight
    embeddings.normal_()
    base.get_output_embeddings().weight.copy_(embeddings.roll(1, 0))
    for name, weight in base.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(0.05)
    base.generation_config.eos_token_id, base.generation_config.pad_token_id = None, 0
    return base.eval().requires_grad_(False)


def prompts(sizes: Sizes, count: int, length: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Batches of one random prompt each."""
    coin = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, sizes.vocab_size, (1, length), generator=coin).to(device) for _ in range(count)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]


class SuccessorDrafter(nn.Module, Drafter):
    """Drafts chains for a `successor_base`: the first `right` tokens are its own, the others are not."""

    on_device = True  # type: ignore[assignment]
    layers = ()  # type: ignore[assignment]
    right: Tensor

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        # A tensor, so that one compiled step serves every number.
        self.register_buffer("right", torch.zeros((), dtype=torch.long, device=device))

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return chain(7)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        grown = unwrapped_plan(plan)
        if not isinstance(grown, StaticTree):  # it drafts nothing
            return DraftTree.root_only(context.root)
        root, depth = context.root.unsqueeze(1), grown.depth  # (B, 1)
        made = grown.topology(len(root), root.device)
        node = torch.arange(depth + 1, device=root.device)  # (D + 1,)
        wrong = (node > self.right) * (self.vocab_size // 2)
        return DraftTree((root + node + wrong) % self.vocab_size, made.parents, depth, topology=made)
