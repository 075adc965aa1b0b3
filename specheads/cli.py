"""The `specheads` command: demo, train, generate, evaluate, info. Exit code 2 and one line on stderr on bad input.

torch and transformers are imported inside the commands, so that --help does not wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specheads import console as terminal

if TYPE_CHECKING:
    from specheads.convert import SpecModel
    from specheads.planner import Plan

# UsageError, BadParameter and their kin; typer carries click under another name from version to version.
_ClickException: Any = typer.BadParameter.__mro__[2]
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
        help="Draft tree: chain:DEPTH, dynamic:NODES,DEPTH,TOP_K, static[:NODES], sampled:2,2,1 (default: the head's)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")]
Count = Annotated[int, typer.Option(min=1)]


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
      specheads train recipes/eagle3.yaml data.train=my.jsonl
      specheads evaluate checkpoints/eagle3 --num-prompts 8
      specheads info checkpoints/eagle3
    """


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.01, help="Of live training.")] = 2.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts out of the held-out files.")] = 6,
    max_new_tokens: NewTokens = 96,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    checkpoints: Annotated[Path | None, typer.Option(help="Where base/ and the heads are (default: shipped).")] = None,
    output: Annotated[Path, typer.Option(help="Where the head trained here is saved.")] = Path("runs/demo"),
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures there.")] = None,
) -> None:
    """Train a head live, save and restore it, and race it against transformers' generate() and the shipped heads.

    \b
    Examples:
      specheads demo
      specheads demo --minutes 5 --num-prompts 12
      specheads demo --json demo.json
    """
    from specheads import demo as story

    options = story.DemoOptions(
        minutes=minutes, num_prompts=num_prompts, max_new_tokens=max_new_tokens, seed=seed, checkpoints=checkpoints,
        output=output, json=json_path,
    )  # fmt: skip
    if not story.run(options, terminal.make_console()):
        raise typer.Exit(1)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file; recipes/ has one for each head.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the recipe's.")] = None,
    as_json: Json = False,
) -> None:
    """Train a draft head from a recipe, in this process. For several GPUs: accelerate launch train/heads.py RECIPE.

    \b
    Examples:
      specheads train recipes/eagle3.yaml
      specheads train recipes/medusa.yaml base=Qwen/Qwen3-0.6B data.train=my.jsonl training.output_dir=out
      accelerate launch --config_file recipes/accelerate/ddp.yaml train/heads.py recipes/eagle3.yaml
    """
    if not recipe.is_file():
        raise ValueError(f"{recipe} is not a file; give a recipe such as recipes/eagle3.yaml")
    for override in overrides or []:
        if "=" not in override:
            raise ValueError(f"{override!r} is not KEY=VALUE, such as training.max_steps=100")
    from specheads.launch import LaunchError
    from specheads.recipe import read_recipe
    from specheads.training import prepare

    try:
        prepared = prepare(read_recipe(recipe, overrides or []))
    except LaunchError as error:
        raise ValueError(str(error)) from error
    metrics = prepared.train()
    if as_json:
        emit(metrics)
        return
    length = metrics.get("eval_accepted_length")
    shown = "" if length is None else f", accepted length {length:.3f} on the held-out rows"
    print(f"saved {prepared.trainer.args.output_dir}: loss {metrics['train_loss']:.4g}{shown}")


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="The prompt (default: what stdin gives).")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    max_new_tokens: NewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the sampling.")] = None,
    tree: Tree = None,
    draft: Annotated[bool, typer.Option("--draft/--no-draft", help="--no-draft: one token a step.")] = True,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it comes.")] = True,
    color_depth: Annotated[bool, typer.Option("--color-depth", help="Colour tokens by draft depth.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the chat template.")] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Generate text with a draft head. The text goes to stdout, the statistics to stderr.

    \b
    Examples:
      specheads generate checkpoints/eagle3 --prompt "def fibonacci(n):" --color-depth
      specheads generate out/head --prompt-file question.txt --chat --temperature 0.7 --seed 1
      cat file.py | specheads generate checkpoints/medusa --tree chain:4 --json
    """
    asked = read_prompt(prompt, prompt_file)
    if temperature == 0 and (top_p is not None or top_k is not None):
        raise ValueError("--top-p and --top-k shape sampling; give --temperature above 0 with them")
    if not draft and tree is not None:
        raise ValueError("--tree says what to draft and --no-draft not to; give one of them")
    spec, tokenizer = load(model, base, dtype, device)
    if chat and not tokenizer.chat_template:
        raise ValueError(f"--chat: the tokenizer of {spec.base.name_or_path} has no chat template")
    if chat:
        message = [{"role": "user", "content": asked}]
        asked = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(asked, return_tensors="pt", add_special_tokens=not chat).to(spec.device)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if not inputs["input_ids"].shape[1]:
        raise ValueError("the prompt has no tokens; give at least one character")
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        # 0 and 1.0 switch off what the base's own generation config may ask for.
        sampling |= {"temperature": temperature, "top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}
    out, errors = terminal.make_console(), terminal.make_console(stderr=True)
    shown = terminal.TokenStream(out, tokenizer, colored=color_depth)
    if color_depth and not as_json:
        terminal.write(out, asked, "bright_black")
        if not out.is_terminal:
            terminal.write(out, "▶")
    result: Any = spec.generate(
        **inputs, **sampling, seed=seed, tree=parse_tree(tree, spec), draft=draft, max_new_tokens=max_new_tokens,
        streamer=shown if stream and not as_json else None, return_dict_in_generate=True,
    )  # fmt: skip
    last = result.steps[-1]
    statistics = result.statistics()
    tokens = [token for step in result.steps for token in step.tokens[0]]
    if as_json:
        depths = [
            depth if depth <= step.accepted[0] else 0
            for step in result.steps
            for depth in range(1, len(step.tokens[0]) + 1)
        ]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        emit({
            "model": model, "base": spec.base.name_or_path, "prompt": asked, "text": text, "token_ids": tokens,
            "draft_depths": depths, "statistics": statistics,
        })  # fmt: skip
        return
    if not stream:
        shown.put(inputs["input_ids"])
        for step in result.steps:
            shown.put(_tensor(step.tokens[0]))
    shown.close(last.accepted[0])
    terminal.write(out, "\n")
    if color_depth:
        if errors.is_terminal:
            errors.print(terminal.legend())
        errors.print(terminal.depth_counts(shown.depths))
    errors.print(
        f"{statistics['tokens']} tokens in {statistics['seconds']:.2f} s: {statistics['tokens_per_second']:.1f} "
        f"tokens/s, {statistics['steps']} steps, accepted length {statistics['accepted_length']:.2f}"
    )


@app.command()
def evaluate(
    model: Model,
    prompts: Annotated[
        Path | None, typer.Option(help=".jsonl ('prompt' or 'text') or one prompt a line; default: held-out files.")
    ] = None,
    max_new_tokens: NewTokens = 128,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="How many (default: 8, or all of the file).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are over this many.")] = 3,
    tree: Tree = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Measure a head with real decoding: tokens/s, accepted length, acceptance by depth, and is the text the same.

    transformers' generate() and our own loop without drafts run on the same prompts in turn with the head, greedily.
    A token counts as repeated text if the 8 tokens that end with it came up before in the same text.

    \b
    Examples:
      specheads evaluate checkpoints/eagle3
      specheads evaluate out/head --prompts questions.jsonl --max-new-tokens 256 --json > figures.json
    """
    from specheads.bench import decoders, environment, report, runner
    from specheads.bench.prompts import held_out_prompts, prompts_from

    texts = prompts_from(prompts, num_prompts) if prompts else None
    spec, tokenizer = load(model, base, dtype, device)
    if texts is None:
        texts = held_out_prompts(tokenizer, num_prompts or 8)
    head = f"{spec.head.config.kind} head"
    reference = "transformers generate"
    racers = {
        reference: decoders.transformers_generate(spec.base, max_new_tokens),
        "our loop, no drafts": decoders.drafted(spec, max_new_tokens, draft=False),
        head: decoders.drafted(spec, max_new_tokens, plan=parse_tree(tree, spec)),
    }
    errors = terminal.make_console(stderr=True)
    with terminal.progress(errors, "measuring") as told:
        batches = decoders.batches(tokenizer, texts, spec.device)
        result = runner.race(racers, batches, repeats=repeats, report=told)
    rows = report.summary(result, reference)
    where = environment.environment()
    if as_json:
        emit({
            "model": model, "num_prompts": len(texts), "max_new_tokens": max_new_tokens, "repeats": repeats,
            "tree": tree, "dtype": str(spec.dtype).removeprefix("torch."), "environment": where, "decoders": rows,
        })  # fmt: skip
        return
    out = terminal.make_console()
    title = f"{len(texts)} prompts × {max_new_tokens} tokens, greedy, median of {repeats}"
    out.print(terminal.table(title, report.COLUMNS, [report.cells(n, r) for n, r in rows.items()]))
    parts = [report.part_cells(name, row) for name, row in rows.items()]
    out.print(terminal.table("New text and text that repeats itself", report.PART_COLUMNS, parts))
    depths = rows[head]["accepted_by_depth"]
    out.print("accepted at depth " + ", ".join(f"{d}: {share:.0%}" for d, share in enumerate(depths, start=1)))
    out.print(environment.line(where))


@app.command()
def info(
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="A head checkpoint.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a head checkpoint holds; without PATH: versions, devices and the shipped checkpoints.

    \b
    Examples:
      specheads info
      specheads info checkpoints/eagle3
      specheads info out/head --json
    """
    from specheads.bench.environment import checkpoint_record, system_record

    record = system_record() if path is None else checkpoint_record(path)
    if as_json:
        emit(record)
        return
    width = max(map(len, record))
    for name, value in record.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        print(f"{name.replace('_', ' '):<{width}}  {value}")


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """From --prompt, --prompt-file or stdin. ValueError where there is none, or more than one."""
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if file is not None:
        try:
            prompt = file.read_text("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return prompt


def parse_tree(spec: str | None, model: SpecModel) -> Plan | None:
    """chain:4 | dynamic:60,7,10 | static[:16] | sampled:2,2,1 → the plan; None for the head's default."""
    from specheads.planner import DynamicTree, SampledTree, chain, default_static

    if spec is None:
        return None
    kind, _, rest = spec.partition(":")
    expected = "expected chain:DEPTH, dynamic:NODES,DEPTH,TOP_K, static[:NODES] or sampled:WIDTH,WIDTH,…"
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError as error:
        raise ValueError(f"--tree {spec!r}: {rest!r} is not whole numbers; {expected}") from error
    try:
        if kind == "chain" and len(numbers) == 1:
            return chain(*numbers)
        if kind == "dynamic" and len(numbers) == 3:
            return DynamicTree(*numbers)
        if kind == "sampled" and numbers:
            return SampledTree(tuple(numbers))
        if kind == "static" and len(numbers) <= 1:
            nodes = numbers[0] if numbers else 16
            if nodes < 2:
                raise ValueError(f"a tree of {nodes} nodes drafts nothing; ask for 2 or more")
            return default_static(nodes, getattr(model.head.config, "num_heads", 5))
    except ValueError as error:
        raise ValueError(f"--tree {spec!r}: {error}") from error
    raise ValueError(f"--tree {spec!r} is no tree; {expected}")


def load(source: str, base: str | None, dtype: str, device: str) -> tuple[SpecModel, Any]:
    """Base + head on the device asked for, and the base's tokenizer. ValueError or OSError with the reason."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging as hf_logging

    from specheads.convert import SpecModel

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype != "auto" and dtype not in dtypes:
        raise ValueError(f"--dtype {dtype!r} is none of auto, {', '.join(dtypes)}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not usable here: {error}") from error
    hf_logging.disable_progress_bar()
    wanted = dtypes.get(dtype, torch.float32 if place.type == "cpu" else None)
    model: Any = SpecModel.from_pretrained(source, base=base, dtype=wanted)
    model.to(place)
    return model, AutoTokenizer.from_pretrained(base or model.base.name_or_path)


def emit(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False))


def _tensor(tokens: list[int]) -> Any:
    import torch

    return torch.tensor(tokens)


def run(args: Sequence[str] | None = None) -> int:
    """The exit code. Bad input is one line on stderr and 2."""
    given = (sys.argv[1:] if args is None else list(args)) or ["--help"]
    try:
        return int(app(given, prog_name="specheads", standalone_mode=False) or 0)
    except typer.Abort:
        print("specheads: stopped", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("specheads: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _ClickException as error:
        message = error.format_message()
    except (ValueError, OSError) as error:
        if "--debug" in given or os.environ.get(DEBUG):
            raise
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    print(f"specheads: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    sys.exit(run())


if __name__ == "__main__":
    main()
