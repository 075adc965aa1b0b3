"""A peer's process without an engine: it repeats each prompt's last token, and fails on demand."""

import json
import os
import sys

NAME = sys.argv[1] if len(sys.argv) > 1 else "fake"

opened = set()
for line in sys.stdin:
    request = json.loads(line)
    op = request.pop("op")
    if op == "open":
        opened.add(request["key"])
        answer = {}
    elif op == "generate" and request["key"] not in opened:
        answer = {"error": f"{request['key']} is not open"}
    elif op == "versions":
        answer = {NAME: "1.2", "pid": os.getpid()}
    elif op == "generate" and request.get("options", {}).get("fails"):
        answer = {"error": "no such mode"}
    elif op == "generate" and request["ids"][0][-1] == request.get("options", {}).get("fails_after"):
        answer = {"error": "a prompt it cannot take"}
    elif op == "generate":
        tokens = [[row[-1]] * request["max_new_tokens"] for row in request["ids"]]
        answer = {"tokens": tokens, "seconds": 0.25, "statistics": {"gained": 6, "rows_stepped": 3}}
    elif op == "die":
        sys.exit(7)
    else:
        answer = {"op": op, **request}
    print(json.dumps(answer), flush=True)
