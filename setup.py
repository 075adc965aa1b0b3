"""Package metadata, dependencies and the `specheads` command."""

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def repository():
    """The address of the clone's remote on the web, or None: a fork's wheel points to the fork."""
    try:
        done = subprocess.run(["git", "-C", ROOT, "remote", "get-url", "origin"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.fullmatch(r"(?:https://|ssh://git@|git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?", done.stdout.strip())
    return f"https://{found[1]}/{found[2]}" if found else None


def description(address):
    """README.md, with links that work where it is shown alone, as on PyPI."""

    def link(found):
        return f"{found[1]}]({address}/{'raw' if found[1].startswith('!') else 'blob'}/main/"

    text = (ROOT / "README.md").read_text("utf8")
    return re.sub(r"(!?\[[^\]]*)\]\((?!\w+:|#)", link, text) if address else text


def urls(address):
    pages = {
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: address + path for name, path in pages.items()} if address else {}


setup(
    name="specheads",
    version="0.1.0",
    description="Train draft heads for any Hugging Face language model and get the same text several times faster",
    long_description=description(repository()),
    long_description_content_type="text/markdown",
    author="The specheads authors",
    url=repository(),
    project_urls=urls(repository()),
    keywords=["speculative decoding", "draft heads", "EAGLE-3", "Medusa", "transformers"],
    license="Apache-2.0",
    python_requires=">=3.11",
    # recipes/ is a folder of the repository, and of the package in a wheel: see specheads/cli/shipped.py.
    packages=[*find_packages(include=["specheads", "specheads.*"]), "specheads.recipes"],
    package_dir={"specheads.recipes": "recipes"},
    package_data={
        "specheads": ["py.typed", "decoding/kernels/few_rows.cpp", "decoding/planner/by_cost/shipped/*.json"],
        "specheads.recipes": ["*.yaml", "*/*.yaml"],
    },
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17",
        "safetensors>=0.5",
        "numpy>=1.26",
        "pyyaml>=6.0",
    ],
    extras_require={
        "train": ["accelerate>=1.15", "datasets>=4.0", "peft>=0.19.1"],
        "cli": ["rich>=13.0", "typer>=0.28", "prompt_toolkit>=3.0.50"],
        "deepspeed": ["deepspeed>=0.18"],
        "qlora": ["bitsandbytes>=0.46"],
        "self_distill": ["openai>=3.0"],
        "plots": ["matplotlib>=3.8"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings-python>=1.16"],
        "dev": [
            "pytest>=8.0",
            "pytest-xdist>=3.5",
            "ruff>=0.9",
            "mypy>=1.15",
            "import-linter>=2.6",
            "pre-commit>=4.0",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["specheads = specheads.cli.program:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
