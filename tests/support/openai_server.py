"""An OpenAI-compatible server on this machine, for tests: what it answers is a function of the request."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

DROP = object()  # the connection is closed without a word


@contextmanager
def serving(reply, metrics=None):
    """The address of a server, up to /v1, whose page of metrics is this text, or what this function gives.
    reply(route, body, headers) → DROP or (status, JSON, text or bytes), and headers of its own after it. What is in
    flight at the end is dropped."""
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as those of real servers

        def do_GET(self):
            content = (metrics() if callable(metrics) else metrics or "").encode()
            self.send_response(404 if metrics is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = reply(self.path.removeprefix("/v1/"), body, self.headers)
            if answer is DROP or closed.is_set():
                self.close_connection = True
                return
            status, said, *headers = answer
            content = (
                said if isinstance(said, bytes) else (said if isinstance(said, str) else json.dumps(said)).encode()
            )
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(content)),
                **(headers[0] if headers else {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *words):  # clients that are killed
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        closed.set()
        server.shutdown()
        server.server_close()


def chat(content, finish_reason="stop", *, prompt_ids=None, ids=None, **message):
    """A choice of /chat/completions as vLLM sends it."""
    choice = {"index": 0, "finish_reason": finish_reason, "token_ids": ids}
    choice["message"] = {"role": "assistant", "content": content, **message}
    return 200, {"prompt_token_ids": prompt_ids, "choices": [choice]}


def of_model(base, tokenizer, *, send_ids=True):
    """What a server of this model replies: transformers' generate() after the tokenizer's own template."""
    lock = threading.Lock()
    ends = {*base.generation_config.eos_token_id}

    def reply(route, body, headers):
        is_chat = route == "chat/completions"
        ids = body.get("prompt")
        if is_chat:
            text = tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"), tokenize=False,
                                                 add_generation_prompt=True)  # fmt: skip
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        sampling = {"do_sample": False}
        if body["temperature"]:
            sampling = {"do_sample": True, "temperature": body["temperature"]}
        with lock, torch.no_grad():
            torch.manual_seed(body["seed"])
            made = base.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                 max_new_tokens=body["max_tokens"], **sampling)[0, len(ids):].tolist()  # fmt: skip
        choice = {"finish_reason": "stop" if made[-1] in ends else "length"}
        text = tokenizer.decode(made, skip_special_tokens=True)
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if send_ids and body.get("return_token_ids"):
            return 200, {"prompt_token_ids": ids, "choices": [choice | {"token_ids": made}]}
        return 200, {"choices": [choice]}

    return reply
