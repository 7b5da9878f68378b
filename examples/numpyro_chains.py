"""NumPyro: eight chains of NUTS on four devices, checked against the exact posterior.

    python examples/numpyro_chains.py    # needs the extra `chains`

`chain_method="parallel"` runs one chain on each device, and one after another where there are more chains than devices.
`chain_method=synk.map` takes any number, and no device waits for another before its own chains are done. The model is a
linear regression of known noise, whose posterior is a formula.
"""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS

import synk

CHAINS, NOISE = 8, 0.5

rng = np.random.default_rng(0)
x = rng.normal(size=(40, 3)).astype(np.float32)
y = (x @ np.array([1.0, -2.0, 0.5]) + NOISE * rng.normal(size=40)).astype(np.float32)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


synk.init(4)
mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=400, num_chains=CHAINS, chain_method=synk.map, progress_bar=False)
mcmc.run(jax.random.key(0), x, y)
draws = np.asarray(mcmc.get_samples(group_by_chain=True)["w"])
assert draws.shape == (CHAINS, 400, 3)
covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(3))
mean = covariance @ x.T @ y / NOISE**2
off = np.abs(draws.mean((0, 1)) - mean) / np.sqrt(np.diag(covariance))
spread = draws.std((0, 1)) / np.sqrt(np.diag(covariance))
r_hat = summary({"w": draws})["w"]["r_hat"].max()
assert off.max() < 0.1 and np.abs(spread - 1).max() < 0.1 and r_hat < 1.02
print(f"{CHAINS} chains: r_hat {r_hat:.3f}; means are {off.max():.3f} standard deviations off, at most")
