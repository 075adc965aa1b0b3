"""Package metadata, dependencies and the `specheads` command."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="specheads",
    version="0.1.0",
    description="Train draft heads for any Hugging Face language model and get the same text several times faster",
    long_description=Path(__file__).with_name("README.md").read_text("utf8"),
    long_description_content_type="text/markdown",
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
        "cli": ["rich>=13.0", "typer>=0.28"],
        "deepspeed": ["deepspeed>=0.18"],
        "qlora": ["bitsandbytes>=0.46"],
        "self_distill": ["openai>=3.0"],
        "plots": ["matplotlib>=3.8"],
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
