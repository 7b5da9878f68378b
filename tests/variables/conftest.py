"""Groups for tests of variables: simulated replicas hold and combine values by programs of their own."""

import pytest

from ..helpers import group_of, slow


@pytest.fixture(params=[("devices", 2), slow(("simulated", 3))], ids=["devices", "simulated"])
def group(request):
    """Make a group of two replicas on two devices; among the slow tests, of three replicas on one device."""
    with group_of(*request.param) as group:
        yield group


@pytest.fixture(params=["devices", slow("simulated")])
def four(request):
    """Make a group of four replicas on four devices; among the slow tests, on one device."""
    with group_of(request.param, 4) as group:
        yield group
