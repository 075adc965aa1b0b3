"""DraftTree: what follows from parents is what walking up from each node gives."""

import itertools

import pytest
import torch

from specheads.decoding.acceptance import Exact, Lenient, Traversal, walk
from specheads.decoding.planner import SampledTree
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology, ancestors


def random_parents(generator, batch, num):
    """(batch, num) with parents[i] < i, and here and there an unused slot (−1)."""
    rows = []
    for _ in range(batch):
        row = [-1]
        for i in range(1, num):
            unused = bool(torch.rand((), generator=generator) < 0.1)
            row.append(-1 if unused else int(torch.randint(i, (), generator=generator)))
        rows.append(row)
    return torch.tensor(rows)


def climb(parents, i):
    """Node i and its ancestors, from a list of parents."""
    line = [i]
    while parents[line[-1]] >= 0:
        line.append(parents[line[-1]])
    return line


def test_ancestors_and_depth_equal_climbing():
    for num in [1, 2, 3, 4, 5, 8, 9, 17, 33, 64]:
        generator = torch.Generator().manual_seed(num)
        parents = random_parents(generator, 5, num)
        parents[0] = torch.arange(-1, num - 1)  # a chain: as deep as it gets
        parents[1, 1:] = 0  # a star
        topology = TreeTopology.of(parents)
        for b, row in enumerate(parents.tolist()):
            for i in range(num):
                line = climb(row, i)
                assert sorted(line) == topology.ancestors[b, i].nonzero().flatten().tolist()
                assert topology.depth[b, i] == len(line) - 1


def test_a_depth_bound_changes_nothing_where_it_holds():
    parents = torch.tensor([[-1, 0, 0, 1, 3, 4, 2, 6], [-1, 0, 1, 2, 3, 4, 5, 5]])
    whole = ancestors(parents)
    depth = int(whole.sum(-1).max()) - 1
    assert torch.equal(ancestors(parents, depth), whole)
    assert torch.equal(ancestors(parents, depth + 3), whole)
    assert not torch.equal(ancestors(torch.arange(-1, 7).unsqueeze(0), 2), ancestors(torch.arange(-1, 7).unsqueeze(0)))


def test_ranks_count_the_earlier_siblings():
    generator = torch.Generator().manual_seed(1)
    parents = random_parents(generator, 4, 12)
    ranks = TreeTopology.of(parents).ranks
    for b, row in enumerate(parents.tolist()):
        expected = [sum(row[j] == row[i] for j in range(i)) for i in range(12)]
        assert ranks[b].tolist() == expected


def test_sibling_groups_list_the_children_of_nodes_that_have_several():
    parents = random_parents(torch.Generator().manual_seed(2), 4, 12)
    above, children = TreeTopology.of(parents).sibling_groups
    found = {int(node): [int(one) for one in row if one] for node, *row in zip(above, *children, strict=True)}
    expected = {}
    for b, row in enumerate(parents.tolist()):
        for i, parent in enumerate(row):
            if parent >= 0:
                expected.setdefault(12 * b + parent, []).append(12 * b + i)
    assert found == {node: nodes for node, nodes in expected.items() if len(nodes) > 1}


def test_postorder_comes_after_descendants_and_earlier_siblings_and_rejection_order_in_draft_order():
    parents = random_parents(torch.Generator().manual_seed(3), 4, 12)
    topology = TreeTopology.of(parents)
    for b, row in enumerate(parents.tolist()):
        index = {node: i for i, node in enumerate(topology.postorder[b].tolist())}
        assert sorted(index) == list(range(12))
        reached = [i for i in range(12) if climb(row, i)[-1] == 0]
        for i in reached:
            assert index[i] < len(reached) and all(index[i] <= index[above] for above in climb(row, i))
            for j in range(i):
                if row[i] == row[j] >= 0:  # all below the earlier sibling, too
                    below = [k for k in range(12) if j in climb(row, k)]
                    assert all(index[k] < index[m] for k in below for m in range(12) if i in climb(row, m))
    rejected = []
    for above, child, earlier in topology.rejection_order:
        for node, one, before in zip(above.tolist(), child.tolist(), earlier.tolist(), strict=True):
            assert parents.flatten()[one] + one // 12 * 12 == node and one not in [child for _, child in rejected]
            assert before == [child for parent, child in rejected if parent == node]
        rejected += zip(above.tolist(), child.tolist(), strict=True)
    assert sorted(child for _, child in rejected) == (parents.flatten() >= 0).nonzero().flatten().tolist()


def test_a_chain_is_known_by_its_parents():
    for parents, expected in [
        ([-1, 0, 1, 2], True),
        ([-1, 0, 1, -1], True),
        ([-1, 0, 0, 1], False),
        ([-1, -1, 0, 2], False),
    ]:
        both = torch.tensor([[-1, 0, 1, 2], parents])
        assert DraftTree(torch.zeros_like(both), both, 3).is_chain is expected


def test_root_only_is_one_node_at_depth_0():
    tree = DraftTree.root_only(torch.tensor([5, 7]))
    assert tree.tokens.tolist() == [[5], [7]] and tree.parents.tolist() == [[-1], [-1]]
    assert tree.num_nodes == 1 and tree.max_depth == 0 and tree.probs is None
    assert tree.topology.depth.tolist() == [[0], [0]] and tree.topology.ancestors.all()


def test_tokens_and_parents_must_have_one_shape():
    with pytest.raises(ValueError, match=r"tokens \(1, 2\) and parents \(1, 3\)"):
        DraftTree(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long), 1)


def test_postorder_of_the_deepest_tree_needs_no_recursion():
    parents = torch.arange(-1, 1023).unsqueeze(0)
    assert TreeTopology.of(parents).postorder[0].tolist() == list(range(1023, -1, -1))


FULL = SampledTree((2, 2, 1)).topology(1, torch.device("cpu"))


def parts(count, seed=0):
    """Random slots used of the full tree, (count, N): a slot only if its parent and its earlier siblings are."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.rand(count, FULL.parents.shape[1], generator=generator) < 0.7
    above = FULL.parents[0].tolist()
    for node, parent in enumerate(above):
        used[:, node] &= used[:, parent] if parent > 0 else parent == 0
        if node > 1 and above[node - 1] == parent:
            used[:, node] &= used[:, node - 1]
    return used


def test_a_part_of_a_tree_has_the_topology_of_its_own_parents():
    used = parts(40)
    whole = SampledTree((2, 2, 1)).topology(40, used.device)
    whole.complete()
    part = whole.masked(used)
    own = TreeTopology.of(part.parents, 3)
    assert (part.drafted == used).all()
    for name in ("ancestors", "depth", "ranks", "first_siblings", "children", "num_drafted", "not_required"):
        assert torch.equal(getattr(part, name), getattr(own, name)), name
    table = own.child_table
    assert torch.equal(part.child_table[:, : table.shape[1]], table)
    assert not part.child_table[:, table.shape[1] :].any()
    again = part.masked(used & (part.depth < 2))
    assert torch.equal(again.ancestors, TreeTopology.of(again.parents, 3).ancestors) and again.whole is whole


def test_a_part_of_a_tree_is_judged_as_a_tree_of_its_own():
    for rule, cut in itertools.product([Exact(), Lenient(0.5), Traversal()], [3, 1]):
        batch, generator = 400, torch.Generator().manual_seed(1)
        used = parts(batch)
        num = used.shape[1]
        whole = SampledTree((2, 2, 1)).topology(batch, used.device)
        whole.complete()
        logits = torch.randn(batch, num, 5, generator=generator, dtype=torch.float64)
        probs = torch.randn(batch, num, 5, generator=generator, dtype=torch.float64).softmax(-1)
        probs = probs.gather(1, whole.parent_index.unsqueeze(2).expand_as(probs))  # siblings share theirs
        tokens = torch.zeros(batch, num, dtype=torch.long)
        for node in range(num):
            earlier = [i for i in range(1, node) if whole.parents[0, i] == whole.parents[0, node]]
            left = probs[:, node].scatter(1, tokens[:, earlier], 0) if earlier else probs[:, node]
            tokens[:, node] = torch.multinomial(left, 1, generator=generator)[:, 0]
        part = whole.masked(used)
        trees = [DraftTree(tokens, part.parents, 3, probs, topology=topology) for topology in (part, None)]
        depths = torch.full((batch,), cut)
        trees = [trees[0].within(depths), trees[1].cut(depths.tolist())]
        assert torch.equal(trees[0].parents, trees[1].parents)
        verdicts = []
        for tree in trees:
            sampler = Sampler(do_sample=True, seeds=range(batch))
            sampler.seed_rows(batch, logits.device)
            sampler.begin(3, depths)
            verdicts.append(walk(tree, logits, rule, sampler))
        for name in ("path", "length", "bonus"):
            assert torch.equal(getattr(verdicts[0], name), getattr(verdicts[1], name)), name
        assert verdicts[0].length.max() == min(cut, 3) + 1
