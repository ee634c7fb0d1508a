"""Variational inference: bounds on a log-likelihood, each with the gradient estimator that suits it.

    bound = ap.variational.doubly_reparameterized(samples=10)
    loss = lambda key, theta, phi, x: -jnp.mean(bound(key, encoder(phi, x), lambda z: log_joint(theta, z, x)))

A *bound* is a function `(key, proposal, log_joint)` of the proposal q(z | x), a distribution of any batch shape, and of
log p(x, z), a function of samples (samples, *batch, *event). It returns the estimate for each member of the batch. Its
derivatives of any order are right in expectation, with respect to all that proposal and `log_joint` were made of, if
`log_joint` of one sample and member depends on no other. Else make members one event, by `.to_event`.

| bound | for | K samples | reference |
|---|---|---|---|
| `sticking_the_landing()` | q with a pathwise derivative | 1 | Roeder et al., 2017 |
| `importance_weighted(K)` | q with a pathwise derivative | K | Burda et al., 2016 |
| `doubly_reparameterized(K)` | q with a pathwise derivative | K | Tucker et al., 2019 |
| `vimco(K)` | any q, discrete ones too | K >= 2 | Mnih & Rezende, 2016 |
| `leave_one_out(K)` | any q, discrete ones too | K >= 2 | Kool et al., 2019 |

`elbo` is for models and guides written in NumPyro, with an estimator for each site.
"""

from apgrad.expectations.variational._doubly_reparameterized import doubly_reparameterized as doubly_reparameterized
from apgrad.expectations.variational._elbo import elbo as elbo
from apgrad.expectations.variational._importance_weighted import importance_weighted as importance_weighted
from apgrad.expectations.variational._leave_one_out import leave_one_out as leave_one_out
from apgrad.expectations.variational._sticking_the_landing import sticking_the_landing as sticking_the_landing
from apgrad.expectations.variational._vimco import vimco as vimco
