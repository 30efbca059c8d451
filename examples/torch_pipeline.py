"""The character transformer cut in two, its halves run as a pipeline, each half averaged over its replicas.

With 4 ranks: ranks 0 and 1 hold the first half, ranks 2 and 3 the second; 0 feeds 2, and 1 feeds 3. One rank alone
holds both halves. The losses are the same either way.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn

import horo_lite.torch as hvd

BATCH, MICRO, STEPS, LENGTH, WIDTH = 16, 4, 12, 48, 48

hvd.init(process_sets="dynamic")
stages = 1 if hvd.size() == 1 else 2
if hvd.size() % stages:
    raise SystemExit("start this on an even number of ranks, or on one")
replicas = hvd.size() // stages
stage, replica = divmod(hvd.rank(), replicas)
sets = [hvd.add_process_set(range(k * replicas, (k + 1) * replicas)) for k in range(stages)] if stages > 1 else []

torch.manual_seed(0)
text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(letter) for letter in text])
mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, src_mask=mask, is_causal=True)


halves = [
    nn.Sequential(nn.Embedding(len(alphabet), WIDTH), Block()),
    nn.Sequential(Block(), nn.Linear(WIDTH, len(alphabet))),
]
model = nn.Sequential(*halves) if stages == 1 else halves[stage]
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=MICRO if stage == stages - 1 else 1,
    process_set=sets[stage] if sets else hvd.global_process_set,
)


def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()) / MICRO


for step in range(STEPS):
    starts = torch.randint(len(codes) - LENGTH - 1, (BATCH,))
    windows = torch.stack([codes[start : start + LENGTH + 1] for start in starts])
    mine = windows.view(replicas, MICRO, -1, LENGTH + 1)[replica]
    optimizer.zero_grad()
    loss = torch.zeros(())
    if stages == 1:
        for window in mine:
            part = loss_of(model(window[:, :-1]), window[:, 1:])
            part.backward()
            loss += part.detach()
    elif stage == 0:
        tokens = [hvd.send(model(window[:, :-1]), replicas + replica, tag=m) for m, window in enumerate(mine)]
        torch.autograd.backward(tokens)
    else:
        for m, window in enumerate(mine):
            hidden = hvd.recv(torch.empty(len(window), LENGTH, WIDTH), replica, tag=m)
            part = loss_of(model(hidden), window[:, 1:])
            part.backward()
            loss += part.detach()
    optimizer.step()
    loss = hvd.allreduce(loss, op=hvd.Sum, name="loss") / replicas
    if hvd.rank() == 0 and (step + 1) % 4 == 0:
        print(f"step {step + 1:3}: loss {loss:.5f}")
