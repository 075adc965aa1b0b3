"""Let the target write its own training rows: heads learn best on the text they will draft.

rows with `messages`: the target answers every turn, through the chat template. Earlier answers in a prompt are its own.
  The row's answers are dropped, except tool calls followed by their results: these stay, and the target also answers
  that turn itself. `tools` and the calls' reasoning are passed to the template. One output line per turn.
    python train/self_distill.py --base my/chat-model --source chats.jsonl --output own.jsonl
rows with `prompt`: the target answers the text as it is or, with --chat, as a user message.
    python train/self_distill.py --base my/chat-model --source prompts.jsonl --output own.jsonl --chat --temperature 0.7
rows with `text` (without --source, the standard library): the target continues --prompt_tokens tokens from random
  positions.
    python train/self_distill.py --base checkpoints/base --output runs/own.jsonl --num_rows 4000
a large target, on OpenAI-compatible servers (vLLM, SGLang, …): chats go to /chat/completions as messages, prompts and
  text to /completions as token ids. Servers that honour return_token_ids send exact tokens; the text of others
  is tokenized here. Needs the openai package. The key is read from OPENAI_API_KEY.
    python train/self_distill.py --base my/70b --source chats.jsonl --output own.jsonl --server http://gpu1:8000/v1
    python train/self_distill.py --base my/70b --source chats.jsonl --output own.jsonl --server http://gpu1:8000/v1
      http://gpu2:8000/v1 --model served-name --concurrency 256 --temperature 0 0.7 1 --num_rows 100000

Each line of the output is {"input_ids": […], "labels": […]}: token ids, so that decoding and encoding cannot
change the text. An answer is supervised, including its end of text unless it was cut; its prompt is not (-100). Text is
supervised from the start of its window. Each question is asked once (and sampled again if --num_rows exceeds the number
of turns), no line is written twice, and OUTPUT.left_out lists what was left out and why. A stopped run resumes if it is
started again with the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specheads.cli.errors import listen
from specheads.cli.script import options_from, run_script


def main(arguments: Sequence[str] | None = None) -> int:
    def work() -> None:
        from specheads.training.self_distill.options import Options
        from specheads.training.self_distill.run import run

        run(options_from(Options, __doc__, arguments))

    return run_script("train/self_distill.py", work)


if __name__ == "__main__":
    listen("train/self_distill.py")
    sys.exit(main())
