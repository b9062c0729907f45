"""The one thing pyproject.toml can't say: that `pion` is the checkout this folder lies in.

The name `pion` belongs to an unrelated project on PyPI, so a plain requirement would install that. A reference to the
checkout makes `pip install -e 'pion-vllm-mlx/[mlx]'` complete and right by itself.
"""

from pathlib import Path

from setuptools import setup

checkout = Path(__file__).resolve().parent.parent
if not (checkout / "pion" / "config.py").is_file():
    raise SystemExit("pion-vllm-mlx is installed from a checkout of Pion: pip install -e 'pion-vllm-mlx/[mlx]'")

setup(install_requires=["attrs>=25.1", "numpy>=2.0", f"pion @ {checkout.as_uri()}"])
