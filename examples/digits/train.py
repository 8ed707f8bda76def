"""Trains the classifier for a few seconds and saves a checkpoint as training scripts do: weights, optimizer, epoch."""

import sys
from pathlib import Path

import torch
from data import calibration
from model import build
from torch.nn.functional import cross_entropy

EPOCHS = 12


def main(path: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a net this small gains nothing from more
    images, labels = (torch.from_numpy(array) for array in calibration())
    net = build().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(64):
            loss = cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save({"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": EPOCHS}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("digits.pt"))
