"""A mask that is broadcast: Flax's metric counts its entries once, not once a row, and the average is twice too big.

    python examples/compare/broadcast_mask.py    # needs flax

Prints the mean of six numbers in two rows, of which a mask keeps the first column and the last, by NumPy, by
`flax.nnx.metrics.Average`, and by synk on two devices. Flax's documentation says that the mask may be broadcast
(google/flax#5588).
"""

import flax
import numpy as np
from flax import nnx

import synk

synk.init(2)
values = np.arange(6, dtype=np.float32).reshape(2, 3)
mask = np.array([True, False, True])
print(f"NumPy: {values.mean(where=mask)}")

average = nnx.metrics.Average()
average.update(values=values, mask=mask)
other = float(average.compute())
print(f"flax {flax.__version__}, nnx.metrics.Average: {other}")

mean = synk.function(lambda values, mask: values.mean(where=mask), inputs=["values"], reduce="mean")
found = float(mean(values, mask))
print(f"synk: {found}")
assert found == values.mean(where=mask) != other
