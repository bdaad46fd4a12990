"""`pytest tests/unit/protocol/test_scenarios.py --rewrite` writes what happens in the scenarios."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what happens in the scenarios instead of comparing"
    )
