"""MaG drafts what its published steps say, and its bigram table is counted, saved and checked as its format says."""

import json
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from specheads import MaxGram
from specheads.data.corpus import checkpoints_dir
from specheads.decoding.drafters.maxgram import count_bigrams, load_bigrams, save_bigrams
from specheads.decoding.generation.generate import generate
from tests.reference.published_maxgram import published
from tests.support.drafter_context import context
from tests.support.random_rows import random_row
from tests.support.tiny_models import tiny_llama
from train import bigram as command


def test_it_drafts_what_the_published_steps_draft():
    for alphabet in [1, 2, 3, 8, 40]:
        rng = random.Random(alphabet)
        bigrams = [rng.randrange(alphabet) if rng.random() < 0.8 else 0 for _ in range(alphabet)]
        bare, tabled = MaxGram(), MaxGram(bigrams=bigrams)
        target = SimpleNamespace(vocab_size=alphabet)
        short = 0
        for _ in range(40):
            row = random_row(rng, alphabet, rng.randint(1, 30))
            own = [drafter.paths(context([row], target=target), 10)[0][0] for drafter in (tabled, bare)]
            assert own == [published(row, 10, bigrams), published(row, 10, [0] * alphabet)]
            short += len(own[0]) < 10
        assert short or alphabet < 40, "no draft ran into an unknown id"


def test_the_rows_of_a_batch_are_searched_each_on_its_own():
    rows = [[1, 2, 3, 1, 2], [4], [5, 5]]
    assert MaxGram().paths(context(rows), 3) == [[[3, 1, 2]], [[]], [[5, 5, 5]]]


def test_a_table_for_another_vocabulary_is_refused_before_anything_is_drafted(base):
    with pytest.raises(ValueError, match=r"3.*97"):
        generate(base, torch.tensor([[5]]), draft=MaxGram(bigrams=[0, 1, 2]), max_new_tokens=4, eos_token_id=97)


def test_a_tree_is_refused():
    with pytest.raises(ValueError, match="width=2, but it knows one follower only"):
        MaxGram(width=2)


# --- The bigram table ---


def test_the_table_holds_the_most_frequent_followers():
    rng = random.Random(0)
    rows = [[rng.randrange(12) for _ in range(rng.randint(0, 40))] for _ in range(20)]
    table = count_bigrams(rows, 14)
    for token in range(14):
        after = [b for row in rows for a, b in pairwise(row) if a == token]
        best = max(map(after.count, after), default=0)
        assert table[token] == (min(b for b in after if after.count(b) == best) if after else 0)
    assert table[12:] == [0, 0]


def test_ids_outside_the_vocabulary_are_refused():
    for row, worst in (([1, 5], 5), ([-1, 2], -1)):
        with pytest.raises(ValueError, match=f"id {worst} is outside vocab_size=5"):
            count_bigrams([row], 5)


def test_a_saved_table_is_a_json_list_that_loads_again(tmp_path):
    path = tmp_path / "new" / "bigram.json"
    save_bigrams([2, 0, 1], path)
    assert json.loads(path.read_text()) == [2, 0, 1]
    assert load_bigrams(path, 3) == (2, 0, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "has 2 entries, but the vocabulary 3 ids"),
        ("[1, 2, 3]", "has 3 at index 2: expected an id from 0 to 2"),
        ("[1, 2, -1]", "has -1 at index 2"),
        ("[1, 2, 1.5]", "has 1.5 at index 2"),
        ("[1, true, 0]", "has True at index 1"),
        ('{"a": 1}', "is a dict: expected a list, one id for each id"),
        ("[1, 2", "is not JSON"),
    ],
)
def test_a_file_that_is_no_table_of_the_vocabulary_is_refused(tmp_path, content, message):
    path = tmp_path / "bigram.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_bigrams(path, 3)


def test_the_command_counts_a_corpus(tmp_path, capsys):
    base = checkpoints_dir() / "base"
    rows = ["def f(x):\n    return x\n" * 3, "import os\nimport sys\n"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    output = tmp_path / "bigram.json"
    assert command.main(["--base", str(base), "--source", str(tmp_path / "rows.jsonl"), "--output", str(output)]) == 0
    table = load_bigrams(output, 4096)
    known = sum(map(bool, table))
    assert 5 < known < 50
    assert f"a follower for {known} of 4096 tokens" in capsys.readouterr().out
    assert command.main(["--base", str(base), "--source", "no.txt", "--output", str(output)]) == 2
    assert capsys.readouterr().err.startswith("train/bigram.py: no file 'no.txt'")
    assert command.main(["--base", str(base), "--source", "no.txt", "--output", str(tmp_path)]) == 2  # before it counts
    assert capsys.readouterr().err == f"train/bigram.py: --output {tmp_path} is a folder: give a file\n"


def test_a_drafter_with_the_table_drafts_after_ids_never_seen():
    base = tiny_llama()
    bigrams = [(token + 1) % 97 for token in range(97)]
    ids = torch.tensor([[5, 9]])
    out = generate(
        base, ids, draft=MaxGram(3, bigrams=bigrams), do_sample=False, max_new_tokens=6, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, base.generate(ids, do_sample=False, max_new_tokens=6))
    assert out.steps[1].drafted == [3]
