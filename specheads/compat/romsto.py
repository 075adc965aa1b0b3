"""https://github.com/romsto/Speculative-Decoding: its generation functions, which take and return lists of ids, and its
n-gram storages, whose methods also take tensors of rows, and then return tensors.

Its README calls the end tokens end_tokens_id, its code eos_tokens_id: all functions accept both names.
Shapes: B rows, T ids in a row, K tokens after it, n ids in an n-gram.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.compat.debug import CountingRule, Printer, StepPrinter
from specheads.compat.plain import checked_ids, checked_model, generate_raw, room_for
from specheads.compat.processors import GreedyProcessor, LogitsProcessor, whole
from specheads.decoding.acceptance import Acceptance, Exact, NoResidual
from specheads.decoding.drafters import DraftModel, NGram, ngram
from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.drafters.path_drafter import Paths
from specheads.decoding.planner import Plan, SampledTree, chain
from specheads.options import require_whole, shown

EndTokens = int | list[int]
Ids = Sequence[int] | Tensor


def autoregressive_generate(
    inputs: list[int],
    model: PreTrainedModel,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor | None = None,
    eos_tokens_id: EndTokens = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    debug: bool = False,
    *,
    end_tokens_id: EndTokens | None = None,
    tokenizer: Any = None,
) -> list[int]:
    """The new ids, up to and including the first end token. logits_processor: default greedy.

    debug: print each token, as an id without a tokenizer. use_cache and pad_token_id have no effect: there is always a
    cache, and nothing is padded.
    """
    return _generate(
        inputs, checked_model("model", model), max_gen_len, logits_processor, end_tokens(eos_tokens_id, end_tokens_id),
        debug=debug, tokenizer=tokenizer,
    )[0]  # fmt: skip


def speculative_generate(
    inputs: list[int],
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any = None,
    gamma: int = 5,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: EndTokens = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
    *,
    end_tokens_id: EndTokens | None = None,
) -> tuple[list[int], float]:
    """The new ids, and the acceptance rate α: accepted over drafted tokens, 0 if none were drafted. All drafted tokens
    count, including those after an end token.

    skip_sample_adjustment: the rule `NoResidual`, which is not lossless. debug: print each step's drafts and the
    target's own token, as ids without a tokenizer. use_cache and pad_token_id have no effect: there is always a cache,
    and nothing is padded. Neither has first_target: the first token always comes from the prefill, which has the same
    distribution and costs one forward pass less than drafting it.
    """
    target, drafter = checked_model("target", target), checked_model("drafter", drafter)
    whole("gamma", gamma)
    sampled = _checked(logits_processor).do_sample
    return _generate(
        inputs, target, max_gen_len, logits_processor, end_tokens(eos_tokens_id, end_tokens_id),
        drafter=DraftModel(drafter), tree=SampledTree((1,) * gamma) if sampled else chain(gamma),
        accept=NoResidual() if skip_sample_adjustment else Exact(), debug=debug, tokenizer=tokenizer,
    )  # fmt: skip


def ngram_assisted_speculative_generate(
    inputs: list[int],
    ngramstorage: ngram.NGramStorage,
    target: PreTrainedModel,
    tokenizer: Any = None,
    gamma: int = 5,
    filler_top_k: int = 3,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 40,
    eos_tokens_id: EndTokens = 1,
    pad_token_id: int | None = 0,
    use_cache: bool = False,
    first_target: bool = True,
    stop_if_unknown: bool = False,
    debug: bool = False,
    *,
    end_tokens_id: EndTokens | None = None,
) -> tuple[list[int], float]:
    """As `speculative_generate`, but drafting from a storage, which learns this text and keeps earlier counts.

    filler_top_k, stop_if_unknown: see `NGram`. Sampled text also has the target's distribution.
    """
    target = checked_model("target", target)
    if not isinstance(ngramstorage, ngram.NGramStorage):
        raise TypeError(f"ngramstorage={shown(ngramstorage)} must be a storage: NGramStorage(n=3, vocab_size=...)")
    whole("gamma", gamma)
    require_whole("filler_top_k", filler_top_k)
    drafter = _Learner(
        gamma, storage=ngramstorage, filler_top_k=max(1, filler_top_k), stop_if_unknown=stop_if_unknown,
        reset_between=False,
    )  # fmt: skip
    generated, rate = _generate(
        inputs, target, max_gen_len, logits_processor, end_tokens(eos_tokens_id, end_tokens_id), drafter=drafter,
        debug=debug, tokenizer=tokenizer,
    )  # fmt: skip
    prompt = checked_ids("inputs", inputs)
    if target.config.is_encoder_decoder and not drafter.learned:
        ngramstorage.initialize(prompt)
    ngramstorage.initialize(generated if target.config.is_encoder_decoder else prompt + generated, drafter.learned)
    return generated, rate


class _Learner(NGram):
    """learned: number of the text's ids that the storage has counted, so without those of the last step."""

    learned = 0

    def paths(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[Paths]:
        vars(self)["learned"] = len(context.history[0])
        return super().paths(context, length, rows)


# The same functions serve both kinds of model. For an encoder-decoder, the ids start with the decoder's start token, as
# in romsto's code.
autoregressive_generate_encoder_decoder = autoregressive_generate
speculative_generate_encoder_decoder = speculative_generate


def end_tokens(eos_tokens_id: Any, end_tokens_id: Any) -> list[int]:
    """The end tokens given under either name (eos_tokens_id defaults to 1). TypeError or ValueError unless ids."""
    if end_tokens_id is not None and eos_tokens_id not in (1, end_tokens_id):
        raise ValueError("eos_tokens_id and end_tokens_id are two names of one option, and differ: give one of them")
    name, value = ("eos_tokens_id", eos_tokens_id) if end_tokens_id is None else ("end_tokens_id", end_tokens_id)
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise TypeError(
            f"{name}={shown(value)} must be an id or a list of ids, such as tokenizer.eos_token_id; [] for none"
        )
    return ids


def _generate(
    inputs: list[int],
    target: PreTrainedModel,
    max_gen_len: int,
    processor: LogitsProcessor | None,
    ends: list[int],
    *,
    drafter: Drafter | None = None,
    tree: Plan | None = None,
    accept: Acceptance | None = None,
    debug: bool = False,
    tokenizer: Any = None,
) -> tuple[list[int], float]:
    ids, processor = checked_ids("inputs", inputs), _checked(processor)
    counts = CountingRule(accept or Exact())
    shown_steps = StepPrinter(Printer(tokenizer, ends), counts if drafter else None) if debug else None
    out = generate_raw(
        target, torch.tensor([ids]), room_for(target, len(ids), max_gen_len), processors=[processor],
        do_sample=processor.do_sample, draft=drafter, tree=tree, accept=counts, eos_token_id=ends, pad_token_id=0,
        streamer=shown_steps,
    )  # fmt: skip
    generated = out.sequences[0].tolist()
    return generated if target.config.is_encoder_decoder else generated[len(ids) :], counts.rate


def _checked(processor: Any) -> LogitsProcessor:
    """The processor; greedy for None. TypeError unless it is one of ours or a subclass that generate() supports."""
    if processor is None:
        return GreedyProcessor()
    if not isinstance(processor, LogitsProcessor):
        raise TypeError(
            f"logits_processor={shown(processor)} must be one of specheads.compat's, such as NucleusProcessor(...), "
            "or a subclass of them"
        )
    if type(processor).__call__ is not LogitsProcessor.__call__:
        raise TypeError(
            f"logits_processor={type(processor).__name__} has its own __call__, by which drafts cannot be judged: "
            "write _process(logits) and sample(probs) instead"
        )
    return processor


class NGramStorage(ngram.NGramStorage):
    """Counts which ids follow contexts of n − 1, n − 2, …, 1 ids."""

    def initialize(self, ids: Ids, start: int = 1) -> None:
        """Count the ids of rows (B, T) or of a list."""
        for row in rows_of(ids):
            super().initialize(row, start)

    def update(self, context: Ids, tokens: Ids) -> None:
        """Count tokens (B, K) as following the rows (B, T); or both as lists."""
        for row, following in zip(rows_of(context), rows_of(tokens), strict=True):
            super().update(row, following)

    def next_token(self, context: Ids, level: int | None = None) -> Any:
        """Rows (B, T) → next tokens (B,) and whether each is known (B,); for a list, a token and a bool."""
        answers = [super(NGramStorage, self).next_token(row, level) for row in rows_of(context)]
        if not isinstance(context, Tensor):
            return answers[0]
        tokens, known = zip(*answers, strict=True)
        return torch.tensor(tokens), torch.tensor(known, device=context.device)

    def has_gram(self, gram: Ids) -> bool:
        """Has the last id of `gram` been counted after the ids before it, or after the last few of them?"""
        (row,) = rows_of(gram)
        return len(row) >= min(self.levels) + 1 and any(
            row[-1] in known.counts
            for level in self.levels
            if (known := self._known[level].get(tuple(row[:-1][-level:]))) is not None
        )


class OneLevelNGramStorage(NGramStorage, ngram.OneLevelNGramStorage):
    """Counts which ids follow contexts of n − 1 ids, and of no other length."""


def rows_of(ids: Ids) -> list[list[int]]:
    """Rows (B, T), or one row (T,) as a tensor or list → a list of rows."""
    if not isinstance(ids, Tensor):
        return [list(ids)]
    rows: list[list[int]] = ids.reshape(-1, ids.shape[-1]).tolist()
    return rows
