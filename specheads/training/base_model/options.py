"""What a base model is trained with, as train/base_model.py takes it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Options:
    output_dir: str = field(metadata={"help": "where the model, tokenizer, held_out.txt and training.json go"})
    init: str | None = field(default=None, metadata={"help": "continue from this saved model instead of from scratch"})
    teacher: str | None = field(default=None, metadata={"help": "learn this saved model's output (same tokenizer)"})
    config: str | None = field(
        default=None, metadata={"help": "config.json of what to train from scratch instead of a Llama, of any class"}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "use this saved tokenizer instead of training one"})
    layers: int | None = field(
        default=None,
        metadata={
            "help": "number of layers (default: 8, or those of --init, which is deepened or thinned out to others)"
        },
    )
    hidden_size: int = 256
    intermediate_size: int = 704
    head_dim: int = 64
    vocab_size: int = 4096
    data: list[str] = field(
        default_factory=list, metadata={"help": "files, and folders of .py files, to train on beside the library"}
    )
    packages: list[str] = field(
        default_factory=list,
        metadata={"help": "installed packages whose own .py files to train on too (their tests and copies left out)"},
    )
    files: int | None = field(
        default=None, metadata={"help": "train on so many files of the library, drawn at random (default: all)"}
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
