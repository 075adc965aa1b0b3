"""The options of train/base_model.py."""

from __future__ import annotations

from dataclasses import dataclass, field

_LEAST = {
    "layers": 1, "hidden_size": 1, "intermediate_size": 1, "head_dim": 2, "vocab_size": 1, "files": 1, "save_steps": 1,
    "batch_size": 1, "sequence_length": 2, "seed": 0,
}  # fmt: skip


@dataclass
class Options:
    output_dir: str = field(metadata={"help": "where the model, tokenizer, held_out.txt and training.json go"})
    init: str | None = field(default=None, metadata={"help": "continue from this saved model instead of from scratch"})
    teacher: str | None = field(default=None, metadata={"help": "distil this saved model (same tokenizer)"})
    config: str | None = field(
        default=None, metadata={"help": "config.json of a model of any class to train from scratch instead of a Llama"}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "use this saved tokenizer instead of training one"})
    layers: int | None = field(
        default=None,
        metadata={"help": "number of layers (default: 8, or that of --init, to which layers are added or removed)"},
    )
    hidden_size: int = 256
    intermediate_size: int = 704
    head_dim: int = 64
    vocab_size: int = 4096
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "files, and folders of .py files, to train on besides the standard library"},
    )
    packages: list[str] = field(
        default_factory=list,
        metadata={"help": "installed packages whose .py files to train on too (without tests and vendored copies)"},
    )
    files: int | None = field(
        default=None, metadata={"help": "number of standard library files to train on, drawn at random (default: all)"}
    )
    minutes: float = field(default=90.0, metadata={"help": "wall-clock budget of the training loop"})
    tokens: float | None = field(default=None, metadata={"help": "budget in tokens, such as 40e6, instead of minutes"})
    save_steps: int = field(default=200, metadata={"help": "steps between saves of the model"})
    batch_size: int = 4
    sequence_length: int = 512
    muon_lr: float = field(default=0.02, metadata={"help": "peak learning rate of the matrices (Muon)"})
    adam_lr: float = field(default=3e-3, metadata={"help": "peak learning rate of embeddings and norms (AdamW)"})
    flat_fraction: float = field(default=0.4, metadata={"help": "share of the run before the linear decay starts"})
    bf16: bool = field(default=False, metadata={"help": "bfloat16 autocast (weights stay float32)"})
    compile: bool = field(default=False, metadata={"help": "torch.compile the training forward and backward"})
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name} {value}: expected at least {least}")
        if self.minutes <= 0:
            raise ValueError(f"--minutes {self.minutes:g}: expected a number above 0")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"--tokens {self.tokens:g}: give a number of tokens to train on, 40e6 say")
        if not 0 <= self.flat_fraction <= 1:
            raise ValueError(f"--flat_fraction {self.flat_fraction:g}: expected a share of the run, from 0 to 1")
        if self.head_dim % 2:
            raise ValueError(f"--head_dim {self.head_dim}: expected an even number, which rotary positions need")
        if not self.heads or self.heads % self.key_value_heads:
            raise ValueError(
                f"--hidden_size {self.hidden_size} --head_dim {self.head_dim}: gives {self.heads} heads, which share "
                "keys and values in pairs; expected an even number of them, 1 or 3"
            )

    @property
    def heads(self) -> int:
        """Attention heads of a new Llama."""
        return self.hidden_size // self.head_dim

    @property
    def key_value_heads(self) -> int:
        return max(1, self.heads // 2)
