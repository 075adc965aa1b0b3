"""Mutations of checkpoints of every format, ours included: each is refused with one line, or decodes the base's text.

    python tests/support/mutate_checkpoints.py -n 1000 --seed 0
    python tests/support/mutate_checkpoints.py --seed 0 --index 17     one of them again

In one process: each mutant may take 2 GiB of memory beyond what is held, write files of 2 GiB, and compute for 20
seconds (or wait for 120, on a machine that others use too).
Exits with 1 where one of them broke something.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(TESTS.parent))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from specheads import CheckpointError, SpecModel, UnsupportedModel  # noqa: E402
from specheads.models.base.lora import adapters, detach  # noqa: E402
from tests.reference import foreign, foreign_blocks, foreign_depths  # noqa: E402
from tests.support.assert_drafts import embeddings  # noqa: E402
from tests.support.checkpoint_edits import MUTATIONS, base_name  # noqa: E402
from tests.support.heads_on_disk import trained  # noqa: E402
from tests.support.tiny_models import tiny_llama  # noqa: E402

BYTES, SECONDS, LINE = 2 << 30, 20, 4000  # of memory and of each file; of time; characters of an error
IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60, 12, 33], [9, 2, 60, 41, 17, 5, 8, 70, 3]])
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


class OutOfTime(BaseException):
    """Not an Exception, so that no handler of errors takes it for one."""


def ours(head, **options):
    return lambda folder, base: trained(base, head, **options).save_pretrained(folder)


def adapted(folder, base):
    """A head with adapters on its base, which are in its checkpoint."""
    model = trained(base, "medusa", num_heads=2, lora={"r": 2, "target_modules": ["q_proj"]})
    with torch.no_grad():
        for name, parameter in model.base.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.3)
    model.save_pretrained(folder)
    detach(base)


def safe_hydra(folder, base):
    tensors = foreign_depths.hydra(folder, prefix=True, base=base)
    (folder / "hydra_lm_head.pt").unlink()
    foreign.write(folder, None, tensors)


def modules_of_a_model(folder, base):
    """MTP modules under DeepSeek's names, of a model of the base's class."""
    head = trained(base, "mtp", num_modules=2)
    layers, tensors = base.config.num_hidden_layers, {}
    for name, tensor in head.head.state_dict().items():
        _, k, part = name.split(".", 2)
        theirs = "shared_head.norm.weight" if part == "norm.weight" else part.removeprefix("layers.0.")
        tensors[f"model.layers.{layers + int(k)}.{theirs}"] = tensor
    foreign.write(folder, base.config.to_dict(), tensors)


def module_apart(folder, base):
    """A module in a file of its own, as speculators names it."""
    theirs = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "norm": "final_layernorm",
    }
    tensors = {}
    for name, tensor in trained(base, "mtp").head.state_dict().items():
        first, _, rest = name.removeprefix("mtp.0.").partition(".")
        part = rest.removeprefix("0.") if first == "layers" else f"{theirs[first]}.{rest}"
        tensors[f"mtp_layers.0.{part}"] = tensor
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": base.config.to_dict(),
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": None, "architectures": []}},
    }  # fmt: skip
    foreign.write(folder, config, tensors)


MAKERS = {
    "ours: medusa": ours("medusa", num_heads=3, draft_vocab_size=40, tree=((0,), (1,), (0, 0))),
    "ours: hydra": ours("hydra", num_heads=2),
    "ours: hydra++": ours("hydra", num_heads=2, prefix_layer=True),
    "ours: eagle": ours("eagle", num_layers=2),
    "ours: eagle3": ours("eagle3", draft_vocab_size=40, norm_features=True, norm_output=True),
    "ours: mtp": ours("mtp", num_modules=2),
    "ours: parallel": ours("parallel", draft_vocab_size=40, confidence=True, block_size=4, markov_rank=6),
    "ours: adapters": adapted,
    "eagle3, pickle": lambda folder, base: foreign.eagle3(folder, "eagle"),
    "eagle3, vllm": lambda folder, base: foreign.eagle3(folder, "vllm", fc_norm=True, norm_output=True),
    "eagle3, modelopt": lambda folder, base: foreign.eagle3(folder, "modelopt"),
    "eagle3, speculators": lambda folder, base: foreign.eagle3(folder, "speculators", embed=embeddings(base)),
    "p-eagle": lambda folder, base: foreign.peagle(folder, "speculators"),
    "mtp, speculators": module_apart,
    "eagle": lambda folder, base: foreign.eagle(folder, "sglang", embed=embeddings(base)),
    "medusa, pickle": lambda folder, base: foreign_depths.medusa(folder, "v1"),
    "medusa, v2": lambda folder, base: foreign_depths.medusa(folder, "v2"),
    "medusa, trtllm": lambda folder, base: foreign_depths.medusa(folder, "trtllm"),
    "medusa, vllm": lambda folder, base: foreign_depths.medusa(folder, "vllm", draft=40),
    "hydra, pickle": lambda folder, base: foreign_depths.hydra(folder),
    "hydra++": safe_hydra,
    "dspark": lambda folder, base: foreign_blocks.head(folder, "dspark", draft=40),
    "dflash, speculators": lambda folder, base: foreign_blocks.head(folder, "dflash"),
    "dflash, z-lab": lambda folder, base: foreign_blocks.head(folder, "z-lab"),
    "dflash, modelopt": lambda folder, base: foreign_blocks.head(folder, "modelopt"),
    "jetspec": lambda folder, base: foreign_blocks.head(folder, "jetspec"),
    "dflash2": lambda folder, base: foreign_blocks.head(folder, "dflash2"),
    "dflash2, speculators": lambda folder, base: foreign_blocks.head(folder, "dflash2-sp"),
    "domino": lambda folder, base: foreign_blocks.head(folder, "domino"),
    "deepspec": lambda folder, base: foreign_blocks.head(folder, "deepspec", base=base),
    "mtp": modules_of_a_model,
}


@contextlib.contextmanager
def limited():
    """Memory, the size of files and time, for one mutant."""

    def over(*_):
        raise OutOfTime

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    kept = {what: resource.getrlimit(what) for what in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
    before = {one: signal.signal(one, over) for one in (signal.SIGPROF, signal.SIGALRM)}
    try:
        for what, most in ((resource.RLIMIT_AS, held + BYTES), (resource.RLIMIT_FSIZE, BYTES)):
            resource.setrlimit(what, (most, kept[what][1]))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(6 * SECONDS)
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for one, handler in before.items():
            signal.signal(one, handler)
        for what, limits in kept.items():
            resource.setrlimit(what, limits)


class Mutants:
    """Checkpoints in a folder, and one base for all of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        tiny_llama().save_pretrained(folder / "base")
        self.fresh_base()
        for name, make in MAKERS.items():
            make(folder / "whole" / name, self.base)
        self.fresh_base()
        for name in MAKERS:
            found = self.outcome(folder / "whole" / name, None)
            assert found == ("decodes", ""), f"{name} without a mutation: {found}"

    def fresh_base(self) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(self.folder / "base").eval()
        self.text = self.base.generate(IDS, **OPTIONS)

    def make(self, index: int) -> tuple[str, Path, random.Random, list[str]]:
        """The format of a mutant, where it is, what else is drawn at random, and what was done to it."""
        rng, done = random.Random(f"{self.seed}:{index}"), []
        name = list(MAKERS)[index % len(MAKERS)]
        here = self.folder / "mutant" / name
        shutil.rmtree(self.folder / "mutant", ignore_errors=True)
        shutil.copytree(self.folder / "whole" / name, here)
        wanted = rng.choice((1, 1, 1, 2, 3))
        while len(done) < wanted:
            one = rng.choices(list(MUTATIONS), list(MUTATIONS.values()))[0]
            what = None
            with contextlib.suppress(OSError, RecursionError):  # a file that an edit before this one made unreadable
                what = one(here, rng)
            if what:
                done.append(what)
                if one is base_name:
                    return name, here, rng, done  # loaded beside the base it names
        return name, here, rng, done

    def outcome(self, here: Path, rng: random.Random | None, named: bool = False) -> tuple[str, str]:
        """refused, decodes or broken, and why. rng: of the options it is loaded with; named: with its own base."""
        pickles, nonfinite = (True, False) if rng is None else (rng.random() < 0.9, rng.random() < 0.3)
        options = {"base": None if named else self.base, "allow_pickle": pickles, "allow_nonfinite": nonfinite}
        try:
            with limited():
                model = SpecModel.from_pretrained(here, **options)
        except Exception as error:
            return refusal(error, self.left())
        except OutOfTime:
            return "broken", f"loading takes more than {SECONDS} s"
        try:
            with limited():
                text = model.generate(IDS, **OPTIONS)
                right = self.text if model.joint is None else model.base.generate(IDS, **OPTIONS)
        except Exception as error:
            if model.joint is not None and "NaN" in str(error) and model.base(IDS).logits.isnan().any():
                return "refused", str(error)  # with these adapters the base's own logits are no numbers
            return "broken", f"loads, and dies in decoding: {type(error).__name__}: {str(error)[:300]}"
        except OutOfTime:
            return "broken", f"decoding takes more than {SECONDS} s"
        finally:
            if model.joint is not None and not named:
                detach(self.base)
        return ("decodes", "") if torch.equal(text, right) else ("broken", "decodes another text than the base")

    def left(self) -> str:
        """What a refusal changed in the base, which is made anew then."""
        if not adapters(self.base) and not getattr(self.base, "peft_config", None):
            return ""
        self.fresh_base()
        return "; adapters were left in the base"


def refusal(error: Exception, left: str) -> tuple[str, str]:
    text = str(error)
    clear = type(error) in (CheckpointError, UnsupportedModel, ValueError) and text and "\n" not in text
    if clear and len(text) <= LINE and not left:
        return "refused", text
    return (
        "broken",
        f"no clear line of an error{left}: {type(error).__name__} of {len(text)} characters: {text[:300]!r}",
    )


def run(count: int, seed: int = 0, only: int | None = None, show: bool = False) -> tuple[dict[str, Counter], list[str]]:
    """Outcomes by format, and a line for each broken mutant, with what makes it again."""
    logging.disable(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    table, broken = {name: Counter() for name in MAKERS}, []
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            mutants = Mutants(Path(folder), seed)
            for index in range(count) if only is None else (only,):
                name, here, rng, done = mutants.make(index)
                if show:
                    print(f"{index} {name}: {' | '.join(done)}"[:300].encode("ascii", "replace").decode(), flush=True)
                outcome, why = mutants.outcome(here, rng, done[-1].startswith("the base is"))
                table[name][outcome] += 1
                if show:
                    print(f"   {outcome}: {why}".encode("ascii", "replace").decode(), flush=True)
                if outcome == "broken":
                    again = f"python tests/support/mutate_checkpoints.py --seed {seed} --index {index}"
                    broken.append(
                        f"{again}\n  {name}: {' | '.join(done)[:300]}\n  {why}".encode("ascii", "replace").decode()
                    )
    finally:
        logging.disable(logging.NOTSET)
        hf_logging.enable_progress_bar()
    return table, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=1000, help="mutants (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, help="one of them alone")
    parser.add_argument("--show", action="store_true", help="say what each one is before it is loaded")
    given = parser.parse_args()
    faulthandler.enable()
    table, broken = run(given.n, given.seed, given.index, given.show or given.index is not None)
    print(f"{'format':<22}{'refused':>9}{'decodes':>9}{'broken':>8}")
    total = sum(table.values(), Counter())
    for name, found in [*table.items(), ("all", total)]:
        if found:
            print(f"{name:<22}{found['refused']:>9}{found['decodes']:>9}{found['broken']:>8}")
    print("\n".join(broken))
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
