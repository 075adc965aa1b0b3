"""specheads.compat: a model's own generation config, ModelOpt's names, and CS Drafting's bigram files."""

import json

import pytest
import torch

import specheads
from specheads import compat
from tests.support.tiny_models import near, tiny_llama

IDS, NEW = torch.tensor([[27, 42, 22]]), 6
TEXTS = {
    "autoregressive": lambda base, small: compat.autoregressive_generate([27, 42, 22], base, NEW, eos_tokens_id=[]),
    "speculative": lambda base, small: compat.speculative_generate(
        [27, 42, 22], small, base, max_gen_len=NEW, eos_tokens_id=[]
    ),
    "beams": lambda base, small: compat.beam_search_generate([27, 42, 22], base, NEW, eos_tokens_id=[]),
    "csd": lambda base, small: compat.csd([small], base, IDS, IDS, [[2]], NEW).tolist(),
    "notebook": lambda base, small: compat.speculative_decode(IDS, NEW, target=base, drafter=small)[0].tolist(),
}  # fmt: skip
# What generate() with drafts refuses, or answers with several texts a prompt.
OWN_OPTIONS = {
    "stop_strings": ["a"], "token_healing": True, "output_hidden_states": True, "output_attentions": True,
    "dola_layers": "low", "force_words_ids": [[5]], "num_return_sequences": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_no_option_of_the_models_own_generation_config_counts(name):
    base = tiny_llama(num_hidden_layers=2)
    small = near(base)
    plain = TEXTS[name](base, small)
    for option, value in OWN_OPTIONS.items():
        base.generation_config.update(do_sample=True, **{option: value})
        assert TEXTS[name](base, small) == plain, option
        base.generation_config.update(do_sample=None, **{option: None})


def test_a_bigram_file_of_another_vocabulary_is_refused(tmp_path):
    (tmp_path / "bigrams.json").write_text(json.dumps([0] * 96))
    mag = compat.get_mag_model(tmp_path / "bigrams.json").cuda(0)
    with pytest.raises(ValueError, match="has 96 entries"):
        specheads.generate(tiny_llama(num_hidden_layers=1), torch.tensor([[27, 42]]), draft=mag, max_new_tokens=4)
