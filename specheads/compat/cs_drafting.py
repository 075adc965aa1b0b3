"""https://github.com/lfsszd/CS-Drafting: csd(), its wrappers of models, and the test questions of its experiments.

A wrapper is a model with its name and a count of its reviews, which `csd` updates. There is always a cache, so classes
with and without one are the same. A review is a pass of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.bench.compare import tasks
from specheads.bench.cost import COST_MODELS
from specheads.compat.plain import checked_model, checked_row, generate_raw
from specheads.decoding.drafters import Cascade, DraftModel, MaxGram
from specheads.decoding.generation.recorded import Record, replay
from specheads.decoding.verify.hf_base import vocabulary_size
from specheads.decoding.verify.seq2seq import decoder_start
from specheads.options import refuse_unknown, require_number, require_whole, shown

# The first key that occurs in a model's name gives its cost per review; without any, the cost is 0. A 7B Llama costs
# 7,000 (million; the published 70,000 is a slip).
TIME_COST = {name: dict(costs) for name, costs in COST_MODELS.items()}
TIME_COST["model_parameters"]["llama"] = TIME_COST["model_parameters"]["7b"]


class CSDraftingModel:
    """Wraps a Hugging Face model and exposes its attributes. vocab_size: used if the model's config has none.

    ValueError for sample=True: `csd` is greedy.
    """

    def __init__(self, model: Any, sample: bool = False, name: str = "", vocab_size: int = 32128) -> None:
        if sample:
            raise ValueError(
                "sample=True: csd() is greedy; sample with specheads.generate(target, draft=specheads.Cascade(…), "
                "do_sample=True)"
            )
        self.model, self.sample, self.name = model, sample, name
        self.vocab_size = getattr(getattr(model, "config", None), "vocab_size", vocab_size)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # during unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def device(self) -> torch.device:
        return getattr(self.model, "device", torch.device("cpu"))

    def to(self, device: Any) -> CSDraftingModel:
        self.model.to(device)
        return self

    def cuda(self, device: Any = None) -> CSDraftingModel:
        self.model.cuda(device)
        return self

    def cpu(self) -> CSDraftingModel:
        self.model.cpu()
        return self


class CSDraftingDecoderModel(CSDraftingModel):
    """A decoder-only model."""

    def __init__(self, model: Any, sample: bool = False, name: str = "", vocab_size: int = 32000) -> None:
        super().__init__(model, sample, name, vocab_size)


class CSDraftingDecoderModelKVCache(CSDraftingDecoderModel):
    """The same: there is always a cache."""


class CSDraftingEncoderDecoderModel(CSDraftingModel):
    """An encoder-decoder. first_decode_id: the token that its text starts with; 0 for a DummyModel."""

    @property
    def first_decode_id(self) -> int:
        return decoder_start(self.model) if isinstance(self.model, PreTrainedModel) else 0


class _Counted(CSDraftingModel):
    """forward_count: reviews since `calculate_time_cost` was called."""

    def __init__(
        self, model: Any, sample: bool = False, name: str = "", counter_version: str = "model_parameters",
        vocab_size: int = 32128,
    ) -> None:  # fmt: skip
        CSDraftingModel.__init__(self, model, sample, name, vocab_size)
        refuse_unknown([counter_version], TIME_COST, "counter_version")
        self.counter_version = counter_version
        self.time_cost = next((cost for key, cost in TIME_COST[counter_version].items() if key in name), 0)
        self.forward_count = 0

    def calculate_time_cost(self) -> float:
        """The cost of the reviews counted so far; resets the count."""
        cost, self.forward_count = self.forward_count * self.time_cost, 0
        return cost


class CountedCSDraftingDecoderModel(_Counted, CSDraftingDecoderModel):
    def __init__(
        self, model: Any, sample: bool = False, name: str = "", counter_version: str = "model_parameters",
        vocab_size: int = 32000,
    ) -> None:  # fmt: skip
        super().__init__(model, sample, name, counter_version, vocab_size)


class CountedCSDraftingDecoderModelKVCache(CountedCSDraftingDecoderModel, CSDraftingDecoderModelKVCache):
    pass


class CountedCSDraftingEncoderDecoderModel(_Counted, CSDraftingEncoderDecoderModel):
    pass


class _Recorded(_Counted):
    """A target that replays the texts in the file `cache_dir`: {prompt ids: text ids}, ids joined by "_".

    A text includes what precedes it: the start token of an encoder-decoder, or else the prompt.
    """

    def __init__(
        self, model: Any, sample: bool = False, name: str = "", counter_version: str = "model_parameters",
        cache_dir: str | Path = "",
    ) -> None:  # fmt: skip
        CSDraftingModel.__init__(self, model, sample, name, getattr(model, "vocab_size", 32128))
        _Counted.__init__(self, model, sample, name, counter_version, self.vocab_size)
        self.cache_dir = cache_dir

    @cached_property
    def cache(self) -> dict[str, str]:
        return json.loads(Path(self.cache_dir).read_text("utf8"))

    def text(self, prompt: list[int]) -> list[int]:
        """The ids recorded for these prompt ids. ValueError if there are none."""
        key = "_".join(map(str, prompt))
        if key not in self.cache:
            raise ValueError(f"a prompt of {len(prompt)} tokens is not recorded in {self.cache_dir}")
        return [int(token) for token in self.cache[key].split("_")]


class CountedCSDraftingCachedDecoderModel(_Recorded, CSDraftingDecoderModel):
    pass


class CountedCSDraftingCachedEncoderDecoderModel(_Recorded, CountedCSDraftingEncoderDecoderModel):
    pass


class DummyModel:
    """Stands in for a recorded target's model: only a device and a vocabulary size."""

    def __init__(self, vocab_size: int = 32128) -> None:
        self.vocab_size, self.device = vocab_size, torch.device("cpu")

    def to(self, device: Any) -> None:
        self.device = torch.device(device)

    def cuda(self, device: Any = None) -> None:
        self.device = torch.device("cuda", device)

    def cpu(self) -> None:
        self.device = torch.device("cpu")


class CSDraftingMaGModel(MaxGram):
    """`MaxGram` over a bigram table (a list or tensor of ids), with a model's methods: moving it to a device does
    nothing, and its reviews are free."""

    name: str
    vocab_size: int
    device = torch.device("cpu")

    def __init__(self, model: Any = None, sample: bool = False, name: str = "", vocab_size: int = 32128) -> None:
        table = model.tolist() if isinstance(model, torch.Tensor) else model
        super().__init__(bigrams=None if table is None else tuple(table))
        vars(self).update(name=name, vocab_size=vocab_size)

    def cuda(self, device: Any = None) -> CSDraftingMaGModel:
        return self

    def to(self, device: Any) -> CSDraftingMaGModel:
        return self

    def cpu(self) -> CSDraftingMaGModel:
        return self

    def calculate_time_cost(self) -> float:
        return 0


def get_mag_model(bi_gram_path: str | Path, is_decoder_only: bool = True) -> CSDraftingMaGModel:
    """MaG over a bigram file, which must have an entry for each id of the target's vocabulary, except for padding."""
    table = json.loads(Path(bi_gram_path).read_text("utf8"))
    return CSDraftingMaGModel(table, name="mag", vocab_size=32000 if is_decoder_only else 32128)


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
        out = generate_raw(target, ids, max_length, draft=cascade, **options)
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
    begin, prompt = input_ids[0].tolist(), checked_row("initial_input", initial_input)[0].tolist()
    text = target.text(prompt)
    if text[: len(begin)] != begin:
        raise ValueError(f"the text recorded for this prompt begins with {text[:4]}…, not with the ids given")
    output = text[len(begin) :][:max_length]
    if not output:
        return input_ids, 0
    start = begin[0] if isinstance(target, CSDraftingEncoderDecoderModel) else None
    if start is not None and len(begin) > 1:
        raise ValueError(f"a recorded encoder-decoder begins with its start token alone, not {len(begin)} ids")
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
