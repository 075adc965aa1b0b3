"""DraftedRollouts: a callback that drafts the rollouts of TRL's trainers, with a head that follows the policy.

For trainers that generate by transformers' own generate() (GRPO, RLOO, online DPO, GKD …; not with use_vllm). This
does not import TRL. Shapes: B batch rows, T prompt columns.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TrainerCallback

from specheads.compat.patch import DraftingGenerate, replace_generate
from specheads.decoding.drafters import as_drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.hf_options import effective_config
from specheads.decoding.generation.many import generate_many
from specheads.decoding.verify.hf_base import UnsupportedModel, refuse_unsupported, unwrapped, without_dropout
from specheads.decoding.verify.model_inputs import input_device
from specheads.files import replacing
from specheads.heads import DraftHead
from specheads.models import checkpoint
from specheads.models.base.fingerprint import record_base
from specheads.models.base.lora import detach
from specheads.models.config import SpecConfig
from specheads.models.costs import auto_drafter
from specheads.training.distributed.launch import refuse_several
from specheads.training.observed import Observed
from specheads.training.online import HeadUpdater

_log = logging.getLogger(__name__)
_STATE = "updater.pt"  # beside the head in each checkpoint
# What generate_many() takes for a batch of prompts; the model's own arguments (pixel_values …) go to generate().
_SHARED = {"logits_processor", "stopping_criteria", "stop_strings", "tokenizer"}
_SHARED |= {*GenerationConfig().to_dict()} - {"num_return_sequences", "return_dict_in_generate"}
_PROMPTS = {"inputs", "input_ids", "attention_mask", "generation_config"}


class DraftedRollouts(TrainerCallback):
    """`GRPOTrainer(..., callbacks=[DraftedRollouts("path/of/head")])`: the trainer's rollouts draft, and the head
    follows the policy.

    From the beginning of train() to its end, the policy's generate() drafts: each text has the distribution of plain
    sampling, and with draft=False, at the same seed, is the same in float32. It runs in eval mode, without dropout. A
    call that asks for beams or a drafter of its own is left as it is.

    head: a folder or hub id, or a `DraftHead` for this policy. draft: "auto" (the head, a copy of earlier text or
    nothing, by cost), "head" or another drafter as in `specheads.generate`; False: plain decoding through the same
    loop. batch_size: texts decoded at a time; as one ends, the next takes its row. compile: as in `specheads.generate`.

    every: optimizer steps between steps of the head, on one micro-batch that the policy's training pass computes
    anyway; None: the head stays as it is. Other options (max_tokens, learning_rate …): see `HeadUpdater`.

    rollout_… and head_loss are in the trainer's log history. Each checkpoint has the head in its folder `head`, from
    which a run in the same output_dir resumes, and at the end of training so has output_dir.
    """

    def __init__(
        self, head: Any, *, every: int | None = 4, draft: Any = "auto", batch_size: int = 16,
        compile: bool | str = False, **updater: Any,
    ) -> None:  # fmt: skip
        if not isinstance(head, DraftHead | str | Path):
            raise TypeError(
                f"head={type(head).__name__} must be the folder or hub id of a head, or a DraftHead: of a SpecModel, "
                "give its .head, and let the policy train again: policy.requires_grad_(True)"
            )
        if every is None and updater:
            raise ValueError(f"{', '.join(updater)}: the head stays as it is (every=None), so leave them out")
        self.source, self.every, self.draft, self.options = head, every, draft, updater
        self.batch_size, self.compile = batch_size, compile
        self.head: DraftHead | None = None
        self.updater: HeadUpdater | None = None
        self.observed: Observed | None = None
        self.drafter: Any = None
        self.config: SpecConfig | None = None
        self._patched: Any = None
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._losses: list[float] = []

    # The policy, from attach() to detach()

    def attach(self, policy: Any) -> None:
        """Let this policy's generate() draft. UnsupportedModel or CheckpointError, leaving it as it was, says why not.
        ValueError in several processes, whose heads would learn apart."""
        refuse_several()
        if self._patched is not None:
            raise ValueError("these rollouts have a policy already; detach() it first")
        base = unwrapped(policy)
        refuse_unsupported(base)
        if self.head is not None:  # as an earlier train() left it
            head, config = self.head, self.config or SpecConfig.of(self.head.config)
        elif isinstance(self.source, DraftHead):
            head, config = self.source, record_base(SpecConfig.of(self.source.config), base)
        else:
            config, _, head = checkpoint.load(self.source, base=base)
        if config.joint is not None:
            detach(base)
            raise UnsupportedModel(
                f"{self.source} was trained with adapters of its base (Medusa-2), which would train with the policy; "
                "give a head without them"
            )
        self.head, self.config = head.eval(), config
        automatic = isinstance(self.draft, str) and self.draft.partition(":")[0] == "auto"
        self.drafter = (
            auto_drafter(base, self.head, self.draft.partition(":")[2] or None)
            if automatic
            else as_drafter(self.draft, self.head, base)
        )
        if self.every is not None:
            self.updater = HeadUpdater(self.head, base, every=self.every, **self.options)
            self.observed = Observed(self.updater)
            self.observed.install()
        self._patched = replace_generate(base, partial(_RolloutGenerate, rollouts=self))  # type: ignore[arg-type]

    def detach(self) -> None:
        """Restore the policy's own generate()."""
        if self._patched is not None:
            self._patched.__exit__(None, None, None)
        if self.observed is not None:
            self.observed.remove()
        self._patched = self.observed = None

    @contextmanager
    def attached(self, policy: Any) -> Iterator[DraftedRollouts]:
        """For a training loop of one's own: in the block this policy's generate() drafts. The head takes a step where
        the loop calls `updater.step(...)`, or `before_step()`, forward and backward, `after_backward()`."""
        self.attach(policy)
        try:
            yield self
        finally:
            self.detach()

    def before_step(self) -> None:
        """Before the passes of an optimizer step: if the head is to learn from them, keep what it needs."""
        if self.updater is not None and self.observed is not None and self.updater.due:
            self.observed.arm()

    def after_backward(self) -> float | None:
        """After them, before the optimizer's step changes the policy: the head's step → its loss, if it took one."""
        if self.updater is None or self.observed is None:
            return None
        armed, sample = self.observed.armed, self.observed.take()
        if armed and sample is None:
            _log.warning("no training pass of the policy reached its decoder: the head did not learn in this step")
        loss = self.updater.learn(sample)
        if loss is not None:
            self._losses.append(loss)
        return loss

    # Rollouts

    @torch.no_grad()
    def generate(self, base: Any, call: dict[str, Any]) -> Any:
        """What the policy's generate() returns, drafted. call: its arguments by name."""
        began = time.perf_counter()
        assert self.head is not None
        self.head.copy_frozen_weights(base)  # the policy's rows, as they are now
        given = {name: value for name, value in call.items() if value is not None}
        config = effective_config(base, call.get("generation_config"))
        alone = (config.num_return_sequences or 1) > 1 or config.return_dict_in_generate
        ids = given.get("inputs", given.get("input_ids"))
        with without_dropout(base):
            if alone or not isinstance(ids, Tensor) or {*given} - _SHARED - _PROMPTS or base.config.is_encoder_decoder:
                result = generate(base, draft=self.drafter, compile=self.compile, **call)
            else:
                result = self._refilled(base, ids, given, config)
        self._counts["seconds"] += time.perf_counter() - began
        return result

    def _refilled(self, base: Any, ids: Tensor, given: dict[str, Any], config: Any) -> Tensor:
        """(B, T) prompts → (B, T + longest), padded on the right."""
        rows, mask = ids.tolist(), given.get("attention_mask")
        seen = [[1] * len(row) for row in rows] if mask is None else mask.tolist()
        prompts = [[t for t, one in zip(row, kept, strict=True) if one] for row, kept in zip(rows, seen, strict=True)]
        options = {name: value for name, value in given.items() if name not in _PROMPTS - {"generation_config"}}
        texts = generate_many(
            base, prompts, batch_size=min(self.batch_size, len(prompts)), draft=self.drafter, compile=self.compile,
            **options,
        )  # fmt: skip
        for text in texts:
            drafted = [step for step in text.steps[1:] if step.tokens[0]]
            self._counts["tokens"] += len(text.tokens)
            self._counts["passes"] += len(drafted)
            self._counts["gained"] += sum(len(step.tokens[0]) for step in drafted)
        ends = config.eos_token_id
        pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if isinstance(ends, list) else ends
        longest = max(len(text.tokens) for text in texts)
        added = [text.tokens + [pad or 0] * (longest - len(text.tokens)) for text in texts]
        return torch.cat([ids, torch.tensor(added, dtype=ids.dtype, device=ids.device).view(len(rows), longest)], 1)

    def figures(self) -> dict[str, float]:
        """Since the last call: rollout_seconds, rollout_tokens, rollout_tokens_per_step (a row's, of one pass of the
        policy) and head_loss, each if there is something to report."""
        counts, losses = self._counts, self._losses
        self._counts, self._losses = defaultdict(float), []
        found: dict[str, float] = {}
        if counts["seconds"]:
            found |= {"rollout_seconds": counts["seconds"]}
        if counts["passes"]:
            found |= {
                "rollout_tokens": int(counts["tokens"]),
                "rollout_tokens_per_step": counts["gained"] / counts["passes"],
            }
        return found | ({"head_loss": sum(losses) / len(losses)} if losses else {})

    # Checkpoints

    def save(self, folder: Any) -> None:
        """Write the head as it is now, beside what a resumed run needs."""
        if self.head is None or self.config is None or self.updater is None:
            return
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        config = record_base(self.config, self.updater.base)
        checkpoint.save(folder, config, self.head.config, tensors, tensors)
        with replacing(Path(folder) / _STATE) as path:
            torch.save(self.updater.state_dict(), path)

    def resume(self, folder: Any) -> None:
        """Go on with the head that `save` wrote there. Attach the policy first. ValueError for another head's."""
        if self.updater is None:
            return
        state = torch.load(Path(folder) / _STATE, map_location=input_device(self.updater.base), weights_only=True)
        self.updater.load_state_dict(state)

    # The trainer's events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(args, name, False):
                raise ValueError(f"{name}=True: the rollouts do not come from the policy's generate(); leave it out")
        self.attach(model)
        folder = _folder(args, state)
        if state.global_step and self.updater is not None:
            if not (folder / _STATE).is_file():
                _log.warning("%s has no head: the run resumes, and the head begins as it was given", folder.parent)
            else:
                self.resume(folder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_backward()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        found = self.figures()
        logs |= found
        if state.log_history:
            state.log_history[-1].update(found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(_folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.save(Path(args.output_dir) / "head")
        self.detach()


class _RolloutGenerate(DraftingGenerate):
    """The generate() of a policy in training: calls that name no drafter of their own draft too."""

    def __init__(self, base: Any, before: Any, rollouts: DraftedRollouts) -> None:
        super().__init__(base, before)
        self.rollouts = rollouts

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        call = self.by_name(args, kwargs)
        config = effective_config(self.base, call.get("generation_config"))
        beams = call.get("num_beams") or config.num_beams or 1
        if call.get("custom_generate") is not None or beams > 1 or self.is_transformers_own(call):
            return super()._own(*args, **kwargs)
        return self.rollouts.generate(self.base, call)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "head"
