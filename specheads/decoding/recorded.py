"""A target that replays what it once wrote, so that drafts are reviewed without a pass of it: greedy, by the record.

Shapes: B batch rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.acceptance import Exact
from specheads.decoding.drafters import Drafter
from specheads.decoding.generate import generate
from specheads.decoding.loop import Step, decode
from specheads.decoding.planner import Plan
from specheads.decoding.sampler import Sampler
from specheads.decoding.target.causal import Target, TargetOutput, text_config
from specheads.decoding.target.seq2seq import decoder_start
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class Record:
    """outputs: prompt ids → what the target wrote behind them, greedily, its first `length` tokens or up to an end.

    start: of an encoder-decoder, whose encoder reads the prompt, the token its text begins with (not in outputs).
    """

    vocab_size: int
    length: int
    outputs: dict[tuple[int, ...], tuple[int, ...]]
    start: int | None = None

    def __post_init__(self) -> None:
        for prompt, output in self.outputs.items():
            if not prompt or not output or len(output) > self.length:
                raise ValueError(
                    f"a record of {len(prompt)} prompt and {len(output)} output ids; expected 1 or more of both, and "
                    f"at most {self.length} of the output"
                )
            if not all(0 <= token < self.vocab_size for token in (*prompt, *output)):
                raise ValueError(f"a record with ids outside the vocabulary of {self.vocab_size}")

    def save(self, path: Path) -> None:
        rows = [{"prompt": list(prompt), "output": list(output)} for prompt, output in self.outputs.items()]
        held = {"vocab_size": self.vocab_size, "length": self.length, "outputs": rows}
        text = json.dumps(held if self.start is None else {**held, "start": self.start})
        path.write_text(text + "\n", "utf8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """OSError unread, ValueError where it is no record."""
        try:
            held = json.loads(path.read_text("utf8"))
            outputs = {tuple(row["prompt"]): tuple(row["output"]) for row in held["outputs"]}
            return cls(held["vocab_size"], held["length"], outputs, held.get("start"))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} is no record of a target: {reason}") from error


def record(base: PreTrainedModel, prompts: Iterable[Sequence[int]], length: int) -> Record:
    """What the target writes behind each prompt, decoded once, token by token."""
    outputs, start = {}, decoder_start(base) if base.config.is_encoder_decoder else None
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=base.device)
        out = generate(base, ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        outputs[tuple(prompt)] = tuple(cast(Tensor, out)[0, len(prompt) if start is None else 1 :].tolist())
    return Record(text_config(base).vocab_size, length, outputs, start)


class RecordedTarget:
    """Stands where `Target` does in decode(), for one batch of recorded prompts: at each node the recorded token of its
    depth is certain, token 0 behind the end. Off a row's recorded path no path is accepted, so what stands there does
    not matter. It has no features."""

    def __init__(self, record: Record, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.record, self.device = record, device
        self.texts = [record.outputs[tuple(prompt)] for prompt in prompts]
        vocabulary = SimpleNamespace(weight=torch.empty(record.vocab_size, 0))
        # What drafters ask a target's base and config for is the size of its vocabulary.
        config = SimpleNamespace(is_encoder_decoder=record.start is not None)
        self.base = SimpleNamespace(get_output_embeddings=lambda: vocabulary, config=config)
        self.config = SimpleNamespace(vocab_size=record.vocab_size)
        source = SimpleNamespace(ids=[list(prompt) for prompt in prompts])
        self.limit, self.source, self.switch = 0, None if record.start is None else source, None

    def prefill(self, ids: Tensor, lengths: Tensor, *, room: int, inputs: object = None) -> TargetOutput:
        self.done = [0] * len(self.texts)  # recorded tokens in front of the root
        self.limit = ids.shape[1] + room
        return TargetOutput(self._certain([[text[0]] for text in self.texts]), torch.empty(*ids.shape, 0))

    def verify(self, tree: DraftTree) -> TargetOutput:
        depths = tree.topology.depth.tolist()
        following = [
            [text[done + depth + 1] if done + depth + 1 < len(text) else 0 for depth in row]
            for text, done, row in zip(self.texts, self.done, depths, strict=True)
        ]
        return TargetOutput(self._certain(following), torch.empty(*tree.tokens.shape, 0))

    def commit(self, path: Tensor, length: Tensor, bound: int) -> None:
        self.done = [done + kept for done, kept in zip(self.done, length.tolist(), strict=True)]

    def _certain(self, tokens: list[list[int]]) -> Tensor:
        """(B, N) ids → logits (B, N, V)."""
        ids = torch.tensor(tokens, device=self.device)
        return torch.zeros(*ids.shape, self.record.vocab_size, device=self.device).scatter_(2, ids.unsqueeze(2), 1.0)


def replayed(
    record: Record, prompt: Sequence[int], drafter: Drafter, plan: Plan, device: torch.device
) -> Iterator[Step]:
    """The steps of greedy decoding with these drafts, without the target. ValueError for a prompt that was not recorded
    and for a drafter that reads the target's features."""
    if drafter.layers:
        raise ValueError(
            f"{type(drafter).__name__} drafts from the target's features, which a record has not; replay n-grams, "
            "draft models and their cascades"
        )
    if drafter.wants_target_top:
        raise ValueError(
            f"{type(drafter).__name__} learns the target's second choices, which a record has not; "
            "filler_top_k=1 does not"
        )
    if tuple(prompt) not in record.outputs:
        raise ValueError(f"a prompt of {len(prompt)} tokens is not in the record; record it again with these prompts")
    length = len(record.outputs[tuple(prompt)])
    before = list(prompt) if record.start is None else [record.start]  # what the text stands behind

    def stop(row: int, ids: list[int], count: int) -> int:
        until = len(ids) - len(before)
        return count - (until - length) if until >= length else -1

    ids = torch.tensor([before], device=device)
    lengths = torch.tensor([len(before)], device=device)
    return decode(
        cast(Target, RecordedTarget(record, [prompt], device)), drafter, ids, lengths, plan=plan, sampler=Sampler(),
        accept=Exact(), stop=stop, max_new_tokens=record.length,
    )  # fmt: skip


def reviewed(
    record: Record, prompts: Iterable[Sequence[int]], drafter: Drafter, plan: Plan, device: torch.device
) -> dict[str, Any]:
    """Over all prompts: tokens, reviews by the target (its prefill not counted), draft_reviews where the drafter counts
    its own, drafted, accepted, accepted_length."""
    later: list[Step] = []
    own: list[tuple[int, ...]] = []
    tokens = 0
    for prompt in prompts:
        first, *others = replayed(record, prompt, drafter, plan, device)
        tokens += sum(len(step.tokens[0]) for step in (first, *others))
        later += others
        own.append(drafter.reviews if others else ())
    gained = sum(len(step.tokens[0]) for step in later)
    return {
        "tokens": tokens, "reviews": len(later), "draft_reviews": added(own) if any(own) else None,
        "drafted": sum(step.drafted[0] for step in later), "accepted": sum(step.accepted[0] for step in later),
        "accepted_length": gained / len(later) if later else 1.0,
    }  # fmt: skip


def added(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sums by place, of counts that are all of one length or empty."""
    return [sum(column) for column in zip(*filter(None, counts), strict=True)]
