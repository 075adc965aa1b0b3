"""A program that passes for a Python with an engine: it forwards what its server is asked to a server of the test's own
process, so that it starts at once. Like vLLM it has a second process, which does not heed SIGTERM."""

import sys
from pathlib import Path

PROGRAM = """#!{python} -SE
import json, os, signal, subprocess, sys, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "-c" in sys.argv:
    print(json.dumps({{"vllm": "0.0", "torch": "0.1", "python": "3"}}))
    sys.exit()
if "--version" in sys.argv:
    print("version: 7 (fake)", file=sys.stderr)
    sys.exit()
with open({arguments!r}, "w") as file:
    json.dump(sys.argv[1:], file)
print("loading", flush=True)
if not {url!r}:
    sys.exit("ValueError: no memory\\n  at the end")


class Forward(BaseHTTPRequestHandler):
    def forward(self, body=None):
        if self.path == "/health":
            return self.reply(200, b"")
        with urllib.request.urlopen(urllib.request.Request({url!r} + self.path, body)) as answer:
            self.reply(answer.status, answer.read())

    def reply(self, status, content):
        if content == b"end":
            print("RuntimeError: out of memory", flush=True)
            os._exit(1)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = forward

    def do_POST(self):
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *words):
        pass


second = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
second = subprocess.Popen([sys.executable, "-SE", "-c", second], stdout=subprocess.PIPE)
second.stdout.readline()
with open("processes", "w") as file:
    json.dump([os.getpid(), second.pid], file)
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Forward).serve_forever()
"""


def program(folder, url=""):
    """The program's path. url: of the test's server; without one the engine does not start. It writes the arguments of
    its last start into arguments.json beside it, and the numbers of its processes into processes in its own folder."""
    path = Path(folder, "python")
    arguments = str(Path(folder, "arguments.json"))
    path.write_text(
        PROGRAM.format(python=sys.executable, arguments=arguments, url=url.removesuffix("/v1")),
        "utf8",
    )
    path.chmod(0o755)
    return path
