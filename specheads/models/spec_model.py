"""SpecModel: a frozen base and its draft head; forward() gives the head's loss, generate() decodes with tree drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from specheads.data.batches import documents_of, positions_of
from specheads.data.images import TYPES
from specheads.decoding.acceptance import Acceptance
from specheads.decoding.drafters import as_drafter
from specheads.decoding.drafters.base import Drafter
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.many import Continuation, generate_many
from specheads.decoding.planner import Plan, StaticTree, static_choices
from specheads.decoding.verify.hf_base import logits_of
from specheads.decoding.verify.model_inputs import BasePositions, image_arguments, input_device, row_positions
from specheads.heads import DraftHead, TapBatch
from specheads.hub import upload
from specheads.losses.targets import tokens_before, tokens_left
from specheads.losses.teacher import LiveTeacher, Teacher, packed_mask, tap_base
from specheads.models import card, checkpoint
from specheads.models.base.loading import keep_4bit_layout
from specheads.models.base.lora import JointConfig, adapters, base_loss, is_adapter
from specheads.models.config import SpecConfig
from specheads.models.costs import auto_drafter
from specheads.models.formats.export.exporting import export


@dataclass
class SpecOutput(ModelOutput):
    """loss: the head's (joint training adds the base's); ranks and overlaps (R', S) and terms: see DraftHead.loss.
    positions (R',), in evaluation: the output position of each start, by `losses.targets.tokens_before`."""

    loss: Tensor | None = None
    ranks: Tensor | None = None
    overlaps: Tensor | None = None
    terms: dict[str, Tensor] | None = None
    positions: Tensor | None = None


class SpecModel(PreTrainedModel):
    """A frozen base model and its draft head."""

    config_class = SpecConfig
    config: SpecConfig
    base_model_prefix = "base"
    _supports_sdpa = True
    _supports_attention_backend = True
    _keys_to_ignore_on_save = None

    def __init__(self, config: SpecConfig, base: PreTrainedModel, head: DraftHead) -> None:
        super().__init__(config)
        keep_4bit_layout(base)
        self.base = base.requires_grad_(False).eval()
        self.config.describe_base(base.config)
        self.head = head
        self.note_trained_length(config.trained_length)
        self.joint = None if config.joint is None else JointConfig.of(config.joint)
        self.progress = 1.0  # share of the run that is done, set by a trainer
        self.draw_seed: int | None = None  # TapBatch.seed, set by a trainer
        self.compiles: bool | str = False  # generate()'s default for `compile`, set by compile()
        if self.joint is not None:
            for adapter in adapters(base):
                adapter.requires_grad_(True)
        # So that a plain Trainer that restores a head-only file does not report the base's tensors as missing.
        untrained = [name for name in base.state_dict() if self.joint is None or not is_adapter(name)]
        self._keys_to_ignore_on_save = [f"base.{name}" for name in untrained]
        # What launchers read from a model: tied weights, layers that must not be split, devices.
        tied = getattr(base, "all_tied_weights_keys", None) or {}
        self.all_tied_weights_keys = {f"base.{name}": f"base.{source}" for name, source in tied.items()}
        self._no_split_modules = base._no_split_modules
        if placed := getattr(base, "hf_device_map", None):
            self.hf_device_map = {f"base.{name}": device for name, device in placed.items()}

    @property
    def device(self) -> torch.device:
        return input_device(self.base)

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def generation_config(self) -> GenerationConfig:
        return self.base.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        if "base" in self._modules:
            self.base.generation_config = value

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.base.get_output_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> torch.nn.Embedding:
        raise ValueError("the base is frozen, and the head has its vocabulary; resize the base before convert()")

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def head_state_dict(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, under this model's names: the head's, `head.…`, and the adapters'."""
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        if self.joint is not None:
            tensors |= {f"base.{name}": t for name, t in self.base.state_dict().items() if is_adapter(name)}
        return tensors

    def train(self, mode: bool = True) -> SpecModel:
        super().train(mode)
        self.base.eval()  # frozen: its dropout stays off
        if self.joint is not None:
            for name, module in self.base.named_modules():
                if name.endswith("lora_dropout"):
                    module.train(mode)
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """The head's loss on input_ids (B, T).

        labels (B, T): −100 where token t is not learnt (Hugging Face's convention, before any shift); or loss_mask
        (B, T): true where it is. With neither, this is the base's own forward and returns its output.
        document_ids (B, T): 1, 2 … for packed documents, which do not attend to one another; 0 is padding. Without
        them a document begins wherever position_ids do not increase. kwargs: the images of a batch, as `Collator` with
        a processor makes them.
        """
        if labels is None and loss_mask is None:
            if document_ids is not None:
                raise ValueError("packed documents (document_ids) need labels or loss_mask, to say what is learnt")
            return self.base(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        supervised, num_items_in_batch = self.select_supervised(
            input_ids, labels, loss_mask, attention_mask, num_items_in_batch
        )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids) if document_ids is None else (document_ids > 0).long()
        if document_ids is None and position_ids is not None:
            document_ids = documents_of(position_ids, attention_mask)
        documents = attention_mask.long() if document_ids is None else document_ids
        packed = document_ids is not None and bool((document_ids > 1).any())
        if position_ids is None:
            position_ids = positions_of(documents)
        features, teacher, base_positions = self.observe_base(
            input_ids, attention_mask, position_ids, documents if packed else None, **kwargs
        )
        # Evaluations use the final weights of losses, so that they are comparable.
        progress = self.progress if self.training else 1.0
        batch = TapBatch(
            tokens=input_ids,
            features=features,
            teacher=teacher,
            supervised=supervised & (documents > 0),
            documents=documents,
            position_ids=position_ids,
            embed=self.base.get_input_embeddings(),
            lm_head=lambda hidden: logits_of(self.base, hidden),
            num_items=num_items_in_batch,
            seed=self.draw_seed,
            progress=progress,
            base_positions=base_positions,
        )
        loss, terms = self.head.loss(batch)
        if self.joint is not None:
            assert isinstance(teacher, LiveTeacher)
            mask = packed_mask(self.base, documents, position_ids) if packed else attention_mask
            of_base = base_loss(self.joint, batch, teacher, self.base, mask)
            loss = of_base + self.joint.weight(progress) * loss
            terms["base"] = of_base.detach()
        ranks, positions = terms.pop("ranks", None), None
        if not self.training and ranks is not None:
            positions = tokens_before(batch.supervised, documents)[tokens_left(batch.supervised, documents) > 0]
        return SpecOutput(loss, ranks, terms.pop("overlaps", None), terms, positions)

    def select_supervised(
        self, input_ids: Tensor, labels: Tensor | None, loss_mask: Tensor | None, attention_mask: Tensor | None,
        num_items: Tensor | float | None,
    ) -> tuple[Tensor, Tensor | float | None]:  # fmt: skip
        """(B, T) bool, true where token t is learnt, and the number of items by which the batch's loss is divided."""
        if labels is not None and loss_mask is not None:
            raise ValueError("give labels or loss_mask, not both")
        if labels is not None:
            return labels != -100, num_items
        assert loss_mask is not None
        return loss_mask.bool(), num_items

    def observe_base(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Teacher, BasePositions | None]:
        """Run the base on a batch: its tapped features (B, T, F), the teacher with its distribution, and the base's
        positions, if these have several parts.

        documents (B, T): document ids of packed rows, else None. TypeError for arguments that would be ignored."""
        images = image_arguments(self.base, kwargs)
        if unknown := sorted(set(kwargs) - {*images, TYPES}):
            raise TypeError(f"a head learns from tokens and images: {', '.join(unknown)} would be left out")
        if images and (documents is not None or self.joint is not None):
            raise ValueError(
                "images go with neither packed rows nor adapters on the base: leave out packing and lora, or the images"
            )
        mask = attention_mask if documents is None else packed_mask(self.base, documents, position_ids)
        with torch.set_grad_enabled(self.joint is not None and torch.is_grad_enabled()):
            features, teacher = tap_base(self.base, input_ids, mask, position_ids, self.head.layers, images)
        places = row_positions(self.base, input_ids, attention_mask, images) if images else None
        return features, teacher, places

    def note_trained_length(self, length: int | None) -> None:
        """Record that the head was trained on texts of `length` tokens. The maximum is saved with the head."""
        self.config.trained_length = max(length or 0, self.config.trained_length or 0) or None
        self.head.trained_length = self.config.trained_length if self.head.attends else None

    def set_default_tree(self, tree: StaticTree | str | tuple[tuple[int, ...], ...] | None) -> None:
        """Set the static tree that the head drafts by default; it is saved with the head.

        tree: the tree, its text ("static:16", "chain:4"), its choices, or None for the default of this kind of head.
        ValueError for anything else.
        """
        choices = static_choices(tree) if isinstance(tree, str | StaticTree) else tree
        self.head.config = replace(self.head.config, tree=choices)
        self.config.head = self.head.config.to_dict()

    def compile(self, backend: str | None = None) -> SpecModel:  # type: ignore[override]
        """From now on generate() decodes with compiled steps, unless called with compile=False; returns the model.

        backend: of torch.compile (default: inductor). Nothing is compiled before the first text.
        """
        self.compiles = backend or True
        return self

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        draft: Drafter | str | bool | None = "auto",
        tree: Plan | str | None = None,
        accept: Acceptance | str | None = None,
        seed: int | Sequence[int] | None = None,
        compile: bool | str | None = None,
        **kwargs: Any,
    ) -> Tensor | ModelOutput:
        """Hugging Face's generate() with tree drafts: the same arguments, the same text, in fewer passes.

        draft: "auto" picks what pays at each step, by the costs that `specheads tune` measured here: the head's draft,
        a copy of earlier text, or nothing ("auto:FILE" names the costs). True or "head" for this model's head, which
        "auto" also means if tree or accept is given; False for plain decoding through the same loop; "lookup",
        "ngram", "maxgram", "model:PATH" (a smaller model), a head's folder, "cascade:DRAFTER+DRAFTER…", or any other
        drafter. tree: a plan (`DynamicTree`, `StaticTree`,
        `chain`, `SampledTree`; default: the head's) or its text, "chain:3". accept: the rule or its text,
        "fuzzy:js:0.2" (default `Exact`; also lossless: `Block`, `Traversal`; not lossless: `Fuzzy`, `Typical` and
        others). seed: for sampling, one number or one for each row. With return_dict_in_generate=True the output also
        has `steps` and `statistics()`. compile: as in `specheads.generate`; None: as set by compile().
        """
        compile = self.compiles if compile is None else compile
        drafter = self._choose_drafter(draft, shaped=tree is not None or accept is not None)
        return generate(
            self.base, inputs, generation_config, draft=drafter, tree=tree, accept=accept, seed=seed, compile=compile,
            **kwargs,
        )  # fmt: skip

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        draft: Drafter | str | bool | None = "auto",
        compile: bool | str | None = None,
        **options: Any,
    ) -> list[Continuation] | Iterator[Continuation]:
        """`specheads.generate_many` with this model; draft and compile as in `generate`."""
        compile = self.compiles if compile is None else compile
        shaped = options.get("tree") is not None or options.get("accept") is not None
        drafter = self._choose_drafter(draft, shaped=shaped)
        return generate_many(self.base, prompts, draft=drafter, compile=compile, **options)

    def _choose_drafter(self, draft: Any, *, shaped: bool) -> Drafter | None:
        """The drafter, from generate()'s draft. "auto" is the head if `shaped`: a plan or a rule is given."""
        if not (isinstance(draft, str) and draft.partition(":")[0] == "auto"):
            return as_drafter(draft, self.head, self.base)
        costs = draft.partition(":")[2] or None
        if not shaped:
            return auto_drafter(self.base, self.head, costs)
        if costs is not None:
            auto_drafter(self.base, self.head, costs)  # only to raise if the file is missing or wrong
        return self.head

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute the activations of the head's blocks in the backward pass instead of storing them; the frozen base
        stores none. activation_checkpointing_kwargs: arguments of torch's checkpoint()."""
        options = dict(activation_checkpointing_kwargs or {})
        if options.pop("use_reentrant", False):
            raise ValueError("use_reentrant=true gives no gradients to blocks whose inputs are frozen; leave it out")
        if every_n_layers != 1 or offload:
            raise ValueError(f"every_n_layers={every_n_layers}, offload={offload}: heads recompute every block or none")
        if self.joint is not None:
            raise ValueError(
                "activation checkpointing covers the head alone, and a base with adapters stores more; turn it off"
            )
        self.head.checkpointing = options

    def activation_checkpointing_disable(self) -> None:
        self.head.checkpointing = None

    @property
    def is_activation_checkpointing(self) -> bool:
        return self.head.checkpointing is not None

    # The names before transformers 5.23.
    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write only the head: model.safetensors and config.json, atomically; push_to_hub=True uploads it too.

        state_dict: as gathered by a launcher that shards parameters. Other arguments (repo_id …) are for `push_to_hub`.
        """
        if is_main_process:
            self._write(save_directory, state_dict)
            if push_to_hub:
                repo_id = kwargs.pop("repo_id", Path(save_directory).name)
                self.push_to_hub(repo_id, state_dict=state_dict, **{"run": save_directory, **kwargs})

    def _write(self, directory: Any, state_dict: dict[str, Tensor] | None, **options: Any) -> None:
        tensors = self.head_state_dict()
        state_dict = tensors if state_dict is None else state_dict
        checkpoint.save(directory, self.config, self.head.config, state_dict, tensors, **options)

    def push_to_hub(  # type: ignore[override]
        self, repo_id: str, *, run: Any = None, license: str | None = None,
        state_dict: dict[str, Tensor] | None = None, **options: Any,
    ) -> str:  # fmt: skip
        """Upload the head with a model card written from its run: metrics, recipe, curves, how to serve it elsewhere.

        run: the folder of the training run (default: where the head was loaded from, unless it has changed since).
        license: the head's. state_dict: as in `save_pretrained`. options: commit_message, private, token, revision,
        create_pr. A card that is already on the hub is not replaced. A base in a local folder is not named, so whoever
        loads the head must pass base=.
        """
        head = self.head
        if state_dict is not None:
            head = checkpoint.build_head(head.config, self.base, checkpoint.select_head(state_dict))
        with tempfile.TemporaryDirectory() as folder:
            self._write(folder, state_dict, names_local_base=False)
            card.write(Path(folder), self.config, self.base, head, run, repo_id=repo_id, license=license)
            return upload(Path(folder), repo_id, **options)

    def export(
        self, out: Any, to: str, *, dtype: torch.dtype | str | None = None, embeddings: bool = False,
        gguf: Path | str | None = None,
    ) -> Path:  # fmt: skip
        """Write the head into the directory `out` in another program's format, with a README on how to serve it.

        to: one of `specheads.models.formats.ENGINES`. See `specheads.models.formats.export.exporting.export`.
        """
        return export(self.config, self.base, self.head, out, to, dtype=dtype, embeddings=embeddings, gguf=gguf)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> SpecModel:
        """Load base and head from a directory or hub id, in this library's format or a foreign one, which is recognised
        by its files and logged.

        base: a different base model for the head, or its name. revision, subfolder, token …: where the head is. dtype:
        of both, or only of the head with a base in memory; None: the head gets the base's, so a float32 head is
        narrowed for a bfloat16 base; "auto": each keeps the one it was saved in. allow_pickle: read a foreign format's
        pickles, as tensors. allow_nonfinite: accept NaN and Inf among the weights. quantize: "4bit",
        "8bit" or "int8", the base's weights. Other arguments (device_map, attn_implementation …) are for loading the
        base."""
        config, base, head = checkpoint.load(pretrained_model_name_or_path, **kwargs)
        return cls(config, base, head).eval()

    @classmethod
    def _from_config(cls, config: SpecConfig, **kwargs: Any) -> SpecModel:
        raise ValueError(
            "a SpecModel needs more than a config: give a base a head with convert(), or use from_pretrained()"
        )


AutoModelForCausalLM.register(SpecConfig, SpecModel)
