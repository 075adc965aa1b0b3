"""lm-evaluation-harness with drafts: the model `specheads`, which is the harness's `hf` with a drafted generate().

python -m specheads.compat.harness run --model specheads --model_args pretrained=BASE head=HEAD --tasks gsm8k

The harness (0.4.13) finds models in its own table alone and reads no entry points; this module adds ours and then runs
its command.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"this needs lm-evaluation-harness: pip install 'lm_eval>=0.4.13' ({error})") from error
from transformers.utils import logging as hf_logging

from specheads.compat.patch import patch
from specheads.decoding.verify.hf_base import unwrapped
from specheads.models.convert import load_head
from specheads.models.named import load_drafter
from specheads.models.spec_model import SpecModel
from specheads.options import refuse_unknown

NAME = "specheads"
logger = hf_logging.get_logger(__name__)


class DraftedLM(HFLM):
    """The harness's `hf` model, whose generated answers are drafted; scores of given answers are the base's own.

    pretrained: the base, as for `hf`. head: a checkpoint, ours or of a published format. draft: what drafts, as in
    `SpecModel.generate` with a head ("auto" by default) and in `specheads.generate` without ("lookup" by default).
    tree, accept: as there; a lossy rule changes the answers. Other arguments are those of `hf`.

    statistics: tokens and steps of all answers so far.
    """

    def __init__(
        self, pretrained: Any, head: str | None = None, draft: Any = None, tree: str | None = None,
        accept: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(pretrained, **options)
        if isinstance(self.model, SpecModel):
            raise ValueError(f"pretrained={pretrained} is a draft head; give pretrained=BASE and head={pretrained}")
        if head is None and draft in ("auto", "head"):
            refuse_unknown([draft], ["lookup", "ngram", "maxgram"], "draft= without head=")
        base: Any = unwrapped(self.model)
        self.statistics = {"tokens": 0, "row_steps": 0}
        if head is None:
            drafter = "lookup" if draft is None else draft
        else:
            usual = "auto" if tree is None and accept is None else "head"
            drafter = load_drafter(usual if draft is None else draft, base, load_head(base, head).head)
        self._drafts = {"draft": drafter, "tree": tree, "accept": accept}
        patch(base)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        """Ids (B, T + new) for prompts `context` (B, T); the harness calls this for each batch of questions."""
        out = super()._model_generate(
            context, max_length, stop, **generation_kwargs, **self._drafts, return_dict_in_generate=True
        )
        drafting = getattr(out, "steps", [])[1:]
        self.statistics["row_steps"] += sum(bool(row) for step in drafting for row in step.tokens)
        self.statistics["tokens"] += sum(len(row) for step in drafting for row in step.tokens)
        sequences: torch.Tensor = out.sequences
        return sequences

    def generate_until(self, *args: Any, **kwargs: Any) -> Any:
        answers = super().generate_until(*args, **kwargs)
        if self.statistics["row_steps"]:
            logger.warning("%.2f tokens a step", self.statistics["tokens"] / self.statistics["row_steps"])
        return answers


def main() -> None:
    """The harness's own command, which now knows the model `specheads`."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target="specheads.compat.harness:DraftedLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
