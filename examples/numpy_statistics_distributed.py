"""The mean of a table and a least-squares fit to it, with numpy, the rows spread over all ranks."""

import numpy as np

import horo_lite as hvd

hvd.init()
random = np.random.default_rng(0)
table = random.normal(loc=[1, -2, 0.5], size=(12_000, 3))
target = table @ [0.3, -1.2, 2.0] + random.normal(scale=0.1, size=len(table))
table, target = (part[hvd.rank() :: hvd.size()] for part in (table, target))

mean = hvd.allreduce(table.mean(axis=0), name="mean")

# The normal equations: their sums over rows are all that a fit needs to know.
products = hvd.allreduce(table.T @ table, op=hvd.Sum, name="products")
moments = hvd.allreduce(table.T @ target, op=hvd.Sum, name="moments")
weights = np.linalg.solve(products, moments)

if hvd.rank() == 0:
    print("mean", *mean.round(6), "weights", *weights.round(6))
