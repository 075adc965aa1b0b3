"""specheads.compat.csd: its arguments, and the target's own greedy text whatever the cascade."""

import pytest
import torch
from conftest import tiny_llama
from test_draft_model import near

from specheads import MaxGram, compat

IDS = torch.tensor([[27, 42, 22, 85, 13, 36]])
NEW = 20


@pytest.fixture(scope="module")
def models():
    """Target, and two drafts, the larger nearer to it."""
    target = tiny_llama(num_hidden_layers=3)
    drafts = [compat.CSDraftingDecoderModel(near(target, noise), name=f"{noise}") for noise in (0.02, 0.05)]
    target.generation_config.update(repetition_penalty=1.9, do_sample=True)
    return compat.CSDraftingDecoderModel(target, name="llama", vocab_size=97), drafts


def greedy(target, **options):
    return target.generate(
        IDS, **{"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.0, "eos_token_id": 2, **options}
    )


@pytest.mark.parametrize("leniency", [1, 5])
@pytest.mark.parametrize(
    "k_matrix", [torch.tensor([[3, 2, 6], [0, 2, 6], [0, 0, 6]]), [[2, 1, 1], [0, 1, 1], [0, 0, 1]]]
)
def test_a_cascade_writes_the_targets_own_text(models, k_matrix, leniency, tmp_path):
    target, drafts = models
    (tmp_path / "bigrams.json").write_text(str([0] * 97))
    mag = compat.get_mag_model(tmp_path / "bigrams.json", True)
    mag.cuda(0)
    out = compat.csd([*drafts, mag], target, IDS, IDS, k_matrix, max_length=NEW, leniency=leniency)
    assert torch.equal(out, greedy(target))


def test_the_text_ends_at_its_end_token_and_at_max_length(models):
    target, drafts = models
    plain = greedy(target)
    end = int(plain[0, IDS.shape[1] + 7])
    first = plain[0, IDS.shape[1] :].tolist().index(end)
    before, target.generation_config.eos_token_id = target.generation_config.eos_token_id, end
    out = compat.csd([drafts[0], MaxGram()], target, IDS, IDS, [[5, 10], [0, 10]], max_length=NEW)
    target.generation_config.eos_token_id = before
    assert torch.equal(out, plain[:, : IDS.shape[1] + first + 1])
    for length in (1, 3):
        out = compat.csd([drafts[0], MaxGram()], target, IDS, IDS, [[5, 10], [0, 10]], max_length=length)
        assert torch.equal(out, plain[:, : IDS.shape[1] + length])


def test_a_k_matrix_that_does_not_fit_is_refused(models):
    target, drafts = models
    with pytest.raises(ValueError, match="k-matrix has rows"):
        compat.csd([*drafts, MaxGram()], target, IDS, IDS, torch.tensor([[5, 10], [0, 10]]))
