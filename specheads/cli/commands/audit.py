"""`specheads audit`: does a running server write its model's text?"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from specheads import SpecModel, terminal
from specheads.audit.acceptance import Comparison, compare
from specheads.audit.clients.http import HttpClient, LlamaCppClient, OpenAIClient, SGLangClient
from specheads.audit.clients.text import TextClient, TransformersServe
from specheads.audit.page import markdown
from specheads.audit.run import audit
from specheads.audit.scoring import Scorer
from specheads.audit.settings import Settings
from specheads.audit.watch import AuditConfig
from specheads.bench.prompts import held_out_prompts, read_prompts
from specheads.cli.app import output
from specheads.cli.errors import say
from specheads.cli.options.audit import AuditOptions
from specheads.hub import hub_options
from specheads.models.base.loading import placement, settle_dtype, stop_ids
from specheads.models.named import tokenizer_of

PROMPTS = 64  # held-out ones
COMPARED = 16  # of the prompts, with --head


def run(options: AuditOptions) -> int:
    """Print the verdict; the exit code is 0, 3 (not lossless) or 4 (undecided)."""
    if options.page is not None and not options.page.parent.is_dir():
        raise ValueError(f"--page {options.page}: there is no folder {options.page.parent}")
    tokenizer = tokenizer_of(options.base)
    client = _client(options, tokenizer)
    _, device = placement("auto", "auto")
    hub = hub_options(options.base)
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype="auto", **hub)
    served = base.dtype  # a server's own choice, unless it is told otherwise
    settle_dtype(base, device)
    base.to(device)
    eos = frozenset(stop_ids(options.base, base.config, tokenizer, **hub))
    if options.kind == "llama.cpp" and len(eos) > 1:
        raise ValueError(f"llama.cpp does not say which of the base's {len(eos)} end tokens ended a text")
    settings = [Settings(temperature, eos=eos) for temperature in options.temperature or (0.0, 1.0)]
    config, prompts = AuditConfig(tv=options.tv), _prompts(options, tokenizer)
    with terminal.progress(terminal.make_console(stderr=True), "auditing") as progress:
        report = audit(Scorer(base, served), client, prompts, settings, config, progress, tokenizer)
    comparison = _compare(options, client, base, prompts, eos)
    if options.page is not None:
        options.page.write_text(markdown(report, options.base, comparison), encoding="utf-8")
    record = report.to_dict() | ({"acceptance": comparison.to_dict()} if comparison else {})
    output(record, lambda record: print(*filter(None, (report, comparison)), sep="\n"), options.as_json)
    return report.exit_code


def _compare(
    options: AuditOptions, client: HttpClient, base: Any, prompts: list[list[int]], eos: frozenset[int]
) -> Comparison | None:
    if options.head is None:
        return None
    model: Any = SpecModel.from_pretrained(options.head, base=base)
    comparison = compare(client, model, prompts[:COMPARED], Settings(0.0, eos=eos))
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


def _prompts(options: AuditOptions, tokenizer: object) -> list[list[int]]:
    """Prompts as ids. ValueError for a conversation, which the server's template would render."""
    if options.prompts is None:
        asked: list[object] = [*held_out_prompts(tokenizer, PROMPTS)]
    else:
        asked = [prompt.asked for prompt in read_prompts(options.prompts)]
    prompts: list[list[int]] = []
    for prompt in asked:
        if not isinstance(prompt, str | list):
            raise ValueError(f"{options.prompts}: an audit takes texts or token ids, not conversations")
        prompts.append(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)  # type: ignore[operator]
    return prompts
