"""The console's session: what a setting changes and refuses, what is compared, remembered and read once."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.cli.chat import console
from specheads.cli.chat.completion import completions
from specheads.cli.chat.session import Interruption, Session
from specheads.cli.chat.settings import SETTINGS, change
from specheads.cli.options.decode import ChatOptions, GenerateOptions
from specheads.decoding.acceptance import RULES
from specheads.decoding.planner import PLANS, tree_named
from specheads.models import named
from specheads.models.base import loading
from specheads.models.named import Models
from tests.support.command_line import run, ship

LENGTH = 16
DEFAULT = ChatOptions(model="", max_new_tokens=LENGTH, chat=False)
GREEDY = replace(DEFAULT, draft="head", compare="draft=none")


@pytest.fixture(scope="module")
def models(shipped):
    return Models.load(str(shipped / "eagle3"), device="cpu")


@pytest.fixture
def session(models):
    return Session(models, GREEDY)


def answers(session, prompt, seed=0):
    return [session.answer(way, prompt, seed) for way in session.ways()]


def set_to(session, *lines):
    for line in lines:
        session.change(*line.split(" ", 1) if " " in line else (line, ""))
    return session.options


def test_settings_have_the_names_of_generates_options_and_are_set_and_reset(session):
    shared = {"draft", "tree", "accept", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "chat"}
    assert shared <= set(SETTINGS) and shared <= set(GenerateOptions.__dataclass_fields__)
    assert ChatOptions(model="").draft == "auto" == GenerateOptions(model="").draft
    assert set_to(session, "max_new_tokens 7", "seed 5", "tree comb:2,2", "accept typical:0.1", "top_p 0.5") == replace(
        GREEDY, max_new_tokens=7, seed=5, tree="comb:2,2", accept="typical:0.1", top_p=0.5
    )
    assert set_to(session, "seed", "tree", "accept", "top_p", "max_new_tokens") == replace(GREEDY, max_new_tokens=128)
    assert change(DEFAULT, "chat", "on").chat is True and change(DEFAULT, "chat", "off").chat is False
    assert change(DEFAULT, "system", r"Be brief.\nBe kind.").system == "Be brief.\nBe kind."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_new_tokens 0", "max_new_tokens 0 must be at least 1"), ("max_new_tokens many", "'many' is not a whole"),
        ("seed -1", "seed -1 must be at least 0"), ("seed x", "'x' is not a whole number"),
        ("temperature hot", "'hot' is not a number"), ("temperature nan", "temperature nan"),
        ("top_p 1.5", "top_p 1.5 must be at least 0.0 and at most 1.0"), ("top_k 0", "top_k 0"),
        ("chat maybe", "'maybe' is neither on nor off"), ("view dept", "did you mean 'depth'"),
        ("accept exakt", "did you mean 'exact'"), ("accept fuzzy:js", "threshold"),
        ("tree bush:2", "unknown tree 'bush'"), ("tree chain:0", "depth=0"),
        ("draft auto:/nowhere", "No such file or directory: /nowhere"), ("draft /nowhere/at/all", "/nowhere/at/all"),
        ("compare drat=none", "did you mean 'draft'"), ("compare seed=1", "unknown setting 'seed'"),
        ("compare none", "unknown setting 'none'"), ("compare tree=bush:2", "unknown tree 'bush'"),
        ("system Be brief.", "begins a conversation, and prompts are text to continue"),
    ],
)  # fmt: skip
def test_a_bad_value_changes_nothing(line, message, session, models):
    before, drafters = session.options, len(models.drafters)
    with pytest.raises(ValueError) as error:
        set_to(session, line)
    assert message in str(error.value) and str(error.value).startswith(f"/{line.split()[0]}: ")
    assert session.options == before and len(models.drafters) == drafters


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("draft lookup", "accept fuzzy:js:0.1"), ("accept fuzzy:js:0.1", "draft maxgram"),
        ("draft {shipped}/medusa", "tree chain:9"), ("tree chain:9", "draft {shipped}/medusa"),
        ("tree sampled:2,1", "accept block"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_when_it_is_set(first, second, session, shipped):
    before = set_to(session, first.format(shipped=shipped))
    with pytest.raises(ValueError, match=f"^/{second.split()[0]}: "):
        set_to(session, second.format(shipped=shipped))
    assert session.options == before


def test_a_system_message_needs_a_conversation_and_a_template_that_reads_it(models):
    with pytest.raises(ValueError, match=r"begins a conversation, and prompts are text .* \(--chat\)"):
        Session(models, replace(DEFAULT, system="Be brief."))
    session = Session(models, replace(DEFAULT, system="Be brief.", chat=True))
    session.tokenizer = AutoTokenizer.from_pretrained(models.target.name_or_path)
    session.tokenizer.chat_template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}"
    session.tokenizer.chat_template += "{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="/system: the model's chat template ignores system messages"):
        set_to(session, "system Be kind.")


def test_two_answers_are_the_targets_greedy_text_and_are_compared_over_one_seed(session, shipped, small):
    inputs = AutoTokenizer.from_pretrained(small)("def f(x):", return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(shipped / "base", dtype=torch.float32)
    wanted = plain.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()
    for draft in ("head", "auto", f"cascade:model:{small}+maxgram"):
        set_to(session, f"draft {draft}")
        drafted, alone = pair = answers(session, "def f(x):")
        assert drafted.token_ids == alone.token_ids == wanted
        first, second = (console.figures(answer, pair) for answer in pair)
        assert first["same_text"] and second["speedup"] == 1 and second["accepted_length"] == 1
        seconds = sum(step.seconds for step in drafted.steps)
        assert first["tokens"] == LENGTH and first["tokens_per_second"] == pytest.approx(LENGTH / seconds)
        assert first["speedup"] == pytest.approx(second["seconds"] / seconds)
        counts = [sum(getattr(step, name)[0] for step in drafted.steps) for name in ("drafted", "accepted")]
        assert first["acceptance_rate"] == (counts[1] / counts[0] if counts[0] else None)
    set_to(session, "draft head", "compare accept=fuzzy:kl:3")
    exact, fuzzy = pair = answers(session, "x = ")
    assert fuzzy.name == "accept=fuzzy:kl:3" and not console.figures(exact, pair)["same_text"]


def test_a_seed_governs_both_answers_and_a_fresh_one_is_drawn_without(session):
    set_to(session, "temperature 1", "tree chain:3", "seed 4")
    first, again, other = ([answer.token_ids for answer in answers(session, "x", seed)] for seed in (4, 4, 5))
    # A walk through drafts that were not sampled draws once a token, as plain decoding does.
    assert first == again and first[0] == first[1] and first[0] != other[0]
    assert session.seed() == 4
    set_to(session, "seed")
    assert session.seed() != session.seed()  # wrong once in 2^31


def test_the_conversation_is_kept_in_the_template_and_read_once_until_it_is_cleared(session, monkeypatch):
    set_to(session, "chat on", "system Be brief.", "compare")
    (first,) = answers(session, "hi")
    session.turns.append(("hi", first.text))
    spelled = session.tokenizer.decode(session.prompt_ids("and?"))
    assert spelled == f"<system>Be brief.<user>hi<assistant>{first.text}<user>and?<a>"
    read = []
    real = session.models.target.forward
    monkeypatch.setattr(
        session.models.target, "forward", lambda *args, **kwargs: (read.append(kwargs["input_ids"].shape[1]), real(
            *args, **kwargs))[1],
    )  # fmt: skip
    (again,) = answers(session, "and?")
    assert read[0] < len(session.prompt_ids("and?")), "the first turn is not read again"
    monkeypatch.undo()
    kept = list(session.turns)
    session.forget()
    session.turns = kept
    assert answers(session, "and?")[0].token_ids == again.token_ids, "and the text is that of the whole prompt"
    session.forget()
    assert session.tokenizer.decode(session.prompt_ids("a")) == "<system>Be brief.<user>a<a>"


def test_a_text_ends_where_the_models_positions_do(session):
    set_to(session, "max_new_tokens 16", "compare")
    (answer,) = answers(session, "a" * 500)
    assert len(answer.token_ids) == 12 and answer.full
    with pytest.raises(ValueError, match="512 positions"):
        answers(session, "a" * 512)
    assert not answers(session, "a" * 100)[0].full


def test_a_stop_ends_the_text_after_the_current_step(session):
    stop = Interruption()

    class Streamer:
        seen = 0

        def put(self, value):
            self.seen += 1
            stop.asked = self.seen > 4

        def end(self):
            pass

    set_to(session, "draft none")
    answer = session.answer(session.ways()[0], "x = ", 0, streamer=Streamer(), stop=stop)
    assert answer.stopped and len(answer.token_ids) == 5  # the prompt is put first, and the fifth token was under way
    assert console.figures(answer, [answer, answer])["same_text"] is None


def test_a_plain_model_without_a_template_is_drafted_for_by_its_text(small, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(small).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    models = Models.load(str(tmp_path), device="cpu")
    session = Session(models, replace(GREEDY, draft="auto", chat=None, tree="chain:3"))
    assert session.options.chat is False and session.ways()[0].name == "lookup, chain:3"
    pair = answers(session, "abab")
    assert console.figures(pair[0], pair)["same_text"]
    with pytest.raises(ValueError, match="no chat template"):
        set_to(session, "chat on")
    with pytest.raises(ValueError, match="there is no head"):
        set_to(session, "draft head")
    with pytest.raises(ValueError, match="--base"):
        Models.load(str(tmp_path), base=str(small), device="cpu")


def test_a_draft_model_may_have_another_vocabulary(shipped, small, tmp_path):
    from tests.support.tiny_models import tiny_llama

    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.add_tokens(["def"])
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=0).save_pretrained(tmp_path)
    session = Session(Models.load(str(shipped / "base"), device="cpu"), replace(GREEDY, draft=f"model:{tmp_path}"))
    pair = answers(session, "def f")
    assert console.figures(pair[0], pair)["same_text"] and pair[0].statistics["drafted"] > 0


def test_tab_completes_commands_and_their_values(tmp_path, monkeypatch):
    for name in ("heads/eagle3", "heads/medusa", "headway", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "heads.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    names = ("auto", "lookup", "maxgram", "head")
    offered = {
        "": [], "hello": [], "a /max": [], "/ma": ["/max_new_tokens "], "/dr": ["/draft "], "/cl": ["/clear "],
        "/t": ["/tree ", "/temperature ", "/top_p ", "/top_k "], "/chat ": ["on ", "off "], "/chat of": ["off "],
        "/view d": ["depth "], "/chat on o": [], "/accept ex": ["exact "], "/accept ty": ["typical:"],
        "/accept fuzzy:tv": ["fuzzy:tv:"], "/tree co": ["comb:"], "/tree ": [f"{kind}:" for kind in PLANS],
        "/draft lo": ["lookup "], "/draft no": ["none "], "/draft mo": ["model:"], "/nonsense ": [], "/seed 1": [],
        "/draft hea": ["head ", "heads/", "headway/"], "/draft heads/e": ["heads/eagle3/"], "/draft nowhere/": [],
        "/compare dr": ["draft="], "/compare t": ["tree=", "temperature=", "top_p=", "top_k="],
        "/compare se": [], "/compare draft=no": ["draft=none "], "/compare draft=none draft=lo": ["draft=lookup "],
        "/compare draft=head tree=co": ["tree=comb:"], "/compare draft=heads/e": ["draft=heads/eagle3/"],
        f"/draft {tmp_path}/heads/": [f"{tmp_path}/heads/eagle3/", f"{tmp_path}/heads/medusa/"],
    }  # fmt: skip
    for line, words in offered.items():
        assert sorted(completions(line, names)) == sorted(words), line
    assert "hidden" not in str(completions("/draft ", ()))
    for name in RULES:
        assert f"{name}{':' if ':' in RULES.usage(name) else ' '}" in completions("/accept ", names)
    numbers = {"dynamic": "6,2,2", "best": "6,2,2"}
    assert all(tree_named(f"{kind}:{numbers.get(kind, 2)}") for kind in PLANS)


def test_a_quantisation_without_its_library_or_of_another_size_is_one_line(shipped, capsys, monkeypatch):
    code, _, err = run(capsys, "chat", shipped / "base", "--quantize", "8")
    assert code == 2 and err.startswith("specheads: --quantize 8 is unknown; expected 4bit") and err.count("\n") == 1
    monkeypatch.setattr("specheads.models.base.loading.is_bitsandbytes_available", lambda: False)
    for kind in ("base", "eagle3"):
        code, out, err = run(capsys, "chat", shipped / kind, "--quantize", "4bit")
        assert (code, out) == (2, "") and err.startswith("specheads: quantize=4bit needs") and err.count("\n") == 1


def test_both_models_are_asked_for_in_as_many_bits(shipped, small, monkeypatch):
    """Without the library: what its loading is asked for, a plain model instead of it."""
    asked, real = [], loading.AutoModelForCausalLM.from_pretrained

    def load(source, quantization_config, device_map, **options):
        asked.append((str(source), quantization_config, device_map))
        return real(source, **options)

    for module in (loading, named):
        monkeypatch.setattr(module, "quantization", lambda quantize, dtype: quantize)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    Models.load(str(shipped / "base"), device="cpu", quantize="8bit").choose(f"model:{small}")
    how = ("8bit", {"": torch.device("cpu")})
    assert asked == [(str(shipped / "base"), *how), (str(small), *how)]


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["base", "eagle3"])
def test_a_quantised_target_answers(kind, quantize, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    folder = ship(tmp_path, hidden_size=64, intermediate_size=128)  # its 4 bits share a scale among 64 weights
    models = Models.load(str(folder / kind), device="cpu", quantize=quantize)
    small = models.choose(f"model:{folder / 'base'}")[1].small
    layer = "Linear4bit" if quantize == "4bit" else "Linear8bitLt"
    for model in (models.target, small):
        assert layer in {type(module).__name__ for module in model.modules()}
    session = Session(models, replace(GREEDY, draft=f"model:{folder / 'base'}", max_new_tokens=8))
    drafted, alone = answers(session, "x = ")
    assert len(alone.token_ids) == 8
    if quantize == "4bit":  # the eighth bit rounds activations by what else is in a pass
        assert drafted.token_ids == alone.token_ids


def test_the_record_of_a_prompt_has_the_settings_that_were_typed(shipped, capsys, monkeypatch, tmp_path):
    (tmp_path / "input").write_text("/tree chain:2\nx = \n", "utf8")
    with open(tmp_path / "input", encoding="utf8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        out = run(capsys, "chat", shipped / "eagle3", "--max-new-tokens", 4, "--no-chat", "--json")[1]
    record = json.loads(out)
    assert set(record["settings"]) == set(SETTINGS) and record["settings"]["tree"] == "chain:2"
    assert record["drafter"] == "eagle3 head, chain:2" and not record["compared"] and record["speedup"] is None
