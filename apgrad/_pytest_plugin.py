"""A pytest plugin: the fixture `certify`, and a summary of the certificates at the end of a run.

The fixture is `apgrad.testing.certify` with a PRNG key that is made of the test's name. `pytest --certify-samples=10`
makes ten times as many estimates. Neither JAX nor the rest of apgrad is imported before a test asks for the fixture.
"""

import zlib
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("apgrad").addoption(
        "--certify-samples",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="make FACTOR times as many estimates in each test that uses the fixture certify",
    )


@pytest.fixture
def certify(request: pytest.FixtureRequest) -> Any:
    """`apgrad.testing.certify`, with a key made of the test's name."""
    from apgrad import testing

    factor, certificates = float(request.config.getoption("certify_samples") or 1), _certificates(request.config)

    def certify(estimate, truth, *args, num_estimates=10_000, key=None, **options):
        if key is None:
            import jax

            key = jax.random.key(zlib.crc32(request.node.nodeid.encode()), impl="threefry2x32")
        try:
            certificate = testing.certify(
                estimate, truth, *args, key=key, num_estimates=max(2, int(num_estimates * factor)), **options
            )
        except testing.NotCertifiedError as error:
            certificates.append((request.node.nodeid, error.certificate))
            raise
        certificates.append((request.node.nodeid, certificate))
        return certificate

    return certify


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if certificates := _certificates(config):
        terminalreporter.section("gradient certificates")
        for test, certificate in certificates:
            terminalreporter.write_line(f"{test}\n{certificate}")


def _certificates(config: pytest.Config) -> list[Any]:
    return config.stash.setdefault(_KEY, [])


_KEY = pytest.StashKey[list[Any]]()
