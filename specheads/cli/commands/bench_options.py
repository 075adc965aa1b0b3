"""specheads bench."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specheads.cli.app import emit
from specheads.cli.errors import refuse_file
from specheads.cli.options.typed import Base, Device, DType, Json


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Head checkpoint or plain Hugging Face model (default, in a clone: the shipped base and heads).",
        ),
    ] = None,
    decoder: Annotated[
        list[str] | None,
        typer.Option(
            "--decoder",
            "-d",
            help="transformers, transformers-static, transformers-lookup[:TOKENS], transformers-assisted:PATH, "
            "openvino[:TOKENS:HEAD[:DEPTH:BRANCHING]], openvino-lookup[:TOKENS], llama.cpp, llama.cpp-lookup[:TOKENS], "
            "plain, or what drafts, with tree=…, accept=…, compile, auto and refill after it: "
            "'head tree=chain:5 compile', 'head auto'. Repeatable.",
        ),
    ] = None,
    tree: Annotated[list[str] | None, typer.Option(help="Draft tree of decoders that name none; repeatable.")] = None,
    accept: Annotated[
        list[str] | None, typer.Option(help="Acceptance rule of decoders that name none; repeatable.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Also run each of our decoders compiled.")] = False,
    reference: Annotated[str, typer.Option(help="The decoder that the others are compared with.")] = "transformers",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON",
            help="An engine in an environment of its own: openvino=PYTHON, llama.cpp=PYTHON. Repeatable.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of prompts: .jsonl with 'messages', 'turns' (Spec-Bench, MT-bench), 'prompt' (HumanEval), "
            "'question' (GSM8K), 'problem' (MATH) or 'text' (MBPP), or one prompt a line. Repeatable (default: "
            "held-out files and third-party code)."
        ),
    ] = None,
    categories: Annotated[str | None, typer.Option(help="Only these categories of the files: writing,coding.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask plain prompts of files as a user's message, through the chat template.")
    ] = False,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts per set (default: 64, or all of a file).")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens per prompt of the default sets; 16-128: drawn for each.")
    ] = "64",
    max_new_tokens: Annotated[
        str, typer.Option(help="Maximum tokens to generate; 32-256: drawn for each prompt.")
    ] = "96",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    queue: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts per round; with refill a finished row takes the next one (default: a batch)."
        ),
    ] = None,
    temperature: Annotated[str, typer.Option(help="Sampling temperatures; 0 is greedy.")] = "0,0.8",
    turns: Annotated[
        str,
        typer.Option(
            help="Decoders alternate after each of these: texts, or steps (steadier ratios on a busy machine, but each "
            "finds less in the processor's caches)."
        ),
    ] = "texts",
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; each prompt batch counts with its median.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed for sampling, and for whatever else is drawn.")] = 0,
    out: Annotated[Path, typer.Option(help="Results folder; an interrupted run resumes from it.")] = Path("runs/bench"),
    wide: Annotated[bool, typer.Option("--wide", help="Print every column; the files always have all.")] = False,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw a picture; needs specheads[plots].")] = True,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder of base/ and heads, named by their subfolders (default: shipped).")
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Race decoders: speed, accepted length, the same text or not.

    In a clone it needs no MODEL, and `-d eagle3` is the shipped head of that name. All decoders run on the same prompts
    in one process, batch by batch in turn, after a warm-up; with --turns steps, step by step. Each finished round is
    saved in OUT/results.jsonl: after Ctrl-C the tables show what is done, and the same command resumes. OUT gets
    bench.json with all samples, bench.md and bench.png.

    \b
    Examples:
      specheads bench out/head --batch 1 --temperature 0 --num-prompts 16 --repeats 1
      specheads bench out/head -d head --tree chain:3 --tree chain:5 --tree static:16 --accept exact --accept typical
      specheads bench out/head --compile -d plain -d lookup -d "head tree=chain:5"
      specheads bench out/head -d head -d "head refill" --reference head --batch 8 --queue 64 --max-new-tokens 32-256
      specheads bench out/head --turns steps --reference plain -d plain -d "head auto" --batch 8 --temperature 0.8
      specheads bench out/head --peer openvino=ov/bin/python -d openvino -d openvino:5:out/head -d head
      specheads bench org/model -d transformers-assisted:org/small -d model:org/small --prompts question.jsonl
      specheads bench out/head --batch 1 --temperature 0 --prompts mt_bench.jsonl --prompts gsm8k.jsonl --chat
    """
    from specheads.bench.compare.decoder_texts import expand
    from specheads.bench.compare.prompt_sets import default_sets, sets_from
    from specheads.bench.compare.run import BenchOptions
    from specheads.bench.shipped import held_out_names
    from specheads.bench.sweep.grid import parse_numbers, parse_range
    from specheads.cli.commands import bench as command

    refuse_file(out, "--out")
    sizes = tuple(parse_numbers(batch, "batch", int) or ())
    (lowest, most), (fewest, longest) = (
        parse_range(text, name) for text, name in ((max_new_tokens, "max_new_tokens"), (prompt_tokens, "prompt_tokens"))
    )
    temperatures = tuple(parse_numbers(temperature, "temperature", float) or ())
    peers = command.parse_peers(peer)
    if (categories is not None or chat) and not prompts:
        name = "--chat is for" if categories is None else "--categories chooses among"
        raise ValueError(f"{name} the prompts of a file; give --prompts FILE")
    folder = command.heads_folder(model, checkpoints)
    command.check_decoders([*(decoder or []), reference], peers, folder)  # before a model loads
    models = command.load(model or base or f"{folder}/base", base if model else None, dtype, device)
    texts = tuple(decoder or command.default_decoders(models, folder, peers))
    options = BenchOptions(
        tuple(expand(texts, tuple(tree or ()), tuple(accept or ()), compile=compile)), reference, sizes, temperatures,
        most, repeats, seed, lowest, queue, turns,
    )  # fmt: skip
    if prompts:
        wanted = [name.strip() for name in categories.split(",")] if categories else []
        sets = sets_from(prompts, models.tokenizer, num_prompts, wanted, chat=chat)
    else:
        held_out = held_out_names(Path(str(models.target.name_or_path)))
        sets = default_sets(models.tokenizer, num_prompts or 64, longest, held_out, fewest=fewest, seed=seed)
    words = shlex.join(["specheads", *sys.argv[1:]])
    record = command.bench(models, folder, options, sets, out, peers=peers, plots=plots, command=words)
    if as_json:
        emit(record)
    else:
        command.show(record, wide=wide)
    if not record["complete"]:
        raise typer.Exit(130)
