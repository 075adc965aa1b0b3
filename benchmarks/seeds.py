"""Races each of the systems that specheads replaces, running its own code, against ours on the same models.

    git clone https://github.com/romsto/Speculative-Decoding romsto
    git clone https://github.com/lfsszd/CS-Drafting csd
    git clone https://github.com/maxholsman/fsd fsd
    python -m venv old && old/bin/pip install torch==2.13.0
    old/bin/pip install transformers==4.44.2 torch==2.13.0 numpy termcolor
    python benchmarks/seeds.py --romsto romsto --csd csd --fsd fsd --old old/bin/python --draft checkpoints/draft \\
        --notebook --out docs/benchmarks

--old runs FSD, and the first two with their caches, which do not work with transformers 5. --modelopt mo/bin/python
races the EAGLE-3 head of --modelopt-head in ModelOpt, in an environment as in benchmarks/peers.py. The notebook has no
repository: --notebook races a reimplementation of its published algorithm.

Same target, draft model, prompts (held-out files), γ, k, K-matrix and thresholds; float32, one thread, batch 1; no end
token, so that every text has the requested length. In each repeat, ours and theirs take turns at every prompt, ours in
this process, theirs in it too or, if needed, in their own Python. Speed is by CPU time, and tokens that they generate
beyond the requested ones count in their favour; intervals are 95 %, by a bootstrap over repeats and prompts. Exit code
1, with nothing written, if one of our greedy texts differs from the target's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from seed_race import figures
from seed_race.ours import OURS
from seed_race.settings import Race, races
from seed_race.theirs import SIDES, PassCounter, introduce, load_model
from seed_race.workers import Local, Remote, Worker, refuse_other_model
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from specheads.bench import environment, report, shipped
from specheads.bench.prompts import held_out_prompts
from specheads.data import corpus
from specheads.decoding.drafters.maxgram import count_bigrams, save_bigrams
from specheads.models.convert import load_head
from specheads.models.formats import FORMATS
from specheads.models.formats.export.exporting import head_tensors

PARTS = {  # what a checkout of each must contain
    "romsto": "sampling/speculative_decoding.py", "csd": "csd.py", "fsd": "fsd_utils.py",
}  # fmt: skip


def python_of(system: str, cache: bool, options: argparse.Namespace) -> str | None:
    """The Python that a system runs in; None for this process's."""
    if system == "modelopt":
        return str(options.modelopt)
    return options.old if cache else None


def portable(folder: Path, out: Path) -> str:
    """Copy a checkpoint in a form that transformers 4.44 and 5 both read, without an end token → its path. SystemExit
    without model.safetensors."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise SystemExit(f"{folder} has no model.safetensors: give a saved model of one file")
    config = json.loads((folder / "config.json").read_text("utf8"))
    rope = dict(config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)})
    config["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = rope
    config |= {"torch_dtype": "float32", "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").symlink_to(weights.resolve())
    return str(out)


def prepare(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The job given to all sides: models, prompts (ids), and what only some of them need."""
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    names = shipped.held_out_names(Path(options.base))
    texts = held_out_prompts(tokenizer, options.num_prompts, options.prompt_tokens, names)
    job: dict[str, Any] = {
        "target": portable(Path(options.base), work / "target"), "draft": portable(Path(options.draft), work / "draft"),
        "prompts": [tokenizer(text)["input_ids"] for text in texts], "count": options.max_new_tokens, "threads": 1,
    }  # fmt: skip
    job["parameters"] = {name: load_model(job[name]).num_parameters() for name in ("target", "draft")}
    if options.csd:
        files = itertools.islice(corpus.texts("train"), 100)
        rows = (tokenizer(text, verbose=False)["input_ids"] for _, text in files)
        job["bigrams"] = str(work / "bigrams.json")
        save_bigrams(count_bigrams(rows, load_model(job["target"]).config.vocab_size), job["bigrams"])
    if options.modelopt:
        job |= {
            "own_head": options.modelopt_head,
            "head": write_head(job["target"], options.modelopt_head, work / "head"),
        }
    return job


def write_head(target: str, head: str, out: Path) -> str:
    """Write an EAGLE-3 head with ModelOpt's tensor names, sizes and norms → its path. SystemExit if ModelOpt does not
    support it."""
    model = load_head(load_model(target), head, dtype=torch.float32)
    config, form = model.head.config, next(form for form in FORMATS if form.engine == "modelopt")
    if config.kind != form.kind:
        raise SystemExit(f"--modelopt-head {head} is a head of kind {config.kind}: give one of kind {form.kind}")
    tensors = head_tensors(model.head)
    if wrong := form.refusals(replace(config, norm_before_residual=False), tensors, model.base):
        raise SystemExit(f"--modelopt-head {head}: ModelOpt has no such head: {'; '.join(wrong)}")
    written = form.write(config, tensors, model.base)
    out.mkdir()
    own = {"norm_before_residual": config.norm_before_residual, "rope": config.rope_parameters}
    (out / "config.json").write_text(json.dumps(written.config | own))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in written.tensors.items()}, out / "model.safetensors"
    )
    return str(out)


def workers(job: dict[str, Any], planned: list[Race], options: argparse.Namespace, work: Path) -> dict[Any, Worker]:
    """A worker for our side of each system, (system, None), and for theirs with and without its cache, (system, cache).

    Those in this process share one target and draft model. SystemExit if a model differs when loaded in another Python.
    """
    paths = {"romsto": options.romsto, "cs-drafting": options.csd, "fsd": options.fsd}
    shared = {job[name]: load_model(job[name]) for name in ("target", "draft")}
    counter = PassCounter(shared[job["target"]])
    started: dict[Any, Worker] = {}
    own: dict[str, Any] | None = None
    for system, cache in sorted({(race.system, cache) for race in planned for cache in race.caches}):
        its = job | {"system": system, "path": str(Path(paths.get(system) or ".").resolve())}
        if (system, None) not in started:
            side = OURS[system](its, shared.__getitem__)
            own = own or introduce(side, job["prompts"], job["count"])
            started[system, None] = Local(side, counter, own)
        python = python_of(system, cache, options)
        if python is None:
            started[system, cache] = Local(SIDES[system](its, shared.__getitem__), counter, own)
        else:
            started[system, cache] = Remote(python, its, work / f"{system}-{cache}")
    ours = next(worker for (_, cache), worker in started.items() if cache is None)
    for (system, _), worker in started.items():
        refuse_other_model(system, worker, ours)
    return started


def run(planned: list[Race], sides: dict[Any, Worker], job: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Run every side of every race on every prompt, in turn, after one untimed run each."""
    records = []
    for race in planned:
        racers: dict[bool | None, Worker] = {None: sides[race.system, None]}
        racers |= {cache: sides[race.system, cache] for cache in race.caches}
        answers: dict[bool | None, list[list[dict[str, Any]]]] = {name: [[] for _ in range(repeats)] for name in racers}
        order = list(racers)
        for repeat in range(-1, repeats):  # the first is a warm-up on one prompt
            for i, prompt in enumerate(job["prompts"] if repeat >= 0 else job["prompts"][:1]):
                turn = (i + repeat) % len(order)
                for name in order[turn:] + order[:turn]:
                    setting = race.setting | {"cache": name}
                    seed = 1000 * (repeat + 1) + i
                    request = {"prompt": prompt, "count": job["count"], "setting": setting, "seed": seed}
                    given = racers[name].ask(request)
                    if repeat >= 0:
                        answers[name][repeat].append(given)
        for cache in race.caches:
            own = racers[cache].introduced, racers[None].introduced
            records.append(figures.record(race, cache, answers[cache], answers[None], *own))
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    return records


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--romsto", help="a checkout of romsto/Speculative-Decoding")
    parser.add_argument("--csd", help="a checkout of lfsszd/CS-Drafting")
    parser.add_argument("--fsd", help="a checkout of maxholsman/fsd; needs --old")
    parser.add_argument("--old", help="a Python with transformers 4.44: for FSD, and for the caches of the other two")
    parser.add_argument("--notebook", action="store_true", help="race the notebook's algorithm")
    parser.add_argument("--modelopt", help="a Python with nvidia-modelopt")
    parser.add_argument("--modelopt-head", default="checkpoints/eagle3", help="the EAGLE-3 head for both sides")
    parser.add_argument("--base", default="checkpoints/base", help="the target")
    parser.add_argument("--draft", required=True, help="a smaller model with the target's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="the folder for seeds.md and seeds.json")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gamma", type=int, default=5, help="drafts per step (FSD always has 5)")
    parser.add_argument("--top-k", type=int, default=50, help="for the notebook's sampling")
    parser.add_argument("--threshold", type=float, default=0.4, help="for FSD's divergence")
    parser.add_argument("--divergence", default="js_div", choices=["js_div", "kl_div", "kl_div_reversed", "tv_div"])
    options = parser.parse_args(arguments)
    for name, part in PARTS.items():
        folder = getattr(options, name)
        if folder and not (Path(folder) / part).is_file():
            parser.error(f"--{name} {folder} has no {part}: give a checkout of that repository")
    for name in ("old", "modelopt"):
        if (python := getattr(options, name)) and not Path(python).is_file():
            parser.error(f"--{name} {python} is no program: give the bin/python of an environment")
    for name in ("base", "draft", "modelopt_head")[: 3 if options.modelopt else 2]:
        if not (Path(folder := getattr(options, name)) / "config.json").is_file():
            parser.error(f"--{name.replace('_', '-')} {folder} has no config.json: give a folder with a saved model")
    for name in ("num_prompts", "prompt_tokens", "max_new_tokens", "repeats", "gamma", "top_k"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1")
    if options.fsd and not options.old:
        parser.error("--fsd needs --old, a Python with transformers 4.44")
    if not races(options):
        parser.error("no original to race: give --romsto, --csd, --fsd, --modelopt or --notebook")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)
    planned = races(options)
    where = environment.environment()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        job = prepare(options, work)
        sides = workers(job, planned, options, work)
        records = run(planned, sides, job, options.repeats)
        for worker in sides.values():
            if isinstance(worker, Remote):
                worker.close()
    if wrong := figures.wrong(records):
        print(f"greedy texts of ours that are not the target's own: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    show(records, options, where | {"parameters": job["parameters"]})
    return 0


def named_paths(options: argparse.Namespace) -> str:
    """The options as given, each path under the name that it has in the description above."""
    paths = {
        "romsto": "romsto", "csd": "csd", "fsd": "fsd", "old": "old/bin/python", "modelopt": "mo/bin/python",
        "draft": "checkpoints/draft", "notebook": "", "out": "docs/benchmarks",
    }  # fmt: skip
    parts = [f"--{name} {path}".strip() for name, path in paths.items() if getattr(options, name)]
    numbers = (
        "num_prompts", "prompt_tokens", "max_new_tokens", "repeats", "gamma", "top_k", "threshold", "divergence",
    )  # fmt: skip
    return " ".join([*parts, *(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in numbers)])


def show(records: list[dict[str, Any]], options: argparse.Namespace, where: dict[str, Any]) -> None:
    command = "python benchmarks/seeds.py " + named_paths(options)
    versions = sorted({f"{r['system']}: transformers {r['versions']['transformers']}" for r in records})
    target, draft = (where["parameters"][name] / 1e6 for name in ("target", "draft"))
    notes = [f"- {figures.NOTES[name]}" for name in dict.fromkeys(r["system"] for r in records)
             if name in figures.NOTES]  # fmt: skip
    text = "\n".join([
        "# A race against each original system\n", f"`{command}`\n",
        f"{environment.line(where)}. The originals ran under: {'; '.join(versions)}.\n",
        f"{options.num_prompts} prompts of {options.prompt_tokens} tokens out of held-out files, "
        f"{options.max_new_tokens} new tokens asked for; a target of {target:.1f}M parameters and a draft model of "
        f"{draft:.1f}M, float32, one thread, batch 1; medians of {options.repeats} "
        "interleaved repeats, with a 95 % interval of a bootstrap over repeats and prompts. Tokens/s are of CPU time, "
        "and what an original writes beyond the tokens asked for counts too. “Greedy text”: on how many prompts it is "
        "the target's own; “–” where the rule does not promise that. Acceptance is as the original counts it: romsto "
        "and FSD accepted by drafted, the notebook drafted tokens kept by tokens written, ModelOpt tokens a step. "
        "“Passes” are the target's, each over the whole text where there is no cache; ours always has one.\n",
        figures.table(records), "\n".join(notes) + "\n" if notes else "",
    ])  # fmt: skip
    report.write(options.out, "seeds", text, {"command": command, "environment": where, "races": records})
    print(text)


if __name__ == "__main__":
    sys.exit(main())
