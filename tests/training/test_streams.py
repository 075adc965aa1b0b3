"""Runs over rows of unknown number: steps that go on after the last row with the first, and resume in any pass."""

import pytest
from torch.utils.data import IterableDataset

from tests.support.trainers import logged, model_of, rows, same, trainer_of, weights


def stream(count, **shuffled):
    data = rows(count).to_iterable_dataset()
    return data.shuffle(**shuffled) if shuffled else data


@pytest.mark.parametrize(("count", "accumulated"), [(5, 2), (7, 3), (1, 3)])
def test_a_step_takes_as_many_rows_at_the_end_of_a_stream_as_anywhere(count, accumulated, tmp_path):
    options = {"gradient_accumulation_steps": accumulated, "max_steps": 5}
    endless = trainer_of(tmp_path, data=stream(count), **options)
    endless.train()
    repeated = list(rows(count)) * 30
    listed = trainer_of(tmp_path, data=repeated, train_sampling_strategy="sequential", **options)
    listed.train()
    assert same(weights(endless.model), weights(listed.model))
    assert logged(endless, "tokens_seen", "loss") == logged(listed, "tokens_seen", "loss")


def test_a_run_over_a_stream_resumes_in_any_pass_with_the_order_of_that_pass(tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    data = {"seed": 3, "buffer_size": 4}
    whole = trainer_of(tmp_path, data=stream(7, **data), **options)
    whole.train()
    for saved in (1, 3, 5):
        resumed = trainer_of(tmp_path, model_of(seed=9), data=stream(7, **data), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
        assert same(weights(resumed.model), weights(whole.model))
        assert logged(resumed) == logged(whole)


class Once(IterableDataset):
    """Rows that can be read a single time."""

    def __init__(self, count):
        self.left = iter(rows(count))

    def __iter__(self):
        return self.left


def test_a_stream_that_can_be_read_once_is_enough_for_its_rows_and_no_more(tmp_path):
    assert trainer_of(tmp_path, data=Once(4), max_steps=2).train().global_step == 2
    with pytest.raises(ValueError, match=r"ended after 5, before the last step, .* give a stream that begins anew"):
        trainer_of(tmp_path, data=Once(5), max_steps=4).train()
