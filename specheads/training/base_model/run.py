"""One training run of a base model: texts → tokenizer, model → the loop, which can be resumed → the saved model."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specheads.data import corpus
from specheads.models.files import replacing
from specheads.training.base_model.options import Options
from specheads.training.base_model.parts import build_model, build_optimizers, encode, load_teacher, train_tokenizer

RESUME = "resume.pt"
RECORD = "training.json"  # written when the model has been
# Options that may differ between a run and its resumption: where it is, and how long it goes on.
_FREE = ("output_dir", "resume", "minutes", "tokens", "save_steps")


def batch(data: np.ndarray, rng: np.random.Generator, options: Options) -> torch.Tensor:
    starts = rng.integers(0, len(data) - options.sequence_length - 1, options.batch_size)
    return torch.from_numpy(np.stack([data[i : i + options.sequence_length] for i in starts]))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, data: np.ndarray, options: Options, num_batches: int = 16) -> float:
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
    """A training run between two steps: all that the next step depends on, and what the log counts."""

    options: Options
    model: LlamaForCausalLM
    optimizers: list[tuple[torch.optim.Optimizer, float]]  # and the peak learning rate of each
    data: np.ndarray
    rng: np.random.Generator
    step: int = 0
    seconds: float = 0.0  # of the training loop, before and after interruptions
    recent: list[float] = field(default_factory=list)  # the losses of the last 50 steps

    @property
    def tokens(self) -> int:
        return self.step * self.options.batch_size * self.options.sequence_length

    @property
    def done(self) -> float:
        """The share of the budget that is used up."""
        if self.options.tokens is not None:
            return self.tokens / self.options.tokens
        return self.seconds / 60 / self.options.minutes

    def set_learning_rates(self) -> None:
        """50 steps of warm-up, a flat part, and a linear decay to a hundredth."""
        flat = self.options.flat_fraction
        decay = 1.0 if self.done < flat else (1 - self.done) / (1 - flat)
        scale = min(1.0, (self.step + 1) / 50) * max(0.01, decay)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = peak * scale

    def save(self, path: Path) -> None:
        state = {
            "options": fixed_options(self.options), "data": digest(self.data), "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "rng": json.dumps(self.rng.bit_generator.state),
            "step": self.step, "seconds": self.seconds, "recent": self.recent,
        }  # fmt: skip
        with replacing(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """ValueError where what was saved is of other options or other data."""
        state = torch.load(path, weights_only=True, map_location="cpu")
        own = fixed_options(self.options)
        for name, value in state["options"].items():
            if own.get(name) != value:
                raise ValueError(f"--resume: the run in {path.parent} has --{name} {value}, not {own.get(name)}")
        if state["data"] != digest(self.data):
            raise ValueError(
                f"--resume: the text to train on is not what {path.parent} was trained on (another Python, or files "
                "changed under --data); continue from the model with --init in another folder"
            )
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.step, self.seconds, self.recent = state["step"], state["seconds"], state["recent"]


def fixed_options(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name not in _FREE}


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def load_texts(options: Options, held_out: list[str]) -> tuple[list[str], list[str]]:
    """Texts to train on and texts held out. A file under --data that is one of the latter is left out."""
    eval_texts = [text for _, text in corpus.texts("held_out", held_out)]
    train_texts = [text for _, text in corpus.texts("train", held_out)]
    seen = {*eval_texts, *train_texts}
    if options.files is not None:
        train_texts = random.Random(options.seed).sample(train_texts, min(options.files, len(train_texts)))
    for _, text in corpus.texts_of(options.data):
        if text not in seen:
            seen.add(text)
            train_texts.append(text)
    return train_texts, eval_texts


_print_line = functools.partial(print, flush=True)


def train(
    options: Options, say: Callable[[str], None] = _print_line, tell: Callable[[float, str], None] | None = None
) -> None:
    """Train, and save the model, its tokenizer, held_out.txt and the record in options.output_dir.

    say: is told how it begins and ends; tell: every 50 steps the share that is done and how it goes, else say is.
    ValueError or OSError for options that do not fit together, or not what is there.
    """
    torch.manual_seed(options.seed)
    out = Path(options.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    if (unfinished := (out / RESUME).is_file()) and not options.resume:
        raise ValueError(f"{out} holds a run that was interrupted: continue it with --resume, or delete {out / RESUME}")
    if options.tokens is not None and options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens:g}: give a number of tokens to train on, 40e6 say")
    recorded = Path(options.init) / "held_out.txt" if options.init else out / "held_out.txt"
    held_out = recorded.read_text("utf8").split() if recorded.is_file() else corpus.default_held_out()
    train_texts, eval_texts = load_texts(options, held_out)
    if options.init or unfinished:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.init or out)
    else:
        tokenizer = train_tokenizer(train_texts, options.vocab_size)
    model = build_model(options)
    train_ids, eval_ids = encode(tokenizer, train_texts), encode(tokenizer, eval_texts)
    bytes_per_token = sum(len(text.encode()) for text in eval_texts) / len(eval_ids)
    say(
        f"{model.num_parameters() / 1e6:.2f}M parameters, {len(train_texts)} files, {len(train_ids) / 1e6:.2f}M tokens "
        f"to train on, {len(eval_texts)} files held out"
    )
    if not unfinished:  # written once, so that an interruption cannot leave half of them
        tokenizer.save_pretrained(out)
        (out / "held_out.txt").write_text("\n".join(held_out) + "\n", "utf8")
    run = Run(options, model, build_optimizers(model, options), train_ids, np.random.default_rng(options.seed))

    def save(loss: float | None) -> None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        half: LlamaForCausalLM = copy.deepcopy(model).bfloat16()
        half.save_pretrained(out)
        record = {
            "options": vars(options), "steps": run.step, "held_out_loss": loss, "tokens": run.tokens,
            "bits_per_byte": None if loss is None else loss / np.log(2) / bytes_per_token,
            "parameters": model.num_parameters(), "minutes": round(run.seconds / 60, 1),
        }  # fmt: skip
        (out / RECORD).write_text(json.dumps(record, indent=2) + "\n", "utf8")

    if unfinished:
        run.load(out / RESUME)
        say(f"resumed after step {run.step}, {run.tokens / 1e6:.2f}M tokens")
    elif options.resume:
        say(f"nothing to resume in {out}: starting from the beginning")
    say(f"held-out loss at the start {held_out_loss(model, eval_ids, options):.3f}")
    model.train()
    step_model = torch.compile(model) if options.compile else model
    teacher = load_teacher(options.teacher, tokenizer) if options.teacher else None
    last = time.monotonic()
    while run.done < 1:
        run.set_learning_rates()
        ids = batch(run.data, run.rng, options)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bf16):
            if teacher is None:
                loss = step_model(input_ids=ids, labels=ids, use_cache=False).loss
            else:
                with torch.no_grad():
                    probs = teacher(input_ids=ids, use_cache=False).logits.float().softmax(-1)
                logits = step_model(input_ids=ids, use_cache=False).logits.float()
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), probs.flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.recent = [*run.recent[-49:], loss.item()]
        run.step += 1
        now = time.monotonic()
        run.seconds, last = run.seconds + now - last, now
        if run.step % 50 == 0:
            speed = run.tokens / run.seconds
            line = f"step {run.step} {run.tokens / 1e3:.0f}k tokens {speed:.0f} tok/s loss {np.mean(run.recent):.3f}"
            say(f"{run.done:5.1%} {line}") if tell is None else tell(run.done, line)
        if run.step % options.save_steps == 0 and run.done < 1:
            save(None)
            run.save(out / RESUME)
    final = held_out_loss(model, eval_ids, options)
    save(final)
    (out / RESUME).unlink(missing_ok=True)
    bits = final / np.log(2) / bytes_per_token
    say(f"held-out loss {final:.3f} nats a token, {bits:.3f} bits a byte; saved in {out}")
