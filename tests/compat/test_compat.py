"""specheads.compat: ModelOpt's names, and CS Drafting's bigram files."""

import json

import pytest
import torch

import specheads
from specheads import compat
from tests.support.tiny_models import tiny_llama


def test_a_bigram_file_of_another_vocabulary_is_refused(tmp_path):
    (tmp_path / "bigrams.json").write_text(json.dumps([0] * 96))
    mag = compat.get_mag_model(tmp_path / "bigrams.json").cuda(0)
    with pytest.raises(ValueError, match="has 96 entries"):
        specheads.generate(tiny_llama(num_hidden_layers=1), torch.tensor([[27, 42]]), drafter=mag, max_new_tokens=4)
