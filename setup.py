"""Packaging of fairseq_tutel. Ranges stand here, the tested pins in scripts/constraints*.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
PACKAGE = (ROOT / "fairseq_tutel" / "__init__.py").read_text(encoding="utf-8")

setup(
    name="fairseq_tutel",
    version=re.search(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)[1],
    description="Mixture-of-experts layers for PyTorch, and Meta's MoE models for stock fairseq",
    author="fairseq_tutel contributors",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE", "CITATION.cff"],
    # the papers; the repository has no address yet
    project_urls={
        "Tutel": "https://arxiv.org/abs/2206.03382",
        "Meta's MoE language models": "https://arxiv.org/abs/2112.10684",
        "NLLB": "https://arxiv.org/abs/2207.04672",
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["fairseq_tutel", "fairseq_tutel.*"]),
    # fairseq_tutel/configs is a link to configs/
    package_data={"fairseq_tutel": ["py.typed", "configs/*.yaml", "configs/hardware/*.yaml"]},
    # fairseq only looks for a --user-dir among real files.
    zip_safe=False,
    python_requires=">=3.10",
    # 2.5 is the oldest one tried, on a CPU; the kernels for GPUs need Triton 3.6, which comes with
    # torch 2.10 (an older torch runs the torch backend there).
    install_requires=["torch>=2.5"],
    extras_require={
        # Not among the requirements, for two reasons. fairseq_tutel.moe, the layer, is of use
        # without fairseq. And fairseq-fixed is a source package compiled against torch: pip must
        # find torch installed and be told --no-build-isolation, or it fetches a second torch for
        # the build alone. As an extra it is built only by those who ask for it:
        #   pip install torch setuptools wheel cython "numpy<2"
        #   pip install --no-build-isolation "fairseq_tutel[fairseq]"
        "fairseq": [
            "fairseq-fixed>=0.12.3,<0.13",
            # its --sample-break-mode eos, complete and complete_doc use numpy.compat, gone in 2.0
            "numpy>=1.26,<2",
            "hydra-core>=1.3,<1.4",
            "omegaconf>=2.3,<2.4",
        ],
        # The last official release, for Python 3.10: pip builds it in isolation, and refuses the
        # metadata of omegaconf 2.0 from pip 24.1 on.
        #   pip install "pip<24.1"; pip install "fairseq_tutel[fairseq-official]"
        "fairseq-official": [
            "fairseq==0.12.2; python_version<'3.11'",
            "numpy>=1.26,<2",
            "hydra-core>=1.0.7,<1.1",
            "omegaconf>=2.0.6,<2.1",
        ],
        "triton": ["triton>=3.6"],
        "quickstart": [
            "matplotlib>=3.8",
            "num2words>=0.5.13",
            "safetensors>=0.8",
            "sentencepiece>=0.2",
        ],
        # timm requires some torchvision, and each torchvision exactly one torch: left to itself,
        # pip takes the newest of both. This one keeps the torch that the tests were run with; what
        # to do beside another: scripts/examples/README.md.
        "vision": ["timm>=1.0.20,<1.1", "torchvision==0.28.0"],
        # safetensors writes an export for transformers (fairseq_tutel/export), and both load it;
        # neither requires a torch
        "export": ["transformers>=5.23,<6", "safetensors>=0.8"],
        # programs that train models of others, run with the recipes of scripts/examples/hosts; each
        # takes the torch that is installed
        "hosts": [
            "accelerate>=1.15,<2",
            "deepspeed>=0.19.8,<0.20",
            "lightning-fabric>=2.6.6,<3",
            "pytorch-lightning>=2.6.6,<3",
            "safetensors>=0.8",
            "transformers>=5.23,<6",
        ],
        # what fairseq's --tensorboard-logdir writes with (or tensorboard itself)
        "tensorboard": ["tensorboardX>=2.6"],
        # what `pytest` imports beside the extra "fairseq", without which tests of the plugin fail
        "test": [
            "numpy>=1.26,<2",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3",
            "safetensors>=0.8",
        ],
    },
)
