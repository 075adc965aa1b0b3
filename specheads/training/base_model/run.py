"""One training run of a base model: texts → tokenizer, model → the loop → the saved model."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specheads.data import corpus
from specheads.models.base.loading import load_config
from specheads.training.base_model.options import Options
from specheads.training.base_model.parts import build_model, build_optimizers, encode, load_teacher, train_tokenizer
from specheads.training.distributed.launch import refuse_several

HELD_OUT = "held_out.txt"
RECORD = "training.json"  # written after the model


def batch(data: np.ndarray, rng: np.random.Generator, options: Options) -> torch.Tensor:
    starts = rng.integers(0, len(data) - options.sequence_length - 1, options.batch_size)
    return torch.from_numpy(np.stack([data[i : i + options.sequence_length] for i in starts]))


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, data: np.ndarray, options: Options, num_batches: int = 16) -> float:
    model.eval()
    rng = np.random.default_rng(1)
    losses = [
        model(input_ids=(ids := batch(data, rng, options)), labels=ids, use_cache=False).loss.item()
        for _ in range(num_batches)
    ]
    model.train()
    return sum(losses) / len(losses)


@dataclass
class Run:
    """A training run between two steps."""

    options: Options
    model: PreTrainedModel
    optimizers: list[tuple[torch.optim.Optimizer, float]]  # and the peak learning rate of each
    data: np.ndarray
    rng: np.random.Generator
    step: int = 0
    seconds: float = 0.0  # of the training loop
    recent: list[float] = field(default_factory=list)  # the losses of the last 50 steps

    @property
    def tokens(self) -> int:
        return self.step * self.options.batch_size * self.options.sequence_length

    @property
    def progress(self) -> float:
        """The share of the budget that has been used."""
        if self.options.tokens is not None:
            return self.tokens / self.options.tokens
        return self.seconds / 60 / self.options.minutes

    def set_learning_rates(self) -> None:
        """50 warm-up steps, a constant part, and a linear decay to a hundredth of the peak."""
        flat = self.options.flat_fraction
        decay = 1.0 if self.progress < flat else (1 - self.progress) / (1 - flat)
        scale = min(1.0, (self.step + 1) / 50) * max(0.01, decay)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = peak * scale

    def train_step(self, model: Any, teacher: PreTrainedModel | None) -> None:
        """One training step. model: this run's, perhaps compiled. teacher: learn its distribution, not the text."""
        self.set_learning_rates()
        ids = batch(self.data, self.rng, self.options)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.options.bf16):
            if teacher is None:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            else:
                with torch.no_grad():
                    probs = teacher(input_ids=ids, use_cache=False).logits.float().softmax(-1)
                logits = model(input_ids=ids, use_cache=False).logits.float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), probs.flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.recent = [*self.recent[-49:], loss.item()]
        self.step += 1


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on, and held out. held_out: names of the held-out files of the standard library."""

    tokenizer: PreTrainedTokenizerFast
    train_ids: np.ndarray
    eval_ids: np.ndarray
    bytes_per_token: float  # of the held-out text
    num_files: int  # to train on
    num_held_out: int  # files
    held_out: list[str]


def load_texts(options: Options, held_out: list[str]) -> tuple[list[str], list[str]]:
    """Texts to train on, and texts held out. Files of --data or --packages that are held out are skipped."""
    eval_texts = [text for _, text in corpus.texts("held_out", held_out)]
    train_texts = [text for _, text in corpus.texts("train", held_out)]
    seen = {*eval_texts, *train_texts}
    if options.files is not None:
        train_texts = random.Random(options.seed).sample(train_texts, min(options.files, len(train_texts)))
    for _, text in chain(corpus.texts_of(options.data), corpus.texts_of_packages(options.packages)):
        if text not in seen:
            seen.add(text)
            train_texts.append(text)
    return train_texts, eval_texts


def load_corpus(options: Options, out: Path) -> Corpus:
    """The texts as token ids, with the tokenizer of --init or --tokenizer, or a new one."""
    recorded = Path(options.init) / HELD_OUT if options.init else out / HELD_OUT
    held_out = recorded.read_text("utf8").split() if recorded.is_file() else corpus.default_held_out()
    train_texts, eval_texts = load_texts(options, held_out)
    if saved := options.init or options.tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    else:
        tokenizer = train_tokenizer(train_texts, options.vocab_size)
    train_ids, eval_ids = encode(tokenizer, train_texts), encode(tokenizer, eval_texts)
    bytes_per_token = sum(len(text.encode()) for text in eval_texts) / len(eval_ids)
    return Corpus(tokenizer, train_ids, eval_ids, bytes_per_token, len(train_texts), len(eval_texts), held_out)


def refuse_wrong_start(options: Options) -> None:
    """ValueError for contradictory options, or a head given as a model."""
    sizes = ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
    for origin, names in (("init", ("config", "tokenizer", *sizes)), ("config", ("layers", *sizes[:3]))):
        for name in names if getattr(options, origin) else ():
            if (value := getattr(options, name)) != getattr(Options, name):
                raise ValueError(f"--{name} {value}: --{origin} {getattr(options, origin)} has its own; leave one out")
    for name in filter(None, (options.init, options.teacher)):
        load_config(name)  # refuses a draft head


def save_model(run: Run, texts: Corpus, out: Path, loss: float | None) -> None:
    """Save the model in bfloat16, its tokenizer, the held-out names and its record. loss: the held-out one; None before
    the end."""
    texts.tokenizer.save_pretrained(out)
    (out / HELD_OUT).write_text("\n".join(texts.held_out) + "\n", "utf8")
    run.model.generation_config.pad_token_id = texts.tokenizer.pad_token_id
    half: PreTrainedModel = copy.deepcopy(run.model).bfloat16()
    half.save_pretrained(out)
    record = {
        "options": vars(run.options), "steps": run.step, "held_out_loss": loss, "tokens": run.tokens,
        "bits_per_byte": None if loss is None else loss / np.log(2) / texts.bytes_per_token,
        "parameters": run.model.num_parameters(), "minutes": round(run.seconds / 60, 1),
        "package_versions": {name: importlib.metadata.version(name) for name in run.options.packages},
    }  # fmt: skip
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf8")


_print_line = functools.partial(print, flush=True)


def train(
    options: Options, say: Callable[[str], None] = _print_line, tell: Callable[[float, str], None] | None = None
) -> None:
    """Train, and save the model, its tokenizer, held_out.txt and the record in options.output_dir.

    say: called with lines at the start and at the end; tell: called every 50 steps with the share done and a line
    (default: say). ValueError or OSError for contradictory options, or files that are missing or wrong.
    """
    refuse_several()
    torch.manual_seed(options.seed)
    out = Path(options.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    refuse_wrong_start(options)
    texts = load_corpus(options, out)
    model = build_model(options, texts.tokenizer)
    say(
        f"{model.num_parameters() / 1e6:.2f}M parameters, {texts.num_files} files, {len(texts.train_ids) / 1e6:.2f}M "
        f"tokens to train on, {texts.num_held_out} files held out"
    )
    run = Run(options, model, build_optimizers(model, options), texts.train_ids, np.random.default_rng(options.seed))
    say(f"held-out loss at the start {held_out_loss(model, texts.eval_ids, options):.3f}")
    run_to_the_end(run, texts, out, tell or (lambda done, line: say(f"{done:5.1%} {line}")))
    loss = held_out_loss(model, texts.eval_ids, options)
    save_model(run, texts, out, loss)
    bits = loss / np.log(2) / texts.bytes_per_token
    say(f"held-out loss {loss:.3f} nats a token, {bits:.3f} bits a byte; saved in {out}")


def run_to_the_end(run: Run, texts: Corpus, out: Path, tell: Callable[[float, str], None]) -> None:
    """Train until the budget is used up, saving the model every --save_steps steps."""
    options = run.options
    run.model.train()
    step_model = torch.compile(run.model) if options.compile else run.model
    teacher = load_teacher(options.teacher, texts.tokenizer) if options.teacher else None
    last = time.monotonic()
    while run.progress < 1:
        run.train_step(step_model, teacher)
        now = time.monotonic()
        run.seconds, last = run.seconds + now - last, now
        if run.step % 50 == 0:
            speed, loss = run.tokens / run.seconds, np.mean(run.recent)
            tell(run.progress, f"step {run.step} {run.tokens / 1e3:.0f}k tokens {speed:.0f} tok/s loss {loss:.3f}")
        if run.step % options.save_steps == 0 and run.progress < 1:
            save_model(run, texts, out, None)
