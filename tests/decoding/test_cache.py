"""The verifier's cache: a tree's logits are those of its paths, and a commit keeps what a fresh prefill would hold."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from specheads import Target, UnsupportedModel
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify import cache
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.masks import Reach, visible
from tests.support.families import RECURRENT, build
from tests.support.tiny_models import tiny_llama

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def sliding(window=8):
    """A Mistral, every layer of which looks `window` positions back."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()


def mixed(window=8):
    """A Gemma-3, one layer of which looks back without end."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=layers, tie_word_embeddings=False)
    return Gemma3ForCausalLM(config).eval()


BASES = {
    "full": tiny_llama, "sliding": sliding, "mixed": mixed, "convolutions": lambda: build(*RECURRENT["LFM2"]),
    "gated delta": lambda: build(*RECURRENT["Qwen3.5"]), "states and keys": lambda: build(*RECURRENT["Falcon-H1"]),
    "one by one": lambda: build(*RECURRENT["Jamba"]),
}  # fmt: skip


@pytest.fixture(scope="module", params=BASES)
def base(request):
    return BASES[request.param]()


def random_rows(lengths, seed=0):
    coin = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=coin).tolist() for length in lengths]


def packed(rows):
    """Rows packed left into one batch, and their lengths."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def random_tree(roots, num_nodes, coin):
    """A tree of another shape in each row; -1 marks a slot that is not used."""
    batch = len(roots)
    tokens = torch.randint(3, VOCAB, (batch, num_nodes), generator=coin)
    tokens[:, 0] = torch.tensor(roots)
    parents = torch.full((batch, num_nodes), -1)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(0, node, (batch,), generator=coin)
    parents[0, num_nodes - 1] = -1
    return DraftTree(tokens, parents, num_nodes - 1)


def path_to(tree, row, node):
    """Nodes from the root to `node`."""
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[row, path[-1]]))
    return path[::-1]


@torch.no_grad()
def plain_logits(base, ids):
    """Logits after the last of ids, in one forward without a cache."""
    return base(torch.tensor([ids]), use_cache=False).logits[0, -1]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_tree_logits_equal_path_logits(base):
    rows, coin = random_rows((9, 23, 1)), torch.Generator().manual_seed(1)
    target = Target(base, scratch=12)
    out = target.prefill(*packed(rows), room=40)
    for row, prompt in enumerate(rows):
        close(out.logits[row, 0], plain_logits(base, prompt))
    tree = random_tree([5, 6, 7], 12, coin)
    logits = target.verify(tree).logits
    for row, prompt in enumerate(rows):
        for node in range(12):
            if node and tree.parents[row, node] < 0:
                continue
            path = path_to(tree, row, node)
            close(logits[row, node], plain_logits(base, prompt + tree.tokens[row, path].tolist()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reserve", [8, cache.RESERVE], ids=["buffers grow", "buffers suffice"])
def test_commit_equals_fresh_prefill(base, reserve, monkeypatch):
    """Ragged commits from trees of changing size, over lengths past two buckets; one row gains nothing at times."""
    monkeypatch.setattr(cache, "RESERVE", reserve)
    rows, coin = random_rows((50, 62, 3)), torch.Generator().manual_seed(2)
    target = Target(base, layers=(1,), scratch=10)
    target.prefill(*packed(rows), room=120)
    roots, passed = [5, 6, 7], set()
    for step in range(30):
        target.prepare(max(map(len, rows)))
        tree = random_tree(roots, (10, 4, 7)[step % 3], coin)
        logits = target.verify(tree).logits
        paths = [path_to(tree, row, int(torch.randint(0, tree.num_nodes - 1, (), generator=coin))) for row in range(3)]
        for row in range(3):
            close(logits[row, 0], plain_logits(base, rows[row] + [roots[row]]))
        lengths = torch.tensor([len(path) for path in paths])
        if step % 4 == 3:
            lengths[1], paths[1] = 0, [0]  # a finished row stays where it is
        width = int(lengths.max())
        path = torch.tensor([path + [path[-1]] * (width - len(path)) for path in paths])
        for row in range(3):
            kept = paths[row][: int(lengths[row])]
            rows[row] += tree.tokens[row, kept].tolist()
            if kept:
                roots[row] = int(torch.randint(3, VOCAB, (), generator=coin))
        target.commit(path, lengths)
        assert target.cache.lengths.tolist() == list(map(len, rows))
        passed.add(target.cache.end - target.cache.scratch)
    assert {64, 128} <= passed
    fresh = Target(base, scratch=10)
    logits = fresh.prefill(*packed(rows), room=11).logits
    tree = random_tree(roots, 10, coin)
    target.prepare(max(map(len, rows)))
    close(target.verify(tree).logits, fresh.verify(tree).logits)
    for row in range(3):
        close(logits[row, 0], plain_logits(base, rows[row]))
        real = slice(target.cache.scratch, target.cache.scratch + len(rows[row]))
        for layer, twin in zip(target.cache.tree_layers, fresh.cache.tree_layers, strict=True):
            if layer.keys is None:  # a recurrent layer
                continue
            close(layer.keys[row, :, real], twin.keys[row, :, real])
            close(layer.values[row, :, real], twin.values[row, :, real])


@torch.no_grad()
@pytest.mark.slow
def test_prompt_of_thousands_of_tokens():
    for base in (tiny_llama(num_hidden_layers=2, max_position_embeddings=8192), sliding(window=100)):
        rows = random_rows((5000, 3100))
        target = Target(base, scratch=4)
        out = target.prefill(*packed(rows), room=8)
        tree = random_tree([5, 6], 4, torch.Generator().manual_seed(3))
        logits = target.verify(tree).logits
        for row, prompt in enumerate(rows):
            close(out.logits[row, 0], plain_logits(base, prompt))
            close(logits[row, 2], plain_logits(base, prompt + tree.tokens[row, path_to(tree, row, 2)].tolist()))


def test_prefill_gives_the_base_no_mask(monkeypatch):
    base, seen = tiny_llama(num_hidden_layers=2), []
    forward = base.model.forward
    monkeypatch.setattr(base.model, "forward", lambda *a, **k: seen.append(k["attention_mask"]) or forward(*a, **k))
    target = Target(base, scratch=2)
    target.prefill(*packed(random_rows((30, 4))), room=4)
    assert seen == [None]  # B × T × T numbers would be 256 MB a row at 8,000 tokens


def test_a_high_token_limit_costs_no_memory_before_it_is_used():
    target = Target(tiny_llama(num_hidden_layers=2), scratch=2)
    target.prefill(*packed(random_rows((6,))), room=1_000_000)
    assert all(stack.shape[3] < 2000 for stack in target.cache.stacks)


def test_capacity_errors_say_what_does_not_fit():
    base = tiny_llama(num_hidden_layers=2)
    target = Target(base, scratch=4)
    target.prefill(*packed(random_rows((6, 9))), room=3)
    with pytest.raises(ValueError, match="17 tokens do not fit a cache made for 16"):
        target.prepare(17)
    with pytest.raises(ValueError, match="a tree of 5 nodes needs scratch ≥ 5, not 4"):
        target.verify(random_tree([5, 6], 5, torch.Generator().manual_seed(0)))
    with pytest.raises(UnsupportedModel, match=r"layer 7 cannot be tapped: .* hidden_states 0 to 2"):
        Target(base, layers=(7,)).prefill(*packed(random_rows((6,))), room=3)
    small = TreeCache(1, 2, 4)
    small.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), 0)
    with pytest.raises(ValueError, match="a prompt of 5 tokens does not fit a cache made for 4"):
        small.load_prompt(torch.tensor([5]), 5)


def test_reach_is_measured_by_position_not_by_slot():
    """Four nodes, then five committed tokens; the root at position 5, children at 6, a grandchild at 7."""
    for reach, slots in [
        (Reach(), [0, 2, 3, 4, 5, 6, 7, 8]),
        (Reach("sliding", 4), [0, 2, 3, 8]),
        (Reach("sliding", 2), [2, 3]),
        (Reach("chunked", 4), [0, 2, 3, 8]),
        (Reach("chunked", 6), [2, 3]),
    ]:
        tree = DraftTree(torch.zeros(1, 4, dtype=torch.long), torch.tensor([[-1, 0, 0, 2]]), 2)
        mask = visible(tree.topology.ancestors, tree.topology.depth, torch.tensor([5]), 4 + 8, reach)
        assert mask[0, 3].nonzero().flatten().tolist() == slots


def test_how_states_continue_is_found_anew_in_another_dtype():
    """Where rounding is coarse, two ways of a layer look the same."""
    for family in ["Zamba2", "Nemotron-H"]:
        base = build(*RECURRENT[family]).bfloat16()
        coarse = [one.one_by_one for one in Target(base).recurrent]
        base.float()
        assert [one.one_by_one for one in Target(base).recurrent] == [
            one.one_by_one for one in Target(build(*RECURRENT[family])).recurrent
        ]
        assert coarse == [one.one_by_one for one in Target(base.bfloat16()).recurrent]
