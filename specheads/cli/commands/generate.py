"""`specheads generate`: streams one text, with tokens coloured by where they came from, and the pace, if requested."""

from __future__ import annotations

import sys
from typing import Any

from specheads import terminal
from specheads.cli.app import emit
from specheads.cli.errors import refuse_folder
from specheads.cli.options.decode import GenerateOptions
from specheads.cli.text import depth_counts, legend, write_text
from specheads.cli.text_picture import text_svg
from specheads.data.chat_template import template_of
from specheads.decoding.acceptance import as_rule
from specheads.decoding.drafters.retokenize import TextPieces
from specheads.decoding.generation.generate import generate
from specheads.decoding.planner import as_plan
from specheads.files import write_whole
from specheads.models.named import Models
from specheads.models.payoff import Drafted, loss, watch_head


def run(options: GenerateOptions) -> None:
    prompt = read_prompt(options.prompt)
    if options.svg is not None:
        refuse_folder(options.svg, "--svg")
    rule = as_rule(options.accept)  # refuses a bad name before a model is loaded
    models = Models.load(
        options.model, base=options.base, dtype=options.dtype, device=options.device, quantize=options.quantize
    )
    shaped = options.tree is not None or options.accept is not None
    name, drafter = models.choose(options.draft, shaped=shaped)
    arguments = {
        "draft": drafter, "tree": as_plan(options.tree, drafter), "accept": rule, "seed": options.seed,
        "compile": options.compile, **options.sampling(),
    }  # fmt: skip
    prompt, inputs = encode(models, prompt, chat=options.chat)
    if options.as_json:
        result: Any = generate(models.target, **inputs, **arguments, return_dict_in_generate=True)
        emit({**options.record(), "drafter": name, **record(models, prompt, result)})
    else:
        with watch_head() as uses:
            result = show(models, prompt, inputs, arguments, live=options.live)
        if drafter is not None:
            text = Drafted(
                draft=options.draft, drafter=drafter, plan=arguments["tree"], steps=result.steps, uses=uses,
                prompt=inputs["input_ids"].shape[1], limit=options.max_new_tokens, sampled=options.temperature > 0,
                compiled=options.compile,
            )  # fmt: skip
            if (line := loss(models, text)) is not None:
                terminal.make_console(stderr=True).print(line)
    if options.svg is not None:
        tokens, depths = tokens_of(result)
        write_whole(options.svg, text_svg(prompt, tokens, depths, len(result.steps), models.tokenizer))


def read_prompt(prompt: str | None) -> str:
    """The prompt from --prompt or stdin. ValueError if there is none."""
    source = "--prompt"
    if prompt is None and not sys.stdin.isatty():
        prompt, source = sys.stdin.read().removeprefix("\ufeff"), "stdin"
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT, or pipe it in")
    return terminal.utf8_text(prompt, source)


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


def tokens_of(result: Any) -> tuple[list[int], list[int]]:
    """The tokens of generate()'s output, and the draft depth of each (0: the model's own)."""
    tokens = [token for step in result.steps for token in step.tokens[0]]
    depths = [
        depth if depth <= step.accepted[0] else 0
        for step in result.steps
        for depth in range(1, len(step.tokens[0]) + 1)
    ]
    return tokens, depths


def record(models: Models, prompt: str, result: Any) -> dict[str, Any]:
    """The text with its tokens, their pieces of it and draft depths, and the statistics."""
    tokens, depths = tokens_of(result)
    pieces = TextPieces(models.tokenizer)
    return {
        "base": models.target.name_or_path, "prompt": prompt,
        "text": models.tokenizer.decode(tokens, skip_special_tokens=True), "token_ids": tokens,
        "draft_depths": depths,
        "pieces": [pieces.add(token, last=i == len(tokens) - 1) for i, token in enumerate(tokens)],
        "statistics": result.statistics(),
    }  # fmt: skip


def show(models: Models, prompt: str, inputs: dict[str, Any], arguments: dict[str, Any], *, live: bool) -> Any:
    """Stream the text to stdout, and print the statistics on stderr → generate()'s output."""
    out, errors = terminal.make_console(), terminal.make_console(stderr=True)
    if live and terminal.has_colors(out) and terminal.has_colors(errors):
        errors.print(legend())
    result, depths = write_text(out, models.target, models.tokenizer, prompt, inputs, live=live, **arguments)
    if live:
        errors.print(depth_counts(depths))
    statistics = result.statistics()
    errors.print(
        f"{statistics['tokens']} tokens in {statistics['seconds']:.2f} s: {statistics['tokens_per_second']:.1f} "
        f"tokens/s, {statistics['steps']} steps, accepted length {statistics['accepted_length']:.2f}"
    )
    return result
