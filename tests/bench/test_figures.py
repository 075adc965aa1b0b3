"""Figures of runs: intervals against brute force, rounds made by hand, the floor on a fake clock, the results' file."""

import errno
import os
import random

import pytest
import torch
from torch import nn

from benchmarks import bootstrap
from specheads.bench.figures import floor, intervals, samples
from specheads.bench.figures.results import Results
from specheads.bench.figures.samples import repeated
from specheads.bench.runner import Output, TimedRun
from tests.support.tiny_models import tiny_llama

# ----------------------------------------------------------------------------------------------------------- intervals


def brute_force(work, reference, drawn):
    """The 2.5th and 97.5th percentile of the ratio over the batches drawn, one at a time."""
    ratios = []
    for batches in drawn:
        own = sum(work[i][0] for i in batches) / sum(work[i][1] for i in batches)
        other = sum(reference[i][0] for i in batches) / sum(reference[i][1] for i in batches)
        ratios.append(own / other)
    ratios.sort()

    def percentile(share):
        position = share * (len(ratios) - 1)
        low = int(position)
        return ratios[low] + (position - low) * (ratios[min(low + 1, len(ratios) - 1)] - ratios[low])

    return percentile(0.025), percentile(0.975)


def random_work(rng, n, faster):
    return [(rng.randint(20, 90), rng.uniform(1, 2) / faster) for _ in range(n)]


def test_an_interval_is_the_percentiles_of_the_ratio_over_resampled_batches():
    rng = random.Random(3)
    work, reference = random_work(rng, 9, 2.0), random_work(rng, 9, 1.0)
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(9, (500, 9), generator=generator).tolist()
    found = intervals.ratio_interval(work, reference, resamples=500, seed=5)
    assert found == pytest.approx(brute_force(work, reference, drawn))
    assert found[0] < intervals.speed(work) / intervals.speed(reference) < found[1]
    assert found == intervals.ratio_interval(work, reference, resamples=500, seed=5)


def test_figures_of_one_batch_are_resampled_together():
    """Batches differ in difficulty tenfold, the ratio does not: an interval without pairs would be wide."""
    rng = random.Random(0)
    reference = [(64, rng.choice([0.1, 1.0])) for _ in range(20)]
    work = [(64, seconds / 2) for _, seconds in reference]
    assert intervals.ratio_interval(work, reference) == pytest.approx((2.0, 2.0))


def test_95_percent_intervals_hold_the_true_ratio_about_as_often():
    """Of 200 samples of 40 batches; at a true coverage of 94 % a false alarm has a probability below 1e-4."""
    rng = random.Random(1)
    held = 0
    for seed in range(200):
        work = [(64, rng.lognormvariate(0, 0.3)) for _ in range(40)]
        reference = [(64, rng.lognormvariate(0.5, 0.3)) for _ in range(40)]
        low, high = intervals.ratio_interval(work, reference, resamples=400, seed=seed)
        held += low <= 2.718281828**0.5 <= high
    assert 0.86 * 200 < held <= 0.995 * 200


def test_one_batch_has_no_interval_and_other_batches_are_refused():
    assert intervals.ratio_interval([(1, 1)], [(1, 2)]) is None
    with pytest.raises(ValueError, match="2 prompt batches beside 1"):
        intervals.ratio_interval([(1, 1)] * 2, [(1, 2)])


def test_95_percent_intervals_of_a_median_hold_it_about_as_often():
    """Of 200 samples of 40; at a true coverage of 94 % a false alarm has a probability below 1e-4."""
    rng = random.Random(2)
    held = 0
    for seed in range(200):
        low, high = bootstrap.median_interval([rng.lognormvariate(0, 0.5) for _ in range(40)], resamples=400, seed=seed)
        held += low <= 1 <= high
    assert 0.86 * 200 < held <= 0.995 * 200
    assert bootstrap.median_interval([3.0]) is None and bootstrap.median_interval([3.0] * 5) == (3.0, 3.0)


def crossed_work(coin, seeds=12, prompts=30, gain=0.0):
    """(seeds, prompts, 2): steps, and tokens of which each step has 3 and what is particular to the seed and prompt."""
    of_seed, of_prompt = (
        0.3 * torch.randn(shape, generator=coin, dtype=torch.float64) for shape in ((seeds, 1), (1, prompts))
    )
    steps = torch.full((seeds, prompts), 20.0, dtype=torch.float64)
    return torch.stack([(3 + gain + of_seed + of_prompt) * steps, steps], -1)


def test_95_percent_intervals_over_seeds_and_prompts_hold_the_true_length_about_as_often():
    """Of 200 samples of 12 seeds and 30 prompts. Intervals hold the length in 92.4 % (of 2,000 samples); at
    that coverage a false alarm has a probability below 1e-4."""
    coin, held = torch.Generator().manual_seed(4), 0
    for seed in range(200):
        low, high = bootstrap.crossed_interval(crossed_work(coin), resamples=400, seed=seed)
        held += low <= 3 <= high
    assert 0.84 * 200 < held <= 0.985 * 200


def test_a_difference_is_of_the_same_seeds_and_prompts():
    """Prompts and seeds differ, the gain does not: an interval without pairs would be wide."""
    reference = crossed_work(torch.Generator().manual_seed(0), seeds=3)
    own = crossed_work(torch.Generator().manual_seed(0), seeds=3, gain=0.25)
    assert bootstrap.crossed_interval(own, reference) == pytest.approx((0.25, 0.25))
    assert bootstrap.crossed_interval(own[:1], reference[:1]) is None
    with pytest.raises(ValueError, match="beside"):
        bootstrap.crossed_interval(own, reference[:2])


# ------------------------------------------------------------------------------------------------------------- figures


def one_sample(seconds, gains, **other):
    given = {"prefill": None, "parts": {}, "differs_at": [None] * len(gains)}
    return {"seconds": seconds, "tokens": [sum(row) for row in gains], "gains": gains, **given, **other}


def one_round(index, repeat=0, categories=("a",), **decoders):
    return {"index": index, "repeat": repeat, "categories": list(categories), "decoders": decoders}


def test_a_batch_counts_with_its_median_over_repeats():
    rounds = [
        one_round(0, repeat, ours=one_sample(s, [[1, 3]]), theirs=one_sample(8.0, [[1, 1, 1, 1]]))
        for repeat, s in enumerate([2.0, 40.0, 4.0])
    ]
    found = samples.figures(rounds, "ours", "theirs")
    assert found["tokens_per_second"] == pytest.approx(1.0) and found["speed_up"] == pytest.approx(2.0)
    assert found["texts"] == 1 and found["same_text"] == 1 and found["speed_up_interval"] is None


def test_speed_is_all_tokens_over_all_seconds():
    rounds = [
        one_round(0, ours=one_sample(1.0, [[8]]), theirs=one_sample(2.0, [[8]])),
        one_round(1, ours=one_sample(3.0, [[4]]), theirs=one_sample(6.0, [[4]])),
    ]
    found = samples.figures(rounds, "ours", "theirs")
    assert found["tokens_per_second"] == pytest.approx(12 / 4)
    assert found["speed_up_interval"] == pytest.approx((2.0, 2.0))


def test_accepted_length_by_depth_category_and_position_leaves_the_prefill_out():
    # Steps begin at 1, 61 and 71 in row 0, at 1 and 3 in row 1; the second range of positions begins at 64.
    rounds = [one_round(0, categories=("math", None), ours=one_sample(1.0, [[1, 60, 10, 2], [1, 2, 1]]))]
    found = samples.accepted(rounds, "ours")
    assert found["accepted_length"] == pytest.approx(75 / 5)
    assert found["accepted_by_depth"][:2] == pytest.approx([4 / 5, 2 / 5])
    assert found["accepted_by_category"] == {"math": pytest.approx(24.0)}
    assert found["accepted_by_position"] == {"0": pytest.approx(73 / 4), "64": 2.0}


def test_a_step_that_ends_with_a_draft_counts_at_the_depth_of_that_draft():
    """The second step of the first row ends its text with its second draft; all others end with the base's token."""
    ours = one_sample(1.0, [[1, 3, 2], [1, 1]], accepted=[[0, 2, 2], [0, 0]])
    assert samples.accepted([one_round(0, categories=("a", "b"), ours=ours)], "ours")[
        "accepted_by_depth"
    ] == pytest.approx([2 / 3, 2 / 3])


def test_a_decoder_that_only_counts_steps_has_an_accepted_length_alone():
    counted = {"seconds": 1.0, "tokens": [9], "gains": [], "gained": 8, "rows_stepped": 4}
    found = samples.accepted([one_round(0, peer=counted)], "peer")
    assert found["accepted_length"] == 2 and found["accepted_by_depth"] is None
    assert samples.accepted([one_round(0, peer={**one_sample(1.0, []), "tokens": [9]})], "peer") == {
        "accepted_length": None, "accepted_drafts": None, "accepted_by_depth": None, "accepted_by_category": None,
        "accepted_by_position": None, "accepted_nodes": None,
    }  # fmt: skip


def test_time_is_split_into_shares_of_the_whole_and_a_step_leaves_the_prefill_out():
    parts = {"draft": 1.0, "verify": 4.0, "accept": 0.5, "other": 2.5}
    rounds = [
        one_round(0, ours=one_sample(10.0, [[1, 2, 2, 2], [1, 2]], parts=parts, prefill=2.0, differs_at=[None, 3]))
    ]
    found = samples.figures(rounds, "ours", "ours")
    assert found["shares"] == {"prefill": 0.2, "draft": 0.1, "verify": 0.4, "accept": 0.05, "other": 0.25}
    assert found["step_seconds"] == pytest.approx(8 / 3) and found["verify_seconds"] == pytest.approx(4 / 3)
    assert found["same_text"] == 1 and found["texts"] == 1
    compiled = one_sample(10.0, [[1, 2, 2]], parts={"draft": 0.0, "verify": 1.0, "step": 7.0}, prefill=2.0)
    found = samples.time_split([compiled])
    assert found["shares"]["step"] == 0.7 and found["step_seconds"] == 4 and found["verify_seconds"] is None


def test_a_step_is_one_of_a_whole_batch_and_not_of_the_fewer_rows_that_are_left():
    parts = {"verify": 6.0}
    whole = [one_sample(seconds, [[1, 1, 1]] * 4, parts=parts, prefill=2.0) for seconds in (10.0, 14.0)]
    rest = [one_sample(4.0, [[1, 1, 1]], parts={"verify": 1.0}, prefill=2.0)] * 2
    found = samples.time_split([*whole, *rest])
    assert found["step_seconds"] == 5 and found["verify_seconds"] == 3
    # transformers reports its steps where there is one row alone
    unknown = {**one_sample(9.0, []), "tokens": [3] * 4}
    found = samples.time_split([unknown, one_sample(3.0, [[1, 1, 1]], prefill=1.0)])
    assert found["step_seconds"] is None


def test_a_sample_keeps_what_figures_need_and_compares_texts():
    output = Output([[5, 6, 7]], {"gained": 2, "rows_stepped": 1}, [[1, 2]], {"prefill": 0.5, "verify": 1.0})
    kept = samples.sample(TimedRun(output, 2.0), TimedRun(Output([[5, 9, 7]]), 1.0))
    assert kept == {
        "seconds": 2.0, "tokens": [3], "gains": [[1, 2]], "prefill": 0.5, "parts": {"verify": 1.0}, "differs_at": [1],
        "gained": 2, "rows_stepped": 1,
    }  # fmt: skip
    watched = samples.sample(TimedRun(Output([[5, 6]]), 2.0, ((1, 0.7), (1, 0.3))))
    assert watched["gains"] == [[1, 1]] and watched["prefill"] == 0.7 and watched["differs_at"] is None


# --------------------------------------------------------------------------------------------------------------- floor


def test_a_pass_reads_each_weight_once_and_an_input_embedding_only_if_it_is_the_output_matrix():
    sizes = {"tie_word_embeddings": False}
    base, tied = tiny_llama(**sizes), tiny_llama(tie_word_embeddings=True)
    embeddings = base.get_input_embeddings().weight.numel()
    assert floor.weight_bytes(base) == 4 * (sum(p.numel() for p in base.parameters()) - embeddings)
    assert floor.weight_bytes(tied) == 4 * sum(p.numel() for p in tied.parameters())
    assert floor.weight_bytes(nn.Linear(8, 4, bias=False).bfloat16()) == 2 * 32


def test_bandwidth_is_of_the_fastest_read_after_the_first():
    times = iter([0.0, 1e-9, 1.0, 1.4, 2.0, 2.2, 3.0, 3.3])
    found = floor.read_bandwidth(4096 * 16, torch.device("cpu"), repeats=3, clock=lambda: next(times))
    assert found == pytest.approx(4096 * 16 / 0.2)
    assert floor.Floor(1000, 500.0).seconds == 2 and floor.Floor(1000, 500.0).to_dict()["seconds"] == 2


# ------------------------------------------------------------------------------------------------------------- results


def test_a_torn_last_line_is_dropped_and_a_strange_file_refused(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results = Results(path)
    results.add("a", {"x": 1})
    with open(path, "ab") as file:
        file.write(b'{"key": "b", "ro')
    again = Results(path)
    assert again.rows == {"a": {"x": 1}} and path.read_text("utf8").count("\n") == 1
    again.add("c", {"x": 2})
    assert Results(path).rows == {"a": {"x": 1}, "c": {"x": 2}}
    path.write_text('{"a": 1}\n', "utf8")
    with pytest.raises(ValueError, match="line 1 is no result of bench"):
        Results(path)


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path, monkeypatch):
    path, write, room = tmp_path / "results.jsonl", os.write, [9]

    def nearly_full(file, data):
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop()])

    results = Results(path)
    results.add("a", {"x": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match=r"No space left on device.*results\.jsonl"):
            results.add("b", {"x": 2})
    results.add("c", {"x": 3})
    assert results.rows == Results(path).rows == {"a": {"x": 1}, "c": {"x": 3}}


# ------------------------------------------------------------------------------------------- new and repeated text


def test_a_token_is_repeated_if_the_tokens_that_end_with_it_came_before():
    assert repeated([1, 2, 3, 1, 2, 3, 1], gram=3) == [False] * 5 + [True, True]
    assert not any(repeated([1, 1, 2, 2, 3, 3], gram=3))
    assert repeated([7, 7, 7, 7, 7], gram=3) == [False, False, False, True, True]  # overlapping counts


def watched(tokens, seconds, per_step=1):
    """A sample of these tokens, `per_step` at a time; seconds: of each step."""
    sizes = [min(per_step, len(tokens) - start) for start in range(0, len(tokens), per_step)]
    return samples.sample(TimedRun(Output([tokens]), sum(seconds), tuple(zip(sizes, seconds, strict=True))))


def test_new_and_repeated_text_have_ratios_of_their_own():
    tokens = [*range(8), *range(8), 50, 51]  # only the sixteenth completes 8 tokens that occurred before
    own, other = watched(tokens, [1.0] * 15 + [0.5] + [1.0] * 2), watched(tokens, [2.0] * 18)
    found = samples.by_text([one_round(0, ours=own, theirs=other)], "ours", "theirs")
    assert found["unrepeated"] == {
        "share": 17 / 18, "tokens_per_second": 1.0, "speed_up": 2.0, "accepted_length": 1.0,
    }  # fmt: skip
    assert found["repeated"] == {"share": 1 / 18, "tokens_per_second": 2.0, "speed_up": 4.0, "accepted_length": 1.0}
    assert samples.by_text([one_round(0, a=one_sample(1.0, [[1]]), b=one_sample(1.0, [[1]]))], "a", "b") is None


def test_on_new_and_repeated_text_too_a_batch_counts_with_its_median_over_repeats():
    tokens = [*range(8), *range(8), 50, 51]
    rounds = [
        one_round(index, repeat, ours=watched(tokens, [second] * 18), theirs=watched(tokens, [4.0] * 18))
        for index, seconds in enumerate([(1.0, 40.0, 2.0), (4.0, 6.0, 30.0)])
        for repeat, second in enumerate(seconds)
    ]
    for part in samples.by_text(rounds, "ours", "theirs").values():  # 2 and 6 seconds a step
        assert part["tokens_per_second"] == pytest.approx(2 / 8) and part["speed_up"] == pytest.approx(1.0)


def test_new_and_repeated_text_add_up_to_the_whole_run():
    tokens = [1, 2] * 12
    own = watched(tokens, [1.0] * 6, per_step=4)
    found = samples.by_text([one_round(0, ours=own)], "ours", "ours")
    assert sum(part["share"] * len(tokens) / part["tokens_per_second"] for part in found.values()) == pytest.approx(6)
    assert found["repeated"]["accepted_length"] == 4


def test_text_that_repeats_itself_in_one_decoder_alone_has_a_speed_and_no_ratio():
    own, other = watched([5] * 10, [1.0] * 10), watched([*range(10)], [1.0] * 10)
    found = samples.by_text([one_round(0, ours=own, theirs=other)], "ours", "theirs")
    assert found["repeated"]["tokens_per_second"] == 1 and found["repeated"]["speed_up"] is None
    assert list(samples.by_text([one_round(0, ours=own, theirs=other)], "theirs", "ours")) == ["unrepeated"]
