"""The prompt sets of `specheads bench`: held-out files and third-party code, or the given files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specheads.bench.batches import draw_numbers
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.tasks import Task, load_task
from specheads.bench.prompts import Prompt, evenly_spaced, held_out_prompts, package_prompts, read_prompts
from specheads.data.conversation import Conversation
from specheads.options import OptionError, refuse_unknown

HELD_OUT = "held-out files"
THIRD_PARTY = "third-party code"
DEFAULT_PROMPTS = 64


@dataclass(frozen=True)
class PromptSet:
    """ids: token ids of each prompt; categories: one for each prompt. note: a remark for readers of the tables.
    conversations: those of the prompts, empty if none has a second turn; `ids` are then of the first turns. last_turns:
    the tokens before a conversation's last answer, without the earlier answers, and the number of these. task: the
    questions and how their answers are judged, if they have right ones."""

    name: str
    ids: list[list[int]]
    categories: list[str | None]
    note: str = ""
    conversations: list[Conversation] = field(default_factory=list)
    last_turns: list[tuple[int, int]] = field(default_factory=list)
    task: Task | None = None

    def longest(self, max_new_tokens: int) -> int:
        """The most tokens of a prompt, earlier turns and their answers included."""
        contexts = [tokens + earlier * max_new_tokens for tokens, earlier in self.last_turns]
        return max([*map(len, self.ids), *contexts])


def prompt_sets(options: BenchOptions, tokenizer: Any, held_out: list[str] | None) -> list[PromptSet]:
    """The prompt sets that the options name, else the default ones."""
    if not options.prompts and not options.task:
        fewest, longest = options.lengths
        of_each = options.num_prompts or DEFAULT_PROMPTS
        return default_sets(tokenizer, of_each, longest, held_out, fewest=fewest, seed=options.seed)
    chat, count = options.chat, options.num_prompts
    sets = sets_from(options.prompts, tokenizer, count, options.categories, chat=chat)
    for name in options.task:
        task = load_task(name, tokenizer, count, run_code=options.run_code)
        prompts = [question.prompt for question in task.questions]
        asked = [Conversation.from_text(prompt) if chat and isinstance(prompt, str) else prompt for prompt in prompts]
        sets.append(replace(encode(name, [Prompt(prompt) for prompt in asked], tokenizer), task=task))
    return sets


def default_sets(
    tokenizer: Any, count: int, num_tokens: int, held_out: list[str] | None = None, *, fewest: int | None = None,
    seed: int = 0,
) -> list[PromptSet]:  # fmt: skip
    """Both default sets, with `count` prompts of `num_tokens` tokens each, or of random lengths from `fewest` up."""
    files = [Prompt(text) for text in held_out_prompts(tokenizer, count, num_tokens, held_out)]
    packages, missing = package_prompts(tokenizer, count, num_tokens)
    note = f"without {', '.join(missing)}, not installed here" if missing else ""
    sets = [encode(HELD_OUT, files, tokenizer), encode(THIRD_PARTY, packages, tokenizer, note)]
    if fewest is None:
        return sets
    lengths = {
        prompt_set.name: draw_numbers(count, fewest, num_tokens, seed, f"lengths {prompt_set.name}")
        for prompt_set in sets
    }
    return [
        replace(prompt_set, ids=[ids[:n] for ids, n in zip(prompt_set.ids, lengths[prompt_set.name], strict=True)])
        for prompt_set in sets
    ]


def sets_from(
    paths: Sequence[Path], tokenizer: Any, count: int | None, categories: Sequence[str] = (), *, chat: bool = False
) -> list[PromptSet]:
    """A set for each file, of at most `count` prompts, evenly spaced, and only of `categories` if any are given. chat:
    plain prompts are asked as a user's message.
    ValueError for a file given twice, whose prompts would count twice."""
    sets = []
    names, files = [path.name for path in paths], [path.resolve() for path in paths]
    if twice := [path for path, file in zip(paths, files, strict=True) if files.count(file) > 1]:
        raise OptionError("{prompts} is given twice; give each file once", prompts=twice[0])
    for path in paths:
        prompts = read_prompts(path, chat=chat)
        if categories:
            there = sorted({p.category for p in prompts if p.category})
            if not there:
                raise ValueError(f"--categories: the prompts of {path} have none; leave it out")
            refuse_unknown(categories, there, f"category in {path}")
            prompts = [prompt for prompt in prompts if prompt.category in categories]
        if count is not None and count < len(prompts):
            prompts = evenly_spaced(prompts, count)
        sets.append(encode(path.name if names.count(path.name) == 1 else str(path), prompts, tokenizer))
    return sets


def encode(name: str, prompts: Sequence[Prompt], tokenizer: Any, note: str = "") -> PromptSet:
    """Tokenize text as it is and conversations in the chat template. ValueError for a prompt without tokens."""
    ids: list[list[int]] = []
    last_turns: list[tuple[int, int]] = []
    for prompt in prompts:
        asked = prompt.asked
        if isinstance(asked, Conversation):
            ids.append(asked.prompt((), tokenizer))
        else:
            ids.append(tokenizer(asked)["input_ids"] if isinstance(asked, str) else asked)
        if isinstance(asked, Conversation) and asked.num_turns > 1:
            earlier = asked.num_turns - 1
            last_turns.append((len(asked.prompt([""] * earlier, tokenizer)), earlier))
    if [] in ids:
        raise ValueError(f"{name}: prompt {ids.index([])} has no tokens; give at least one character")
    categories = [prompt.category for prompt in prompts]
    if not last_turns:
        return PromptSet(name, ids, categories, note)
    conversations = [p.asked if isinstance(p.asked, Conversation) else Conversation.from_text("") for p in prompts]
    texts = sum(conversation.num_turns for conversation in conversations)
    note = "; ".join(filter(None, [note, f"{texts} texts, each answer being context of the next turn"]))
    return PromptSet(name, ids, categories, note, conversations, last_turns)
