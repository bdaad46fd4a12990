"""`pytest tests/unit/protocol --rewrite` writes the traces that the scenarios give now."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="write the scenarios' traces instead of comparing"
    )
