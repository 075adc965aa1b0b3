"""A recorded target: replays a greedy text, so that drafts are verified without running the model.

Shapes: B batch rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.acceptance import Exact
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.loop import decode
from specheads.decoding.planner import Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.results import AcceptanceCounts, Step
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.hf_base import text_config
from specheads.decoding.verify.model_inputs import ModelInputs, input_device
from specheads.decoding.verify.seq2seq import decoder_start
from specheads.decoding.verify.verifier import TargetOutput, Verifier
from specheads.files import write_whole


@dataclass(frozen=True)
class Record:
    """outputs: prompt ids → the target's greedy text after them, its first `length` tokens or up to an end.

    start: for an encoder-decoder, whose encoder reads the prompt, the first token of its text (not in outputs).
    base: the fingerprint of the target; None where it was not recorded.
    """

    vocab_size: int
    length: int
    outputs: dict[tuple[int, ...], tuple[int, ...]]
    start: int | None = None
    base: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for prompt, output in self.outputs.items():
            if not prompt or not output or len(output) > self.length:
                raise ValueError(
                    f"a record of {len(prompt)} prompt and {len(output)} output ids; expected 1 or more of both, and "
                    f"at most {self.length} of the output"
                )
            if not all(0 <= token < self.vocab_size for token in (*prompt, *output)):
                raise ValueError(
                    f"a record holds ids outside the vocabulary of {self.vocab_size} tokens; record it again"
                )

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        rows = [{"prompt": list(prompt), "output": list(output)} for prompt, output in self.outputs.items()]
        content = {"vocab_size": self.vocab_size, "length": self.length, "outputs": rows}
        known = {name: value for name in ("start", "base") if (value := getattr(self, name)) is not None}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**content, **known}) + "\n")

    def cut(self, length: int) -> Record:
        """The record of texts of at most so many tokens. ValueError if they were recorded shorter."""
        if length > self.length:
            raise ValueError(f"it holds {self.length} tokens of each text, and {length} are asked for")
        return replace(self, length=length, outputs={prompt: text[:length] for prompt, text in self.outputs.items()})

    @classmethod
    def load(cls, path: Path) -> Record:
        """OSError if it cannot be read, ValueError if it is not a record."""
        try:
            content = json.loads(path.read_text("utf8"))
            outputs = {tuple(row["prompt"]): tuple(row["output"]) for row in content["outputs"]}
            return cls(content["vocab_size"], content["length"], outputs, content.get("start"), content.get("base"))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is no record of a target: {reason}") from error


def record(base: PreTrainedModel, prompts: Iterable[Sequence[int]], length: int, **options: Any) -> Record:
    """The target's greedy text after each prompt, decoded token by token. options: of generate(); they override the
    target's generation config."""
    outputs, start = {}, decoder_start(base) if base.config.is_encoder_decoder else None
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=input_device(base))
        given = {**options, "max_new_tokens": length, "do_sample": False}
        out = generate(base, ids, attention_mask=torch.ones_like(ids), **given)
        outputs[tuple(prompt)] = tuple(cast(Tensor, out)[0, len(prompt) if start is None else 1 :].tolist())
    return Record(text_config(base).vocab_size, length, outputs, start)


class RecordedTarget(Verifier):
    """Verifies the drafts of one batch of recorded prompts, without features.

    At each node the recorded token of its depth is certain; after the text's end, token 0. A path that leaves the
    record is never accepted, so the logits there do not matter.
    """

    name = "the recorded target"

    def __init__(self, record: Record, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.record, self.device = record, device
        self.texts = [record.outputs[tuple(prompt)] for prompt in prompts]
        self.is_encoder_decoder = record.start is not None
        self.source_ids = [list(prompt) for prompt in prompts] if self.is_encoder_decoder else None

    @property
    def vocab_size(self) -> int:
        return self.record.vocab_size

    def prefill(
        self, ids: Tensor, lengths: Tensor, *, room: int | Sequence[int], inputs: ModelInputs | None = None
    ) -> TargetOutput:
        self.done = [0] * len(self.texts)  # recorded tokens before the root
        self.limit = ids.shape[1] + (room if isinstance(room, int) else max(room))
        return TargetOutput(self._certain([[text[0]] for text in self.texts]), torch.empty(*ids.shape, 0))

    def verify(self, tree: DraftTree) -> TargetOutput:
        depths = tree.topology.depth.tolist()
        following = [
            [text[done + depth + 1] if done + depth + 1 < len(text) else 0 for depth in row]
            for text, done, row in zip(self.texts, self.done, depths, strict=True)
        ]
        return TargetOutput(self._certain(following), torch.empty(*tree.tokens.shape, 0))

    def commit(self, path: Tensor, length: Tensor) -> None:
        self.done = [done + kept for done, kept in zip(self.done, length.tolist(), strict=True)]

    def _certain(self, tokens: list[list[int]]) -> Tensor:
        """(B, N) ids → logits (B, N, V)."""
        ids = torch.tensor(tokens, device=self.device)
        return torch.zeros(*ids.shape, self.vocab_size, device=self.device).scatter_(2, ids.unsqueeze(2), 1.0)


def replay(record: Record, prompt: Sequence[int], drafter: Drafter, plan: Plan, device: torch.device) -> Iterator[Step]:
    """The steps of greedy decoding with these drafts, without the target.

    Raises ValueError for a prompt that was not recorded, and for a drafter that reads the target's features.
    """
    if drafter.layers:
        raise ValueError(
            f"{type(drafter).__name__} drafts from the target's features, which a record does not hold; replay "
            "n-grams, draft models and their cascades"
        )
    if drafter.wants_target_top:
        raise ValueError(
            f"{type(drafter).__name__} learns the target's second choices, which a record does not hold; "
            "give it filler_top_k=1"
        )
    if tuple(prompt) not in record.outputs:
        raise ValueError(f"a prompt of {len(prompt)} tokens is not in the record; record it again with these prompts")
    length = len(record.outputs[tuple(prompt)])
    before = list(prompt) if record.start is None else [record.start]  # the decoder's prompt

    def stop(row: int, ids: list[int], count: int) -> int:
        written = len(ids) - len(before)
        return count - (written - length) if written >= length else -1

    ids = torch.tensor([before], device=device)
    lengths = torch.tensor([len(before)], device=device)
    return decode(
        RecordedTarget(record, [prompt], device), drafter, ids, lengths, plan=plan, sampler=Sampler(),
        accept=Exact(), stop=stop, max_new_tokens=record.length,
    )  # fmt: skip


def review(
    record: Record, prompts: Iterable[Sequence[int]], drafter: Drafter, plan: Plan, device: torch.device
) -> dict[str, Any]:
    """Totals over all prompts: tokens, reviews by the target (without its prefill), draft_reviews if the drafter counts
    its own, drafted, accepted, accepted_length."""
    drafting: list[Step] = []
    draft_reviews: list[tuple[int, ...]] = []
    tokens = 0
    for prompt in prompts:
        first, *others = replay(record, prompt, drafter, plan, device)
        tokens += sum(len(step.tokens[0]) for step in (first, *others))
        drafting += others
        draft_reviews.append(drafter.reviews if others else ())
    counts = AcceptanceCounts.of(drafting)
    return {
        "tokens": tokens, "reviews": len(drafting),
        "draft_reviews": sum_columns(draft_reviews) if any(draft_reviews) else None,
        "drafted": sum(step.drafted[0] for step in drafting), "accepted": sum(counts.by_depth),
        "accepted_length": counts.tokens_per_step,
    }  # fmt: skip


def sum_columns(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sums by column, of counts that all have one length or are empty."""
    return [sum(column) for column in zip(*filter(None, counts), strict=True)]
