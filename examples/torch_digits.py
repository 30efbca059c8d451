"""Handwritten digits with PyTorch: a small convolutional network, trained by one process."""

import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH, EPOCHS, TEST = 96, 10, 357

torch.manual_seed(0)
images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
images = (images / 16).float().reshape(-1, 1, 8, 8)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[TEST:], order[:TEST]

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(EPOCHS):
    mean_loss = torch.zeros(())
    batches = train[torch.randperm(len(train))].split(BATCH)[: len(train) // BATCH]
    for batch in batches:
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss += loss.detach() / len(batches)
    print(f"epoch {epoch + 1:2}: training loss {mean_loss:.4f}")

with torch.no_grad():
    scores = model(images[test])
accuracy = (scores.argmax(1) == labels[test]).float().mean()
print(f"test loss {nn.functional.cross_entropy(scores, labels[test]):.5f}, accuracy {accuracy:.4f}")
