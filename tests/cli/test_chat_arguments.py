"""What is typed into the console: escapes in prompts, words that Tab completes, names it does not know."""

import sys

import pytest

from specheads.cli.chat.completion import completions
from specheads.cli.chat.console import Console
from specheads.cli.chat.lines import Entry, read_entry, unescaped
from specheads.cli.chat.session import Session
from specheads.cli.chat.settings import COMMANDS, PROCESSORS, STORAGES, Settings, change, numbers_of
from specheads.decoding.acceptance import RULES
from specheads.decoding.planner import PLANS, tree_named
from specheads.models.named import Models
from tests.support.command_line import run

NAMES = ("lookup", "maxgram", "head")


@pytest.fixture(scope="module")
def models(shipped):
    return Models.load(str(shipped / "eagle3"), assistant=None, base=None, dtype="auto", device="cpu")


@pytest.fixture
def console(models):
    return Console(Session(models, Settings(drafter="head", length=4)))


def typed(line):
    return read_entry(lambda prompt: line)


def test_a_typed_escape_is_a_newline_or_a_tab():
    assert typed(r"a\nb\tc") == Entry("a\nb\tc")
    assert typed(r"print('a\\n')") == Entry(r"print('a\n')"), "two backslashes give the two characters"
    assert typed(r'"""print(a\n)"""') == Entry(r"print(a\n)"), "between three quotes all is as it is"
    assert typed(r"C:\\dir \alpha \\\\ \d") == Entry(r"C:\\dir \alpha \\\\ \d"), "no other backslash means anything"
    assert typed(r"/drafter C:\new") == Entry(r"drafter C:\new", command=True), "nor one in a command"
    assert change(Settings(), "system", r"Be brief.\nBe kind.").system == "Be brief.\nBe kind."
    assert unescaped(r"\\\n") == r"\\n"


def test_a_typed_newline_reaches_the_model(models, console):
    console.do(typed(r"x\ny"))
    assert console.session.prompt_ids(typed(r"x\ny").text, models.tokenizer) == models.tokenizer("x\ny")["input_ids"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", []), ("hello", []), ("a /len", []),
        ("/le", ["/length "]), ("/dr", ["/drafter "]), ("/t", ["/target ", "/tree ", "/top_k_filler "]),
        ("/target ", ["on ", "off "]), ("/target of", ["off "]), ("/debug d", ["depth "]), ("/target on o", []),
        ("/processor top", ["topk ", "topknucleus "]), ("/processor topk 1", []),
        ("/set_ngramstorage ", [f"{name} " for name in STORAGES]), ("/set_ngramstorage basic ", []),
        ("/accept ex", ["exact "]), ("/accept ty", ["typical:"]), ("/accept fuzzy:tv", ["fuzzy:tv:"]),
        ("/tree co", ["comb:"]), ("/tree ", [*(f"{kind}:" for kind in PLANS), "default "]),
        ("/drafter lo", ["lookup "]), ("/drafter o", ["on ", "off "]), ("/nonsense ", []), ("/length 1", []),
    ],
    ids=str,
)  # fmt: skip
def test_tab_completes_commands_and_their_arguments(line, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sorted(completions(line, NAMES)) == sorted(found)


def test_all_that_tab_offers_is_taken():
    for name in RULES:
        assert f"{name}{':' if ':' in RULES.usage(name) else ' '}" in completions("/accept ", NAMES)
    numbers = {"dynamic": "6,2,2", "best": "6,2,2"}
    assert all(tree_named(f"{kind}:{numbers.get(kind, 2)}") for kind in PLANS)
    for name, command in COMMANDS.items():
        for word in command.words[0] if command.words else ():
            numbers = " ".join("1" for _ in (numbers_of(word) if word in PROCESSORS else ()))
            change(Settings(), name, f"{word} {numbers}".strip())


def test_tab_completes_folders(tmp_path, monkeypatch):
    for name in ("heads/eagle3", "heads/medusa", "headway", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "heads.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert completions("/drafter hea", ()) == ["heads/", "headway/"]
    assert completions("/drafter heads/e", ()) == ["heads/eagle3/"]
    assert completions(f"/drafter {tmp_path}/heads/", ()) == [f"{tmp_path}/heads/eagle3/", f"{tmp_path}/heads/medusa/"]
    assert completions("/drafter nowhere/", ()) == [] and "hidden" not in str(completions("/drafter ", ()))


def test_readline_is_given_the_line_and_gives_the_words_in_turn(console, monkeypatch):
    readline = pytest.importorskip("readline")
    from specheads.cli.chat import lines

    monkeypatch.setattr(lines, "interactive", lambda: True)
    lines.asker(console._completions)
    monkeypatch.setattr(readline, "get_line_buffer", lambda: "/drafter head")
    monkeypatch.setattr(readline, "get_endidx", lambda: len("/drafter he"))
    complete = readline.get_completer()
    assert [complete("he", state) for state in (0, 1)] == ["head ", None]


@pytest.fixture
def piped(shipped, capsys, monkeypatch, tmp_path):
    """Lines of input → exit code and stderr."""

    def through(text):
        (tmp_path / "input").write_text(text, "utf8")
        with open(tmp_path / "input", encoding="utf8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code, _, err = run(capsys, "chat", shipped / "eagle3", "--max-new-tokens", 4, "--no-chat")
            return code, err

    return through


def test_what_the_console_does_not_know_is_answered_in_one_line_with_the_nearest(piped):
    asked = {
        "/lenght 5": "unknown command /lenght; did you mean /length? /help lists all",
        "/zzz": "unknown command /zzz; /help lists all",
        "/": "unknown command /; /help lists all",
        "/processor nucles 1 .9": "/processor: unknown processor 'nucles'; did you mean 'nucleus'?",
        "/accept exakt": "/accept: accept 'exakt': unknown rule 'exakt'; did you mean 'exact'? expected exact, block",
        "/tree chian:4": "/tree: tree 'chian:4': unknown tree 'chian'; did you mean 'chain'? expected chain:DEPTH",
        "/drafter lokup": "/drafter: unknown drafter 'lokup'; did you mean 'lookup'?",
        "/set_ngramstorage basik": "/set_ngramstorage: unknown n-gram storage 'basik'; did you mean 'basic'?",
        "/debug dept": "/debug: unknown view 'dept'; did you mean 'depth'?",
        "/chat onn": "/chat: 'onn' is neither on nor off",
    }
    code, err = piped("".join(f"{line}\n" for line in asked))
    assert code == 1 and len(err.splitlines()) == len(asked)
    for line, said in zip(err.splitlines(), asked.values(), strict=True):
        assert line.startswith(said)


def test_what_is_not_utf8_is_one_line_and_changes_nothing(models, console):
    for entry, what in (
        (Entry("a\udcff"), "the prompt"),
        (Entry("system a\udcff", command=True), "the system message"),
    ):
        with pytest.raises(ValueError, match=f"{what} is not UTF-8 text: .* byte 0xff in position 1"):
            console.do(entry)
    assert console.session.settings.system is None and not console.session.turns


def test_a_drafter_that_cannot_be_loaded_leaves_the_prompt_usable(offline, piped, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    lines = ["/drafter nonsense", f"/drafter {tmp_path}/broken", f"/drafter {tmp_path}/none", "/length 3"]
    code, err = piped("\n".join([*lines, ""]))
    said = err.splitlines()
    assert code == 1 and len(said) == 4 and said[3] == "/length: 3"
    assert all(line.startswith("/drafter: ") for line in said[:3]) and "Traceback" not in err


def test_no_error_of_a_command_costs_the_models_that_are_loaded(piped, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("size mismatch\nfor lm_head")

    monkeypatch.setattr("specheads.models.named.load_head", fail)
    monkeypatch.setattr("specheads.models.named.refuse_adapters", lambda name: None)
    monkeypatch.setattr("specheads.models.named.refuse_unknown_name", lambda *given: None)
    monkeypatch.setattr("specheads.models.named.holds_head", lambda name: "eagle3" in name)
    code, err = piped("/drafter other/eagle3\n/length 3\n")
    assert code == 1
    assert err.splitlines() == ["RuntimeError: size mismatch for lm_head (SPECHEADS_DEBUG=1 shows where)", "/length: 3"]
    monkeypatch.setenv("SPECHEADS_DEBUG", "0")
    assert piped("/drafter other/eagle3\n")[0] == 1
    monkeypatch.setenv("SPECHEADS_DEBUG", "1")
    with pytest.raises(RuntimeError):
        piped("/drafter other/eagle3\n")
