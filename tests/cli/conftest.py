"""Fixtures that tests of several commands share."""

import pytest
from transformers import AutoTokenizer

from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def small(shipped, tmp_path_factory):
    """A smaller model with the shipped base's tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = AutoTokenizer.from_pretrained(shipped / "base")
    tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=0, bos_token_id=0).save_pretrained(folder)
    return folder
