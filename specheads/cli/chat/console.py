"""The console: reads an entry, runs it and shows the result, until the input ends."""

from __future__ import annotations

import json
import os
import textwrap
from typing import Any

import torch
from rich.text import Text

from specheads import terminal
from specheads.cli.app import DEBUG, OFF
from specheads.cli.chat.completion import completions
from specheads.cli.chat.lines import Entry, asker, interactive, read_entry
from specheads.cli.chat.session import Answer, Interruption, Session, Way, stoppable
from specheads.cli.chat.settings import COMMANDS, SETTINGS, TREE_ALONE, written
from specheads.cli.chat.tree import drawn
from specheads.cli.options.decode import ChatOptions
from specheads.cli.text import TokenStream, depth_counts, legend
from specheads.models.named import Models
from specheads.options import nearest, reason, shortened

FAILURES = (ValueError, OSError, torch.OutOfMemoryError)
COLUMNS = ("", "tokens", "tokens/s", "speed-up", "accepted", "accepted length", "text")


def run(options: ChatOptions) -> int:
    models = Models.load(
        options.model, base=options.base, dtype=options.dtype, device=options.device, quantize=options.quantize
    )
    return Console(Session(models, options)).run()


class Console:
    """Answers go to stdout, as text or as one JSON object per line. Messages about settings go to stderr."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.out, self.messages = terminal.make_console(), terminal.make_console(stderr=True)
        self.failed = False

    def run(self) -> int:
        """Run until /quit or the end of the input. Bad input prints one line on stderr and changes nothing.

        Returns the exit code: 1 if anything failed in a non-interactive session, such as a pipe."""
        typed = interactive()
        ask = asker(lambda line: completions(line, self.session.models.names()))
        if typed:
            self._say(self._greeting())
            self._show_legend()
        while True:
            try:
                entry = read_entry(ask)
                if entry.command and entry.text.split()[:1] == ["quit"]:
                    break
                self._do_safely(entry)
            except EOFError:
                if typed:
                    self.out.print()
                break
            except KeyboardInterrupt:
                if not typed:
                    raise
                self._say("\n/quit or Ctrl-D leaves")
        return int(self.failed and not typed)

    def _do_safely(self, entry: Entry) -> None:
        """Run the entry; an error must not cost the user the loaded models."""
        try:
            self.do(entry)
        except KeyboardInterrupt:
            self._say("\nstopped")
        except BrokenPipeError:
            raise
        except FAILURES as error:
            self._fail(" ".join(str(error).split()))
        except Exception as error:
            if os.environ.get(DEBUG, "").lower() not in OFF:
                raise
            self._fail(f"{type(error).__name__}: {reason(error)} ({DEBUG}=1 shows where)")

    def do(self, entry: Entry) -> None:
        if entry.command:
            self.command(entry.text)
        elif entry.text.strip():
            self.prompt(entry.text)

    def command(self, text: str) -> None:
        """Run the command `name value`. ValueError or OSError for a bad value."""
        name, _, value = text.partition(" ")
        name = name.strip()
        if name == "help":
            self._list_commands()
        elif name == "clear":
            self.session.forget()
            if self.out.is_terminal:
                self.out.clear()
            self._say("/clear: done")
        elif name == "tree" and not value.strip():
            self._draw_tree()
        elif name in SETTINGS:
            self.session.change(name, value)
            self._say(f"/{name}: {written(getattr(self.session.options, name))}")
            if name == "view":
                self._show_legend()
            if name == "compare" and self.session.options.compare is not None:
                self._answer_again()
        else:
            near = nearest(name, [*SETTINGS, *COMMANDS])
            hint = f"did you mean /{near}? " if near else ""
            raise ValueError(f"unknown command {shortened('/' + name)}; {hint}/help lists all")

    def _show_legend(self) -> None:
        if self.session.options.view == "depth" and terminal.has_colors(self.out):
            self.messages.print(legend())

    def _draw_tree(self) -> None:
        if self.session.trees.last is None:
            raise ValueError("/tree: nothing was drafted yet; /tree chain:4 sets a tree")
        line, tree = drawn(*self.session.trees.last, self.session.tokenizer)
        self._say(line)
        self.messages.print(tree)

    def prompt(self, text: str) -> None:
        """Answer; after Ctrl-C the answer so far is shown, and the conversation continues without this prompt."""
        text = terminal.utf8_text(text, "the prompt")
        session, seed = self.session, self.session.seed()
        answers, stopped = self._answer(text, seed)
        session.last = (text, seed, len(session.turns))  # not of a prompt that was refused
        if stopped:
            self._say("stopped; the conversation continues without this turn" if session.options.chat else "stopped")
        elif session.options.chat:
            session.turns.append((text, answers[0].text))
        self._show(text, seed, answers)

    def _answer_again(self) -> None:
        """Answer the last prompt once more, with its seed, beside what is compared. The conversation stays as it is."""
        session = self.session
        if session.last is None:
            return
        text, seed, before = session.last
        turns, session.turns = session.turns, session.turns[:before]
        try:
            answers, stopped = self._answer(text, seed)
        finally:
            session.turns = turns
        if stopped:
            self._say("stopped")
        self._show(text, seed, answers)

    def _answer(self, text: str, seed: int) -> tuple[list[Answer], bool]:
        """The answers under the settings and under those compared, with one seed; and were they stopped?"""
        session = self.session
        answers: list[Answer] = []
        with stoppable() as stop:
            for way in session.ways():
                if session.options.as_json:
                    answers.append(session.answer(way, text, seed, stop=stop))
                else:
                    answers.append(self._show_answer(way, text, seed, stop))
                if stop.asked:
                    break
        return answers, stop.asked

    def _show(self, text: str, seed: int, answers: list[Answer]) -> None:
        if self.session.options.as_json:
            self._emit(text, seed, answers)
        else:
            self._show_figures(seed, answers)

    def _show_answer(self, way: Way, text: str, seed: int, stop: Interruption) -> Answer:
        """The answer, shown as it is written, with its pace below it."""
        session, colored = self.session, self.session.options.view == "depth"
        if session.options.compare is not None:
            self.out.print(Text(terminal.printable(way.name), style="bold"), soft_wrap=True)
        with terminal.StatusLine(self.out) as status:
            stream = TokenStream(self.out, session.tokenizer, colored=colored, status=status)
            try:
                answer = session.answer(way, text, seed, streamer=stream, stop=stop)
                stream.close(answer.steps[-1].accepted[0])
            finally:
                terminal.write(self.out, "\n")
        if colored:
            self._say(depth_counts(stream.depths))
        return answer

    def _show_figures(self, seed: int, answers: list[Answer]) -> None:
        notes = []
        if self.session.options.compare is None:
            (answer,) = answers
            statistics = answer.statistics
            notes.append(f"{statistics['tokens']} tokens, {statistics['tokens_per_second']:.1f} tokens/s")
            notes.append(f"accepted length {statistics['accepted_length']:.2f} ({answer.name})")
        else:
            rows = [cells(answer, answers) for answer in answers]
            terminal.print_table(self.out, terminal.table("", COLUMNS, rows))
        if self.session.options.temperature > 0:
            notes.append(f"seed {seed}")
        if any(answer.full for answer in answers):
            notes.append("ended at the model's last position")
        if self.session.options.chat and self.session.turns:
            notes.append(f"turn {len(self.session.turns)}")
        if notes:
            self._say(", ".join(notes))
        if self.session.options.compare is None and answers[0].loss is not None:
            self._say(answers[0].loss)

    def _emit(self, text: str, seed: int, answers: list[Answer]) -> None:
        first, *others = (figures(answer, answers) for answer in answers)
        settings = {name: getattr(self.session.options, name) for name in SETTINGS}
        record = {"prompt": text, "seed": seed, "settings": settings, **first, "compared": others}
        terminal.write(self.out, json.dumps(record, ensure_ascii=False) + "\n")

    def _greeting(self) -> str:
        session = self.session
        kind = "a conversation" if session.options.chat else "text to continue"
        target, (way, *_) = session.models.target.name_or_path, session.ways()
        return f"{target} with {way.name}; prompts are {kind}; /help lists the commands"

    def _list_commands(self) -> None:
        """Print every command with its value, and what it does below it, broken between words only."""
        meanings = {name: field.metadata["help"] for name, field in SETTINGS.items()} | COMMANDS
        meanings["tree"] += f" {TREE_ALONE}"
        for name, meaning in meanings.items():
            value = f"  {written(getattr(self.session.options, name))}" if name in SETTINGS else ""
            line = Text.assemble((f"/{name}", "bold"), (terminal.printable(value), "cyan"))
            self.messages.print(line, soft_wrap=True)
            width = self.messages.width - 4
            for part in textwrap.wrap(meaning, width, break_long_words=False, break_on_hyphens=False):
                self.messages.print(f"    {part}", style="bright_black", soft_wrap=True)

    def _fail(self, text: str) -> None:
        self.failed = True
        self._say(text, style="red")

    def _say(self, text: str, style: str = "bright_black") -> None:
        wraps = self.messages.is_terminal  # between words
        self.messages.print(Text(terminal.printable(text), style=style), soft_wrap=not wraps)


def figures(answer: Answer, answers: list[Answer]) -> dict[str, Any]:
    """speedup and same_text (token by token) are relative to the last answer, and None if there is no other;
    same_text also if either was stopped. acceptance_rate: accepted over drafted tokens, None if nothing was drafted."""
    statistics, other = answer.statistics, answers[-1]
    alone = len(answers) == 1
    drafted, stopped = statistics["drafted"], any(answer.stopped for answer in answers)
    return {
        "drafter": answer.name, "text": answer.text, "token_ids": answer.token_ids,
        **{key: statistics[key] for key in ("tokens", "steps", "drafted", "accepted", "seconds")},
        "tokens_per_second": statistics["tokens_per_second"], "accepted_length": statistics["accepted_length"],
        "acceptance_rate": statistics["accepted"] / drafted if drafted else None,
        "speedup": None if alone else statistics["tokens_per_second"] / other.statistics["tokens_per_second"],
        "same_text": None if alone or stopped else answer.token_ids == other.token_ids, "stopped": answer.stopped,
    }  # fmt: skip


def cells(answer: Answer, answers: list[Answer]) -> list[str]:
    """One row of the table, in the order of COLUMNS."""
    row = figures(answer, answers)
    rate, speedup, same = row["acceptance_rate"], row["speedup"], row["same_text"]
    return [
        answer.name + (" (stopped)" if answer.stopped else ""), str(row["tokens"]), f"{row['tokens_per_second']:.1f}",
        "–" if speedup is None else f"{speedup:.2f}×",
        "–" if rate is None else f"{row['accepted']}/{row['drafted']}", f"{row['accepted_length']:.2f}",
        "–" if same is None or answer is answers[-1] else "same" if same else "differs",
    ]  # fmt: skip
