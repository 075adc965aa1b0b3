"""The console from outside: in a pipe, in a terminal, under Ctrl-C; and how its entries are read and drafts shown."""

import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
import rich.console
import torch
from transformers import AutoTokenizer

from specheads.cli.chat.interrupt import stoppable
from specheads.cli.chat.lines import Entry, read_entry
from specheads.cli.chat.session import Session
from specheads.cli.chat.settings import COMMANDS, Settings
from specheads.cli.chat.steps import Watched, rejected_path
from specheads.cli.chat.view import StepStream
from specheads.decoding.tree import DraftTree
from specheads.models.named import Models
from tests.support.command_line import CONTROL, run, ship
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama

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


def test_a_pipe_is_answered_without_prompts_or_colours(piped):
    code, out, err = piped("/debug\nx = \n/help\n/length 0\n", "--no-chat")
    assert code == 1 and not COLOUR.search(out) and not CONTROL.search(err)
    assert out.startswith("target alone"), "a prompt sign would stand before it"
    assert "target alone" in out and "accepted length" in out and "1.00×" in out
    assert "/length: length 0 " in err
    assert all(f"/{name}" in err for name in COMMANDS)
    assert re.search(r"/debug.*steps", err) and re.search(r"/length N +16", err), "and what is set"


def test_quit_leaves_and_what_follows_is_not_read(piped):
    code, out, _ = piped("/quit\nx = \n")
    assert code == 0 and not out


@pytest.mark.parametrize("failing", ["/lenght 5", "/length 0", "a" * 600, "/target off\n/speculative off\nx"])
def test_a_pipe_in_which_something_failed_ends_with_1_and_the_rest_is_answered(piped, failing):
    code, out, _ = piped(f"{failing}\n/target on\nx = \n", "--no-chat")
    assert code == 1 and "tokens/s" in out
    assert piped("/length 5\nx = \n", "--no-chat")[0] == 0


def test_the_cache_is_said_to_be_always_on(piped):
    _, _, err = piped("/cache\n")
    assert "/cache: on" in err and "always on" in err


def test_json_gives_an_object_a_prompt_and_nothing_else_on_stdout(piped):
    code, out, err = piped("/ngram\nx = \n/tree chain:2\ny = \n/target off\n/speculative off\n/ngram\nz\n", "--json",
                           "--no-chat", "--seed", 3)  # fmt: skip
    first, second = map(json.loads, out.splitlines())
    assert code == 1 and first["prompt"] == "x = " and list(first["modes"]) == ["target alone", "speculative", "n-gram"]
    assert second["settings"]["tree"] == "chain:2" and second["seed"] == 3
    texts = {mode["text"] for mode in first["modes"].values()}
    assert len(texts) == 1 and all(mode["same_text"] for mode in first["modes"].values())
    assert "no decoder is switched on" in err


def test_all_ways_of_a_prompt_share_its_fresh_seed(piped):
    _, out, _ = piped("x = \nx = \n", "--json", "--no-chat", "--temperature", 1)
    first, second = map(json.loads, out.splitlines())
    # A walk through drafts that were not sampled draws once a token, as the target alone does.
    assert first["modes"]["speculative"]["same_text"] and second["modes"]["speculative"]["same_text"]
    assert first["seed"] != second["seed"]
    assert first["modes"]["target alone"]["token_ids"] != second["modes"]["target alone"]["token_ids"]


def test_one_way_that_fails_leaves_the_others(piped, shipped, tmp_path):
    AutoTokenizer.from_pretrained(shipped / "base").save_pretrained(tmp_path)
    tiny_llama(vocab_size=258, num_hidden_layers=1, max_position_embeddings=8).save_pretrained(tmp_path)
    code, out, err = piped("/drafter on\n" + "a" * 20 + "\n", "--json", "--no-chat", "--assistant", tmp_path)
    modes = json.loads(out)["modes"]
    assert code == 1 and modes["target alone"]["tokens"] == LENGTH
    assert "positions" in modes["speculative"]["error"] and "positions" in err


def test_a_conversation_continues_and_clear_forgets_it(piped, shipped, capsys):
    _, out, _ = piped("hi\nand?\n/clear\nhi\n", "--json")
    first, second, again = (json.loads(line)["modes"]["target alone"]["text"] for line in out.splitlines())
    ask = ("generate", shipped / "eagle3", "--max-new-tokens", LENGTH, "--json", "--draft", "none", "--prompt")
    assert first == again == json.loads(run(capsys, *ask, "<user>hi<a>")[1])["text"]
    whole = f"<user>hi<assistant>{first}<user>and?<a>"
    assert second == json.loads(run(capsys, *ask, whole)[1])["text"]


def entries(*lines):
    given, found = iter(lines), []

    def ask(prompt):
        try:
            return next(given)
        except StopIteration:
            raise EOFError from None

    while True:
        try:
            found.append(read_entry(ask))
        except EOFError:
            return found


def test_an_entry_may_have_several_lines():
    assert entries("a\\", "  b\\", "c", "d") == [Entry("a\n  b\nc"), Entry("d")]
    assert entries('"""', "/a", " b", '"""', "/c d") == [Entry("/a\n b\n"), Entry("c d", command=True)]
    assert entries('"""one"""', "two") == [Entry("one"), Entry("two")]
    assert entries('"""a', "b") == [Entry("a\nb")], "the input ended inside"
    assert entries("a\\") == [Entry("a\n")]
    assert entries("/system a\\", "b") == [Entry("system a\nb", command=True)]


def test_the_first_path_after_what_was_accepted_is_shown_as_rejected():
    #      root 9: 1 (3 (5), 4), 2;  an unused slot
    tree = DraftTree(torch.tensor([[9, 1, 2, 3, 4, 5, 9]]), torch.tensor([[-1, 0, 0, 1, 1, 3, -1]]), 3)
    assert rejected_path(tree, []) == [1, 3, 5]
    assert rejected_path(tree, [1]) == [3, 5]
    assert rejected_path(tree, [2]) == rejected_path(tree, [1, 4]) == rejected_path(tree, [1, 3, 5]) == []


class Numbers:
    """A tokenizer that spells each token as its number."""

    def decode(self, ids, **kwargs):
        return "".join(f"{token} " for token in ids)


class Spy(Watched):
    """Notes the drafts of chains."""

    drafts = ()

    def propose(self, *args):
        tree = super().propose(*args)
        self.drafts = (*self.drafts, tree.tokens[0, 1:].tolist())
        return tree


@pytest.mark.parametrize("rule", ["exact", "typical:0.01", "fuzzy:random:0.7"])
def test_debug_marks_accepted_and_rejected_drafts_where_they_are(rule, shipped):
    models = Models.load(str(shipped / "eagle3"), assistant=None, base=None, dtype="auto", device="cpu")
    settings = Settings(target=False, drafter="head", gamma=3, length=40, accept=rule)
    session = Session(models, settings)
    (mode,) = session.modes()
    spy, paper = Spy(mode.drafter), io.StringIO()
    stream = StepStream(rich.console.Console(file=paper), Numbers(), spy)
    outcome = session.run(mode, "x = ", 0, drafter=spy, streamer=stream)
    stream.close(outcome.steps[-1].accepted[0])
    wanted, spell = f"{outcome.token_ids[0]} ", Numbers().decode
    for step, draft in itertools.zip_longest(outcome.steps[1:], spy.drafts, fillvalue=[]):  # the last may have none
        (gained,), (kept,) = step.tokens, step.accepted
        own = gained[kept:]
        wanted += f"{{+{spell(gained[:kept])}+}}" if kept else ""
        wanted += f"[-{spell(draft[kept:])}-]" if own and draft[kept:] else ""
        wanted += spell(own)
    assert paper.getvalue() == wanted and "[-" in wanted and (rule == "exact" or "{+" in wanted)
    assert stream.depths == [d if d <= n else 0 for step, n in
                             ((step, step.accepted[0]) for step in outcome.steps)
                             for d in range(1, len(step.tokens[0]) + 1)]  # fmt: skip


def test_debug_colours_on_a_terminal():
    paper = io.StringIO()
    stream = StepStream(rich.console.Console(file=paper, force_terminal=True, color_system="standard"), Numbers(),
                        Watched(None))  # fmt: skip
    stream.put(torch.tensor([5]))
    stream.put(torch.tensor([6]))
    stream.watched.tree = DraftTree.chains(torch.tensor([6]), [[7, 8]])
    stream.put(torch.tensor([7, 9]))
    stream.close(1)
    assert paper.getvalue() == "\x1b[34m6 \x1b[0m\x1b[32m7 \x1b[0m\x1b[9;31m8 \x1b[0m\x1b[34m9 \x1b[0m"


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, *arguments):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specheads_cli", "chat", *map(str, arguments)], stdin=slave, stdout=slave,
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


def test_ctrl_c_stops_the_text_and_not_the_program_in_a_terminal(endless):
    terminal = Terminal(endless, "--no-chat", "--max-new-tokens", ENDLESS)
    try:
        terminal.wait_for("> ")
        terminal.type("x = \n")
        terminal.wait_for("a token a step")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        terminal.wait_for("target alone (stopped)")
        terminal.wait_for("> ")
        terminal.type("/len\t4\n")  # Tab completes it
        terminal.wait_for("/length: 4")
        terminal.wait_for("> ")
        terminal.type("/lenght 4\n")
        terminal.wait_for("did you mean /length")
        terminal.wait_for("> ")
        terminal.type("/chat of\t\n")
        terminal.wait_for("/chat: off")
        terminal.wait_for("> ")
        terminal.type('"""y\n= """\n')
        figures = terminal.wait_for("lossless")
        assert re.search(r"speculative +4 ", figures) and "\x1b[1m" in figures
        terminal.wait_for("> ")
        terminal.type("abc")
        terminal.wait_for("abc")
        time.sleep(0.2)  # input() does not notice one that comes in before it waits for a key
        terminal.type("\x03")  # at the prompt it drops the line
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT) == 0, "whoever types has seen what failed"
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.mark.slow
def test_ctrl_c_stops_the_text_and_not_the_program_in_a_pipe(endless):
    command = [sys.executable, "-m", "specheads_cli", "chat", endless, "--no-chat", "--max-new-tokens", str(ENDLESS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(b"x = \n/length 4\nx = \n")
        process.stdin.close()
        assert process.stdout.readline().startswith(b"target alone")
        process.stdout.read(20)  # it writes
        process.send_signal(signal.SIGINT)
        out, err = (stream.read().decode(errors="replace") for stream in (process.stdout, process.stderr))
        assert process.wait(WAIT) == 0
        assert "target alone (stopped)" in out and re.search(r"speculative +4 ", out) and "stopped" in err
        assert not COLOUR.search(out)
    finally:
        process.kill()
        process.wait()
