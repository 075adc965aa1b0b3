"""The decoders a race compares: transformers' own generate(), its prompt lookup, our plain loop, and draft heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generate import generate
from specheads.decoding.outputs import SpecGenerateOutput, SpecSeq2SeqOutput
from specheads.decoding.planner import Plan
from specheads.models.spec_model import SpecModel

REFERENCE = "transformers generate"  # what the others are compared with


def batches(
    tokenizer: Any, prompts: Sequence[str | list[int]], device: torch.device, size: int = 1, *, side: str = "left"
) -> list[dict[str, Tensor]]:
    """Prompts (text or token ids) → input_ids and attention_mask (size, T) each; the last may be smaller.

    side: of the padding; right for an encoder, which may count positions from the first column. ValueError for a
    prompt without tokens.
    """
    made = []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    for start in range(0, len(prompts), size):
        taken = prompts[start : start + size]
        rows = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in taken]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompt {start + empty[0]} has no tokens; give at least one character")
        width = max(map(len, rows))
        ids, mask = [], []
        for row in rows:
            padding, own = [pad] * (width - len(row)), [1] * len(row)
            ids.append(padding + row if side == "left" else row + padding)
            mask.append([0] * len(padding) + own if side == "left" else own + [0] * len(padding))
        made.append({
            "input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)
        })  # fmt: skip
    return made


def accepted_length(model: SpecModel, batches: Iterable[dict[str, Any]], **options: Any) -> float:
    """Tokens that a step yields, the prefill's left out. options: of generate()."""
    yielded = []
    for batch in batches:
        out: Any = model.generate(**batch, return_dict_in_generate=True, **options)
        yielded += [len(row) for step in out.steps[1:] for row in step.tokens if row]
    return sum(yielded) / len(yielded)


def transformers_generate(base: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """base.generate(), greedy. options: prompt_lookup_num_tokens=…, say."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        with torch.no_grad():
            out = cast(Any, base).generate(
                **batch, max_new_tokens=max_new_tokens, do_sample=False, streamer=watch, **options
            )
        return Output(new_tokens(base, batch, out))

    return run


def assisted(base: PreTrainedModel, small: PreTrainedModel, max_new_tokens: int, **options: Any) -> Decoder:
    """transformers' assisted generation, greedy. options: of the small model's generation config, which governs it."""
    run = transformers_generate(base, max_new_tokens, assistant_model=small)

    def configured(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        kept = copy.deepcopy(small.generation_config)
        small.generation_config.update(**options)
        try:
            return run(batch, watch)
        finally:
            small.generation_config = kept

    return configured


def drafted(
    model: SpecModel | PreTrainedModel, max_new_tokens: int, *, draft: bool | Drafter = True, plan: Plan | None = None,
    accept: Acceptance | None = None, **sampling: Any,
) -> Decoder:  # fmt: skip
    """Our loop with the head of `model`, or another drafter; draft=False (or a bare base): one token a step.

    Greedy, unless `sampling` says otherwise in generate()'s words: do_sample=True, temperature=…, seed=…
    """
    base = model.base if isinstance(model, SpecModel) else model
    own = model.head if isinstance(model, SpecModel) else None
    drafter = own if draft is True else (draft or None)
    options = {"do_sample": False, **sampling}

    def run(batch: dict[str, Any], watch: Any) -> Output:
        with torch.no_grad():
            out = generate(
                base, **batch, drafter=drafter, max_new_tokens=max_new_tokens, streamer=watch, tree=plan,
                accept=accept, return_dict_in_generate=True, **options,
            )  # fmt: skip
        assert isinstance(out, SpecGenerateOutput | SpecSeq2SeqOutput) and out.steps is not None
        stepped = [row for step in out.steps[1:] for row in step.tokens if row]
        statistics = out.statistics() | {"rows_stepped": len(stepped), "gained": sum(map(len, stepped))}
        return Output(new_tokens(base, batch, out.sequences), statistics)

    return run


def new_tokens(base: PreTrainedModel, batch: dict[str, Any], sequences: Tensor) -> list[list[int]]:
    """What was generated, row by row, up to and with the end of text."""
    eos = base.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    given = 1 if base.config.is_encoder_decoder else batch["input_ids"].shape[1]  # a decoder's text has its start token
    rows = []
    for row in sequences[:, given:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows
