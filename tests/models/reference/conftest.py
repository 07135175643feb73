"""Lets the tests import the scripts of the reference environment, which is no package."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
torch.set_num_threads(1)
