"""The demo: give the shipped base an EAGLE-3 head, train it live, save it, restore it in a new process, and race it.

One run, in order: train_live() → save_pretrained() → show() in another process → compare() → one table.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils import logging as hf_logging

from specheads import console as terminal
from specheads import corpus
from specheads.bench import decoders, environment, report, runner
from specheads.bench.prompts import held_out_prompts
from specheads.convert import SpecModel, convert, load_head
from specheads.heads import Eagle3Head
from specheads.trainer import SpecTrainer, SpecTrainingArguments

REFERENCE = "transformers generate"
SHIPPED = {"medusa": "Medusa", "eagle": "EAGLE-1", "eagle3": "EAGLE-3"}
LIVE = "EAGLE-3, just trained"
RACE_SECONDS = 130.0  # no further repeat of the race begins behind this
DRAFT_VOCAB = 1024  # of the live head: its output matrix is then a third of it, not two thirds
TIE = 1e-3  # logits closer than this may change places between two float32 passes of different shape


@dataclass(frozen=True)
class DemoOptions:
    """checkpoints: the folder of base/ and the heads, by default the shipped one. Of the training: minutes, the
    rows of a step, their tokens, steps of training-time test, the peak learning rate, and which share of the time
    goes into continuations of the base's own, which are then that share of the rows: own_time, own_share."""

    minutes: float = 2.0
    num_prompts: int = 6
    max_new_tokens: int = 96
    seed: int = 0
    checkpoints: Path | None = None
    output: Path = Path("runs/demo")
    json: Path | None = None
    repeats: int = 3
    num_shown: int = 2
    rows: int = 8
    row_tokens: int = 128
    steps: int = 3
    learning_rate: float = 4e-3
    own_time: float = 0.12
    own_share: float = 0.5


def run(options: DemoOptions, out: Console) -> bool:
    """Tell the whole story on `out`. Are the texts of all decoders the same? ValueError or OSError on bad input."""
    began = time.monotonic()
    hf_logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    folder = options.checkpoints or corpus.checkpoints_dir()
    if not (folder / "base" / "config.json").is_file():
        raise FileNotFoundError(f"no base model at {folder / 'base'}: give --checkpoints a folder that holds base/")
    base, tokenizer = load_base(folder / "base")
    names = folder / "base" / "held_out.txt"
    held_out = names.read_text("utf8").split() if names.is_file() else corpus.default_held_out()
    prompts = held_out_prompts(tokenizer, options.num_prompts, held_out=held_out)

    heading(out, "1  A frozen base model gets a draft head")
    model = convert(
        base, "eagle3", steps=options.steps, draft_vocab_size=min(DRAFT_VOCAB, base.config.vocab_size), draft_depth=2
    )
    layers = ", ".join(map(str, model.head.layers))
    out.print(
        f"base: {type(base).__name__}, {base.num_parameters() / 1e6:.1f}M parameters, frozen\n"
        f"head: EAGLE-3 on layers {layers}, {sum(p.numel() for p in model.head.parameters()) / 1e6:.1f}M parameters, "
        "started from the base's last layer and output matrix"
    )

    heading(out, f"2  {options.minutes:g} minutes of training on the standard library's source")
    trained = train_live(model, tokenizer, held_out, options, out)
    model.save_pretrained(options.output)
    del model
    size = sum(p.stat().st_size for p in options.output.iterdir()) / 1e6
    out.print(f"saved {options.output} ({size:.1f} MB: the head alone)")

    heading(out, "3  Restored in a new process, drafting for text it has never seen")
    texts = show_elsewhere(options, folder / "base", prompts[: options.num_shown], out)

    heading(out, f"4  The same {len(prompts)} prompts through every decoder")
    models = {}
    for name, label in SHIPPED.items():
        if (folder / name / "config.json").is_file():
            models[label] = load_head(base, folder / name, dtype=base.dtype)
        else:
            out.print(f"no {label} head at {folder / name}: left out")
    models[LIVE] = load_head(base, options.output, dtype=base.dtype)
    race = compare(base, tokenizer, models, prompts, options, out)
    rows = report.summary(race, REFERENCE)
    where = environment.environment()
    num_raced = len(race.runs[LIVE][0])
    title = f"{num_raced} prompts × {options.max_new_tokens} tokens, greedy, median of {len(race.runs[LIVE])}"
    out.print(terminal.table(title, report.COLUMNS, [report.cells(name, row) for name, row in rows.items()]))
    out.print(environment.line(where))

    shown = [run.output.tokens[0] for run in race.runs[REFERENCE][0][: len(texts)]]
    restored = shown == texts[: len(shown)]
    verdicts = check(race, base, decoders.batches(tokenizer, prompts, base.device))
    if not restored:
        verdicts.append("the restored process wrote other text than the base model does")
    if verdicts:
        out.print("✗ not every text is the same: " + "; ".join(verdicts), style="bold red")
    else:
        num = sum(r.num_tokens for r in race.runs[REFERENCE][0])
        out.print(
            f"✓ every text is the same: {len(rows)} decoders × {num_raced} prompts, {num} tokens each, and the "
            "restored process", style="bold green",
        )  # fmt: skip
    seconds = time.monotonic() - began
    out.print(f"{seconds // 60:.0f} min {seconds % 60:.0f} s in all")
    out.print(f'more: specheads generate {options.output} --prompt "import os" --color-depth')
    if options.json:
        record = {
            "decoders": rows, "environment": where, "training": trained, "same_text": not verdicts,
            "num_prompts": num_raced, "max_new_tokens": options.max_new_tokens, "seconds": seconds,
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n", "utf8")
    return not verdicts


def heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold")


def load_base(folder: Path) -> tuple[PreTrainedModel, Any]:
    """In float32, in which every decoder's arithmetic agrees on the best token; on the GPU where there is one."""
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.to("cuda" if torch.cuda.is_available() else "cpu")
    return base, AutoTokenizer.from_pretrained(folder)


# ---------------------------------------------------------------------------------------------------------- training


class Rows(Dataset):
    """Windows of `ids` (T,) and rows of `own` (R, row_tokens), drawn by index: row i is always the same."""

    def __init__(self, ids: Tensor, own: Tensor, options: DemoOptions) -> None:
        self.ids, self.own, self.options = ids, own, options

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(self.options.seed * len(self) + index)
        if len(self.own) and rng.random() < self.options.own_share:
            row = self.own[rng.randrange(len(self.own))]
        else:
            start = rng.randrange(len(self.ids) - self.options.row_tokens)
            row = self.ids[start : start + self.options.row_tokens]
        return {"input_ids": row, "labels": row}


class TimedTrainer(SpecTrainer):
    """Trains until the clock says so; the learning rate warms up over 10 steps and falls as time passes."""

    def __init__(self, *args: Any, seconds: float, tell: terminal.Report, **kwargs: Any) -> None:
        self.seconds = seconds
        self.began = time.monotonic()
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(_Clock(self, tell))

    @property
    def passed(self) -> float:
        """Share of the time, 0 to 1."""
        return min(1.0, (time.monotonic() - self.began) / self.seconds)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 10) * max(0.03, min(1.0, (1 - self.passed) / 0.7))

        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)  # type: ignore[arg-type]
        return self.lr_scheduler


class _Clock(TrainerCallback):
    def __init__(self, trainer: TimedTrainer, tell: terminal.Report) -> None:
        self.trainer, self.tell = trainer, tell
        self.history: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = self.trainer.passed >= 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and "accepted_length" in logs:
            loss, length = float(logs["loss"]), float(logs["accepted_length"])
            self.history.append({"step": state.global_step, "loss": loss, "accepted_length": length})
            self.tell(self.trainer.passed, f"step {state.global_step}  loss {loss:.2f}  accepted length {length:.2f}")


def train_live(
    model: SpecModel, tokenizer: Any, held_out: list[str], options: DemoOptions, out: Console
) -> dict[str, Any]:
    """Train the head for the time asked for, showing loss and accepted length (of chains, on the rows trained on)."""
    seconds = options.minutes * 60
    began = time.monotonic()
    ids = training_ids(tokenizer, held_out, options)
    head = model.head
    assert isinstance(head, Eagle3Head)
    head.set_draft_vocabulary(torch.bincount(ids, minlength=len(head.t2d)), model.base)
    with terminal.progress(out, "the base continues prompts") as tell:
        own = continuations(model.base, ids, options, seconds * options.own_time, tell)
    with (
        terminal.progress(out, "training") as tell,
        tempfile.TemporaryDirectory() as scratch,
        warnings.catch_warnings(),
    ):
        # The norms keep float32 weights under bfloat16 autocast; torch says once that this is not its fastest path.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        arguments = SpecTrainingArguments(
            output_dir=scratch, max_steps=10**6, per_device_train_batch_size=options.rows, logging_steps=5,
            learning_rate=options.learning_rate, muon=True, head_lr_groups={"lm_head": 0.25}, adam_beta2=0.95,
            weight_decay=0.0, max_grad_norm=1.0, bf16=bfloat16_is_fast(), use_cpu=model.device.type == "cpu",
            save_strategy="no", report_to="none", disable_tqdm=True, seed=options.seed, dataloader_pin_memory=False,
        )  # fmt: skip
        left = max(seconds / 2, seconds - (time.monotonic() - began))
        trainer = TimedTrainer(model, arguments, train_dataset=Rows(ids, own, options), seconds=left, tell=tell)
        trainer.train()
        tell(1.0, f"{trainer.state.global_step} steps")
    history = next(c.history for c in trainer.callback_handler.callbacks if isinstance(c, _Clock))
    steps = trainer.state.global_step
    tokens = steps * options.rows * options.row_tokens
    out.print(f"{steps} steps, {tokens / 1e3:.0f}k tokens, {tokens / left:.0f} tokens/s")
    model.eval()
    return {"seconds": time.monotonic() - began, "steps": steps, "tokens": tokens, "history": history}


def training_ids(tokenizer: Any, held_out: list[str], options: DemoOptions) -> Tensor:
    """(T,) ids of randomly chosen files that nobody holds out, each behind the tokenizer's bos; more than are read."""
    files = [path for name, path in corpus.stdlib_files().items() if name not in set(held_out)]
    random.Random(options.seed).shuffle(files)
    characters = 100_000 + int(500_000 * options.minutes)
    ids: list[int] = []
    for path in files:
        text = corpus.read_text(path)
        if text is None:
            continue
        ids += [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        ids += tokenizer(text, verbose=False)["input_ids"]
        characters -= len(text)
        if characters < 0:
            break
    if len(ids) <= options.row_tokens:
        raise ValueError(f"the standard library's source gives only {len(ids)} tokens to train on; install it whole")
    return torch.tensor(ids)


@torch.no_grad()
def continuations(base: PreTrainedModel, ids: Tensor, options: DemoOptions, seconds: float, tell: Any) -> Tensor:
    """(R, row_tokens): windows of a quarter row and the base's own greedy text behind them, as many as time allows.

    A head drafts for what the base would write, which is not quite what people wrote.
    """
    rng, prompt = random.Random(options.seed + 1), options.row_tokens // 4
    made, began = [], time.monotonic()
    longest = 0.0
    while (passed := time.monotonic() - began) + longest < seconds:
        starts = [rng.randrange(len(ids) - prompt) for _ in range(32)]
        windows = torch.stack([ids[start : start + prompt] for start in starts]).to(base.device)
        length = options.row_tokens - prompt
        rows = base.generate(  # type: ignore[operator]
            windows, attention_mask=torch.ones_like(windows), max_new_tokens=length, min_new_tokens=length,
            do_sample=False, max_time=max(1.0, seconds - passed),
        )  # fmt: skip
        if rows.shape[1] < options.row_tokens:  # out of time
            break
        made.append(rows.cpu())
        longest = max(longest, time.monotonic() - began - passed)
        tell(min(0.99, (time.monotonic() - began) / seconds), f"{32 * len(made)} texts")
    tell(1.0, f"{32 * len(made)} texts")
    return torch.cat(made) if made else torch.empty(0, options.row_tokens, dtype=torch.long)


def bfloat16_is_fast() -> bool:
    """Does this processor multiply bfloat16 matrices faster than float32?"""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


# ---------------------------------------------------------------------------------------------- restoring and racing


def show_elsewhere(options: DemoOptions, base: Path, prompts: list[str], out: Console) -> list[list[int]]:
    """Restore the saved head in a new Python process, which prints the texts; their token ids."""
    with tempfile.TemporaryDirectory() as scratch:
        task, answer = Path(scratch) / "task.json", Path(scratch) / "answer.json"
        record = {
            "head": str(options.output), "base": str(base), "prompts": prompts,
            "max_new_tokens": options.max_new_tokens,
        }  # fmt: skip
        task.write_text(json.dumps(record), "utf8")
        out.file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "specheads.demo", str(task), str(answer)], stdout=_stream(out), check=False
        )
        if done.returncode:
            raise ValueError(f"the new process could not restore {options.output} (exit code {done.returncode})")
        return json.loads(answer.read_text("utf8"))


def _stream(out: Console) -> Any:
    """The console's own file where a process can write to it, else nothing: what a test captures has no descriptor."""
    try:
        out.file.fileno()
    except (OSError, ValueError):
        return subprocess.DEVNULL
    return out.file


def show(head: str, base: str, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
    """Restore a head, print its text behind each prompt as it comes, coloured by draft depth; the token ids."""
    hf_logging.disable_progress_bar()
    out = terminal.make_console()
    loaded, tokenizer = load_base(Path(base))
    model = load_head(loaded, head, dtype=loaded.dtype)
    if out.is_terminal:
        out.print(terminal.legend())
    texts = []
    for prompt, batch in zip(prompts, decoders.batches(tokenizer, prompts, loaded.device), strict=True):
        given: Any = batch
        out.print()
        terminal.write(out, prompt, "bright_black")
        if not out.is_terminal:
            terminal.write(out, "▶")
        stream = terminal.TokenStream(out, tokenizer, colored=True)
        result: Any = model.generate(
            **given, max_new_tokens=max_new_tokens, do_sample=False, streamer=stream, return_dict_in_generate=True
        )
        stream.close(result.steps[-1].accepted[0])
        statistics = result.statistics()
        out.print(
            f"\n── {terminal.depth_counts(stream.depths)}; {statistics['tokens_per_second']:.0f} tokens/s",
            style="italic",
        )
        texts += decoders.new_tokens(loaded, batch, result.sequences)
    return texts


def compare(
    base: PreTrainedModel, tokenizer: Any, models: dict[str, SpecModel], prompts: list[str], options: DemoOptions,
    out: Console,
) -> runner.Race:  # fmt: skip
    """transformers' generate(), our loop without drafts, and every head, in turn on the same prompts."""
    length = options.max_new_tokens
    racers = {
        REFERENCE: decoders.transformers_generate(base, length),
        "our loop, no drafts": decoders.drafted(base, length),
        **{name: decoders.drafted(model, length) for name, model in models.items()},
    }
    batches = decoders.batches(tokenizer, prompts, base.device)
    with terminal.progress(out, "racing") as tell:
        return runner.race(racers, batches, repeats=options.repeats, budget=RACE_SECONDS, report=tell)


@torch.no_grad()
def check(race: runner.Race, base: PreTrainedModel, batches: list[dict[str, Tensor]]) -> list[str]:
    """Where texts differ from transformers' own, leaving out exact ties, at which either token is the best one."""
    found = []
    for name in race.runs:
        for i, row, at in race.differing(name, REFERENCE):
            tokens = race.runs[REFERENCE][0][i].output.tokens[row][:at]
            ids = torch.cat([batches[i]["input_ids"][row], torch.tensor(tokens, device=base.device, dtype=torch.long)])
            best = base(input_ids=ids.unsqueeze(0)).logits[0, -1].topk(2).values
            margin = float(best[0] - best[1])
            if margin > TIE:
                found.append(f"{name} on prompt {i + 1} from token {at + 1} on (the best two are {margin:.2g} apart)")
    return found


if __name__ == "__main__":
    given, written = (Path(argument) for argument in sys.argv[1:])
    written.write_text(json.dumps(show(**json.loads(given.read_text("utf8")))), "utf8")
