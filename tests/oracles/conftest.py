"""Every oracle that asks for a transport runs on thread ranks and on process ranks."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["threads", "processes"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
