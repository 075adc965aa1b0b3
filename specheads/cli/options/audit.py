"""The options of audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specheads.cli.complete import complete_words
from specheads.cli.options.shared import Output
from specheads.options import OptionError, argument, option

SERVERS = ("openai", "sglang", "llama.cpp", "text", "transformers")


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Output):
    """Judge whether a running server writes its model's text.

    Asks it for greedy and for sampled text, and judges each token by the base's own logits. The exit status is 0 if the
    text is the model's (lossless, or within rounding), 3 if not, 4 if undecided.

    \b
    Examples:
      specheads audit http://localhost:8000 --base my/model
      specheads audit http://localhost:8080 --base my/model --kind llama.cpp \\
        --temperature 0
      specheads audit http://localhost:8000 --base my/model --temperature 0.8 \\
        --tv 0.02 --json
      specheads audit http://localhost:8000 --base my/model \\
        --ask 'temperature=0.7 presence_penalty=1 logprobs'
      specheads audit http://localhost:8000 --base my/model --head out/head \\
        --page evidence.md
    """

    server: str = argument("URL", "Address of the server, such as http://localhost:8000.")
    base: str = option(help="The model whose text it should be: a directory or hub id.")
    kind: str = option(
        "openai",
        "openai (vLLM: return_token_ids), sglang, llama.cpp, text (any other, greedy only) or transformers.",
        autocompletion=complete_words(*SERVERS),
    )
    model: str | None = option(None, "The model's name at the server; default: as --base.")
    head: str | None = option(None, "The head that the server drafts with: its accepted drafts beside those here.")
    prompts: Path | None = option(None, "File of prompts, as of bench; default: held-out source code.")
    temperature: list[float] | None = option(None, "Temperatures to ask at, 0 for greedy; default: 0 and 1.")
    ask: list[str] | None = option(
        None, "Another way, such as 'temperature=0.7 top_p=0.9'; also penalties, stop, max_tokens, logprobs."
    )
    tv: float = option(0.05, "Total variation a token that a lossless verdict rules out.")

    page: Path | None = option(None, "Write the evidence to this file, as one page of Markdown.")

    def __post_init__(self) -> None:
        if self.kind not in SERVERS:
            raise OptionError(f"{{kind}}: expected {' or '.join(SERVERS)}", kind=self.kind)
