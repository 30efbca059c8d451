"""A character-level transformer in PyTorch that learns to write Python from the standard library's own source."""

import sysconfig
from pathlib import Path

import torch
from torch import nn

BATCH, STEPS, LENGTH, WIDTH, LAYERS = 24, 40, 64, 64, 2
MODULES = ("argparse", "ast", "dataclasses", "difflib", "functools", "inspect", "pathlib", "tarfile", "typing")

torch.manual_seed(0)
folder = Path(sysconfig.get_path("stdlib"))
files = [path for name in MODULES for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.exists()]
text = "".join(path.read_text(encoding="utf-8") for path in files)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(letter) for letter in text])


class Writer(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(alphabet), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(alphabet))
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.letters(codes) + self.places, mask=self.mask, is_causal=True))


model = Writer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    starts = torch.randint(len(codes) - LENGTH - 1, (BATCH,))
    windows = torch.stack([codes[start : start + LENGTH + 1] for start in starts])
    scores = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 20 == 0:
        print(f"step {step + 1:3}: loss {loss.detach():.4f}")

windows = codes[: 16 * (LENGTH + 1)].reshape(16, -1)
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
print(f"loss on the first characters {loss:.5f}")
