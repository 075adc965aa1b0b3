"""`specheads audit`: does a running server write its model's text?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads import SpecModel, terminal
from specheads.audit.acceptance import COMPARED, TOKENS, Comparison, compare
from specheads.audit.base import Base
from specheads.audit.clients.http import HttpClient, LlamaCppClient, OpenAIClient, SGLangClient
from specheads.audit.clients.text import TextClient, TransformersServe
from specheads.audit.page import markdown
from specheads.audit.run import audit
from specheads.audit.settings import Settings
from specheads.audit.watch import AuditConfig
from specheads.bench.prompts import held_out_prompts, read_prompts
from specheads.cli.app import output
from specheads.cli.errors import say
from specheads.cli.options.audit import AuditOptions
from specheads.models.named import tokenizer_of

PROMPTS = 64  # held-out ones


def run(options: AuditOptions) -> int:
    """Print the verdict; the exit code is 0, 3 (not lossless) or 4 (undecided)."""
    if options.page is not None and not options.page.parent.is_dir():
        raise ValueError(f"--page {options.page}: there is no folder {options.page.parent}")
    tokenizer = tokenizer_of(options.base)
    client, base = _client(options, tokenizer), Base.load(options.base, tokenizer)
    temperatures = options.temperature or (() if options.ask else (0.0, 1.0))
    ways = [*(f"temperature={temperature}" for temperature in temperatures), *(options.ask or ())]
    settings = [Settings.read(way, eos=base.eos, count_prompt=options.kind == "llama.cpp") for way in ways]
    config, prompts = AuditConfig(tv=options.tv), prompts_of(options.prompts, tokenizer)
    with terminal.progress(terminal.make_console(stderr=True), "auditing") as progress:
        report = audit(base.scorer(), client, prompts, settings, config, progress, tokenizer)
    comparison = _compare(options, client, base, prompts)
    if options.page is not None:
        options.page.write_text(markdown(report, options.base, comparison), encoding="utf-8")
    record = report.to_dict() | ({"acceptance": comparison.to_dict()} if comparison else {})
    output(record, lambda record: print(*filter(None, (report, comparison)), sep="\n"), options.as_json)
    return report.exit_code


def _compare(options: AuditOptions, client: HttpClient, base: Base, prompts: list[list[int]]) -> Comparison | None:
    if options.head is None:
        return None
    model: Any = SpecModel.from_pretrained(options.head, base=base.model)
    comparison = compare(client, model, prompts[:COMPARED], Settings(0.0, max_tokens=TOKENS, eos=base.eos))
    if comparison is None:
        say("specheads audit", f"{client.name} does not say what it drafted, so --head is not compared")
    return comparison


def _client(options: AuditOptions, tokenizer: object) -> HttpClient:
    model = options.model or options.base
    if options.kind in ("text", "transformers"):
        return (TextClient if options.kind == "text" else TransformersServe)(options.server, model, tokenizer)
    if options.kind == "openai":
        return OpenAIClient(options.server, model)
    return (SGLangClient if options.kind == "sglang" else LlamaCppClient)(options.server)


def prompts_of(path: Path | None, tokenizer: Any) -> list[list[int]]:
    """The prompts of a file, or held-out ones, as ids. ValueError for a conversation, which the server's template would
    render."""
    if path is None:
        asked: list[object] = [*held_out_prompts(tokenizer, PROMPTS)]
    else:
        asked = [prompt.asked for prompt in read_prompts(path)]
    prompts: list[list[int]] = []
    for prompt in asked:
        if not isinstance(prompt, str | list):
            raise ValueError(f"{path}: an audit takes texts or token ids, not conversations")
        prompts.append(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
    return prompts
