"""The demo's training: an EAGLE-3 head, on source files and the base's own continuations, until held-out text accepts
enough of its drafts; and before it, if the package came without a base, a tiny one on the standard library."""

from __future__ import annotations

import json
import random
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
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from specheads import terminal
from specheads.bench import environment
from specheads.bench.decoders import specheads_generate
from specheads.cli.demo.race import is_busy
from specheads.data import corpus
from specheads.decoding.probs.precision import bfloat16_is_fast
from specheads.heads import Eagle3Head
from specheads.models.spec_model import SpecModel
from specheads.training.base_model.options import Options
from specheads.training.base_model.run import RECORD, train
from specheads.training.trainer.trainer import SpecTrainer, SpecTrainingArguments

MEASUREMENTS, WATCHED_TOKENS = 12, 48  # while a head trains: how often, and of how long a text
BASE_MINUTES = 2.0  # of its training
BASE_FILES = 250  # of the standard library: quickly encoded, and more than two cores train on in that time


@dataclass(frozen=True)
class LiveOptions:
    """minutes: of training, at most. enough: accepted length on held-out text at which it ends. rows: in a batch.
    learning_rate: its peak. continue_time: share of the time in which the base generates continuations.
    continued_share: share of the rows that are such continuations."""

    minutes: float
    seed: int
    enough: float = 2.0
    rows: int = 6
    row_tokens: int = 160  # as many as are decoded later: 64 of a prompt and 96 new ones
    learning_rate: float = 4e-3
    continue_time: float = 0.12
    continued_share: float = 0.5


class Rows(Dataset):
    """Random windows of `ids` (T,) and rows of `continued` (R, row_tokens), seeded by index: row i stays the same."""

    def __init__(self, ids: Tensor, continued: Tensor, options: LiveOptions) -> None:
        self.ids, self.continued, self.options = ids, continued, options

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = random.Random(self.options.seed * len(self) + index)
        if len(self.continued) and rng.random() < self.options.continued_share:
            row = self.continued[rng.randrange(len(self.continued))]
        else:
            start = rng.randrange(len(self.ids) - self.options.row_tokens)
            row = self.ids[start : start + self.options.row_tokens]
        return {"input_ids": row, "labels": row}


class TimedTrainer(SpecTrainer):
    """Trains for `seconds`. The learning rate warms up over 10 steps and then decays with time."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        self.seconds = seconds
        self.began = time.monotonic()
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)

    @property
    def passed(self) -> float:
        """The share of the time that has passed, from 0 to 1."""
        return min(1.0, (time.monotonic() - self.began) / self.seconds)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 10) * max(0.03, min(1.0, (1 - self.passed) / 0.7))

        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)  # type: ignore[arg-type]
        return self.lr_scheduler


class Curve(TrainerCallback):
    """Decodes held-out text MEASUREMENTS times in the training's time, prints a line for each, and ends the training
    when the time is up or `enough` is accepted. points: one for each line."""

    def __init__(
        self, trainer: TimedTrainer, texts: dict[str, Tensor], enough: float, tell: terminal.Report, out: Console
    ) -> None:
        self.trainer, self.texts, self.enough, self.tell, self.out = trainer, texts, enough, tell, out
        self.points: list[dict[str, float]] = []
        self.due = 0.0  # the share of the time at which to measure

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        passed = self.trainer.passed
        self.tell(passed, f"step {state.global_step}")
        if passed >= min(1.0, self.due):
            control.should_training_stop = self.measure(state.global_step) >= self.enough or passed >= 1

    def measure(self, step: int) -> float:
        """The tokens that the base accepts at each pass, its own included."""
        model: Any = self.trainer.model
        model.eval()
        counts = specheads_generate(model, WATCHED_TOKENS)(self.texts, None).statistics
        model.train()
        length, seconds = counts["gained"] / counts["rows_stepped"], time.monotonic() - self.trainer.began
        self.points.append({"seconds": seconds, "step": step, "accepted_length": length})
        self.due = self.trainer.passed + 1 / MEASUREMENTS
        line = f"{terminal.clock_time(seconds):>5}  step {step:>4}  {length:.2f} tokens a pass  "
        self.out.print(line + terminal.bar(length / 4, 32))
        return length


def train_live(
    model: SpecModel, tokenizer: Any, held_out: list[str], texts: dict[str, Tensor], options: LiveOptions, out: Console
) -> dict[str, Any]:
    """Train the head, showing the accepted length on `texts`, a batch of prompts that nothing is trained on."""
    seconds = options.minutes * 60
    began = time.monotonic()
    ids = training_ids(tokenizer, held_out, options)
    head = model.head
    assert isinstance(head, Eagle3Head)
    head.set_draft_vocabulary(torch.bincount(ids, minlength=len(head.t2d)), model.base)
    with terminal.progress(out, "the base continues prompts") as tell:
        continued = continuations(model.base, ids, options, seconds * options.continue_time, tell)
    with (
        terminal.progress(out, "training") as tell,
        tempfile.TemporaryDirectory() as scratch,
        warnings.catch_warnings(),
    ):
        # The norms keep float32 weights under bfloat16 autocast; torch warns once that a faster path exists.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        arguments = SpecTrainingArguments(
            output_dir=scratch, max_steps=10**6, per_device_train_batch_size=options.rows, logging_steps=10**6,
            learning_rate=options.learning_rate, muon=True, head_lr_groups={"lm_head": 0.25}, adam_beta2=0.95,
            weight_decay=0.0, max_grad_norm=1.0, bf16=bfloat16_is_fast(model.device), report_to="none",
            use_cpu=model.device.type == "cpu", save_strategy="no", disable_tqdm=True, seed=options.seed,
            dataloader_pin_memory=False,
        )  # fmt: skip
        left = max(seconds / 2, seconds - (time.monotonic() - began))
        trainer = TimedTrainer(model, arguments, train_dataset=Rows(ids, continued, options), seconds=left)
        curve = Curve(trainer, texts, options.enough, tell, out)
        trainer.add_callback(curve)
        trainer.train()
        steps, length = trainer.state.global_step, curve.points[-1]["accepted_length"]
        tell(1.0, f"{steps} steps")
    model.eval()
    tokens = steps * options.rows * options.row_tokens
    trained = f"{length:.2f} tokens a pass after {steps} steps, {tokens / 1e3:.0f}k tokens"
    out.print(f"{ending(length, options, environment.environment())}: {trained}")
    return {"seconds": time.monotonic() - began, "steps": steps, "tokens": tokens, "history": curve.points}


def ending(length: float, options: LiveOptions, where: dict[str, Any]) -> str:
    """Why training ended at this accepted length, on the machine of an environment's record."""
    if length >= options.enough:
        return f"{options.enough:g} are reached"
    end = f"{options.minutes:g} minutes are up"
    if is_busy(where):
        end += f", part of them with other programs ({where['cores']} cores with a load of {where['load_average']})"
    return end


def training_ids(tokenizer: Any, held_out: list[str], options: LiveOptions) -> Tensor:
    """(T,) ids of randomly chosen files that are not held out, each after the tokenizer's bos; more than training
    reads."""
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
def continuations(base: PreTrainedModel, ids: Tensor, options: LiveOptions, seconds: float, tell: Any) -> Tensor:
    """(R, row_tokens): windows of a quarter row, each continued greedily by the base, as many as time allows.

    A head drafts what the base would write, which differs somewhat from what people wrote.
    """
    rng, prompt = random.Random(options.seed + 1), options.row_tokens // 4
    texts: list[Tensor] = []
    began, count, longest = time.monotonic(), 8, 0.0  # few at first, so that a slow machine finishes some
    while (passed := time.monotonic() - began) + longest < seconds:
        starts = [rng.randrange(len(ids) - prompt) for _ in range(count)]
        windows = torch.stack([ids[start : start + prompt] for start in starts]).to(base.device)
        length = options.row_tokens - prompt
        rows = base.generate(  # type: ignore[operator]
            windows, attention_mask=torch.ones_like(windows), max_new_tokens=length, min_new_tokens=length,
            do_sample=False, max_time=max(1.0, seconds - passed),
        )  # fmt: skip
        if rows.shape[1] < options.row_tokens:  # out of time
            break
        texts.append(rows.cpu())
        longest = max(longest, time.monotonic() - began - passed)
        count = min(2 * count, 32)
        tell(min(0.99, (time.monotonic() - began) / seconds), f"{sum(map(len, texts))} texts")
    tell(1.0, f"{sum(map(len, texts))} texts")
    return torch.cat(texts) if texts else torch.empty(0, options.row_tokens, dtype=torch.long)


def own_base(folder: Path, seed: int, out: Console) -> Path:
    """Make sure that `folder` has a base: one from an earlier demo, or one trained now."""
    if (folder / RECORD).is_file():
        out.print(f"base: {folder}, which an earlier demo trained; delete the folder to train another")
        return folder
    options = Options(
        str(folder), layers=4, hidden_size=128, intermediate_size=352, head_dim=32, vocab_size=2048, batch_size=16,
        sequence_length=128, files=BASE_FILES, minutes=BASE_MINUTES, save_steps=10**9, seed=seed,
    )  # fmt: skip
    with terminal.progress(out, "training a base") as tell:
        train(options, say=lambda line: None, tell=tell)
    record = json.loads((folder / RECORD).read_text("utf8"))
    out.print(
        f"saved {folder}: {record['parameters'] / 1e6:.1f}M parameters, {record['tokens'] / 1e3:.0f}k tokens, held-out "
        f"loss {record['held_out_loss']:.2f}. After so little training it repeats itself more than it writes Python; "
        "what the demo shows is that drafts do not change its text"
    )
    return folder
