"""Runs a script: ``python -m dist_checkpointing.interop.megatron [--backend NAME] script.py``."""

import argparse
import runpy
import sys
from pathlib import Path

from dist_checkpointing.interop.megatron import install

parser = argparse.ArgumentParser(prog="python -m dist_checkpointing.interop.megatron")
parser.add_argument("--backend", default="torch_dist", help="what save writes by default")
parser.add_argument("script", help="a script that imports megatron.core.dist_checkpointing")
parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
given: argparse.Namespace = parser.parse_args()
install(backend=given.backend)
sys.argv = [given.script, *given.arguments]
# As Python itself does for a script.
sys.path.insert(0, str(Path(given.script).resolve().parent))
runpy.run_path(given.script, run_name="__main__")
