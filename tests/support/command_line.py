"""The `specheads` program in this process, and a folder of checkpoints for it."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads.cli import program as cli
from specheads.models.convert import convert
from tests.support.tiny_models import tiny_llama

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def ship(folder, **options):
    """A folder as checkpoints/ is: a tiny random base with a byte tokenizer, and two heads for it. options: the base's
    own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|pad|>"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token=special[0], eos_token=special[0],
                                        pad_token=special[1])  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
    sizes = {"vocab_size": len(vocab), "num_hidden_layers": 4, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    base = tiny_llama(**sizes | options)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "base" / "held_out.txt").write_text("argparse.py\nast.py\nbase64.py\n", "utf8")
    base.name_or_path = str(folder / "base")
    convert(base, "medusa", num_heads=2).save_pretrained(folder / "medusa")
    convert(base, "eagle3", steps=2, norm_before_residual=False).save_pretrained(folder / "eagle3")
    return folder


def run(capsys, *args):
    """Exit code, stdout and stderr of one command in this process."""
    code = cli.run([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err
