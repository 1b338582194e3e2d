"""Calls of the command line, in this process or in one of its own, and a file with targets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxpart import cli

TARGET = """
import os, torch, fxpart
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = self.drop(torch.relu(layer(x)))
        return self.head(x)

def _batch():
    torch.manual_seed(1)
    return torch.randn(8, 16), torch.randint(0, 4, (8,))

def net():
    torch.manual_seed(0)
    return fxpart.Workload(Net(), example=_batch(), loss=nn.functional.cross_entropy)

def with_data():
    torch.manual_seed(0)
    return fxpart.Workload(Net(), example=_batch(), loss=nn.functional.cross_entropy,
                           data=[_batch()] * 2, optimizer=torch.optim.SGD)

def short_data():
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss,
                           data=iter([_batch()]))

def broken_data():
    def data():
        yield _batch()
        raise KeyError("no more files")
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss,
                           data=data)

def killed_data():
    def data():
        yield _batch()
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), 9)
        yield _batch()
    work = with_data()
    return fxpart.Workload(work.model, example=work.example, loss=work.loss, data=data)

class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x

def branches():
    return Branches(), (torch.zeros(4, 3),)

def refuses():
    raise ValueError("not today")
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    """stdout and stderr of a call in this process, which must exit with ``status``."""
    found = cli.run(list(arguments))
    out, err = capsys.readouterr()
    assert found == status, out + err
    assert "Traceback" not in err
    return out, err


def fresh(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A call in a process of its own; ``code`` runs in place of the command line."""
    start = ["-c", code] if code else ["-m", "fxpart"]
    return subprocess.run(
        [sys.executable, *start, *arguments], capture_output=True, text=True, check=False
    )
