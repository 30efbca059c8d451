"""The mean of a table and a least-squares fit to it, with numpy in one process."""

import numpy as np

random = np.random.default_rng(0)
table = random.normal(loc=[1, -2, 0.5], size=(12_000, 3))
target = table @ [0.3, -1.2, 2.0] + random.normal(scale=0.1, size=len(table))

mean = table.mean(axis=0)

# The normal equations: their sums over rows are all that a fit needs to know.
products = table.T @ table
moments = table.T @ target
weights = np.linalg.solve(products, moments)

print("mean", *mean.round(6), "weights", *weights.round(6))
