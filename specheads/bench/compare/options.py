"""The options of `specheads bench`, declared once for Python, a recipe, the record and the command line.

Only the standard library is imported at the top, so that --help does not wait for torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from specheads.options import OptionError, option, refuse_unknown

TURNS = ("texts", "steps")
COSTS = ("measured", "model_parameters", "previous_work")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Race decoders: speed, accepted length, the same text or not.

    Lossy rules are shown with their divergence, and tasks with right answers. In a clone it needs no MODEL, and `-d
    eagle3` is the shipped head of that name. All decoders run on the same prompts in one process, batch by batch in
    turn, after a warm-up; with --turns steps, step by step. Each finished round is saved in OUT/results.jsonl: after
    Ctrl-C the tables show what is done, and the same command resumes. OUT gets bench.json with all samples, bench.md
    and pictures.

    \b
    Examples:
      specheads bench out/head --batch 1 --temperature 0 --num-prompts 16 \\
        --repeats 1
      specheads bench out/head -d head --tree chain:3 --tree chain:5 \\
        --tree static:16 --accept typical
      specheads bench out/head -d head --tree chain:7 \\
        --accept fuzzy:js,tv:0.05,0.1,0.2 --task signatures --batch 8
      specheads bench out/head -d plain -d "plain compile" \\
        -d "head tree=chain:5 compile"
      specheads bench out/head -d head -d "head refill" --reference head \\
        --batch 8 --queue 64 --max-new-tokens 32-256
      specheads bench out/head --turns steps --reference plain -d plain \\
        -d "head auto" --batch 8 --temperature 0.8
      specheads bench out/head \\
        --engine benchmarks/engines/openvino.py=ov/bin/python -d openvino \\
        -d head
      specheads bench org/model -d transformers-assisted:org/small \\
        -d model:org/small --prompts question.jsonl
      specheads bench out/head --batch 1 --temperature 0 \\
        --prompts mt_bench.jsonl --prompts gsm8k.jsonl --chat
      specheads bench large -d "cascade:model:small+maxgram k=[[5,8],[0,8]]" \\
        --batch 1 --temperature 0 --task mmlu
      specheads bench --recipe bench_rules --out runs/rules
    """

    model: str | None = option(
        None,
        "Head checkpoint, plain Hugging Face model, or a folder that holds base/ and heads, which are then named by "
        "their subfolders (default, in a clone: the shipped one).",
        metavar="[MODEL]", positional=True, named=True,
    )  # fmt: skip
    recipe: str | None = option(
        None,
        "YAML file with any of these options, or the name of a shipped one; options given here replace its.",
        recipes="bench",
    )
    decoder: tuple[str, ...] = option(
        (),
        "transformers, transformers-static, transformers-lookup[:TOKENS], transformers-assisted:PATH, one of an "
        "--engine, plain, or what drafts, with tree=…, accept=…, compile, auto and refill after it: "
        "'head tree=chain:5 compile', 'head auto'; after a cascade:DRAFTER+DRAFTER… also k=[[5,8],[0,8]], leniency=… "
        "and notation=incremental or paper. Repeatable.",
        flags=("--decoder", "-d"),
    )  # fmt: skip
    reference: str = option("transformers", "The decoder that the others are compared with.")
    tree: tuple[str, ...] = option((), "Draft tree of decoders that name none; repeatable.")
    accept: tuple[str, ...] = option(
        (),
        "Acceptance rule of decoders that name none, beside the exact one; commas make several: fuzzy:js,tv:0.1,0.2. "
        "Repeatable.",
    )
    engine: tuple[str, ...] = option(
        (), "Another program: a file that registers it, and the Python of its environment. Repeatable.",
        metavar="FILE=PYTHON",
    )  # fmt: skip
    prompts: tuple[Path, ...] = option(
        (),
        "File of prompts: .jsonl (turns, messages, prompt, question, problem or text), or one a line; repeatable "
        "(default: held-out files and third-party code).",
    )
    task: tuple[str, ...] = option(
        (),
        "Prompts with right answers: signatures (shipped), mmlu, gsm8k, csqa or humaneval; rows come from the hub, or "
        "from the files after a colon. Repeatable.",
        metavar="NAME[:FILE,…]",
    )  # fmt: skip
    categories: tuple[str, ...] = option((), "Only prompts of this category in their file; repeatable.")
    chat: bool = option(False, "Format prompts of files and tasks with the chat template.")
    run_code: bool = option(False, "Let the task humaneval run what the model wrote.")
    num_prompts: int | None = option(
        None, "Prompts of each set, evenly spaced (default: 64, or all of a file or task).", min=1
    )
    prompt_tokens: str = option("64", "Tokens per prompt of the default sets; 16-128: drawn for each.")
    max_new_tokens: str = option("96", "Maximum tokens to generate; 32-256: drawn for each prompt.")
    batch: tuple[int, ...] = option((1, 4, 16), "Batch sizes.")
    queue: int | None = option(
        None, "Prompts per round; with refill a finished row takes the next one (default: a batch).", min=1
    )
    temperature: tuple[float, ...] = option((0.0, 0.8), "Sampling temperatures; 0 is greedy.")
    top_k: tuple[int, ...] = option((0,), "Sample from this many of the most likely tokens; 0: all; 1 is greedy.")
    turns: str = option(
        "texts",
        "Decoders alternate after each of these: texts, or steps (steadier ratios on a busy machine, but each finds "
        "less in the processor's caches).",
    )
    repeats: int = option(3, "Repeats; each prompt batch counts with its median.", min=1)
    seed: int = option(0, "Seed for sampling, and for whatever else is drawn.", min=0)
    cost: str = option("measured", f"Cost of a pass of each model of a cascade, for its SWI: {', '.join(COSTS)}.")
    record: Path | None = option(
        None, "Review drafts against the base's text in this file, which is recorded first if missing."
    )
    shard: str | None = option(
        None,
        "Measure only a share of the prompts: 1/2 and 2/2 in two processes, as on two GPUs, with the same --out; then "
        "the command without it shows all.",
        metavar="I/N",
    )  # fmt: skip
    out: Path = option(Path("runs/bench"), "Results folder; an interrupted run resumes from it.")
    plots: bool = option(True, "Draw pictures; needs specheads[plots].", flags=("--plots/--no-plots",))
    dtype: str = option(
        "auto",
        "float32, bfloat16 or float16; auto: the checkpoint's, on a slow CPU or for a small base float32.",
    )
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto: the GPU if there is one.")
    base: str | None = option(None, "Base model to use instead of the one the checkpoint names.")
    quantize: str | None = option(
        None, "Load target and draft models in 4 or 8 bits with bitsandbytes, or with int8 weights on a CPU.",
        metavar="4bit|8bit|int8",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for field in fields(self):
            if str(field.type).startswith("tuple"):
                object.__setattr__(self, field.name, _several(field.name, str(field.type), getattr(self, field.name)))
        for name in ("prompt_tokens", "max_new_tokens"):
            object.__setattr__(self, name, str(getattr(self, name)))
        for name in ("record", "out"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.turns not in TURNS:
            raise OptionError(f"{{turns}}: expected {' or '.join(TURNS)}", turns=self.turns)
        refuse_unknown([self.cost], COSTS, "cost")
        for name, least in (("batch", 1), ("temperature", 0), ("top_k", 0), ("repeats", 1), ("num_prompts", 1)):
            values = getattr(self, name)
            several = values if isinstance(values, tuple) else () if values is None else (values,)
            if values == () or not all(value >= least for value in several):
                shown = several[0] if len(several) == 1 else ",".join(map(str, several))
                raise OptionError(f"{{{name}}} must be at least {least}", **{name: shown})
        if self.queue is not None and self.queue < max(self.batch):
            raise OptionError(f"{{queue}} must be at least a batch of {max(self.batch)}", queue=self.queue)
        if (self.categories or self.chat) and not (self.prompts or self.task):
            name, use = ("chat", "is for") if self.chat else ("categories", "chooses among")
            raise OptionError(f"{{{name}}} {use} the prompts of a file; give {{prompts}}", **{name: ...}, prompts=...)
        if self.run_code and not any(task.partition(":")[0] == "humaneval" for task in self.task):
            raise OptionError(
                "{run_code} is for the {task} humaneval; give it, or leave this out", run_code=..., task=...
            )
        _ = self.limits, self.lengths, self.part

    @property
    def limits(self) -> tuple[int | None, int]:
        """The fewest, if a limit is drawn for each prompt, and the most new tokens."""
        return _range("max_new_tokens", self.max_new_tokens)

    @property
    def lengths(self) -> tuple[int | None, int]:
        """The fewest, if a length is drawn for each prompt, and the most tokens of a prompt of the default sets."""
        return _range("prompt_tokens", self.prompt_tokens)

    @property
    def part(self) -> tuple[int, int]:
        """The shard, counted from 0, and the number of shards."""
        number, slash, count = (self.shard or "1/1").partition("/")
        if not slash or not (number.isdecimal() and count.isdecimal()) or not 1 <= int(number) <= int(count):
            raise OptionError("{shard}: expected a number and how many there are, such as 1/2", shard=self.shard)
        return int(number) - 1, int(count)

    @property
    def samplings(self) -> list[tuple[float, int]]:
        """The (temperature, top-k) pairs. Greedy is (0, 0), whichever of the two asks for it."""
        pairs = [(t, k) if t and k != 1 else (0.0, 0) for t in self.temperature for k in self.top_k]
        return list(dict.fromkeys(pairs))

    def to_dict(self) -> dict[str, Any]:
        """As a record has them: plain values, without those of a command."""
        return {
            name: [str(v) if isinstance(v, Path) else v for v in value] if isinstance(value, tuple)
            else str(value) if isinstance(value, Path) else value
            for name, value in ((field.name, getattr(self, field.name)) for field in fields(BenchOptions))
        }  # fmt: skip

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From a mapping of options by name; those of the recipe that it names, if any, are under them. ValueError for
        an unknown or malformed one, OSError if the recipe cannot be read."""
        from specheads.training.recipe.recipe import RecipeError, parse_file

        below: Any = {}
        if (path := values.get("recipe")) is not None:
            below = parse_file(Path(path))
            if not isinstance(below, dict):
                raise RecipeError(f"{path} holds {below!r:.60}: expected a mapping with model, decoder and so on")
        known = [[field.name for field in fields(kind)] for kind in (BenchOptions, cls)]
        for names, options in zip((below, values), known, strict=True):
            refuse_unknown(names, options, "option of bench")
        return cls(**{**below, **values})


def _several(name: str, annotation: str, value: Any) -> tuple[Any, ...]:
    """The values of an option without duplicates: of a text `1,4`, if they are numbers, or of one or a list."""
    kind: type = next((kind for kind in (int, float, Path) if f"[{kind.__name__}," in annotation), str)
    if isinstance(value, str) and kind in (int, float):
        value = [part.strip() for part in value.split(",")]
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(dict.fromkeys(_parse(name, entry, kind) for entry in values))


def _parse(name: str, value: Any, kind: type) -> Any:
    if kind not in (int, float):
        return kind(value)
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or (kind is int and isinstance(value, float) and number != value):
        raise OptionError(f"{{{name}}} is not {'a whole number' if kind is int else 'a number'}", **{name: value})
    return number


def _range(name: str, text: str) -> tuple[int | None, int]:
    """`32-256` → (32, 256), `96` → (None, 96)."""
    low, dash, high = text.partition("-")
    low, high = (low, high) if dash else ("", low)
    least, most = (_parse(name, part.strip(), int) if part else None for part in (low, high))
    if most is None or most < 1 or (dash and (least is None or not 1 <= least <= most)):
        raise OptionError(f"{{{name}}}: expected a number of at least 1, or two, the smaller first", **{name: text})
    return least, most
