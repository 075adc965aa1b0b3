"""Train a small Llama-style model and its BPE tokenizer from scratch on the standard library's source.

    python train/base_model.py --output_dir out/base --minutes 90
    python train/base_model.py --output_dir out/deeper --init out/base --layers 12 --minutes 80
    python train/base_model.py --output_dir out/small --init out/base --layers 2 --teacher out/base --minutes 30
    python train/base_model.py --output_dir out/longer --init out/base --layers 12 --data src/ --tokens 40e6 --resume

The second form continues from a saved model and, with more --layers, deepens it: each new layer is a copy of the
one below it whose two output projections start at zero, so that the deeper model starts as the same function.
The third makes a small model that drafts for the first: fewer --layers are taken evenly from those it has, and it
learns the teacher's distribution at each token and not the token alone (DistillSpec, arXiv:2310.08461).
The fourth adds source of one's own and takes a budget of tokens, which also paces the learning rate. Every 200 steps
resume.pt is written beside the model; after an interruption, a crash or kill -9 the same command with --resume
continues, with the losses that an undisturbed run has.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specheads import corpus
from specheads.checkpoint import replacing

RESUME = "resume.pt"
# Options that may differ between a run and its resumption: where it is, and how long it goes on.
_FREE = ("output_dir", "resume", "minutes", "tokens", "save_steps")
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|endoftext|>{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Options:
    output_dir: str = field(metadata={"help": "where the model, tokenizer, held_out.txt and training.json go"})
    init: str | None = field(default=None, metadata={"help": "continue from this saved model instead of from scratch"})
    teacher: str | None = field(default=None, metadata={"help": "learn this saved model's output (same tokenizer)"})
    layers: int = field(default=8, metadata={"help": "number of layers; --init is deepened or thinned out to it"})
    hidden_size: int = 256
    intermediate_size: int = 704
    head_dim: int = 64
    vocab_size: int = 4096
    data: list[str] = field(
        default_factory=list, metadata={"help": "files, and folders of .py files, to train on beside the library"}
    )
    minutes: float = field(default=90.0, metadata={"help": "wall-clock budget of the training loop"})
    tokens: float | None = field(default=None, metadata={"help": "budget in tokens, 40e6 say, in place of minutes"})
    resume: bool = field(
        default=False, metadata={"help": "continue the run that was interrupted in output_dir, if any"}
    )
    save_steps: int = field(default=200, metadata={"help": "steps between saves of the model and of resume.pt"})
    batch_size: int = 4
    sequence_length: int = 512
    muon_lr: float = field(default=0.02, metadata={"help": "peak learning rate of the matrices (Muon)"})
    adam_lr: float = field(default=3e-3, metadata={"help": "peak learning rate of embeddings and norms (AdamW)"})
    flat_fraction: float = field(default=0.4, metadata={"help": "share of the run before the linear decay starts"})
    bf16: bool = field(default=False, metadata={"help": "bfloat16 autocast (weights stay float32)"})
    compile: bool = field(default=False, metadata={"help": "torch.compile the training forward and backward"})
    seed: int = 0


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE(byte_fallback=False))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    end, user, assistant, pad = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=end,
        eos_token=end,
        pad_token=pad,
        extra_special_tokens=[user, assistant],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """One stream of ids, each file behind an <|endoftext|>."""
    ids: list[int] = []
    for row in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids += [tokenizer.bos_token_id, *row]
    return np.array(ids, dtype=np.int64)


def with_layers(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """More layers: the same function, the new ones copies whose output projections are zero, spread evenly.
    Fewer: some of the model's own, spread evenly, its first and last among them."""
    old = model.config.num_hidden_layers
    if layers < old:
        kept = [round(i * (old - 1) / max(1, layers - 1)) for i in range(layers)]
        stack = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    else:
        after = [round((i + 1) * old / (layers - old)) - 1 for i in range(layers - old)]
        stack = torch.nn.ModuleList()
        for i, layer in enumerate(model.model.layers):
            stack.append(layer)
            for _ in range(after.count(i)):
                new = copy.deepcopy(layer)
                torch.nn.init.zeros_(new.self_attn.o_proj.weight)
                torch.nn.init.zeros_(new.mlp.down_proj.weight)
                stack.append(new)
    for i, layer in enumerate(stack):
        layer.self_attn.layer_idx = i  # type: ignore[union-attr]
    model.model.layers = stack
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[0]] * layers
    return model


def load_teacher(path: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The model that is learnt from; SystemExit where it has other tokens."""
    own: dict[str, int] = PreTrainedTokenizerFast.from_pretrained(path).get_vocab()
    if own != tokenizer.get_vocab():
        raise SystemExit(f"--teacher {path} has another tokenizer; start from it or from a model of its: --init {path}")
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


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
        """SystemExit where what was saved is of other options or other data."""
        state = torch.load(path, weights_only=True, map_location="cpu")
        own = fixed_options(self.options)
        for name, value in state["options"].items():
            if own.get(name) != value:
                raise SystemExit(f"--resume: the run in {path.parent} has --{name} {value}, not {own.get(name)}")
        if state["data"] != digest(self.data):
            raise SystemExit(
                f"--resume: the text to train on is not what {path.parent} was trained on (another Python, or files "
                "changed under --data); continue from the model with --init in another folder"
            )
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.step, self.seconds, self.recent = state["step"], state["seconds"], state["recent"]


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults, and the examples above as they stand."""


def fixed_options(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name not in _FREE}


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def build_model(options: Options) -> LlamaForCausalLM:
    """The model that --init names, with the layers asked for, or a new one."""
    if options.init:
        return with_layers(LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32), options.layers)
    heads = options.hidden_size // options.head_dim
    config = LlamaConfig(
        hidden_size=options.hidden_size, num_hidden_layers=options.layers, head_dim=options.head_dim,
        intermediate_size=options.intermediate_size, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        vocab_size=options.vocab_size, max_position_embeddings=1024, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0, pad_token_id=3, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, options: Options) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices, AdamW for embeddings and norms, each with its peak learning rate."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=options.muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, options.muon_lr), (adam, options.adam_lr)]


def load_texts(options: Options, held_out: list[str]) -> tuple[list[str], list[str]]:
    """Texts to train on and texts held out. A file under --data that is one of the latter is left out."""
    eval_texts = [text for _, text in corpus.texts("held_out", held_out)]
    train_texts = [text for _, text in corpus.texts("train", held_out)]
    seen = {*eval_texts, *train_texts}
    try:
        for _, text in corpus.texts_of(options.data):
            if text not in seen:
                seen.add(text)
                train_texts.append(text)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    return train_texts, eval_texts


def main() -> None:
    parser = HfArgumentParser([Options], description=__doc__, formatter_class=HelpFormatter)  # type: ignore[list-item]
    (options,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(options.seed)
    out = Path(options.output_dir)
    out.mkdir(parents=True, exist_ok=True)
    if (unfinished := (out / RESUME).is_file()) and not options.resume:
        raise SystemExit(f"{out} holds a run that was interrupted: continue it with --resume, or delete {out / RESUME}")
    if options.tokens is not None and options.tokens < 1:
        raise SystemExit(f"--tokens {options.tokens:g}: give a number of tokens to train on, 40e6 say")
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
    print(
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
        (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", "utf8")

    if unfinished:
        run.load(out / RESUME)
        print(f"resumed after step {run.step}, {run.tokens / 1e6:.2f}M tokens")
    elif options.resume:
        print(f"nothing to resume in {out}: starting from the beginning")
    print(f"held-out loss at the start {held_out_loss(model, eval_ids, options):.3f}", flush=True)
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
            print(
                f"{run.done:5.1%} step {run.step} {run.tokens / 1e3:.0f}k tokens {speed:.0f} tok/s "
                f"loss {np.mean(run.recent):.3f}",
                flush=True,
            )
        if run.step % options.save_steps == 0 and run.done < 1:
            save(None)
            run.save(out / RESUME)
    final = held_out_loss(model, eval_ids, options)
    save(final)
    (out / RESUME).unlink(missing_ok=True)
    bits = final / np.log(2) / bytes_per_token
    print(f"held-out loss {final:.3f} nats a token, {bits:.3f} bits a byte; saved in {out}")


if __name__ == "__main__":
    main()
