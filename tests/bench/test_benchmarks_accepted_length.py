"""benchmarks/accepted_length.py refuses numbers that measure nothing before a head is loaded."""

import pytest

from benchmarks import accepted_length


@pytest.mark.parametrize("option", ["--num-prompts", "--max-new-tokens"])
def test_no_prompts_or_tokens_are_one_line(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        accepted_length.main(["nowhere", option, "0"])
    assert stopped.value.code == 2 and f"{option} 0: expected at least 1" in capsys.readouterr().err
