"""Train a small transformer on text, harvest what passes inside it, and learn from what was stored.

    python examples/harvest.py acts

It needs no download: the text is the help that comes with Python. Break it off at any time, or kill it, and start it
again: it goes on where it was. At the end it draws what it found into `acts/harvest.png`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import tenterhook as th
from tenterhook.harvest.verify import verify
from tenterhook.store.read import Store

WIDTH, LENGTH, BLOCKS, FEATURES = 64, 64, 3, 256
STEPS, SAE_EPOCHS, SEQUENCES = 600, 3, 2000
SELDOM = (0.003, 0.05)
POINTS = ["embed", *(f"blocks.{index}" for index in range(BLOCKS))]


class Text(nn.Module):
    """A transformer that guesses the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next character at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def corpus() -> Tensor:
    """The help of Python as numbers, cut into sequences."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    ids = torch.tensor(list(text))
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def train(model: Text, data: Tensor, console: Console) -> None:
    """A minute of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        batch = data[torch.randint(len(data), (32,), generator=draw)]
        loss = F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == STEPS - 1:
            console.print(f"  step {step:4d}: {loss.item() / 0.6931:.2f} bits a character")


def probe(store: Store, point: str, data: Tensor) -> float:
    """How well a linear layer tells from one row what the character *before* it was."""
    linear = nn.Linear(WIDTH, 128)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-2)
    loader = store.loader(point, "sample", "position", batch_size=1024, seed=1)
    right = total = 0
    for number, batch in enumerate(loader):
        second = batch["position"] > 0
        before = data[batch["sample"], batch["position"].long() - 1][second]
        scores = linear(batch[point][second])
        if number >= len(loader) * 3 // 4:  # Every row comes once, so the last quarter is new.
            right, total = right + int((scores.argmax(1) == before).sum()), total + len(before)
            continue
        optimizer.zero_grad()
        F.cross_entropy(scores, before).backward()
        optimizer.step()
    return right / total


class Sparse(nn.Module):
    """A sparse autoencoder: a row as the sum of a few of many directions."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.mean = nn.Parameter(mean)
        self.encode, self.decode = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH, bias=False)
        self.decode.weight.data = F.normalize(self.encode.weight.data.T.clone(), dim=0)

    def features(self, rows: Tensor) -> Tensor:
        """The sixteen strongest features of each row; the others are zero."""
        found = self.encode(rows - self.mean).relu()
        return torch.zeros_like(found).scatter(1, *_swapped(found.topk(16, dim=1)))

    def forward(self, rows: Tensor) -> Tensor:
        """The rows, as the features have them."""
        return self.decode(self.features(rows)) + self.mean


def _swapped(top: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return top[1], top[0]


def sparse(store: Store, point: str) -> tuple[Sparse, list[float]]:
    """Train it from the store; give the share of the variance that it leaves unexplained, as it falls."""
    some = store[point].sample(2000, seed=0)
    model, spread = Sparse(some.mean(0)), some.var(0).sum().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader, curve = store.loader(point, batch_size=512), []
    for _ in range(SAE_EPOCHS):
        for rows in loader:
            loss = (model(rows) - rows).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item() / spread)
    return model, curve


def contexts(store: Store, model: Sparse, data: Tensor, point: str, count: int = 6) -> list[str]:
    """Features, each with the text around the rows where it is strongest."""
    with torch.no_grad():
        found = torch.cat([model.features(part) for part in store[point][:40_000].split(4096)])
    lines = []
    # Those that are on now and then: neither always nor hardly ever.
    rate = (found > 0).float().mean(0)
    chosen = ((rate > SELDOM[0]) & (rate < SELDOM[1])).nonzero().flatten()[:count]
    for feature in chosen.tolist():
        rows = found[:, feature].topk(4).indices
        where = zip(store["sample"][rows].tolist(), store["position"][rows].tolist(), strict=True)
        shown = [repr(bytes(data[sample, max(0, place - 11) : place + 1].tolist()).decode()) for sample, place in where]
        lines.append(f"  feature {feature:3d}: {'  '.join(shown)}")
    return lines


def draw(path: Path, accuracy: list[float], curve: list[float]) -> None:
    """Both findings in one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.bar(POINTS, accuracy, color="#4c72b0")
    left.set(title="A linear probe for the character before", ylabel="right, of new rows", ylim=(0, 1))
    for index, share in enumerate(accuracy):
        left.text(index, share + 0.02, f"{share:.0%}", ha="center")
    right.plot(curve, color="#c44e52")
    right.set(title=f"A sparse autoencoder of {POINTS[-1]}, 16 of {FEATURES}", xlabel="step", yscale="log")
    right.set_ylabel("variance not explained")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(folder: Path, console: Console) -> None:
    """Train, harvest, verify, learn, draw."""
    torch.manual_seed(0)
    data, model, weights = corpus(), Text(), folder / "model.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    if weights.exists():
        model.load_state_dict(load_file(weights))
    else:
        console.print(f"[bold]Training[/] on {data.numel():,} characters of Python's help")
        train(model, data, console)
        save_file(model.state_dict(), weights)
    model.eval()

    console.print(f"\n[bold]Harvesting[/] {', '.join(POINTS)} over {SEQUENCES:,} sequences")
    done = th.harvest(
        model, data[:SEQUENCES], *POINTS, to=folder / "rows", rows="token", batch_size=32, shard_rows=16 * 32 * LENGTH
    )
    console.print(done)
    console.print(verify(folder / "rows"))
    store = th.open(folder / "rows")

    accuracy = [probe(store, point, data) for point in POINTS]
    console.print("\n[bold]A linear probe[/] for the character before, from one row")
    for point, share in zip(POINTS, accuracy, strict=True):
        console.print(f"  {point:9s} {share:.1%}")
    autoencoder, curve = sparse(store, POINTS[-1])
    console.print(f"\n[bold]A sparse autoencoder[/] explains {1 - curve[-1]:.1%} of the variance with 16 features")
    for line in contexts(store, autoencoder, data, POINTS[-1]):
        console.print(line, markup=False, highlight=False)
    draw(folder / "harvest.png", accuracy, curve)
    console.print(f"\nDrawn into {folder / 'harvest.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "acts"), Console())
