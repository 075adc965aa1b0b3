"""One original system's side of benchmarks/seeds.py: its own code, called as its users call it.

    python benchmarks/seed_race/theirs.py JOB.json

Runs in the Python that the original needs: torch, transformers from 4.44 on, and the original. Each line of stdin is a
request, each line of stdout the answer to it; what the originals print goes nowhere. benchmarks/seeds.py also imports
this file, for the originals that run beside ours.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

Job = dict[str, Any]
Setting = dict[str, Any]
# The new ids, all of them, and the figure that the original itself calls its acceptance (None where it has none).
Result = tuple[list[int], float | None]


def load_model(folder: str, loader: Any = AutoModelForCausalLM) -> Any:
    """The model in float32, which ends no text of its own accord: every side writes as many tokens as are asked for."""
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    model = loader.from_pretrained(folder, **{name: torch.float32}).eval().requires_grad_(False)
    model.generation_config = transformers.GenerationConfig()
    return model


class PassCounter:
    """Counts a model's forward passes, by its first layer, which every way of calling it goes through once."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.get_decoder().layers[0].register_forward_pre_hook(self._add)

    def _add(self, module: Any, given: Any) -> None:
        self.count += 1


# -------------------------------------------------------------------------------------------------------------- sides


class Side(ABC):
    """An original with its target and its draft. generate(): one prompt through it."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        self.job = job
        self.target, self.draft = load(job["target"]), load(job["draft"])
        self.reference = self.target  # what its own greedy text is read from

    @abstractmethod
    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result: ...


class Romsto(Side):
    """github.com/romsto/Speculative-Decoding."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        super().__init__(job, load)
        with contextlib.suppress(ImportError):
            importlib.import_module("termcolor")
        if "termcolor" not in sys.modules:  # it colours debug output, which is off
            stand_in: Any = types.ModuleType("termcolor")
            stand_in.colored = lambda text, *args, **kwargs: text
            sys.modules["termcolor"] = stand_in
        self.sampling, self.ngrams, self.processors = imported(
            job["path"], "sampling", "ngram_assisted", "utils.logits_processor"
        )

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        options = {
            "gamma": setting["gamma"], "max_gen_len": count, "eos_tokens_id": -1, "use_cache": setting["cache"],
            "logits_processor": self.processor(setting),
        }  # fmt: skip
        if setting["draft"] == "model":
            return self.sampling.speculative_generate(prompt, self.draft, self.target, **options)
        storage = self.ngrams.NGramStorage(n=setting["n"], vocab_size=self.target.config.vocab_size)
        return self.ngrams.ngram_assisted_speculative_generate(
            prompt, storage, self.target, filler_top_k=setting["filler_top_k"], **options
        )

    def processor(self, setting: Setting) -> Any:
        return self.processors.MultinomialProcessor(1.0) if setting["sampled"] else self.processors.GreedyProcessor()


class CSDrafting(Side):
    """github.com/lfsszd/CS-Drafting. Its model.py loads a tokenizer from a hub as it is imported, and never uses it."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        super().__init__(job, load)
        known = transformers.AutoTokenizer.from_pretrained
        transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: None
        try:
            self.csd, self.models = imported(job["path"], "csd", "model")
        finally:
            transformers.AutoTokenizer.from_pretrained = known
        self.mag = self.models.get_mag_model(job["bigrams"])
        self.mag.vocab_size = self.target.config.vocab_size  # 32,000 there, whatever the target has

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        wrapper = self.models.CSDraftingDecoderModelKVCache if setting["cache"] else self.models.CSDraftingDecoderModel
        ids = torch.tensor([prompt])
        drafts = [wrapper(self.draft, name="draft"), self.mag]
        out = self.csd.csd(
            drafts, wrapper(self.target, name="target"), ids, ids, torch.tensor(setting["k_matrix"]),
            max_length=count, leniency=setting["leniency"],
        )  # fmt: skip
        return out[0, len(prompt) :].tolist(), None


class FSD(Side):
    """The official code of Fuzzy Speculative Decoding, on transformers 4.44."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        from transformers.generation import candidate_generator

        # It imports this class from transformers, where 4.44.2 lacks it, and never uses it.
        if not hasattr(candidate_generator, "BackoffCandidateGenerator"):
            candidate_generator.BackoffCandidateGenerator = None
        (code,) = imported(job["path"], "fsd_utils")
        super().__init__(job, lambda folder: load_model(folder, code.FSDAutoModelForCausalLM))

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        ids = torch.tensor([prompt])
        options: Setting = {"do_sample": True, "top_k": 0} if setting["sampled"] else {"do_sample": False}
        if setting["threshold"] is not None:
            options |= {"fsd_div_threshold": setting["threshold"], "fsd_div_type": setting["divergence"]}
        begun = len(self.draft.n_matches_list)
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=self.draft, max_new_tokens=count,
            **options,
        )  # fmt: skip
        accepted, drafted = self.draft.n_matches_list[begun:], self.draft.candidate_sequences_list[begun:]
        return out[0, len(prompt) :].tolist(), float(sum(accepted)) / sum(drafted) if drafted else None


class Notebook(Side):
    """The algorithm of the notebook of draft-model decoding with top-k sampling, written anew: batch 1, no KV cache."""

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        ids, kept, k = list(prompt), 0, setting["k"]
        while len(ids) < len(prompt) + count:
            at = len(ids)
            q = []
            drafted = list(ids)
            for _ in range(setting["gamma"]):
                q.append(top_k_probs(self.draft(torch.tensor([drafted])).logits[0, -1:], k)[0])
                drafted.append(int(torch.multinomial(q[-1], 1)))
            p = top_k_probs(self.target(torch.tensor([drafted])).logits[0, at - 1 :], k)
            accepted = 0
            for i, token in enumerate(drafted[at:]):
                if q[i][token] > p[i, token] and torch.rand(()) < 1 - p[i, token] / q[i][token]:
                    break
                accepted += 1
            last = p[accepted]
            if accepted < setting["gamma"]:
                last = (last - q[accepted]).clamp(min=0)
            ids = [*drafted[: at + accepted], int(torch.multinomial(last / last.sum(), 1))]
            kept += accepted
        new = ids[len(prompt) :]
        return new, kept / len(new)


class ModelOpt(Side):
    """NVIDIA ModelOpt's EAGLE-3: the decoding of its validation, which is all it has, and has no cache."""

    def __init__(self, job: Job, load: Callable[[str], Any]) -> None:
        import modelopt.torch.speculative as mtsp
        from modelopt.torch.speculative.config import eagle3_default_config
        from modelopt.torch.speculative.plugins.transformers import HFARValidation
        from safetensors.torch import load_file

        super().__init__(job, load)
        self.reference = load(job["target"])  # the conversion below changes the other one's forward
        head = json.loads((Path(job["head"]) / "config.json").read_text())
        shape = {name: head[name] for name in (
            "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
            "draft_vocab_size",
        )}  # fmt: skip
        rope = {"rope_scaling": head["rope"], "rope_theta": head["rope"]["rope_theta"]}
        taps = {"eagle_aux_hidden_state_layer_ids": head["eagle_config"]["eagle_aux_hidden_state_layer_ids"]}
        mtsp.convert(self.target, [("eagle", {
            "eagle_architecture_config": eagle3_default_config | shape | rope | taps | {"torch_dtype": "float32"},
            "eagle_use_torch_compile": False, "eagle_export_rope_scaling": {},
        })])  # fmt: skip
        module = self.target.eagle_module
        module.load_state_dict(load_file(Path(job["head"]) / "model.safetensors"))
        if head["norm_before_residual"]:
            self._add_norm(module.layers[0])
        nothing = types.SimpleNamespace(chat_template="", eos_token="", convert_tokens_to_ids=lambda token: -1)
        self.validation = HFARValidation(self.target, nothing)

    @staticmethod
    def _add_norm(block: Any) -> None:
        """norm_before_residual, which it has not: the norm of the features is taken before the block, not inside."""
        norm, block.hidden_norm = block.hidden_norm, torch.nn.Identity()

        def normed(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if given:
                return (norm(given[0]), *given[1:]), named
            return given, named | {"hidden_states": norm(named["hidden_states"])}

        block.register_forward_pre_hook(normed, with_kwargs=True)

    def generate(self, prompt: list[int], count: int, setting: Setting) -> Result:
        out, rate = self.validation.validate_online(count, input_ids=torch.tensor([prompt]), steps=setting["depth"])
        return out[0, len(prompt) :].tolist(), rate


SIDES: dict[str, type[Side]] = {
    "romsto": Romsto, "cs-drafting": CSDrafting, "fsd": FSD, "notebook": Notebook, "modelopt": ModelOpt,
}  # fmt: skip


def imported(folder: str, *names: str) -> list[Any]:
    """Modules out of an original's own folder. ImportError names the folder."""
    sys.path.insert(0, folder)
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as error:
        raise ImportError(f"{folder}: {error}") from error
    finally:
        sys.path.remove(folder)


def top_k_probs(logits: Tensor, k: int) -> Tensor:
    """logits (…, V) → the distribution (…, V) of the k likeliest tokens."""
    best = logits.topk(k, -1)
    return torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))


# ------------------------------------------------------------------------------------------------------------- answers


def answer(side: Side, counter: PassCounter, request: dict[str, Any]) -> dict[str, Any]:
    """One prompt, timed: ids, acceptance, the target's passes, and seconds of CPU and wall time."""
    torch.manual_seed(request["seed"])
    counter.count = 0
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), torch.no_grad():
        begun = time.process_time(), time.perf_counter()
        ids, acceptance = side.generate(request["prompt"], request["count"], request["setting"])
        ended = time.process_time(), time.perf_counter()
    return {
        "ids": ids, "acceptance": acceptance, "passes": counter.count,
        "cpu_seconds": ended[0] - begun[0], "wall_seconds": ended[1] - begun[1],
    }  # fmt: skip


@torch.no_grad()
def greedy_text(model: Any, prompt: list[int], count: int) -> list[int]:
    """The model's own greedy text, `count` ids, by its forward and its cache alone."""
    ids, cache, new = torch.tensor([prompt]), None, list[int]()
    while len(new) < count:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        new.append(int(ids))
    return new


def introduce(side: Side, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """The versions here, the target's own texts, and its logits (V,) after the first prompt."""
    with torch.no_grad():
        logits = side.reference(input_ids=torch.tensor([prompts[0]])).logits[0, -1].tolist()
    return {
        "versions": {"transformers": transformers.__version__, "torch": str(torch.__version__)},
        "greedy": [greedy_text(side.reference, prompt, count) for prompt in prompts],
        "logits": logits,
    }


def serve(job: Job) -> None:
    """Answers, a line each, until stdin ends. The first is introduce()'s."""
    torch.set_num_threads(job["threads"])
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 — what the originals print is no answer
    side = SIDES[job["system"]](job, load_model)
    counter = PassCounter(side.target)
    print(json.dumps(introduce(side, job["prompts"], job["count"])), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, counter, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text()))
