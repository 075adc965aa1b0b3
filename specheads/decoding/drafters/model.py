"""DraftModel: a smaller model as the drafter, with its own KV cache so that nothing is recomputed.

Shapes: B batch rows, k nodes a level, V vocabulary of the target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.cached_model import CachedModel
from specheads.decoding.drafters.retokenize import RetokenizedText
from specheads.decoding.planner import AdaptiveChain, ChildLogits, Expand, NoDraft, Plan, SampledTree
from specheads.decoding.planner.plan import unwrapped_plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.hf_base import UnsupportedModel, has_state, text_config, unwrapped, vocabulary_size
from specheads.decoding.verify.model_inputs import forward_arguments
from specheads.decoding.verify.seq2seq import refuse_unsupported

# The share of a vocabulary that may be padding: Qwen2.5 has 151,936 rows in its 0.5B model and 152,064 in its 72B.
PADDING = 0.01
NO_LIMIT = 2**20  # tokens, for a model that states no maximum length


class DraftModel(Drafter):
    """Drafts any plan's trees with `small`, of its likeliest tokens or sampled from its distribution.

    tokenizer, target_tokenizer: the small model's and the target's, if their vocabularies differ. The draft is then a
    chain of the small model's likeliest tokens, converted to the target's ids through text, as in transformers'
    universal assisted generation. A text that outgrows the small model's positions continues without drafts.
    An encoder-decoder drafts for an encoder-decoder of the same vocabulary: its encoder reads the source once.
    """

    layers: tuple[int, ...] = ()
    longest: int = NO_LIMIT

    def __init__(self, small: PreTrainedModel, *, tokenizer: Any = None, target_tokenizer: Any = None) -> None:
        """Raises UnsupportedModel, with the reason, for a small model whose cache cannot hold a tree."""
        if (tokenizer is None) != (target_tokenizer is None):
            missing = "tokenizer" if tokenizer is None else "target_tokenizer"
            raise ValueError(f"drafting through text takes the tokenizers of both models; {missing}= is missing")
        small = unwrapped(small)
        if not (small.config.is_encoder_decoder or writes_alone(small)):
            raise UnsupportedModel(
                f"{type(small).__name__} drafts from another model's states, not from ids alone, so it is no draft "
                "model; a drafter of transformers' own goes to the model's own generate(assistant_model=...)"
            )
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
                "an encoder-decoder drafts only for targets of its own vocabulary; leave out the tokenizers"
            )
        self.rewinds = self.reads_source or not has_state(small)
        if self.through_text:
            self.refuse_state("drafting through text")
        self.longest = getattr(text_config(small), "max_position_embeddings", None) or NO_LIMIT

    @property
    def refillable(self) -> bool:
        return self.rewinds

    @property
    def gives_draft_probs(self) -> bool:
        return not self.through_text

    @property
    def draft_modules(self) -> tuple[nn.Module, ...]:
        return (self.small,)

    def refuse_state(self, purpose: str) -> None:
        """UnsupportedModel for a small model with recurrent layers, which cannot be rewound."""
        if not self.rewinds:
            raise UnsupportedModel(
                f"{purpose} takes back what the draft model has read, and the recurrent layers of "
                f"{type(self.small).__name__} cannot; take a draft model without such layers"
            )

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return SampledTree((1,) * 5) if do_sample and not self.through_text else AdaptiveChain()

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        self.refuse_other_kind(context)
        if self.through_text:
            return self._propose_text(context, sampler, plan)
        model: CachedModel | None = context.memory.get("cached_model")
        longest, vocab_size = max(map(len, context.history)), context.target.vocab_size
        if model is None:
            self.refuse_other_vocabulary(vocab_size)
            model = context.memory["cached_model"] = self.cached(
                context.history, _scratch_slots(plan), context.target.limit, context.source
            )
        elif longest > self.longest:
            return DraftTree.root_only(context.root)
        else:
            model.read(context.following, context.new, longest)
        return plan.grow(context.root, make_expand(model, context.root.device, vocab_size), sampler, vocab_size)

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        memory = context.memory
        if self.through_text:  # the next proposal reads all of the text
            for row in rows:
                memory["rows"][row] = RetokenizedText(self.tokenizer, self.target_tokenizer)
            return
        self.propose(prompts, Sampler(), NoDraft(plan))
        read: CachedModel = prompts.memory["cached_model"]
        memory["cached_model"].replace_rows(torch.tensor(rows), read, read.target.cache.lengths - 1)

    def _propose_text(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        memory = context.memory
        if "rows" not in memory:
            refuse_trees_through_text(plan)
            memory["rows"] = [RetokenizedText(self.tokenizer, self.target_tokenizer) for _ in context.history]
        rows: list[RetokenizedText] = memory["rows"]
        unchanged = [row.extend(history[row.num_read :]) for row, history in zip(rows, context.history, strict=True)]
        longest = max(len(row.ids) for row in rows)
        model: CachedModel | None = memory.get("cached_model")
        if model is None:
            model = memory["cached_model"] = self.cached([row.ids for row in rows], _scratch_slots(plan), self.longest)
        elif longest > self.longest:
            return DraftTree.root_only(context.root)
        else:
            # If nothing new follows the last token, it is read again, for its logits.
            unchanged = [min(n, len(row.ids) - 1) for n, row in zip(unchanged, rows, strict=True)]
            unread = [row.ids[n:] for n, row in zip(unchanged, rows, strict=True)]
            width = max(map(len, unread))
            model.rewind(torch.tensor(unchanged))
            padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in unread])
            model.read(padded, torch.tensor([len(ids) for ids in unread]), longest)
        roots = torch.tensor([row.ids[-1] for row in rows], device=model.device)
        vocab_size = vocabulary_size(self.small)
        tree = plan.grow(roots, make_expand(model, model.device, vocab_size), sampler, vocab_size)
        drafts = [row.to_target_ids(drafted) for row, drafted in zip(rows, tree.tokens[:, 1:].tolist(), strict=True)]
        return DraftTree.chains(context.root, [draft[: plan.depth] for draft in drafts])

    def cached(
        self, rows: list[list[int]], scratch: int, limit: int, source: list[list[int]] | None = None
    ) -> CachedModel:
        """The small model with these rows in its cache. ValueError for rows it has no positions for.

        limit: no row gets longer; source: what an encoder reads, per row.
        """
        if (longest := max(map(len, [*rows, *(source or ())]))) > self.longest:
            raise ValueError(
                f"the draft model has positions for {self.longest} tokens, and the prompt takes {longest} of them; "
                "take a draft model for longer texts"
            )
        return CachedModel(self.small, rows, scratch=scratch, limit=min(self.longest, limit), source=source)

    def refuse_other_kind(self, context: Context) -> None:
        refuse_other_kind(self.small, context.target.name, context.target.is_encoder_decoder)
        if self.reads_source and context.source is None:
            raise ValueError("the draft model reads the source too, and its ids are not known; give input_ids")

    def refuse_other_vocabulary(self, vocab_size: int) -> None:
        """ValueError if the target's vocabulary, of vocab_size ids, is not the small model's."""
        size = vocabulary_size(self.small)
        if self.tokenizer is None and abs(size - vocab_size) > PADDING * max(size, vocab_size):
            raise ValueError(
                f"the draft model has a vocabulary of {size}, the target one of {vocab_size}: draft through text with "
                "DraftModel(small, tokenizer=..., target_tokenizer=...), or take a draft model of the target's family"
            )


def writes_alone(model: Any) -> bool:
    """Is this a language model that continues ids by itself? transformers' own drafters (DFlash, Gemma 4's assistants)
    have no language-model head, or read another model's states."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return bool(
        isinstance(model, PreTrainedModel)
        and model.can_generate()
        and model.get_output_embeddings() is not None
        and "input_ids" in forward_arguments(model)
    )


def refuse_other_kind(small: PreTrainedModel, target: str, is_encoder_decoder: bool) -> None:
    """ValueError if only one of the two is an encoder-decoder. target: its name."""
    if small.config.is_encoder_decoder != is_encoder_decoder:
        raise ValueError(
            f"{type(small).__name__} cannot draft for {target}: of the two only one is an "
            "encoder-decoder, and both must read the same; take a draft model of the target's family"
        )


def _scratch_slots(plan: Plan) -> int:
    return max(plan.drafting_slots, plan.depth + 1)


def make_expand(model: CachedModel, device: torch.device, vocab_size: int) -> Expand:
    """The `expand` that a plan calls: the model's logits after its text, on `device`.

    If the two vocabularies differ in size, the smaller counts: ids beyond it are padding and are never drafted.
    """
    size = model.logits.shape[-1]
    ids = torch.arange(size, device=device) if size < vocab_size else None

    def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
        logits = model.logits if parents is None else model.draft(tokens, parents)
        return ChildLogits(logits[..., :vocab_size].to(device), ids)

    return expand


def refuse_trees_through_text(plan: Plan) -> None:
    """ValueError unless the plan is a chain of likeliest tokens, the only one that can be drafted through text."""
    grown = unwrapped_plan(plan)
    sampled = getattr(grown, "sampled", isinstance(grown, SampledTree))
    if sampled or plan.num_nodes != plan.depth + 1:
        raise ValueError(
            f"between two vocabularies a draft is a chain of likeliest tokens, not {grown}; take tree=chain(...) or "
            "AdaptiveChain(...)"
        )
