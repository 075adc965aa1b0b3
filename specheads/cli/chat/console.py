"""The console: reads an entry, runs it and shows the result, until the input ends."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch
from rich.text import Text

from specheads import terminal
from specheads.cli import token_stream
from specheads.cli.chat import view
from specheads.cli.chat.comparison import compare_outcomes
from specheads.cli.chat.completion import completions
from specheads.cli.chat.interrupt import Interruption, stoppable
from specheads.cli.chat.lines import Entry, asker, interactive, read_entry
from specheads.cli.chat.session import Mode, Outcome, Session
from specheads.cli.chat.settings import COMMANDS
from specheads.cli.chat.steps import Watched
from specheads.models.named import describe_drafter
from specheads.options import nearest, reason, shortened
from specheads_cli.app import DEBUG, OFF

FAILURES = (ValueError, OSError, torch.OutOfMemoryError)


class Console:
    """Answers go to stdout, as text or as one JSON object per line. Messages about settings go to stderr."""

    def __init__(self, session: Session, *, as_json: bool = False) -> None:
        self.session, self.as_json = session, as_json
        self.out, self.messages = terminal.make_console(), terminal.make_console(stderr=True)
        self.failed = False

    def run(self) -> int:
        """Run until /quit or the end of the input. Bad input prints one line on stderr and changes nothing.

        Returns the exit code: 1 if anything failed in a non-interactive session, such as a pipe."""
        typed = interactive()
        self._loop(typed)
        return int(self.failed and not typed)

    def _loop(self, typed: bool) -> None:
        ask = asker(self._completions)
        if typed:
            self._say(self._greeting())
        while True:
            try:
                entry = read_entry(ask)
            except EOFError:
                if typed:
                    self.out.print()
                return
            except KeyboardInterrupt:
                if not typed:
                    raise
                self._say("\n/quit or Ctrl-D leaves")
                continue
            try:
                if entry.command and entry.text.split()[:1] == ["quit"]:
                    return
                self.do(entry)
            except KeyboardInterrupt:
                self._say("\nstopped")
            except BrokenPipeError:
                raise
            except FAILURES as error:
                self._fail(" ".join(str(error).split()))
            except Exception as error:  # an error must not cost the user the loaded models
                if os.environ.get(DEBUG, "").lower() not in OFF:
                    raise
                self._fail(f"{type(error).__name__}: {reason(error)} ({DEBUG}=1 shows where)")

    def _completions(self, line: str) -> list[str]:
        return completions(line, self.session.models.names())

    def do(self, entry: Entry) -> None:
        if entry.command:
            self.command(entry.text)
        elif entry.text.strip():
            self.prompt(entry.text)

    def command(self, text: str) -> None:
        """Run the command `name arguments`. ValueError or OSError for bad arguments."""
        name, _, rest = text.partition(" ")
        name = name.strip()
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            hint = f"did you mean /{near}? " if near else ""
            raise ValueError(f"unknown command {shortened('/' + name)}; {hint}/help lists all")
        if name == "help":
            view.commands(self.messages, self.session.settings)
            return
        command = COMMANDS[name]
        if command.change is not None:
            self.session.change(name, rest)
        elif name == "clear":
            self.session.forget()
            if self.out.is_terminal:
                self.out.clear()
        value = command.value(self.session.settings)
        self._say(f"/{name}: {value}" if value else f"/{name}: done")
        if name == "cache":
            self._say(command.meaning)
        if name == "debug" and self.session.settings.debug != "off":
            self.messages.print(view.legend(self.session.settings.debug, colors=terminal.has_colors(self.out)))

    def prompt(self, text: str) -> None:
        """Answer with every decoder that is switched on, all with the same seed, and compare them.

        After Ctrl-C the answers so far are shown, and the conversation continues without this prompt."""
        text = terminal.utf8_text(text, "the prompt")
        session, seed = self.session, self.session.seed()
        modes, outcomes, errors = session.modes(), list[Outcome](), dict[str, str]()
        if not modes:
            raise ValueError("no decoder is switched on; switch one on with /target, /speculative, /ngram or /drafter")
        with stoppable() as stop:
            for mode in modes:
                try:
                    outcomes.append(self._answer(mode, text, seed, stop))
                except ValueError as error:  # other decoders may work
                    errors[mode.name] = " ".join(str(error).split())
                    self._fail(f"{mode.name}: {errors[mode.name]}")
                if stop.asked:
                    break
        if stop.asked:
            self._say("stopped; the conversation continues without this turn" if session.settings.chat else "stopped")
        session.keep(text, outcomes)
        if self.as_json:
            self._emit(text, seed, outcomes, errors)
        elif outcomes:
            view.comparison(self.out, outcomes, self._note(seed, outcomes))

    def _answer(self, mode: Mode, text: str, seed: int, stop: Interruption) -> Outcome:
        if self.as_json:
            return self.session.run(mode, text, seed, stop=stop)
        debug = self.session.settings.debug
        watched = Watched(mode.drafter) if debug == "steps" and mode.drafter is not None else None
        shown = view.stream(self.out, mode, debug, watched)
        view.heading(self.out, mode)
        try:
            outcome = self.session.run(mode, text, seed, drafter=watched, streamer=shown, stop=stop)
            shown.close(outcome.steps[-1].accepted[0])
        finally:
            terminal.write(self.out, "\n")
        if debug == "depth":
            self._say(token_stream.depth_counts(shown.depths))
        return outcome

    def _note(self, seed: int, outcomes: list[Outcome]) -> str:
        session = self.session
        notes = []
        if session.settings.processor.samples:
            notes.append(f"seed {seed}")
        if any(outcome.full for outcome in outcomes):
            notes.append("ended at the model's last position")
        if session.settings.chat and session.turns:
            notes.append(f"turn {len(session.turns)}")
        return ", ".join(notes)

    def _emit(self, text: str, seed: int, outcomes: list[Outcome], errors: dict[str, str]) -> None:
        figures = compare_outcomes(outcomes)
        modes: dict[str, Any] = {
            outcome.mode.name: {"text": outcome.text, "token_ids": outcome.token_ids, **figures[outcome.mode.name]}
            for outcome in outcomes
        }
        modes |= {name: {"error": error} for name, error in errors.items()}
        record = {"prompt": text, "seed": seed, "settings": asdict(self.session.settings), "modes": modes}
        terminal.write(self.out, json.dumps(record, ensure_ascii=False) + "\n")

    def _greeting(self) -> str:
        session = self.session
        drafter = describe_drafter(session.settings.drafter, session.models.drafter(session.settings.drafter))
        kind = "a conversation" if session.settings.chat else "text to continue"
        return f"{session.models.target.name_or_path} with {drafter}; prompts are {kind}; /help lists the commands"

    def _fail(self, text: str) -> None:
        self.failed = True
        self._say(text, style="red")

    def _say(self, text: str, style: str = "bright_black") -> None:
        self.messages.print(Text(terminal.printable(text), style=style), soft_wrap=True)
