"""Two byte-level tokenizers of unlike vocabularies, and a text that both spell."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "Ġ"  # what byte-level tokenizers call it


TEXT = "the cat sat on the mat and the rat sat on the cat in a café on the mat and on a hat "


def toy_tokenizer(specials, letters, merges):
    """A byte-level BPE tokenizer: these letters first, then all other bytes, then the merges."""
    every = [*letters, *sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(letters))]
    words = [*specials, *every, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    pad, bos, eos = specials
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


MERGES = [("t", "h"), ("th", "e"), (SPACE, "the"), ("a", "t"), (SPACE, "s"), (f"{SPACE}s", "at"), ("o", "n")]


TARGET = toy_tokenizer(["<pad>", "<s>", "</s>"], [SPACE, *string.ascii_lowercase], MERGES)


OWN = toy_tokenizer(
    ["[PAD]", "[BOS]", "[EOS]"], [*reversed(string.ascii_lowercase), SPACE], [("c", "at"), ("a", "t")][::-1]
)
