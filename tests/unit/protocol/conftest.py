"""`pytest tests/unit/protocol/test_scenarios.py --rewrite` writes what happens in the texts."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write what happens in scenarios, compare nothing"
    )
