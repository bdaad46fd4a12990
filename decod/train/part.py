"""How a stage's gradient is cut among its members. Imports no torch."""


def part_sizes(num_elements: int, num_parts: int) -> list[int]:
    """Return the sizes of contiguous parts, in elements; they differ by at most 1, longer first.

    Args:
        num_elements: What is cut. At least 0.
        num_parts: At least 1; with more parts than elements the last ones are empty.
    """
    assert num_elements >= 0, num_elements
    assert num_parts >= 1, num_parts
    size, num_longer = divmod(num_elements, num_parts)
    return [size + (index < num_longer) for index in range(num_parts)]
