"""Tiny encoder-decoders on disk, each with a tokenizer of bytes that ends a source as T5's does."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.support.seq2seq_models import tiny_bart, tiny_t5

SPECIAL = ["<pad>", "</s>"]
IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "bos_token_id": 0}


def byte_tokenizer():
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    of_bytes = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    of_bytes.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="</s>", pad_token="<pad>")


def save(model, folder):
    """The model and the tokenizer, in a folder that is returned."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def t5(seed=1, **options):
    return tiny_t5(seed, **{"vocab_size": len(byte_tokenizer()), **IDS, **options})


def bart(seed=1, **options):
    return tiny_bart(seed, **{"vocab_size": len(byte_tokenizer()), "max_position_embeddings": 256, **IDS, **options})
