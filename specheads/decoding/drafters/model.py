"""DraftModel: any smaller model as the drafter, over a cache of its own in which nothing is recomputed.

Shapes: B batch rows, k nodes a level, V vocabulary of the target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.reader import Reader
from specheads.decoding.drafters.translation import Translation
from specheads.decoding.planner import AdaptiveChain, Expand, Plan, SampledTree, Scored
from specheads.decoding.sampler import Sampler
from specheads.decoding.target.causal import Target, text_config, unwrapped
from specheads.decoding.target.seq2seq import refuse_unsupported
from specheads.decoding.tree import DraftTree

# Rows that round a vocabulary's size up, as a share of it: Qwen2.5 has 151,936 in its 0.5B model, 152,064 in its 72B.
PADDING = 0.01
NO_LIMIT = 2**20  # tokens, for a model that names no longest text


class DraftModel(Drafter):
    """Drafts with `small`: any plan's trees, by its likeliest tokens or by sampling from its law.

    tokenizer, target_tokenizer: of the small model and the target, where their vocabularies are not the same. The
    draft is then a chain of the small model's likeliest tokens, told to the target as text, as in transformers'
    universal assisted generation. A text that outgrows the small model's positions goes on without drafts.
    An encoder-decoder drafts for an encoder-decoder of its vocabulary: its own encoder reads the source once.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, small: PreTrainedModel, *, tokenizer: Any = None, target_tokenizer: Any = None) -> None:
        """Raises UnsupportedModel, with the reason, for a small model that cannot hold a tree."""
        if (tokenizer is None) != (target_tokenizer is None):
            missing = "tokenizer" if tokenizer is None else "target_tokenizer"
            raise ValueError(f"drafting through text takes the tokenizers of both models; {missing}= is missing")
        small = unwrapped(small)
        self.reads_source = bool(small.config.is_encoder_decoder)
        if self.reads_source:
            refuse_unsupported(small)
        else:
            Target(small)
        self.small = small.eval()
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.through_text = tokenizer is not None and tokenizer.get_vocab() != target_tokenizer.get_vocab()
        if self.through_text and self.reads_source:
            raise ValueError(
                "an encoder-decoder drafts for targets of its own vocabulary alone; leave out the tokenizers"
            )
        self.longest = getattr(text_config(small), "max_position_embeddings", None) or NO_LIMIT

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return SampledTree((1,) * 5) if do_sample and not self.through_text else AdaptiveChain()

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.refuse_other_kind(context)
        if self.through_text:
            return self._propose_text(context, sampler, plan)
        reader: Reader | None = context.memory.get("reader")
        longest, vocab_size = max(map(len, context.history)), vocabulary_size(context.target.base)
        if reader is None:
            self.refuse_other_vocabulary(vocab_size)
            reader = context.memory["reader"] = self.reader(
                context.history, _scratch(plan), context.target.limit, context.source
            )
        elif longest > self.longest:
            return DraftTree.root_only(context.root)
        else:
            reader.read(context.following, context.new, longest)
        return plan.grow(context.root, growing(reader, context.root.device, vocab_size), sampler, vocab_size)

    def _propose_text(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        memory = context.memory
        if "rows" not in memory:
            refuse_trees(plan)
            memory["rows"] = [Translation(self.tokenizer, self.target_tokenizer) for _ in context.history]
        rows: list[Translation] = memory["rows"]
        kept = [row.read(history[row.num_read :]) for row, history in zip(rows, context.history, strict=True)]
        longest = max(len(row.ids) for row in rows)
        reader: Reader | None = memory.get("reader")
        if reader is None:
            reader = memory["reader"] = self.reader([row.ids for row in rows], _scratch(plan), self.longest)
        elif longest > self.longest:
            return DraftTree.root_only(context.root)
        else:
            # The last token is read again where nothing follows it, for its logits.
            kept = [min(n, len(row.ids) - 1) for n, row in zip(kept, rows, strict=True)]
            unread = [row.ids[n:] for n, row in zip(kept, rows, strict=True)]
            width = max(map(len, unread))
            reader.rewind(torch.tensor(kept))
            padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in unread])
            reader.read(padded, torch.tensor([len(ids) for ids in unread]), longest)
        roots = torch.tensor([row.ids[-1] for row in rows], device=reader.device)
        vocab_size = vocabulary_size(self.small)
        tree = plan.grow(roots, growing(reader, reader.device, vocab_size), sampler, vocab_size)
        drafts = [row.write(drafted) for row, drafted in zip(rows, tree.tokens[:, 1:].tolist(), strict=True)]
        return DraftTree.chains(context.root, [draft[: plan.depth] for draft in drafts])

    def reader(self, rows: list[list[int]], scratch: int, limit: int, source: list[list[int]] | None = None) -> Reader:
        """The small model as a reader of rows, which get no longer than `limit`; ValueError for rows it cannot hold.

        source: what an encoder reads, of each row.
        """
        if (longest := max(map(len, [*rows, *(source or ())]))) > self.longest:
            raise ValueError(
                f"the draft model has positions for {self.longest} tokens, and the prompt takes {longest} of them; "
                "take a draft model for longer texts"
            )
        return Reader(self.small, rows, scratch=scratch, limit=min(self.longest, limit), source=source)

    def refuse_other_kind(self, context: Context) -> None:
        refuse_other_kind(self.small, context.target.base)
        if self.reads_source and context.source is None:
            raise ValueError("the draft model reads the source too, and its ids are not known; give input_ids")

    def refuse_other_vocabulary(self, vocab_size: int) -> None:
        """ValueError where the target's vocabulary, of vocab_size ids, is another."""
        own = vocabulary_size(self.small)
        if self.tokenizer is None and abs(own - vocab_size) > PADDING * max(own, vocab_size):
            raise ValueError(
                f"the draft model has a vocabulary of {own}, the target one of {vocab_size}: draft through text with "
                "DraftModel(small, tokenizer=..., target_tokenizer=...), or take a draft model of the target's family"
            )


def refuse_other_kind(small: PreTrainedModel, base: PreTrainedModel) -> None:
    """ValueError where only one of the two is an encoder-decoder."""
    if small.config.is_encoder_decoder != base.config.is_encoder_decoder:
        raise ValueError(
            f"{type(small).__name__} cannot draft for {type(base).__name__}: of the two only one is an "
            "encoder-decoder, and both must read the same; take a draft model of the target's family"
        )


def _scratch(plan: Plan) -> int:
    return max(plan.drafting_slots, plan.depth + 1)


def growing(reader: Reader, device: torch.device, vocab_size: int) -> Expand:
    """The expand() of a plan: what the reader's model drafts behind its text, on `device`.

    Of two sizes of one vocabulary the smaller counts: what lies beyond is padding and is never drafted.
    """
    own = reader.logits.shape[-1]
    ids = torch.arange(own, device=device) if own < vocab_size else None

    def expand(tokens: Tensor, parents: Tensor | None) -> Scored:
        logits = reader.logits if parents is None else reader.draft(tokens, parents)
        return Scored(logits[..., :vocab_size].to(device), ids)

    return expand


def vocabulary_size(model: PreTrainedModel) -> int:
    weight: Any = model.get_output_embeddings().weight
    return len(weight)


def refuse_trees(plan: Plan) -> None:
    """Between two vocabularies only a chain of likeliest tokens can be told."""
    sampled = getattr(plan, "sampled", isinstance(plan, SampledTree))
    if sampled or plan.num_nodes != plan.depth + 1:
        raise ValueError(
            f"between two vocabularies a draft is a chain of likeliest tokens, not {plan}; take tree=chain(...) or "
            "AdaptiveChain(...)"
        )
