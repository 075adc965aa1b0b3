"""https://github.com/lfsszd/CS-Drafting: csd(), and the test questions of its experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.bench.compare import tasks
from specheads.compat.cs_models import CSDraftingEncoderDecoderModel, CSDraftingModel, _Counted, _Recorded
from specheads.compat.plain import checked_model, checked_row, generate_plainly
from specheads.decoding.drafters import Cascade, DraftModel
from specheads.decoding.generation.recorded import Record, replay
from specheads.decoding.verify.hf_base import vocabulary_size
from specheads.options import refuse_unknown, require_number, require_whole, shown


def csd(
    draft_list: Sequence[Any],
    target_model: Any,
    initial_input: Tensor,
    input_ids: Tensor,
    k_matrix: Any,
    max_length: int = 200,
    leniency: float = 1,
) -> Tensor:
    """input_ids (1, T), followed by at most max_length new ids, up to and including the target's end token.

    draft_list: models from large to small, then the result of `get_mag_model`; models may be wrapped or not.
    initial_input (1, S): the encoder's input, if the target has an encoder. k_matrix, leniency: see `Cascade`. Greedy:
    token for token the target's own text, whatever the leniency, which only affects drafts reviewing drafts. For a
    recorded target, the text is the record. Reviews are added to a wrapper's forward_count, if it has one. Every pass
    of the target counts, including the first, which reads the prompt and yields a token.
    """
    require_whole("max_length", max_length)
    require_number("leniency", leniency)
    checked_row("input_ids", input_ids)
    if not isinstance(draft_list, Sequence):
        raise TypeError(f"draft_list={shown(draft_list)} must be a list of models, the largest first")
    drafts = [DraftModel(bare) if isinstance(bare := _bare(draft), PreTrainedModel) else bare for draft in draft_list]
    cascade = Cascade(drafts, k_matrix, leniency=float(leniency))
    if isinstance(target_model, _Recorded):
        output, reviews = _replay(cascade, target_model, initial_input, input_ids, max_length)
    else:
        target, options = checked_model("target_model", _bare(target_model)), dict[str, Any]()
        ids = input_ids
        if target.config.is_encoder_decoder:
            ids = checked_row("initial_input", initial_input)
            options = {"decoder_input_ids": input_ids.to(target.device)}
        out = generate_plainly(target, ids, max_length, draft=cascade, **options)
        output, reviews = out.sequences, len(out.steps)
    for model, count in zip([target_model, *draft_list], [reviews, *cascade.reviews], strict=True):
        if isinstance(model, _Counted):
            model.forward_count += count
    return output


def _bare(model: Any) -> Any:
    return model.model if isinstance(model, CSDraftingModel) else model


def _replay(
    cascade: Any, target: _Recorded, initial_input: Tensor, input_ids: Tensor, max_length: int
) -> tuple[Tensor, int]:
    """input_ids (1, T) followed by the recorded text, and the target's number of reviews. ValueError for a prompt that
    was not recorded."""
    given, prompt = input_ids[0].tolist(), checked_row("initial_input", initial_input)[0].tolist()
    text = target.text(prompt)
    if text[: len(given)] != given:
        raise ValueError(f"the text recorded for this prompt begins with {text[:4]}…, not with the ids given")
    output = text[len(given) :][:max_length]
    if not output:
        return input_ids, 0
    start = given[0] if isinstance(target, CSDraftingEncoderDecoderModel) else None
    if start is not None and len(given) > 1:
        raise ValueError(f"a recorded encoder-decoder begins with its start token alone, not {len(given)} ids")
    models = [draft.small for draft in cascade.drafts if isinstance(draft, DraftModel)]
    size = vocabulary_size(models[0]) if models else target.vocab_size
    device = models[0].device if models else input_ids.device
    record = Record(size, max_length, {tuple(prompt): tuple(output)}, start)
    steps = list(replay(record, prompt, cascade, cascade.default_plan(device, False), device))
    new = torch.tensor([[token for step in steps for token in step.tokens[0]]], device=input_ids.device)
    return torch.cat([input_ids, new], 1), len(steps)


def format_initial_input(item: Mapping[str, Any], dataset_name: str) -> str:
    """The prompt of a row of gsm8k, mmlu or sampled_mmlu; ValueError for another task."""
    if dataset_name == "gsm8k":
        return tasks.gsm8k_prompt(item["question"])
    if "mmlu" not in dataset_name:
        raise ValueError(f"dataset_name={dataset_name!r} is none of gsm8k, mmlu, sampled_mmlu")
    return tasks.mmlu_prompt(item)


def get_test_set(dataset_name: str, data: str | Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of gsm8k, mmlu or sampled_mmlu, from local files (`data`) or the hub; MMLU's in the columns input, A, B, C,
    D, target."""
    files = [data] if isinstance(data, str) else list(data)
    if dataset_name == "sampled_mmlu" and not files:
        raise ValueError("sampled_mmlu is a file of MMLU's rows that was drawn once: name it by data")
    name = dataset_name.removeprefix("sampled_")
    refuse_unknown([name], tasks.SOURCES, "task")
    rows = [dict(row) for row in tasks.rows_of(name, files)]
    if "mmlu" not in dataset_name:
        return rows
    return [tasks.mmlu_columns(row) for row in rows]
