"""The console's settings and session: what a command changes and refuses, what runs, what is compared, remembered."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.cli.chat.comparison import compare_outcomes
from specheads.cli.chat.interrupt import Interruption
from specheads.cli.chat.session import Session
from specheads.cli.chat.settings import COMMANDS, Processor, Settings, change
from specheads.models.named import Models
from tests.support.tiny_models import tiny_llama

LENGTH = 24


@pytest.fixture(scope="module")
def models(shipped, small):
    return Models.load(str(shipped / "eagle3"), assistant=str(small), base=None, dtype="auto", device="cpu")


@pytest.fixture
def session(models):
    return Session(models, Settings(drafter="head", length=LENGTH))


def answers(session, prompt, seed=0):
    return {mode.name: session.run(mode, prompt, seed) for mode in session.modes()}


def set_to(session, *lines):
    for line in lines:
        session.change(*line.split(" ", 1) if " " in line else (line, ""))
    return session.settings


def test_every_command_of_the_console_is_there():
    romsto = (
        "quit debug clear speculative target drafter cache chat length gamma processor ngram top_k_filler "
        "set_ngramstorage reset_in_between"
    )
    assert {*romsto.split(), "accept", "tree", "seed", "system"} <= set(COMMANDS)


@pytest.mark.parametrize("name", ["target", "speculative", "ngram", "chat", "reset_in_between"])
def test_a_toggle_flips_one_setting_and_takes_on_and_off(name):
    start = Settings()
    flipped = change(start, name, "")
    assert getattr(flipped, name) is not getattr(start, name)
    assert replace(flipped, **{name: getattr(start, name)}) == start
    assert change(flipped, name, "") == start
    assert getattr(change(start, name, "on"), name) and not getattr(change(start, name, "off"), name)


def test_commands_set_what_they_say(session):
    assert set_to(session, "length 7", "gamma 3", "top_k_filler 1", "set_ngramstorage onelevel 2", "seed 5") == replace(
        Settings(drafter="head"), length=7, gamma=3, top_k_filler=1, storage="onelevel", ngram_n=2, seed=5
    )
    assert set_to(session, "tree comb:2,2").tree == "comb:2,2" and set_to(session, "gamma 2").tree is None
    assert set_to(session, "tree").gamma is None and set_to(session, "seed").seed is None
    assert [set_to(session, line).debug for line in ("debug", "debug", "debug depth")] == ["steps", "off", "depth"]
    assert set_to(session, "processor topknucleus 0.7 40 0.9").processor == Processor("topknucleus", 0.7, 40, 0.9)
    assert set_to(session, "accept fuzzy:js:0.1").accept == "fuzzy:js:0.1"
    assert set_to(session, "drafter model", "drafter").alone and not set_to(session, "drafter head").alone


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("length 0", "length 0 must be at least 1"), ("length", "whole number"), ("length many", "'many'"),
        ("gamma -1", "gamma -1"), ("seed -1", "seed -1"), ("seed x", "'x'"), ("top_k_filler 0", "top_k_filler 0"),
        ("target maybe", "'maybe'"), ("debug loud", "'loud'"),
        ("processor", "unknown processor"), ("processor nucles 1 .9", "did you mean 'nucleus'"),
        ("processor topk 1", "1 of 2 numbers"), ("processor topk 1 2 3", "3 of 2 numbers"),
        ("processor topk 1 2.5", "TOP_K: '2.5' is not a whole number"),
        ("processor topk 1 0", "top_k 0"), ("processor nucleus 1 1.5", "top_p 1.5"),
        ("processor multinomial hot", "TEMPERATURE: 'hot' is not a number"),
        ("drafter auto:/nowhere", "/drafter: No such file or directory: /nowhere"),
        ("processor multinomial 0", "temperature 0"), ("processor multinomial nan", "temperature nan"),
        ("set_ngramstorage", "unknown n-gram storage"), ("set_ngramstorage basic 1", "n 1 must be at least 2"),
        ("set_ngramstorage basic 2 3", "one number"), ("set_ngramstorage huge 3", "'huge'"),
        ("accept", "unknown rule"), ("accept exakt", "did you mean 'exact'"), ("accept fuzzy:js", "threshold"),
        ("tree bush:2", "unknown tree 'bush'"), ("tree chain:0", "depth=0"),
        ("drafter /nowhere/at/all", "/nowhere/at/all"), ("drafter on", "cannot write alone"),
        ("system Be brief.", "ignores system messages"),
    ],
)  # fmt: skip
def test_a_bad_argument_changes_nothing(line, said, session, models):
    before, drafters = session.settings, len(models.drafters)
    if line.startswith("system"):  # such templates there are: the shipped base has one
        session.tokenizer = AutoTokenizer.from_pretrained(models.target.name_or_path)
        session.tokenizer.chat_template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}"
        session.tokenizer.chat_template += "{% endif %}{% endfor %}"
    with pytest.raises(ValueError) as error:
        set_to(session, line)
    assert said in str(error.value) and str(error.value).startswith(f"/{line.split()[0]}: ")
    assert session.settings == before and len(models.drafters) == drafters


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("drafter lookup", "accept fuzzy:js:0.1"), ("accept fuzzy:js:0.1", "drafter maxgram"),
        ("drafter {shipped}/medusa", "tree chain:9"), ("tree chain:9", "drafter {shipped}/medusa"),
        ("tree sampled:2,1", "accept block"), ("chat off", "system Be brief."),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_when_it_is_set(first, second, session, shipped):
    before = set_to(session, first.format(shipped=shipped))
    with pytest.raises(ValueError, match=f"^/{second.split()[0]}: "):
        set_to(session, second.format(shipped=shipped))
    assert session.settings == before


def test_a_session_does_not_begin_with_a_system_message_and_no_conversation(models):
    with pytest.raises(ValueError, match=r"begins a conversation, and prompts are text .* \(--chat\)"):
        Session(models, Settings(drafter="head", system="Be brief."))
    Session(models, Settings(drafter="head", system="Be brief.", chat=True))


def test_filters_come_before_the_temperature():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0]).log_softmax(-1)
    probs = Processor("topknucleus", 2.0, 4, 0.9).warpers()(None, logits.clone()[None]).softmax(-1)[0]
    top = logits.softmax(-1)[:4] / logits.softmax(-1)[:4].sum()
    kept = top[: int((top.cumsum(0) < 0.9).sum()) + 1]  # the fewest that have 0.9 of the distribution at temperature 1
    by_hand = kept.sqrt() / kept.sqrt().sum()
    assert len(kept) == 3 and torch.allclose(probs, torch.cat([by_hand, torch.zeros(3)]))
    hot = (logits[:4] / 2).softmax(-1)
    assert int((hot.cumsum(0) < 0.9).sum()) + 1 == 4, "the other order would have kept another nucleus"


def test_all_ways_write_the_targets_greedy_text_and_the_figures_are_over_the_target(session, shipped, small):
    set_to(session, "ngram", "drafter model", "drafter")
    outcomes = answers(session, "def f(x):")
    figures = compare_outcomes(list(outcomes.values()))
    assert list(figures) == ["target alone", "speculative", "n-gram", "draft model alone"]
    inputs = AutoTokenizer.from_pretrained(small)("def f(x):", return_tensors="pt")
    for name, folder in (("target alone", shipped / "base"), ("draft model alone", small)):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = plain.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=LENGTH)
        assert outcomes[name].token_ids == wanted[0, inputs["input_ids"].shape[1] :].tolist()
    assert [figures[name]["same_text"] for name in figures] == [True, True, True, False]
    slow = figures["target alone"]
    for name, own in figures.items():
        steps = outcomes[name].steps
        seconds = sum(step.seconds for step in steps)
        assert own["tokens"] == LENGTH and own["tokens_per_second"] == pytest.approx(LENGTH / seconds)
        assert own["speedup"] == pytest.approx(slow["seconds"] / seconds)
        drafted, accepted = sum(step.drafted[0] for step in steps), sum(step.accepted[0] for step in steps)
        assert own["acceptance_rate"] == (accepted / drafted if drafted else None)
    assert [own["distribution"] for own in figures.values()] == ["the target's", "lossless", "lossless", "its own"]


def test_a_lossy_rule_is_called_so_and_n_grams_without_a_distribution_are_judged_exactly(session):
    set_to(session, "ngram", "accept fuzzy:kl:3")
    figures = compare_outcomes(list(answers(session, "x = ").values()))
    assert figures["speculative"]["distribution"] == "lossy" and not figures["speculative"]["same_text"]
    assert figures["n-gram"]["distribution"] == "lossless" and figures["n-gram"]["same_text"]
    set_to(session, "accept typical", "target off")
    figures = compare_outcomes(list(answers(session, "x = ").values()))
    assert figures["n-gram"]["distribution"] == "lossy" and figures["n-gram"]["speedup"] is None


def test_gamma_is_the_length_of_every_draft(session):
    set_to(session, "gamma 2", "drafter model")
    steps = answers(session, "x = ")["speculative"].steps[1:-2]  # towards the end there is room for fewer
    drafted = {n for step in steps for n in step.drafted}
    assert drafted == {2}
    set_to(session, "processor multinomial 1", "target off")
    (mode,) = session.modes()
    assert mode.plan.branches == (1, 1), "sampled text is drafted by sampling, where the drafter does so by itself"


def test_a_seed_governs_all_ways_and_a_fresh_one_is_drawn_without(session):
    set_to(session, "processor multinomial 1", "seed 4")
    first, again, other = (
        {name: outcome.token_ids for name, outcome in answers(session, "x", seed).items()} for seed in (4, 4, 5)
    )
    assert first == again and all(first[name] != other[name] for name in first)
    assert session.seed() == 4
    set_to(session, "seed")
    assert session.seed() != session.seed()  # wrong once in 2^31


def test_the_conversation_is_kept_in_the_template_until_it_is_cleared(session):
    set_to(session, "chat", "system Be brief.")
    first = answers(session, "hi")
    session.keep("hi", list(first.values()))
    session.keep("stopped", [replace(first["target alone"], stopped=True)])
    answer = first["target alone"].text
    spelled = session.tokenizer.decode(session.prompt_ids("and?", session.tokenizer))
    assert spelled == f"<system>Be brief.<user>hi<assistant>{answer}<user>and?<a>"
    session.forget()
    assert session.tokenizer.decode(session.prompt_ids("a", session.tokenizer)) == "<system>Be brief.<user>a<a>"
    set_to(session, "chat off")
    assert session.tokenizer.decode(session.prompt_ids("a", session.tokenizer)) == "a"


def test_the_n_gram_storage_is_kept_between_prompts_unless_it_is_reset(session):
    set_to(session, "ngram", "speculative off", "target off", "top_k_filler 1")
    context = session.tokenizer("qz")["input_ids"]
    first, second = (compare_outcomes(list(answers(session, "qzqzqz").values()))["n-gram"] for _ in range(2))
    assert second["accepted"] > first["accepted"], "the second time the text is known"
    answers(session, "abc")
    assert session.storage.next_token(context)[1]
    set_to(session, "reset_in_between")
    answers(session, "abc")
    assert not session.storage.next_token(context, 2)[1]
    answers(session, "qzqzqz")
    set_to(session, "set_ngramstorage onelevel 3")
    assert not session.storage.next_token(context)[1]


def test_a_text_ends_where_the_models_positions_do(session):
    set_to(session, "length 400", "speculative off")
    (outcome,) = answers(session, "a" * 500).values()
    assert len(outcome.token_ids) == 12 and outcome.full
    with pytest.raises(ValueError, match="512 positions"):
        answers(session, "a" * 512)
    assert not answers(session, "a" * 100)["target alone"].full


def test_a_stop_ends_the_text_after_the_current_step(session):
    stop = Interruption()

    class Streamer:
        seen = 0

        def put(self, value):
            self.seen += 1
            stop.asked = self.seen > 4

        def end(self):
            pass

    outcome = session.run(session.modes()[0], "x = ", 0, streamer=Streamer(), stop=stop)
    assert outcome.stopped and len(outcome.token_ids) == 5  # the prompt is put first, and the fifth token was under way
    assert compare_outcomes([outcome])["target alone"]["same_text"] is None


def test_a_plain_model_without_a_template_is_drafted_for_by_its_text(small, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(small)
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    models = Models.load(str(tmp_path), assistant=None, base=None, dtype="auto", device="cpu")
    assert models.best == "lookup"
    session = Session(models, Settings(drafter=models.best, length=LENGTH))
    assert compare_outcomes(list(answers(session, "abab").values()))["speculative"]["same_text"]
    with pytest.raises(ValueError, match="no chat template"):
        set_to(session, "chat")
    with pytest.raises(ValueError, match="there is no head"):
        set_to(session, "drafter head")
    with pytest.raises(ValueError, match="--base"):
        Models.load(str(tmp_path), assistant=None, base=str(small), dtype="auto", device="cpu")


def test_a_draft_model_of_another_vocabulary_writes_alone_in_its_own(shipped, small, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(small)
    tokenizer.add_tokens(["def"])
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=0).save_pretrained(tmp_path)
    models = Models.load(str(shipped / "base"), assistant=str(tmp_path), base=None, dtype="auto", device="cpu")
    session = Session(models, Settings(drafter=models.best, length=LENGTH, alone=True))
    *_, alone = session.modes()
    assert session.prompt_ids("def f", alone.tokenizer) != session.prompt_ids("def f", session.tokenizer)
    figures = compare_outcomes(list(answers(session, "def f").values()))
    assert figures["speculative"]["same_text"] and figures["draft model alone"]["tokens"] > 0
