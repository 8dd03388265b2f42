"""Train a small transformer on text, then steer what it writes: towards digits, or away from them.

Run it with `.venv/bin/python examples/steering.py`. It needs no download: the text is that with which scikit-learn
describes its data sets, and the model is trained here, in about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn import datasets
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th
from tenterhook.integrations.transformers import aliases

STEPS = 600
LENGTH = 48
SCALES = (-4, -2, -1, 0, 1, 2, 4)


def read() -> str:
    """Some thirty thousand characters of English, with many numbers among them."""
    loaders = (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_digits, datasets.load_iris)
    return "\n".join(load().DESCR for load in (*loaders, datasets.load_linnerud, datasets.load_wine))


def train(ids: torch.Tensor, vocabulary: int) -> GPT2LMHeadModel:
    """A transformer of three layers that reads characters."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=vocabulary, n_positions=128, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (24,)).tolist()
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        scores = model(batch[:, :-1]).logits
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"Trained: loss {float(loss.detach()):.2f} nats per character.")
    return model.eval()


def contexts(text: str, ids: torch.Tensor, wanted: bool, count: int = 150) -> torch.Tensor:  # noqa: FBT001
    """Pieces of the text after which a digit comes, or a letter."""
    places = [at for at in range(LENGTH, len(text)) if (text[at].isdigit() if wanted else text[at].isalpha())]
    chosen = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return torch.stack([ids[places[at] - 24 : places[at]] for at in chosen])


def main(picture: Path = Path("steering.png")) -> None:
    """Train, find the direction, steer with it, hand it on as a file, and look where it comes from."""
    text = read()
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text])
    model = train(ids, len(letters))
    names = aliases(model)

    found = th.recipes.steering(
        model,
        contexts(text, ids, wanted=True),
        contexts(text, ids, wanted=False),
        point=names.layers[1],
        at=th.at[:, -1],
    )
    print(found)
    prompt = ids[:40][None].expand(8, -1)
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 60, "do_sample": True}
    shares = []
    for scale in SCALES:
        torch.manual_seed(1)
        with found.apply(model, scale, positions="last"):
            tokens = model.generate(prompt, **settings)
        written = ["".join(letters[token] for token in row) for row in tokens[:, 40:].tolist()]
        shares.append(sum(letter.isdigit() for row in written for letter in row) / sum(map(len, written)))
        print(f"scale {scale:+d}: {shares[-1]:6.1%} digits   {written[0][:50]!r}")

    # Handed on: a file of text and numbers, and one line to use it.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.edits"
        th.save_edits(
            path,
            found.edits(SCALES[-1], positions="last"),
            notes={"towards": "digits", "model": "examples/steering.py"},
        )
        size, edits = path.stat().st_size, th.load_edits(path)
    torch.manual_seed(1)
    with th.edit(model, edits):
        again = model.generate(prompt, **settings)
    print(f"From a file of {size:,} bytes: the same text, {torch.equal(again, tokens)}.")

    lens = th.recipes.logit_lens(model, prompt[:1, :16], points=list(names.layers))
    print(lens)
    draw(found, shares, picture)
    print(f"Drawn in {picture}.")


def draw(found: object, shares: list[float], picture: Path) -> None:
    """Where the contexts lie along the direction, and what steering does."""
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for values, label in ((found.negative, "before a letter"), (found.positive, "before a digit")):  # type: ignore[attr-defined]
        left.hist(values.tolist(), bins=24, alpha=0.6, label=label)
    left.set(xlabel="along the direction", ylabel="contexts")
    left.legend(frameon=False, fontsize=8)
    right.plot(SCALES, [100 * share for share in shares], marker="o")
    right.set(xlabel="how often it is added", ylabel="% digits in what is written")
    figure.savefig(picture, dpi=70)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
