"""`specheads generate`: streams one text, with tokens coloured by draft depth if requested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from specheads import terminal
from specheads.cli import token_stream
from specheads.cli.commands.arguments import parse_tree
from specheads.data.chat_template import template_of
from specheads.decoding.acceptance import rule_named
from specheads.decoding.drafters import Drafter
from specheads.decoding.generation.generate import SpecGenerateOutput, generate
from specheads.models.named import Models


@dataclass(frozen=True)
class GenerateOptions:
    """How to continue a prompt. temperature 0 is greedy; tree and accept are as on the command line; draft=False
    decodes one token per step."""

    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int | None
    tree: str | None
    draft: bool
    chat: bool
    accept: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise ValueError("--top-p and --top-k shape sampling; give --temperature above 0 with them")
        if not self.draft and self.tree is not None:
            raise ValueError("--tree says what to draft, and --draft none not to draft; give one of them")
        if not self.draft and self.accept is not None:
            raise ValueError("--accept says which drafts are accepted, and --draft none not to draft; give one of them")
        if self.accept is not None:
            rule_named(self.accept)  # refuses a bad name before a model is loaded

    def arguments(self, drafter: Drafter | None) -> dict[str, Any]:
        """The arguments of generate()."""
        given: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens, "draft": drafter, "tree": parse_tree(self.tree, drafter),
            "seed": self.seed, "do_sample": self.temperature > 0, "compile": self.compile,
            "accept": None if self.accept is None else rule_named(self.accept),
        }  # fmt: skip
        if self.temperature > 0:
            # 0 and 1.0 override the base's own generation config.
            top_p = 1.0 if self.top_p is None else self.top_p
            given |= {"temperature": self.temperature, "top_p": top_p, "top_k": self.top_k or 0}
        return given


def encode(models: Models, prompt: str, *, chat: bool) -> tuple[str, dict[str, Any]]:
    """The prompt, in the chat template if `chat`, and its input_ids and attention_mask (1, T) for generate()."""
    tokenizer = models.tokenizer
    if chat:
        template_of(tokenizer)
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chat).to(models.target.device)
    if not inputs["input_ids"].shape[1]:
        raise ValueError("the prompt has no tokens; give at least one character")
    return prompt, {name: inputs[name] for name in ("input_ids", "attention_mask")}


def record(models: Models, drafter: Drafter | None, prompt: str, options: GenerateOptions) -> dict[str, Any]:
    """The text with its tokens, the draft depth of each (0: the model's own), and the statistics."""
    tokenizer = models.tokenizer
    prompt, inputs = encode(models, prompt, chat=options.chat)
    result: Any = generate(models.target, **inputs, **options.arguments(drafter), return_dict_in_generate=True)
    tokens = [token for step in result.steps for token in step.tokens[0]]
    depths = [
        depth if depth <= step.accepted[0] else 0
        for step in result.steps
        for depth in range(1, len(step.tokens[0]) + 1)
    ]
    return {
        "base": models.target.name_or_path, "prompt": prompt,
        "text": tokenizer.decode(tokens, skip_special_tokens=True), "token_ids": tokens, "draft_depths": depths,
        "statistics": result.statistics(),
    }  # fmt: skip


def show(
    models: Models, drafter: Drafter | None, prompt: str, options: GenerateOptions, *, stream: bool, color_depth: bool
) -> None:
    """Print the text on stdout and the statistics on stderr. stream=False: print the text when it is complete."""
    out, errors = terminal.make_console(), terminal.make_console(stderr=True)
    prompt, inputs = encode(models, prompt, chat=options.chat)
    arguments = options.arguments(drafter)
    result, depths = write_text(
        out, models.target, models.tokenizer, prompt, inputs, stream=stream, color_depth=color_depth, **arguments
    )
    terminal.write(out, "\n")
    if color_depth:
        if terminal.has_colors(out) and terminal.has_colors(errors):
            errors.print(token_stream.legend())
        errors.print(token_stream.depth_counts(depths))
    statistics = result.statistics()
    errors.print(
        f"{statistics['tokens']} tokens in {statistics['seconds']:.2f} s: {statistics['tokens_per_second']:.1f} "
        f"tokens/s, {statistics['steps']} steps, accepted length {statistics['accepted_length']:.2f}"
    )


def write_text(
    out: Console, base: PreTrainedModel, tokenizer: Any, prompt: str, inputs: dict[str, Any], *, color_depth: bool,
    stream: bool = True, **arguments: Any,
) -> tuple[SpecGenerateOutput, list[int]]:  # fmt: skip
    """Print the text that `base` generates after `prompt` → generate()'s output, and the draft depth of each token.

    With color_depth the prompt is printed too, in another colour or, without colours, followed by ▶."""
    before = (prompt if terminal.has_colors(out) else prompt + "▶") if color_depth else ""
    shown = token_stream.TokenStream(out, tokenizer, colored=color_depth, prompt=before)
    streamer: Any = shown if stream else None
    try:
        result: Any = generate(base, **inputs, **arguments, streamer=streamer, return_dict_in_generate=True)
    except BaseException:
        if shown.depths:  # what is said of it begins a line
            terminal.write(out, "\n")
        raise
    if not stream:
        shown.put(inputs["input_ids"])
        for step in result.steps:
            shown.put(torch.tensor(step.tokens[0]))
    shown.close(result.steps[-1].accepted[0])
    return result, shown.depths
