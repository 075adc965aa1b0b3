"""Multi-token prediction: modules built from the target's own decoder layer. DeepSeek-V3, arXiv:2412.19437.

A module reads, at position t, the token x[t+1] and a hidden state: it concatenates norms of both, and applies a
projection, layers of the target's class and a norm. The first module's hidden state is the target's after its final
norm, h[t]; that of module k is the output of module k − 1 at position t − 1, so it predicts x[t+2] from x up to t + 1,
as the first does, but has seen h only up to t − k. From position t, module j mod n drafts depth j, at position t + j.
Where the target's hidden state is not known yet, the first module reads the output that predicted the token; a single
module is thus fed its own output.

Shapes: B batch rows, T positions, P new positions, F tapped features, H hidden, S unrolled steps, A anchors of a row,
k nodes of a level, K attended slots, n modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context
from specheads.decoding.planner import ChildLogits, Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import TreeCache
from specheads.decoding.verify.hf_base import refuse_more_than_lm_head
from specheads.decoding.verify.masks import Levels, Reach, additive, gather_nodes
from specheads.heads.base import TapBatch
from specheads.heads.layers.block import final_norm, keep_committed, soften
from specheads.heads.layers.row_attention import RowMask
from specheads.heads.mtp.config import MtpConfig
from specheads.heads.mtp.row_layers import Keys, StepCache, StepMask, layers_over_row
from specheads.heads.mtp.target_layers import LayerCall, TargetLayers
from specheads.heads.sampling import AnchoredStarts
from specheads.heads.unrolled import UnrolledHead


class MtpModule(nn.Module):
    """One module, number `index` of the head. Parameter names are DeepSeek's."""

    def __init__(self, config: MtpConfig, target: TargetLayers, index: int) -> None:
        super().__init__()
        assert config.hidden_size and config.layer_indices
        self.index, self.hidden_first = index, config.hidden_first
        self.enorm, self.hnorm = target.norm(), target.norm()
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        first = index * len(config.layer_indices)
        self.layers = nn.ModuleList(target.layer(i, first + j) for j, i in enumerate(config.layer_indices)).eval()
        self.norm = target.norm() if config.final_norm else nn.Identity()
        self.target_config = target.config
        self.calls = [LayerCall(layer) for layer in self.layers]

    def train(self, mode: bool = True) -> MtpModule:
        """Layers stay in eval mode, so that they train as they draft, without the dropout that the config may have."""
        super().train(mode)
        self.layers.eval()
        return self

    def forward(
        self, embedded: Tensor, hidden: Tensor, mask: Tensor | None, position: Tensor, rotary: Any, cache: Any
    ) -> Tensor:
        """Embedded tokens and hidden states (B, T, H) → the output (B, T, H), before the norm."""
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        for call, layer in zip(self.calls, self.layers, strict=True):
            x = call(layer, x, mask, position, rotary, cache)
        return x

    def unrolled(
        self, embedded: Tensor, hidden: Tensor, mask: StepMask, position: Tensor, rotary: Any, earlier: list[Keys]
    ) -> tuple[Tensor, Keys]:
        """The output, and this step's keys and values. earlier: those of the steps before, attended first."""
        cache = StepCache(earlier)
        with layers_over_row(self.target_config, mask, cache, hidden.dtype) as given:
            return self(embedded, hidden, given, position, rotary, cache), cache.added


def index_in_document(documents: Tensor) -> Tensor:
    """(B, T) document ids → (B, T) the index of each token in its document."""
    column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != documents.roll(1, 1)
    return column - (column * begins).cummax(1).values


class MtpHead(UnrolledHead):
    Config = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        assert config.target_config is not None and config.layer_indices
        super().__init__(config)
        target = TargetLayers(config.target_config)
        self.mtp: Any = nn.ModuleList(MtpModule(config, target, k) for k in range(config.num_modules))
        self.rotary = target.rotary(config.layer_indices[0])
        self.reach = target.common_reach(config.layer_indices)
        if config.sliding_window is not None:
            if self.reach.kind != "full":
                raise ValueError(
                    f"mtp head option sliding_window={config.sliding_window}: layers {list(config.layer_indices)} of "
                    f"the target have {self.reach.kind} attention, of {self.reach.size} positions; leave it out"
                )
            self.reach = Reach("sliding", config.sliding_window)
        self.is_causal = target.is_causal and self.reach.kind == "full"  # without a mask
        self.float32_names = target.float32_names

    def _apply(self, fn: Any, recurse: bool = True) -> MtpHead:
        """Keep in float32 the buffers that the target keeps so, such as the biases that choose experts."""
        wide = {
            name: buffer
            for name, buffer in self.named_buffers()
            if any(part in name for part in self.float32_names) and buffer.dtype == torch.float32
        }
        super()._apply(fn, recurse)
        for name, before in wide.items():
            path, _, own = name.rpartition(".")
            module, after = self.get_submodule(path), self.get_buffer(name)
            if after.element_size() < before.element_size():
                module._buffers[own] = before.to(after.device)
        return self

    def refuse_unfit(self, base: Any) -> None:
        refuse_more_than_lm_head(base, self.config.kind)
        hidden = next(self.parameters()).new_zeros(1, 1, self.config.hidden_size or 0)
        if hidden.is_meta:
            return
        assert self.config.target_config is not None and self.config.layer_indices
        position = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        with torch.no_grad(), TargetLayers(self.config.target_config).alone(self.config.layer_indices[0]):
            if self.rotary is not None:
                self.rotary.ensure(1, hidden)
            rotary = None if self.rotary is None else self.rotary(position)
            mask = StepMask(RowMask(position, position, Reach()), position.new_zeros(1, 1, 0).bool())
            self.mtp[0].unrolled(hidden, hidden, mask, position, rotary, [])

    def initialise(self, base: Any) -> None:
        """Copy the base's final norm, whose output its lm_head reads, softened. The rest starts at random."""
        norm = final_norm(base)
        assert norm is not None
        for module in self.mtp:
            weights = {n: t for n, t in norm.state_dict().items() if not t.is_meta}
            if self.config.final_norm and weights:
                module.norm.load_state_dict(weights, strict=False)
                soften(module.norm, base)

    def passes(self, length: int) -> float:
        n, steps = self.config.num_modules, self.config.steps
        later = sum(len(self.active(s, steps)) for s in range(1, steps))
        return 1 + later / n * self.passes_of(1, length)

    def active(self, depth: int, depths: int) -> range:
        """The modules that read a token drafted at `depth` (from 1 on), in drafts of `depths` tokens: those that draft
        deeper, as they must have seen it. If depths exceed the modules, all are used again."""
        n = self.config.num_modules
        return range(depth, depths) if depths <= n else range(n)

    def loss(self, batch: TapBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        targets, rows = self.drafts(batch, config.steps)
        scores = self.score(batch, targets, rows, tuple(config.step_decay**s for s in range(config.steps)))
        return scores.total / batch.denominator, scores.terms(batch.denominator)

    def fed(self, k: int, output: Tensor) -> tuple[Tensor, Tensor]:
        """Module k's output → what the next module or step reads, and what lm_head reads."""
        normed = self.mtp[k].norm(output)
        return (normed if self.config.norm_output else output), normed

    def embedded(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, position: Tensor) -> Tensor:
        """The embeddings (B, T, H) of the tokens that are read at positions (B, T)."""
        found = embed(tokens).to(self.dtype)
        return found * (position > 0).unsqueeze(-1) if self.config.zero_first_embedding else found

    def unroll(
        self, batch: TapBatch, steps: int, features: Tensor | None = None, anchored: AnchoredStarts | None = None
    ) -> list[Tensor]:
        hidden = (batch.features if features is None else features).to(self.dtype)
        position, length = batch.position_ids, batch.tokens.shape[1]
        if self.rotary is not None:
            self.rotary.ensure(int(position.max()) + steps + 1, hidden)
        column = torch.arange(length, device=hidden.device).expand_as(position)
        keys: list[list[Keys]] = [[] for _ in self.mtp]
        index = index_in_document(batch.documents)
        seen = RowMask(batch.documents, position, self.reach)
        start, begun = position, index  # (B, T or A) of what step 0 reads

        def run(k: int, s: int, hidden: Tensor) -> Tensor:
            # All keys of step 0, and the query's own key of each later step; none at a document's first k positions,
            # where module k has no input.
            drafts = torch.arange(1, s + 1, device=hidden.device)
            near = self.reach((start + s).unsqueeze(2), start.unsqueeze(2) + drafts)
            own = near & (begun.unsqueeze(2) + drafts >= k)
            mask = StepMask(replace(seen, ahead=s, keys=(index >= k) if k else None), own)
            rotary = None if self.rotary is None else self.rotary(start + s)
            out, added = self.maybe_checkpoint(
                self.mtp[k].unrolled, embedded, hidden, mask, start + s, rotary, list(keys[k])
            )
            keys[k].append(added)
            return out

        tokens = batch.tokens.gather(1, (column + 1) % length)
        embedded = self.embedded(batch.embed, tokens, position)
        fed, outputs = [hidden] * len(self.mtp), []
        for k in range(len(self.mtp)):
            fed[k], normed = self.fed(k, run(k, 0, hidden))
            if k == 0:
                outputs.append(normed if anchored is None or anchored.depth else gather_nodes(normed, anchored.columns))
            hidden = fed[k].roll(1, 1)  # wraps around into a document's first k positions, which are masked
        for s in range(1, steps):
            if s == 1 and anchored is not None:
                column = anchored.columns
                start, begun = position.gather(1, column), index.gather(1, column)
                fed = [gather_nodes(each, column) for each in fed]
                seen = replace(seen, columns=column)
            tokens = batch.tokens.gather(1, (column + s + 1) % length)
            embedded, before = self.embedded(batch.embed, tokens, start + s), list(fed)
            for k in self.active(s, steps):
                fed[k], normed = self.fed(k, run(k, s, before[self.source(k, s)]))
                if k == s % len(self.mtp):
                    outputs.append(normed)
        return outputs

    def source(self, k: int, depth: int) -> int:
        """The module whose output module k reads for a token drafted at `depth`: the one before it; for the first, the
        one that drafted the token."""
        return k - 1 if k else (depth - 1) % self.config.num_modules

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        target, n, depths = context.target, len(self.mtp), plan.depth
        dtype = context.memoize("head", lambda: self.dtype)
        features = context.features.to(dtype)
        # First the positions committed since the last proposal, with the target's features.
        (fed, drafted), cache = keep_committed(
            context, max(depths + 1, plan.drafting_slots), features, n * len(self.mtp[0].layers), self.rotary,
            lambda cache, position, fresh: self.read_committed(context, features, cache, position, fresh),
        )  # fmt: skip
        # Then the tree, level by level, in the scratch slots.
        levels, depth = Levels(cache, dtype), 0
        slots: list[Tensor] = []  # (B, width) the positions in the slots of each level
        fed, drafted = [each.unsqueeze(1) for each in fed], drafted.unsqueeze(1)  # (B, k, H)

        def expand(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            nonlocal depth, fed, drafted
            if parents is not None:
                depth += 1
                levels.next_level(parents)
                position = levels.position.expand(-1, tokens.shape[1])
                embedded, before = self.embedded(target.embed, tokens, position), fed
                rotary = None if self.rotary is None else self.rotary(position)
                seen, fed = levels.mask(self.reach), list(fed)
                slots.append(position)
                rest = cache.positions[levels.written :].expand(len(position), -1)
                key = torch.cat([*slots, rest], 1)[:, None, None] if n > 1 else rest
                for k in self.active(depth, depths):
                    mask = seen.masked_fill(key < k, torch.finfo(dtype).min) if k else seen
                    hidden = gather_nodes(before[self.source(k, depth)], parents)
                    fed[k], normed = self.fed(k, self.mtp[k](embedded, hidden, mask, position, rotary, cache))
                    if k == depth % n:
                        drafted = normed
            return ChildLogits(self.draft_logits(drafted, depth, target.lm_head), None)

        assert self.config.vocab_size is not None
        return plan.grow(context.root, expand, sampler, self.config.vocab_size)

    def read_committed(
        self, context: Context, hidden: Tensor, cache: TreeCache, position: Tensor, fresh: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Run all modules on the new positions (B, P), with the target's hidden states (B, P, H).

        Returns outputs (B, H) at each row's newest position: what each module passes on, and the first module's for
        lm_head. context.memory keeps the outputs that modules will read at the first position of the next call."""
        embedded = self.embedded(context.target.embed, context.following, position)
        rotary = None if self.rotary is None else self.rotary(position)
        query = position.unsqueeze(-1)
        key = position[:, None, :] if fresh else cache.positions
        seen = (key <= query) & self.reach(query, key)
        newest, drafted = [], hidden
        for k, module in enumerate(self.mtp):
            mask = None if fresh and not k and self.is_causal else additive(seen & (key >= k), hidden.dtype)
            output, normed = self.fed(k, module(embedded, hidden, mask, position, rotary, cache))
            newest.append(context.newest(output))
            drafted = drafted if k else context.newest(normed)
            if k + 1 < len(self.mtp):
                hidden = torch.cat([self.carry(context, k, output), output[:, :-1]], 1)
        return newest, drafted

    def carry(self, context: Context, k: int, output: Tensor) -> Tensor:
        """(B, 1, H) module k's output at the position before the new ones, which the newest of `output` (B, P, H)
        replaces in context.memory; the one before that is kept for `refill`."""
        name, rows = f"carried {k}", torch.arange(len(output), device=output.device)
        newest, before = context.newest(output), output[rows, (context.last - 1).clamp_min(0)]
        if name not in context.memory:
            context.memory[name] = torch.stack([newest, before])
            return torch.zeros_like(output[:, :1])
        kept = context.memory[name]
        earlier = kept[0].unsqueeze(1).clone()
        gained = (context.new > 0).unsqueeze(1)
        before = torch.where((context.last > 0).unsqueeze(1), before, earlier[:, 0])
        kept.copy_(torch.where(gained, torch.stack([newest, before]), kept))
        return earlier

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        super().refill(context, rows, prompts, plan)
        for k in range(len(self.mtp) - 1) if "cache" in context.memory else ():
            # The next proposal reads the prompt's last position again.
            name = f"carried {k}"
            context.memory[name][0, rows] = prompts.memory[name][1]
