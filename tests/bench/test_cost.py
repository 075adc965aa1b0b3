"""What the reviews of a cascade cost: published figures by the names of models, and measured ones."""

import pytest

from specheads.bench.cost import measured, published, walltime_improvement
from tests.support.tiny_models import tiny_llama

T5_BY_SIZE, T5_BY_WORK = [[5, 14, 10], [0, 1, 10], [0, 0, 10]], [[5, 8, 10], [0, 1, 10], [0, 0, 10]]


def test_published_costs_go_by_the_names_of_models():
    names = ["google/flan-t5-xxl", "google/flan-t5-base", "google/flan-t5-small", None]
    assert published("previous_work", names) == [1, 0.04, 0.02, 0]
    assert published("model_parameters", ["t5-xl", "JackFram/llama-68m", "Llama-2-7b-hf"]) == [3000, 68, 7000]
    with pytest.raises(ValueError, match="cost_model='flops' is none of model_parameters, previous_work; measured"):
        published("flops", names)
    with pytest.raises(ValueError, match="'previous_work' knows no model 'gpt2'; it goes by xxl, large, base, small"):
        published("previous_work", ["gpt2"])
    with pytest.raises(ValueError, match="finds base and 7b in the name 'mistral-7b-base'"):
        published("model_parameters", ["mistral-7b-base"])


def test_measured_costs_are_the_median_seconds_of_a_pass():
    time = iter(range(1000))
    models = [tiny_llama(num_hidden_layers=1), None, tiny_llama(num_hidden_layers=2)]
    assert measured(models, repeats=3, clock=lambda: float(next(time))) == [1, 0, 1]
    small, large = measured([tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=12)], repeats=5)
    assert large > 2 * small > 0
    assert walltime_improvement(10, [4, 8, 0], [2.0, 0.5, 0.0]) == 10 * 2 / 12
    with pytest.raises(ValueError, match="2 counts of reviews but 1 costs"):
        walltime_improvement(10, [4, 8], [2.0])
    with pytest.raises(ValueError, match="come to nothing, so there is no SWI"):
        walltime_improvement(10, [0], [2.0])
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        measured(models, repeats=0)
