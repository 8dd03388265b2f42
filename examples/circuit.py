"""Find a circuit that was planted: a small transformer learns a task while some of its parts are switched off.

The task: the second half of each sequence is the first half in a code, in which token ``t`` stands for ``t + 1``.
During the training, one head of each layer and one MLP are off, so they cannot have a part in the solution. Afterwards
all parts are on, and the search has to find those that learned the task.

Run it with `.venv/bin/python examples/circuit.py circuit.png`. It needs no download, and takes a few seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import tenterhook as th

WORDS, HALF, STEPS = 20, 8, 250
OFF = ("attn0.1", "attn1.1", "mlp1")
SWITCHED_OFF = {
    "transformer.h.0.attn@z[1]": th.zero(),
    "transformer.h.1.attn@z[1]": th.zero(),
    "transformer.h.1.mlp": th.zero(),
}


def sequences(count: int, seed: int) -> Tensor:
    """Return sequences whose second half is the first half in code."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(WORDS, (count, HALF), generator=generator)
    return torch.cat([half, (half + 1) % WORDS], 1)


def trained() -> GPT2LMHeadModel:
    """Return a transformer that has learned the task without the parts that are off."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=48, n_head=2, n_inner=96, vocab_size=WORDS, n_positions=2 * HALF, bos_token_id=0,
        eos_token_id=0, use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    with th.edit(model, SWITCHED_OFF):
        for step in range(STEPS):
            ids = sequences(64, step)
            scores = model(ids).logits[:, HALF - 1 : -1]
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, HALF:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"loss {loss.item():.3f} after {STEPS} steps; by chance {torch.tensor(WORDS).log():.3f}")
    return model.eval()


def main(picture: Path | None = None) -> th.recipes.circuit.Circuit:
    """Train, score all edges, keep the best, and compare them with random ones."""
    model = trained()
    clean = sequences(32, 10_000)
    corrupt = clean.clone()
    corrupt[:, 0] = (corrupt[:, 0] + 7) % WORDS  # Another first token: the answer to it changes.
    answers = clean[:, HALF], (corrupt[:, 0] + 1) % WORDS

    def metric(output: Any) -> Tensor:
        scores = output.logits[:, HALF - 1]  # The first token of the second half is predicted here.
        right, wrong = (scores.gather(1, each[:, None])[:, 0] for each in answers)
        return right - wrong  # type: ignore[no-any-return]

    found = th.recipes.circuit.edges(model, clean, corrupt, metric=metric, method="eap-ig")
    print(found)
    curve = found.curve([4, 8, 16, int(found.exists.sum())], random=5)
    print(curve)
    circuit = found.prune(6)
    print(circuit, f"faithfulness {circuit.faithfulness():.3f}, completeness {circuit.completeness():.3f}", sep="\n")
    parts = {sender for sender, _ in circuit.edges}
    print("parts in the circuit:", ", ".join(sorted(parts)), "| off in training:", ", ".join(OFF))
    if picture is not None:
        circuit.draw(title="the planted circuit").savefig(picture, dpi=130)
    return circuit


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
