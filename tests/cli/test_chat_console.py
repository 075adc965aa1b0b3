"""The console from outside: in a pipe, in a terminal, under Ctrl-C; and how its entries are read."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from specheads.cli.chat.console import Console
from specheads.cli.chat.lines import Entry, read_entry
from specheads.cli.chat.session import Session, stoppable
from specheads.cli.chat.settings import COMMANDS, SETTINGS
from specheads.cli.chat.tree import drawn
from specheads.cli.options.decode import ChatOptions
from specheads.models.named import Models
from tests.support.command_line import CONTROL, run, ship
from tests.support.paths import ROOT

LENGTH = 16
ENDLESS = 20_000  # tokens that nobody waits for
COLOUR = re.compile("\x1b\\[[0-9;]*m")  # the text itself is passed on as it is, control characters and all
WAIT = 120  # seconds, on a busy machine


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A base whose texts do not end by themselves."""
    folder = ship(tmp_path_factory.mktemp("endless"), max_position_embeddings=2 * ENDLESS, eos_token_id=None)
    return folder / "base"


@pytest.fixture
def piped(shipped, capsys, monkeypatch, tmp_path):
    """Runs the command over lines of input; exit code, stdout and stderr."""

    def through(text, *options):
        file = tmp_path / "input"
        file.write_text(text, "utf8")
        with open(file, encoding="utf8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return run(capsys, "chat", shipped / "eagle3", "--max-new-tokens", LENGTH, *options)

    return through


def test_a_pipe_is_answered_without_prompts_or_colours(piped, shipped, capsys):
    code, out, err = piped("x = \n/help\n/max_new_tokens 0\n", "--no-chat", "--view", "depth")
    assert code == 1 and not COLOUR.search(out) and not CONTROL.search(err)
    ask = ("generate", shipped / "eagle3", "--prompt", "x = ", "--max-new-tokens", LENGTH, "--json")
    assert out == json.loads(run(capsys, *ask)[1])["text"] + "\n", "nothing else is on stdout"
    assert "accepted length" in err and "16 tokens, " in err and "were accepted drafts" in err
    assert "/max_new_tokens: max_new_tokens 0 " in err
    assert all(f"/{name}" in err for name in (*COMMANDS, *SETTINGS)) and re.search(r"/max_new_tokens +16", err)
    code, out, err = piped("x = \n", "--no-chat", "--compare", "draft=none")
    assert code == 0 and out.startswith("auto\n") and "1.00×" in out and "accepted length" in out


def test_quit_leaves_and_what_follows_is_not_read(piped):
    code, out, _ = piped("/quit\nx = \n")
    assert code == 0 and not out


def test_a_pipe_in_which_something_failed_ends_with_1_and_the_rest_is_answered(piped):
    for failing in ("/lenght 5", "/seed x", "a" * 600):
        code, out, err = piped(f"{failing}\nx = \n", "--no-chat")
        assert code == 1 and out and "tokens/s" in err
    assert piped("/seed 5\nx = \n", "--no-chat")[0] == 0


def test_json_gives_an_object_a_prompt_and_nothing_else_on_stdout(piped):
    lines = "x = \n/temperature 1\n/seed\nx = \nx = \n"
    code, out, _ = piped(lines, "--json", "--no-chat", "--seed", 3, "--tree", "chain:2", "--compare", "draft=none")
    first, second, third = map(json.loads, out.splitlines())
    assert code == 0 and first["prompt"] == "x = " and first["seed"] == 3 and first["settings"]["tree"] == "chain:2"
    for record in (first, second, third):
        assert record["same_text"] and [record["text"]] == [other["text"] for other in record["compared"]], record
    assert second["seed"] != third["seed"] and second["token_ids"] != third["token_ids"]


def test_compare_answers_the_last_prompt_again_with_its_seed_and_leaves_the_conversation(piped, shipped, capsys):
    """Each further answer against `generate` with those settings and that seed."""
    lines = "/compare draft=none\nhi\n/compare draft=lookup temperature=0 draft=head tree=chain:2\n/compare\nand?\n"
    code, out, err = piped(lines, "--json", "--temperature", 1)
    first, again, later = map(json.loads, out.splitlines())
    assert code == 0 and "/compare: –" in err
    assert (again["prompt"], again["seed"], again["text"]) == ("hi", first["seed"], first["text"])
    asked = {"draft=lookup temperature=0": ["--draft", "lookup"],
             "draft=head tree=chain:2": ["--draft", "head", "--tree", "chain:2", "--temperature", "1"]}  # fmt: skip
    assert [other["drafter"] for other in again["compared"]] == [*asked] and len(first["compared"]) == 1
    for other, words in zip(again["compared"], asked.values(), strict=True):
        ask = ("generate", shipped / "eagle3", "--max-new-tokens", LENGTH, "--json", "--seed", first["seed"], *words)
        assert other["token_ids"] == json.loads(run(capsys, *ask, "--prompt", "<user>hi<a>")[1])["token_ids"]
    assert not later["compared"] and later["prompt"] == "and?"
    ask = ("generate", shipped / "eagle3", "--max-new-tokens", LENGTH, "--json", "--temperature", 1, "--draft", "none")
    whole = f"<user>hi<assistant>{first['text']}<user>and?<a>"  # the repeated answer is no turn
    assert later["text"] == json.loads(run(capsys, *ask, "--seed", later["seed"], "--prompt", whole)[1])["text"]


def test_a_conversation_continues_and_clear_forgets_it(piped, shipped, capsys):
    _, out, _ = piped("hi\nand?\n/clear\nhi\n", "--json")
    first, second, again = (json.loads(line)["text"] for line in out.splitlines())
    ask = ("generate", shipped / "eagle3", "--max-new-tokens", LENGTH, "--json", "--draft", "none", "--prompt")
    assert first == again == json.loads(run(capsys, *ask, "<user>hi<a>")[1])["text"]
    whole = f"<user>hi<assistant>{first}<user>and?<a>"
    assert second == json.loads(run(capsys, *ask, whole)[1])["text"]


def test_what_the_console_does_not_know_is_answered_in_one_line_with_the_nearest(offline, piped, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    asked = {
        "/max_new_token 5": "unknown command /max_new_token; did you mean /max_new_tokens? /help lists all",
        "/zzz": "unknown command /zzz; /help lists all",
        "/": "unknown command /; /help lists all",
        "/accept exakt": "/accept: accept 'exakt': unknown rule 'exakt'; did you mean 'exact'? expected exact, block",
        "/tree chian:4": "/tree: tree 'chian:4': unknown tree 'chian'; did you mean 'chain'? expected chain:DEPTH",
        "/draft lokup": "/draft: unknown drafter 'lokup'; did you mean 'lookup'?",
        "/draft nonsense": "/draft: ",
        f"/draft {tmp_path}/broken": "/draft: ",
        "/chat onn": "/chat: 'onn' is neither on nor off",
        "/seed 3": "/seed: 3",
    }
    code, _, err = piped("".join(f"{line}\n" for line in asked), "--no-chat")
    assert code == 1 and len(err.splitlines()) == len(asked) and "Traceback" not in err
    for line, message in zip(err.splitlines(), asked.values(), strict=True):
        assert line.startswith(message)


def test_no_error_of_a_command_costs_the_models_that_are_loaded(piped, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("size mismatch\nfor lm_head")

    monkeypatch.setattr("specheads.models.named.load_head", fail)
    monkeypatch.setattr("specheads.models.named.refuse_adapters", lambda name: None)
    monkeypatch.setattr("specheads.models.named.refuse_unknown_name", lambda *given: None)
    monkeypatch.setattr("specheads.models.named.holds_head", lambda name: "eagle3" in name)
    code, _, err = piped("/draft other/eagle3\n/seed 3\n")
    assert code == 1
    assert err.splitlines() == ["RuntimeError: size mismatch for lm_head (SPECHEADS_DEBUG=1 shows where)", "/seed: 3"]
    monkeypatch.setenv("SPECHEADS_DEBUG", "0")
    assert piped("/draft other/eagle3\n")[0] == 1
    monkeypatch.setenv("SPECHEADS_DEBUG", "1")
    with pytest.raises(RuntimeError):
        piped("/draft other/eagle3\n")


def test_what_is_not_utf8_is_one_line_and_changes_nothing(shipped):
    models = Models.load(str(shipped / "eagle3"), device="cpu")
    console = Console(Session(models, ChatOptions(model="", max_new_tokens=4, chat=True)))
    for entry, what in (
        (Entry("a\udcff"), "the prompt"),
        (Entry("system a\udcff", command=True), "the system message"),
    ):
        with pytest.raises(ValueError, match=f"{what} is not UTF-8 text: .* byte 0xff in position 1"):
            console.do(entry)
    assert console.session.options == replace(console.session.options, system=None) and not console.session.turns


def entries(*lines):
    typed, read = iter(lines), []

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    while True:
        try:
            read.append(read_entry(ask))
        except EOFError:
            return read


def test_an_entry_may_have_several_lines():
    assert entries("a\\", "  b\\", "c", "d") == [Entry("a\n  b\nc"), Entry("d")]
    assert entries('"""', "/a", " b", '"""', "/c d") == [Entry("/a\n b\n"), Entry("c d", command=True)]
    assert entries('"""one"""', "two") == [Entry("one"), Entry("two")]
    assert entries('"""a', "b") == [Entry("a\nb")], "the input ended inside"
    assert entries("a\\") == [Entry("a\n")]
    assert entries("/system a\\", "b") == [Entry("system a\nb", command=True)]


def test_a_typed_escape_is_a_newline_or_a_tab():
    assert entries(r"a\nb\tc") == [Entry("a\nb\tc")]
    assert entries(r"print('a\\n')") == [Entry(r"print('a\n')")], "two backslashes give the two characters"
    assert entries(r'"""print(a\n)"""') == [Entry(r"print(a\n)")], "between three quotes all is as it is"
    assert entries(r"C:\\dir \alpha \\\\ \d") == [Entry(r"C:\\dir \alpha \\\\ \d")], "no other backslash means anything"
    assert entries(r"/draft C:\new") == [Entry(r"draft C:\new", command=True)], "nor one in a command"


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, state, *arguments):
        """state: the folder of the console's history."""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        environment["XDG_STATE_HOME"] = str(state)
        environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody answers where the cursor is
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specheads", "chat", *map(str, arguments)], stdin=slave, stdout=slave,
            stderr=slave, env=environment, cwd=ROOT, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.shown, self.seen = "", 0

    def wait_for(self, text):
        """Wait for `text` after what was waited for before; returns what came up to it."""
        end = time.monotonic() + WAIT
        while text not in self.shown[self.seen :]:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536).decode("utf8", "replace")
                self.shown = self.shown.replace("\b\x1b[2C", " ")  # prompt_toolkit's way to write a space
        start, self.seen = self.seen, self.shown.index(text, self.seen) + len(text)
        return self.shown[start : self.seen]

    def type(self, keys):
        os.write(self.master, keys.encode())


@pytest.fixture(autouse=True)
def heeded():
    """Ctrl-C as it is in a terminal, though whoever runs the tests in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_last_tree_has_the_bases_probabilities_and_the_path_that_was_accepted(shipped):
    """Each node's number against a pass of the base over its own prefix; the marks against the text that was gained."""
    models = Models.load(str(shipped / "eagle3"), device="cpu")
    options = ChatOptions(model="", draft="head", tree="comb:3,2", max_new_tokens=9, chat=False)
    session = Session(models, options)
    with pytest.raises(ValueError, match="/tree: nothing was drafted yet"):
        Console(session).command("tree")
    answer = session.answer(session.ways()[0], "x = ", 0)
    assert session.trees.last is not None
    tree, logits, verdict = session.trees.last
    base, ids = models.target, session.prompt_ids("x = ")
    step = next(step for step in reversed(answer.steps) if step.drafted[0])
    before = answer.token_ids[: -sum(len(s.tokens[0]) for s in answer.steps[answer.steps.index(step) :])]
    shown = []  # (mark, token, probability) as they are drawn
    line, drawing = drawn(tree, logits, verdict, session.tokenizer)
    lines = [drawing]
    for branch in lines:
        lines += branch.children
        shown += re.findall(r"([✓✗→]) (.*?) (\d\.\d\d)(?:  |$)", getattr(branch.label, "plain", ""))
    assert len(shown) == tree.num_nodes  # the drafted nodes, and the model's own next token instead of the root
    expected = []
    for node, parent in enumerate(tree.parents[0].tolist()):
        if parent < 0:
            continue
        prefix, at = [], parent
        while at >= 0:
            prefix.insert(0, int(tree.tokens[0, at]))
            at = int(tree.parents[0, at])
        probs = base(torch.tensor([[*ids, *before[:-1], *prefix]])).logits[0, -1].softmax(-1)
        token = int(tree.tokens[0, node])
        expected.append((session.tokenizer.decode([token]), f"{float(probs[token]):.2f}"))
    assert sorted((repr(text), p) for text, p in expected) == sorted((t, p) for mark, t, p in shown if mark != "→")
    accepted = [session.tokenizer.decode([token]) for token in step.tokens[0][: step.accepted[0]]]
    assert [text for mark, text, _ in shown if mark == "✓"] == [repr(text) for text in accepted]
    assert f"{step.accepted[0]} of {tree.num_nodes - 1} drafts accepted" in line


def test_a_second_ctrl_c_does_not_wait_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked and signal.getsignal(signal.SIGINT) is not before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what runs in its background
    try:
        with stoppable() as stop:
            signal.raise_signal(signal.SIGINT)
        assert not stop.asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_the_text_and_not_the_program_in_a_terminal(endless, tmp_path):
    terminal = Terminal(tmp_path, endless, "--no-chat", "--max-new-tokens", ENDLESS, "--compare", "draft=none")
    try:
        terminal.wait_for("> ")
        terminal.type("x = \r")
        terminal.wait_for("auto")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("auto (stopped)")
        terminal.wait_for("> ")
        completes = find_spec("prompt_toolkit") is not None
        terminal.type("/max\t" if completes else "/max_new_tokens ")
        terminal.wait_for("new_tokens")
        terminal.type("4\r")
        terminal.wait_for("/max_new_tokens: 4")
        terminal.wait_for("> ")
        terminal.type("/chat off\r")
        terminal.wait_for("/chat: off")
        terminal.wait_for("> ")
        terminal.type('"""y\r= """\r')
        figures = terminal.wait_for("speed-up") + terminal.wait_for("1.00×")
        assert re.search(r"auto +4 ", figures) and "\x1b[1m" in figures
        terminal.wait_for("> ")
        terminal.type("abc")
        terminal.wait_for("abc")
        time.sleep(0.2)  # input() does not notice one that comes in before it waits for a key
        terminal.type("\x03")  # at the prompt it drops the line
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.mark.slow
def test_ctrl_c_stops_the_text_and_not_the_program_in_a_pipe(endless):
    command = [sys.executable, "-m", "specheads", "chat", endless, "--no-chat", "--max-new-tokens", str(ENDLESS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(b"x = \n/max_new_tokens 4\nx = \n")
        process.stdin.close()
        process.stdout.read(20)  # it writes
        process.send_signal(signal.SIGINT)
        out, err = (stream.read().decode(errors="replace") for stream in (process.stdout, process.stderr))
        assert process.wait(WAIT) == 0
        assert "stopped" in err and "4 tokens, " in err and not COLOUR.search(out)
    finally:
        process.kill()
        process.wait()
