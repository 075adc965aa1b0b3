"""The program, and the options several commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

DEBUG = "SPECHEADS_DEBUG"

app = typer.Typer(
    name="specheads", add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)  # fmt: skip

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Head checkpoint: a directory or a hub id.")]
Base = Annotated[str | None, typer.Option(help="Another base model than the one the checkpoint names.")]
DType = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; auto: float32 on a CPU, else as the checkpoint was saved.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto: the GPU where there is one.")]
Tree = Annotated[
    str | None,
    typer.Option(
        help="Draft tree: chain:DEPTH, comb:DEPTH[,WIDTH], dynamic:NODES,DEPTH,TOP_K, best:NODES,DEPTH,WIDTH, "
        "static[:NODES], sampled:2,2,1 (default: the head's)."
    ),
]
Accept = Annotated[
    str | None,
    typer.Option(
        help="Which drafts stand: exact, block, traversal (lossless); fuzzy:DIVERGENCE:THRESHOLD[:MODE], "
        "typical[:EPSILON[:DELTA]], topn[:N[:MARGIN]], margin:RATIO, lenient:L, cs_leniency:L, ensemble:WEIGHT "
        "(default: exact)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Count = Annotated[int, typer.Option(min=1)]


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def _print_version(wanted: bool) -> None:
    if wanted:
        import specheads

        print(f"specheads {specheads.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", envvar=DEBUG, help="Show a traceback on errors.")] = False,
) -> None:
    """Train draft heads for a frozen language model and decode with them: the same text, several times faster.

    \b
    Examples:
      specheads demo
      specheads generate checkpoints/eagle3 --prompt "def fibonacci(n):" --color-depth
      specheads chat checkpoints/eagle3
      specheads train recipes/eagle3.yaml data.train=my.jsonl
      specheads features recipes/eagle3.yaml --output features/llama
      specheads evaluate checkpoints/eagle3 --num-prompts 8
      specheads sweep recipes/sweep_rules.yaml
      specheads calibrate out/head --data own.jsonl --save
      specheads info checkpoints/eagle3
      specheads export out/head served --to vllm
      specheads import downloaded/eagle3 out/head --base my/model
    """
