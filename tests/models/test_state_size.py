"""What recurrent states are said to take is what the caches hold."""

import pytest
import torch
from transformers import AutoConfig

from specheads import Target
from specheads.decoding.planner import chain
from specheads.decoding.planner.static import parallel_chains
from specheads.decoding.tree import DraftTree
from specheads.models.base.state_size import state_size
from specheads.models.convert import convert
from tests.support.command_line import run
from tests.support.families import FAMILIES, RECURRENT, build


def bytes_held(target):
    """Of all tensors in which recurrent layers hold a state, each storage once."""
    held = {}
    for layer in target.cache.recurrent.layers:
        cell = layer.cell
        tensors = [*cell.conv_states.values(), *cell.recurrent_states.values()]
        for state in (layer.committed, layer.after, layer.level):
            tensors += state or []
        for tensor in filter(lambda tensor: tensor is not None, tensors):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", RECURRENT)
def test_the_size_is_that_of_the_states_of_a_prompt(family):
    base = build(*RECURRENT[family])
    target = Target(base, scratch=4)
    target.prefill(torch.randint(3, 97, (2, 9)), torch.tensor([9, 9]), room=8)
    committed = sum(t.nbytes for layer in target.cache.recurrent.layers for t in layer.committed)
    assert state_size(base.config, torch.float32).bytes_per_row * 2 == committed > 0


@pytest.mark.parametrize("family", ["Qwen3.5", "LFM2", "Falcon-H1", "Granite-4"])
@pytest.mark.parametrize("paths", [1, 3])
def test_as_many_snapshots_are_held_as_it_says(family, paths):
    base, batch = build(*RECURRENT[family]), 2
    plan = chain(3) if paths == 1 else parallel_chains(paths, 2)
    size = state_size(base.config, torch.float32)
    target = Target(base, scratch=plan.num_nodes)
    target.prefill(torch.randint(3, 97, (batch, 9)), torch.tensor([9, 6]), room=40)
    order = {choice: i for i, choice in enumerate([(), *plan.choices])}
    parents = [-1, *(order[choice[:-1]] for choice in plan.choices)]
    for accepted in ([2, 1], [1, 1], [1, 2]):
        tree = DraftTree(torch.randint(3, 97, (batch, plan.num_nodes)), torch.tensor([parents] * batch), plan.depth)
        target.prepare(int(target.cache.lengths.max()))
        target.verify(tree)
        assert bytes_held(target) == size.held(paths) * batch * size.bytes_per_row
        target.commit(torch.tensor([[0, 1], [0, 1]]), torch.tensor(accepted))


def test_half_precision_takes_less_and_a_plain_base_nothing():
    config = build(*RECURRENT["LFM2"]).config
    assert state_size(config, "bfloat16").bytes_per_row * 2 == state_size(config, "float32").bytes_per_row
    assert state_size(build(*FAMILIES["Llama"]).config) is None


def test_it_is_told_by_a_config_on_disk(tmp_path):
    base = build(*RECURRENT["Qwen3.5"])
    base.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert state_size(config) == state_size(base.config, torch.float32)


def test_info_says_it_of_a_hybrid_base(tmp_path, capsys):
    base = build(*RECURRENT["Qwen3.5"])
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    convert(base, "medusa").save_pretrained(tmp_path / "head")
    wanted = state_size(base.config).line()
    assert wanted in run(capsys, "info", tmp_path / "head")[1]
