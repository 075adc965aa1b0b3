"""romsto's debug lines: accepted and rejected drafts, texts without drafts, and the candidates of a beam search."""

import re

import pytest
import torch

from specheads import compat
from tests.reference.greedy_replay import NEW, PROMPT, greedy_draft

TOKENS = {"accepted": r"\{\+([\d ]+)\+\}", "rejected": r"\[-([\d ]+)-\]"}


def printed(out):
    """Of each line its accepted, rejected and own tokens."""

    def numbers(text):
        return [int(token) for token in text.split()]

    rows = []
    for line in out.splitlines():
        parts = line.split(":", 1)[1]
        found = {name: re.findall(TOKENS[name], parts) for name in ("accepted", "rejected")}
        rest = re.sub("|".join((TOKENS["accepted"], TOKENS["rejected"])), "", parts)
        rows.append((*(numbers(" ".join(found[name])) for name in ("accepted", "rejected")), numbers(rest)))
    return rows


def test_debug_shows_accepted_and_rejected_drafts_and_the_targets_own(target, small, capsys):
    options = {"max_gen_len": NEW, "eos_tokens_id": []}
    ids, alpha = compat.speculative_generate(PROMPT, small, target, gamma=4, debug=True, **options)
    rows, text, draft = printed(capsys.readouterr().out), [], greedy_draft(small)
    for number, (accepted, rejected, own) in enumerate(rows):
        assert number == 0 or accepted + rejected == draft(PROMPT + text, min(4, NEW - len(text) - 1))
        assert len(own) == 1
        text += accepted + own
    assert text == ids
    kept, lost = (sum(len(row[i]) for row in rows) for i in (0, 1))
    assert kept and lost and alpha == kept / (kept + lost)

    storage = compat.NGramStorage(3, 97)
    ids, alpha = compat.ngram_assisted_speculative_generate(PROMPT * 3, storage, target, debug=True, **options)
    rows = printed(capsys.readouterr().out)
    assert [token for accepted, _, own in rows for token in accepted + own] == ids and any(row[1] for row in rows)


def test_debug_shows_a_text_without_drafts_and_its_end_token(target, capsys):
    end = target.plain[5]
    ids = compat.autoregressive_generate(PROMPT, target, NEW, end_tokens_id=end, debug=True)
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows == [f"token {i}: {token}" for i, token in enumerate(ids)]
    assert last == f"end token {end} found at position {len(ids) - 1}"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_debug_colours_on_a_terminal(no_color, target, small, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    compat.speculative_generate(PROMPT, small, target, gamma=4, max_gen_len=NEW, eos_tokens_id=[], debug=True)
    out = capsys.readouterr().out
    for code in ("\x1b[32m", "\x1b[9;31m", "\x1b[34m"):  # green, red, blue
        assert (code in out) is not bool(no_color)
    assert ("[-" in out) is bool(no_color)


def test_debug_shows_the_candidates_of_each_step_of_a_beam_search(target, capsys):
    options = {"max_gen_len": 5, "num_beams": 3, "top_k": 2, "min_length": 2.0, "alpha": 0.7, "end_tokens_id": []}
    found = compat.beam_search_generate(PROMPT, target, debug=True, **options)
    steps = capsys.readouterr().out.split("candidates for token ")[1:]
    assert len(steps) == len(found) == 5
    for length, step in enumerate(steps, 1):
        rows = [line.split() for line in step.splitlines()[1:]]
        scores = [float(row[1]) for row in rows]
        assert len(rows) == (3 if length == 1 else 6) and scores == sorted(scores, reverse=True)
        for _, score, *text in rows:
            ids = torch.tensor([PROMPT + [int(token) for token in text]])
            with torch.no_grad():
                log_p = target(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            total = log_p.gather(1, ids[0, len(PROMPT) :].unsqueeze(1)).sum()
            assert float(score) == pytest.approx(float(total) / ((2 + length) / 3) ** 0.7, abs=2e-3)
    assert [int(token) for token in rows[0][2:]] == found
