"""A harvest in a process of its own, to be killed; ``python killed.py FOLDER [SLEEP]``."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tenterhook as th
from tenterhook.store.rows_file import RowsFile

BATCHES, SIZE, WIDTH = 60, 16, 256


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).eval()


def batches():
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(BATCHES * SIZE, 32, generator=generator).split(SIZE))


def run(folder, **options):
    return th.harvest(model(), batches(), "0", "1", to=folder, shard_rows=4 * SIZE, **options)


def slow(pause):
    """Every write and every finish of a file takes a while, and half of its bytes come before, half after.

    No file is finished as long as there is one at the path in HOLD.
    """
    plain, finish, hold = RowsFile.write, RowsFile.finish, os.environ.get("HOLD")

    def write(file, data):
        half = len(data) // 2
        plain(file, data[:half])
        time.sleep(pause)
        plain(file, data[half:])

    def finished(file):
        time.sleep(pause)
        while hold and Path(hold).exists():
            time.sleep(0.01)
        record = finish(file)
        time.sleep(pause)
        return record

    RowsFile.write, RowsFile.finish = write, finished


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        slow(float(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    run(sys.argv[1])
